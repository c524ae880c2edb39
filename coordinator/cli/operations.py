"""Commands on the service's own machine: backup, restore, doctor, health, the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import AnyPlace, Place, home_of
from coordinator.cli.runs import Client
from coordinator.lead.client import ADDRESS_FILE, LeadClient
from coordinator.pki.authority import Authority
from coordinator.pki.server_certificate import ServerCertificate
from coordinator.storage.store import FILE, LOCK_FILE, OBJECTS, CoordinatorStore, lock_home
from fl_core.errors import ConfigError, UnavailableError
from service_core.audit_log.commands import LogOwner, make_app
from service_core.audit_log.log import LOG_FILE, mark_restored
from service_core.command_line import AcceptLoss, BackupFolder, command
from service_core.console import CommandResult, local_time
from service_core.operations import checks
from service_core.operations.checks import Check, Finding
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of
from service_core.storage import backup as backups
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import Credentials, FolderLock
from service_core.version import software

_PARTIAL = "blobs/partial"
AUTHORITY_KEY = "pki/ca.key"


def _layout(authority_key: bool) -> backups.HomeLayout:
    left_out = ("service.json", _PARTIAL)
    return backups.HomeLayout(
        side="coordinator",
        database=FILE,
        objects=OBJECTS,
        databases=(LOG_FILE,),
        left_out=left_out if authority_key else (*left_out, AUTHORITY_KEY),
        referenced=_referenced,
        place=lambda digest: f"{digest[:2]}/{digest}",
    )


def _referenced(database: Path) -> set[str]:
    with closing(CoordinatorStore(database.parent)) as store:
        return store.contributions.referenced_digests()


@command
def backup(
    target: BackupFolder,
    authority_key: Annotated[
        bool,
        typer.Option("--with-authority-key", help="Also copy pki/ca.key. Anybody who has this key can admit members."),
    ] = False,
    *,
    home: Place,
) -> CommandResult:
    """Copy the whole home at one moment, also while the service runs and in the middle of a round.

    The copy contains the keys of the service and of the lead, all runs, models and updates; protect it like the home.
    """
    if (home / FILE).exists():
        CoordinatorStore(home).close()  # refuse a database that is out of date
    made = backups.back_up(home, _layout(authority_key), target, software(), time.time())
    missing = f"{AUTHORITY_KEY} is not in the backup: keep it offline; without it no hospital can be admitted"
    copied = AUTHORITY_KEY in made.files
    return CommandResult(
        {"folder": str(target), "files": len(made.files), "authority_key": copied},
        [f"wrote {len(made.files)} files to {target}"],
        [] if copied else [missing],
    )


@command
def restore(
    source: Annotated[
        Path | None, typer.Argument(help="The folder that `coordinator backup` wrote.", metavar="FROM")
    ] = None,
    accept_loss: AcceptLoss = False,
    *,
    home: AnyPlace,
) -> CommandResult:
    """Restore a backup into an empty home, or continue with an incomplete database (--accept-loss).

    After an interruption run the same command again; until then no other command uses the home.

    Runs continue after the backup's last round; hospitals that are ahead return to it. Runs with secure aggregation
    end; the output shows the command that continues from their last model. With --accept-loss, runs that the database
    does not know are lost, and files that it does not name are deleted at the next start.
    """
    from coordinator.runs.masked_rounds import end_masked_runs

    if (source is None) is not accept_loss:
        raise ConfigError("E-CFG-02", "expected either FROM or --accept-loss: give one of them")
    facts: dict[str, object] = {"home": str(home)}
    with ExitStack() as alone:
        if source is not None:
            contents = alone.enter_context(backups.restoring(source, home, _layout(authority_key=True)))
            facts |= {"at": contents.at, "log_restored": mark_restored(home, contents.at)}
        else:
            alone.enter_context(lock_home(home))
        store = alone.enter_context(closing(CoordinatorStore(home, accept_loss=accept_loss)))
        ended = end_masked_runs(store, ObjectStore(home / OBJECTS, sharded=True).remove)
        facts |= {"runs": len(store.runs.all()), "ended": {run.id: run.reason for run in ended}}
    when, notes = "", []
    if source is not None:
        when, line = f" of {local_time(contents.at)}", facts["log_restored"]
        notes = [
            f"line {line} of the audit log records the restoration; hospitals with a later line report it "
            f"once, as expected. From now on use coordinator log verify --against FILE --restored {line}"
        ]
    notes += [f"{run.id}: {run.reason}" for run in ended]
    if not (home / AUTHORITY_KEY).exists():
        notes.append(f"restore {AUTHORITY_KEY} to admit hospitals and renew certificates")
    return CommandResult(
        facts, [f"{home} continues with its {facts['runs']} runs{when}; next: coordinator serve"], notes
    )


# ---- doctor and health -----------------------------------------------------------------------------------------------

Bind = Annotated[str, typer.Option(help="The address that `coordinator serve` will use.")]


@command
def doctor(bind: Bind = "0.0.0.0:8443", *, home: AnyPlace) -> CommandResult:
    """Check what may keep the service from working; changes nothing. Exit status 1 if there is a problem.

    Checks versions, clock, disk, file permissions, database, certificates, port and proxy, and the connection to the
    service if it runs.
    """
    return checks.report(checks.run_checks(_Coordinator(home, bind).checks()))


@command
def health(client: Client) -> CommandResult:
    """Ask the service on this machine whether it can work: status 0 if so, otherwise 1."""
    answer = client.health()
    value = {"serving": answer.serving, "problems": list(answer.problems), "software": answer.software}
    state = "serving" if answer.serving else f"not ready: {', '.join(answer.problems)}"
    return CommandResult(value, [state], status=int(not answer.serving))


@dataclass(frozen=True, slots=True)
class _Coordinator:
    """The checks of a coordinator's home, also before `coordinator init`."""

    home: Path
    bind: str

    def checks(self) -> dict[str, Check]:
        listed: dict[str, Check] = {
            "version": checks.versions,
            "clock": self._clock,
            "disk": lambda: checks.disk(self.home),
            "home": lambda: checks.interrupted_command(self.home),
        }
        if not (self.home / "pki").exists():
            none = checks.warning("consortium", f"none in {self.home}", "coordinator init NAME --address ...")
            return listed | {"consortium": lambda: [none], "port": lambda: checks.port(self.bind)}
        database, pki = self.home / FILE, self.home / "pki"
        beside = [database, *(database.with_name(f"{database.name}-{end}") for end in ("wal", "shm"))]
        return listed | {
            "modes": lambda: checks.file_modes(self.home, beside, [pki, pki / "ca.key", *self._pems()]),
            "database": lambda: checks.database(database, self._rehearse),
            "certificate": self._certificates,
            "service": self._service,
        }

    def _rehearse(self) -> None:
        """Open a copy of the database, and read what the service and its leads read."""
        with closing(CoordinatorStore(self.home, rehearsal=True)) as store:
            store.members.silos()
            for run in store.runs.all():
                store.runs.rounds(run.id)

    def _clock(self) -> Iterator[Finding]:
        made = {}
        for path in (self.home / "pki" / "ca.crt", self.home / FILE, self.home / ADDRESS_FILE):
            if path.exists():
                made[str(path)] = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        for path in self._pems():
            pem = path.read_bytes()
            made[f"the certificate in {path.name}"] = identity_of(_certificate_part(pem)).not_before
        return checks.clock(made)

    def _certificates(self) -> Iterator[Finding]:
        authority = Authority.open(self.home)
        ca = certificates.load_certificate(authority.ca_pem, "ca.crt")
        validity = ca.not_valid_after_utc - certificates.utc_now()
        remedy = "plan a new consortium: all members must join it again"
        make = checks.problem if validity.days < 0 else checks.warning
        text = f"authority: {authority.consortium}, {validity.days} days left"
        yield make("certificate", text, remedy) if validity.days < 180 else checks.ok("certificate", text)
        for path in self._pems():
            bundle = certificates.read_bundle(path, authority.ca_pem)
            by_itself = "a running service renews it: coordinator serve"
            renewed = by_itself if path.stem == "server" else "have it renewed before it expires"
            yield from checks.certificate(path.stem, bundle, renewed)

    def _service(self) -> Iterator[Finding]:
        if not FolderLock.is_held(self.home, LOCK_FILE):
            yield checks.warning("service", "not running", "coordinator serve")
            yield from checks.port(self.bind)
            return
        try:
            with closing(LeadClient.open(self.home)) as client:
                about = json.loads((self.home / ADDRESS_FILE).read_text())
                yield checks.ok("service", f"it runs (process {about.get('pid', '?')}) at {client.address}")
                yield from checks.proxy([client.address])
                yield from checks.reachable(client.address, self._lead())
                yield from checks.other_side(client.health(), str(client.address))
        except UnavailableError as error:
            yield checks.problem("service", f"it runs but does not answer ({error})", "look at its log, restart it")

    def _lead(self) -> Credentials:
        path = min((self.home / "pki").glob("lead-*.pem"))
        return certificates.read_bundle(path, Authority.open(self.home).ca_pem)

    def _pems(self) -> list[Path]:
        return sorted((self.home / "pki").glob("*.pem"))


def _certificate_part(pem: bytes) -> bytes:
    return pem[max(0, pem.find(b"-----BEGIN CERTIFICATE-----")) :]


# ---- the audit log ---------------------------------------------------------------------------------------------------


def _side(home: Path | None) -> LogOwner:
    place = home_of(home)
    return LogOwner(
        place,
        lambda: Identity(CertificateRole.COORDINATOR, Authority.open(place).consortium).uri,
        lambda: ServerCertificate(place).current().ca_pem,
    )


log = make_app(_side, help="The audit log: who did what, when, and with which result.")
