"""Commands for what a disk may lose: backup, restore."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.audit_log.log import FOLDER, copy_log, mark_restored
from service_core.console import local_time, print_json
from service_core.storage import backup as backups
from service_core.version import software
from silo.cli import console
from silo.cli.options import HomeOption, JsonOption
from silo.cli.page import FILE as OPENED_PAGE
from silo.identity.identity import SiloIdentity
from silo.storage.home import OBJECTS, Home
from silo.storage.store import Store

PAGES = ("page.html", OPENED_PAGE)
"""Links that open a page: they end with its process."""


def _layout(home: Home, ledger_key: bool) -> backups.HomeLayout:
    def inside(path: Path) -> tuple[str, ...]:
        return (str(path.relative_to(home.path)),) if path.is_relative_to(home.path) else ()

    return backups.HomeLayout(
        side="silo",
        database=home.database.name,
        objects=OBJECTS,
        databases=inside(home.ledger),
        left_out=("instance.json", *PAGES, FOLDER, *(() if ledger_key else inside(home.ledger_key))),
        referenced=_referenced,
        place=str,
        copy_log=copy_log,
    )


def _referenced(database: Path) -> set[str]:
    store = Store(database)
    try:
        return store.referenced()
    finally:
        store.close_database()


def backup(
    target: Annotated[Path, typer.Argument(help="A folder that is new or empty, best on another disk.", metavar="TO")],
    ledger_key: Annotated[
        bool, typer.Option("--with-ledger-key", help="Copy the ledger's key as well; keep it apart instead.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the whole home as it is at one moment, also while the service runs and in the middle of a round.

    The copy holds the hospital's key and certificate, its policy, its states and unsent updates, and its ledger where
    that lies in the home. Records are never in it.
    """
    place = Home.at(home)
    if place.database.exists() or SiloIdentity(place.path).folder.exists():
        # One that is behind is not worth a copy; a hospital that has joined and never served has keys, and no database.
        Store(place.database).close_database()
    made = backups.back_up(place.path, _layout(place, ledger_key), target, software(), time.time())
    ledger, key = (
        str(path.relative_to(place.path)) if path.is_relative_to(place.path) else ""
        for path in (place.ledger, place.ledger_key)
    )
    if as_json:
        has = {"ledger": ledger in made.files, "ledger_key": key in made.files}
        print_json({"folder": str(target), "files": len(made.files)} | has)
        return
    facts = [("backup", str(target)), ("files", str(len(made.files)))]
    if ledger not in made.files and place.ledger.exists():
        facts.append(("ledger", f"not in it, back it up apart: {place.ledger}"))
    if key not in made.files and place.ledger_key.exists():
        facts.append(("ledger's key", f"not in it, keep a copy elsewhere: {place.ledger_key}"))
    console.show_facts(facts)


def restore(
    source: Annotated[Path | None, typer.Argument(help="What `silo backup` wrote.", metavar="FROM")] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with what is in the home, although its database is behind.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a backup into an empty home; or let a home whose database lacks something go on with what is there.

    A ledger that lies elsewhere is not touched. One that comes from the backup is held against what the coordinator
    remembers before anything is trained. With --accept-loss, updates and states that the database does not know are
    deleted at the next start; the ledger is not touched.
    """
    if (source is None) is not accept_loss:
        raise ConfigError("E-CFG-02", "expected FROM or --accept-loss: name one of them")
    place = Home.at(home)
    facts: dict[str, object] = {"home": str(place.path)}
    if source is not None:
        contents = backups.restore(source, place.path, _layout(place, ledger_key=True))
        facts |= {"at": contents.at, "log_restored": mark_restored(place.path, contents.at)}
    with place.make().locked():
        store = Store(place.database, accept_loss=accept_loss)
        facts["runs"] = len(store.history())
        store.close_database()
    if as_json:
        print_json(facts)
        return
    shown = [("home", str(place.path)), ("runs", str(facts["runs"])), ("next", "silo serve --data REF")]
    if source is not None:
        shown.insert(1, ("of", local_time(contents.at)))
        line = facts["log_restored"]
        shown.insert(
            2,
            (
                "audit log",
                f"line {line} says so; the coordinator, where it holds a later one, reports it once, as it should; "
                f"silo log verify --against FILE then wants --restored {line}",
            ),
        )
    console.show_facts(shown)
