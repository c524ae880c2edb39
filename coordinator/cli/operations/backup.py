"""Commands for what a disk may lose: backup, restore."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Home, Json, home_of
from coordinator.lead import console
from coordinator.storage.store import FILE, OBJECTS, Store, lock_home
from fl_core.errors import ConfigError
from service_core.audit_log.log import FOLDER, copy_log, mark_restored
from service_core.console import local_time, print_json
from service_core.storage import backup as backups
from service_core.version import software

_PARTIAL = "blobs/partial"
AUTHORITY_KEY = "pki/ca.key"


def _layout(authority_key: bool) -> backups.HomeLayout:
    left_out = ("service.json", _PARTIAL, FOLDER)
    return backups.HomeLayout(
        side="coordinator",
        database=FILE,
        objects=OBJECTS,
        databases=(),
        left_out=left_out if authority_key else (*left_out, AUTHORITY_KEY),
        referenced=_referenced,
        place=lambda digest: f"{digest[:2]}/{digest}",
        copy_log=copy_log,
    )


def _referenced(database: Path) -> set[str]:
    with closing(Store(database.parent)) as store:
        return store.contributions.referenced_digests()


def backup(
    target: Annotated[Path, typer.Argument(help="A folder that is new or empty, best on another disk.", metavar="TO")],
    authority_key: Annotated[
        bool, typer.Option("--with-authority-key", help="Copy pki/ca.key as well: whoever has it admits anybody.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copy the whole home as it is at one moment, also while the service runs and in the middle of a round.

    The copy holds the keys of the service and of the lead, all runs, models and updates; keep it as you keep the home.
    """
    place = home_of(home)
    if (place / FILE).exists():
        Store(place).close()  # one that is behind is not worth a copy
    made = backups.back_up(place, _layout(authority_key), target, software(), time.time())
    if as_json:
        print_json({"folder": str(target), "files": len(made.files), "authority_key": AUTHORITY_KEY in made.files})
        return
    console.OUT.print(f"wrote {len(made.files)} files to {target}", soft_wrap=True)
    if AUTHORITY_KEY not in made.files:
        console.ERR.print(f"{AUTHORITY_KEY} is not in it: keep it offline, nobody can be admitted without it")


def restore(
    source: Annotated[Path | None, typer.Argument(help="What `coordinator backup` wrote.", metavar="FROM")] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with what is in the home, although its database is behind.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Bring a backup into an empty home; or let a home whose database lacks something go on with what is there.

    Runs go on at the last round of the backup: hospitals that are ahead go back to it. With --accept-loss, runs that
    the database does not know are gone, and files that it does not name are deleted at the next start.
    """
    if (source is None) is not accept_loss:
        raise ConfigError("E-CFG-02", "expected FROM or --accept-loss: name one of them")
    place = home_of(home)
    facts: dict[str, object] = {"home": str(place)}
    if source is not None:
        contents = backups.restore(source, place, _layout(authority_key=True))
        facts |= {"at": contents.at, "log_restored": mark_restored(place, contents.at)}
    with lock_home(place), closing(Store(place, accept_loss=accept_loss)) as store:
        facts["runs"] = len(store.runs.all())
    if as_json:
        print_json(facts)
        return
    when = f" of {local_time(contents.at)}" if source is not None else ""
    console.OUT.print(f"{place} goes on with its {facts['runs']} runs{when}; next: coordinator serve", soft_wrap=True)
    if source is not None:
        line = facts["log_restored"]
        console.ERR.print(
            f"line {line} of the audit log says so; hospitals that hold a later one report it once, as they should. "
            f"coordinator log verify --against FILE then wants --restored {line}",
            soft_wrap=True,
        )
    if not (place / AUTHORITY_KEY).exists():
        console.ERR.print(f"put {AUTHORITY_KEY} back to admit hospitals and renew certificates")
