"""Commands on the service's own machine: backup, restore, doctor, health."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.audit_log.log import LOG_FILE, mark_restored
from service_core.command_line import AcceptLoss, BackupFolder, command
from service_core.console import CommandResult, KeyValues, local_time
from service_core.operations import checks
from service_core.storage import backup as backups
from service_core.version import software
from silo.cli.options import AnyHome, DataRootOption, SiloHome, label_space, open_store, text_of
from silo.identity.identity import SiloIdentity
from silo.storage.home import FEATURES, OBJECTS, PACS, Home
from silo.storage.store import ASKED, SiloStore

PAGES = ("page.html", "opened-page.html")
"""Files that open a page: they are removed with its process."""


def _layout(home: Home, ledger_key: bool) -> backups.HomeLayout:
    def inside(path: Path) -> tuple[str, ...]:
        return (str(path.relative_to(home.path)),) if path.is_relative_to(home.path) else ()

    return backups.HomeLayout(
        side="silo",
        database=home.database.name,
        objects=OBJECTS,
        databases=(LOG_FILE, *inside(home.ledger)),
        left_out=("instance.json", FEATURES, PACS, *PAGES, *(() if ledger_key else inside(home.ledger_key))),
        referenced=_referenced,
        place=str,
        strip=_strip,
    )


def _strip(database: Path) -> None:
    """Delete the keys of masked runs from a copy: they could open closed rounds again."""
    with open_store(database) as store:
        store.secagg.forget()
        store.database.compact()


def _referenced(database: Path) -> set[str]:
    with open_store(database) as store:
        return store.referenced()


@command
def backup(
    target: BackupFolder,
    ledger_key: Annotated[
        bool, typer.Option("--with-ledger-key", help="Also copy the ledger's key. It is safer to keep it elsewhere.")
    ] = False,
    *,
    home: SiloHome,
) -> CommandResult:
    """Copy the whole home at one moment, also while the service runs and in the middle of a round.

    The copy contains the hospital's key and certificate, its policy, its states and unsent updates, and its ledger if
    that lies in the home. It never contains records, nor keys of masked runs.
    """
    if home.database.exists() or SiloIdentity(home.path).folder.exists():
        # Refuse a database that is out of date. A hospital that has joined and never served has keys, but no database.
        SiloStore(home.database).close_database()
    made = backups.back_up(home.path, _layout(home, ledger_key), target, software(), time.time())
    ledger, key = (
        str(path.relative_to(home.path)) if path.is_relative_to(home.path) else ""
        for path in (home.ledger, home.ledger_key)
    )
    has = {"ledger": ledger in made.files, "ledger_key": key in made.files}
    facts = [("backup", str(target)), ("files", str(len(made.files)))]
    if ledger not in made.files and home.ledger.exists():
        facts.append(("ledger", f"not in it, back it up apart: {home.ledger}"))
    if key not in made.files and home.ledger_key.exists():
        facts.append(("ledger's key", f"not in it, keep a copy elsewhere: {home.ledger_key}"))
    return CommandResult({"folder": str(target), "files": len(made.files)} | has, [KeyValues(facts)])


@command
def restore(
    source: Annotated[Path | None, typer.Argument(help="The folder that `silo backup` wrote.", metavar="FROM")] = None,
    accept_loss: AcceptLoss = False,
    *,
    home: AnyHome,
) -> CommandResult:
    """Restore a backup into an empty home, or continue with an incomplete database (--accept-loss).

    After an interruption run the same command again; until then no other command uses the home.

    A ledger outside of the home is not touched. One from the backup is checked against the coordinator's record before
    any training. With --accept-loss, updates and states that the database does not know are deleted at the next start;
    the ledger is not touched. In both cases the hospital takes no further part in running masked runs, because the home
    no longer knows which sums it helped to open.
    """
    if (source is None) is not accept_loss:
        raise ConfigError("E-CFG-02", "expected either FROM or --accept-loss: give one of them")
    facts: dict[str, object] = {"home": str(home.path)}
    with ExitStack() as alone:
        if source is not None:
            contents = alone.enter_context(backups.restoring(source, home.path, _layout(home, ledger_key=True)))
            facts |= {"at": contents.at, "log_restored": mark_restored(home.path, contents.at)}
        else:
            alone.enter_context(home.make().locked())
        store = alone.enter_context(open_store(home.database, accept_loss))
        history, masked = store.history(), store.secagg.runs()
        absent = sorted(r.run_id for r in history if r.run_id in masked and r.state in ("running", ASKED))
        store.secagg.forget()
        facts |= {"runs": len(history), "masked_runs": absent}
    shown = [("home", str(home.path)), ("runs", str(facts["runs"])), ("next", "silo serve --data REF")]
    if absent:
        shown.insert(2, ("masked runs", f"absent for the rest of {', '.join(absent)}"))
    if source is not None:
        shown.insert(1, ("of", local_time(contents.at)))
        line = facts["log_restored"]
        shown.insert(
            2,
            (
                "audit log",
                f"line {line} notes the restore. A coordinator that holds a later line reports this once, as "
                f"expected. After this, silo log verify --against FILE needs --restored {line}",
            ),
        )
    return CommandResult(facts, [KeyValues(shown)])


@command
def doctor(
    data: Annotated[
        str | None, typer.Option("--data", help="Also check these data, image by image.", metavar="REF")
    ] = None,
    data_root: DataRootOption = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="The classes, if the data do not define them.", metavar="A,B,...")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Also check this device: cpu, cuda, cuda:N or auto.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="Before joining: a file with an invitation, to test the connection; - reads standard input.",
        ),
    ] = None,
    *,
    home: AnyHome,
) -> CommandResult:
    """Check what may keep this hospital from taking part; changes nothing. Exit status 1 if there is a problem.

    Checks versions, clock, disk, file permissions, certificate, database, the connection to the coordinator, policy and
    ledger. Before joining, it checks what exists already. It can run while the service runs.
    """
    from silo.operations.doctor import Examination

    invitation = None
    if token_file is not None:
        from service_core.pki.invitation import InvitationToken

        invitation = InvitationToken.decode(text_of(token_file).strip())
    patient = Examination(home, data, data_root, label_space(classes), device, invitation)
    return checks.report(checks.run_checks(patient.checks()))


@command
def health(
    connected: Annotated[
        bool, typer.Option("--connected", help="Also require a session with the coordinator.")
    ] = False,
    *,
    home: SiloHome,
) -> CommandResult:
    """Check whether this hospital's service is alive, and connected or trying to connect; exit status 1 if not."""
    from silo.operations.liveness import Health

    health = Health.of(home)
    healthy = health.alive and (health.connected or not connected)

    def words() -> Iterator[str]:
        health.require(connected)
        yield f"{'connected' if health.connected else 'trying to connect'} since {local_time(health.since)}"

    return CommandResult(asdict(health), words(), status=int(not healthy))
