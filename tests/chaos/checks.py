"""What must hold after a disturbed run; each check gives what is wrong, in sentences."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from consilium.research.simulate import runner
from consilium.research.simulate.results import Result
from coordinator.config.hydra_config import compose_spec
from fl_core.errors import FederationError
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.profiles.record import RecordProfile
from tests.chaos.federation import Federation
from tests.chaos.plan import CHARGING, COORDINATOR, DATA, SILOS, RunPlan
from tests.support import until
from tests.support.audit_log import entries

THREADS, FILES = 100, 150
"""Of one process that rests: far above what is usual, and below what a leak per fault makes of it."""
TOLD_S = 300.0
_COUNTED = ("SPENT", "SPENT_ON_RECOVERY", "INTENT", "RUNNING")


def undisturbed(plan: RunPlan) -> Result:
    """Run a plan's run as a simulation, to which nothing happens."""
    return runner.run(compose_spec(plan.overrides))


def after_run(federation: Federation, plan: RunPlan, run: str, found: dict[str, Any], wanted: Result) -> list[str]:
    """Check a finished run: its model, its rounds, the ledgers, its masks, and what is left behind."""
    return [
        *_model(found, wanted),
        *(wrong for name in SILOS for wrong in _ledger(federation, plan, run, name, wanted)),
        *_left_behind(federation, run),
        *(_of_masks(federation, run) if wanted.manifest.secagg is not None else ()),
    ]


def _model(found: dict[str, Any], wanted: Result) -> Iterator[str]:
    if found["model_digest"] != wanted.model_digest:
        yield f"the model is {found['model_digest']}, undisturbed {wanted.model_digest}"
    for record in found["round"]:
        if record["missing"] or sorted(record["included"]) != sorted(SILOS):
            yield f"round {record['round']} has {record['included']} and lacks {record['missing']}"


def _ledger(federation: Federation, plan: RunPlan, run: str, name: str, wanted: Result) -> Iterator[str]:
    """Each round is charged once, as it was planned; what is charged beside it, an interruption explains."""
    home = federation.folder / name
    ledger = Ledger(home / "ledger.db")
    try:
        ledger.verify()
    except FederationError as error:
        yield f"{name}'s ledger: {error}"
        return
    charged: dict[tuple[int, str], list[Counter[object]]] = defaultdict(list)
    interrupted: set[int] = set()  # rounds with a charge whose output the ledger does not name
    for collection in ledger.collections():
        for entry, state, planned in ledger.entries(collection):
            of_run, round, _ = entry.split("/", 2)
            if of_run == run and state in _COUNTED:
                charged[int(round), collection].append(Counter((p.purpose, p.mechanism) for p in planned))
                if state != "SPENT":
                    interrupted.add(int(round))
    expected = _planned(plan, wanted, name)
    excused = sum(f.target == name and f.kind in CHARGING for f in plan.faults)
    for key in sorted({*expected, *charged}):
        made = charged.get(key, [])
        if not 1 <= len(made) <= 1 + excused or any(planned != expected.get(key) for planned in made):
            yield f"{name}'s ledger has {made} of round and collection {key}, expected {expected.get(key)} once"
    again = sum(map(len, charged.values())) - len(expected)
    if again > 2 * excused:  # each interruption repeats one round at most, of training and of test records
        yield f"{name}'s ledger has {again} charges of repeated rounds after {excused} interruptions"
    if plan.private:
        named = {detail for _, _, state, detail, _ in ledger.events() if state == "SPENT"}
        for round, kind, digest in _updates(home / "silo.db", run):
            if digest not in named and round not in interrupted:
                yield f"{name} made an update in round {round} ({kind}) that its ledger has not: {digest}"


def _planned(plan: RunPlan, wanted: Result, name: str) -> dict[tuple[int, str], Counter[object]]:
    if not plan.private:
        return {}
    compiled = CompiledRun.of(wanted.manifest)
    profile, index = compiled.profile, SILOS.index(name)
    assert isinstance(profile, RecordProfile)
    found: dict[tuple[int, str], Counter[object]] = defaultdict(Counter)
    for round in range(wanted.manifest.rounds + 1):
        training = round < wanted.manifest.rounds
        for release in profile.plan(index).releases(round, training, wanted.manifest.members[index].prototypes):
            found[round, f"{DATA}/{release.collection}"][release.purpose, release.mechanism] += 1
    return found


def _updates(database: Path, run: str) -> list[tuple[int, str, str]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT round, kind, object_digest FROM tasks WHERE run_id = ? AND object_digest <> ''", (run,)
        )
        return [(int(a), str(b), str(c)) for a, b, c in rows]


def _left_behind(federation: Federation, run: str) -> Iterator[str]:
    for home, database in ((COORDINATOR, "coordinator.sqlite"), *((name, "silo.db") for name in SILOS)):
        folder = federation.folder / home
        for part in (p for p in folder.rglob("*") if p.is_file() and (p.suffix == ".part" or "partial" in p.parts)):
            yield f"a partial file is left: {part}"
        with closing(sqlite3.connect(f"file:{folder / database}?mode=ro", uri=True)) as db:
            if (state := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                yield f"{folder / database}: {state}"
    for name in SILOS:
        with suppress(AssertionError):  # it is told of the last close after the run has ended, over a slow line later
            until(lambda name=name: not _staged(federation.folder / name, run), "an empty outbox", TOLD_S)
        if number := _staged(federation.folder / name, run):
            yield f"{name} has {number} updates in its outbox"


def _of_masks(federation: Federation, run: str) -> Iterator[str]:
    """No round was opened for two sets, and no key of a closed round is left."""
    sets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries(federation.folder / COORDINATOR):
        if entry.what == "sealed" and entry.about.startswith(f"run={run} "):
            _, round, inside = entry.about.split(" ", 2)
            sets[run, round].add(inside)
    if not sets:
        yield f"no set of {run} is in the coordinator's log"
    for (_, round), found in sets.items():
        if len(found) > 1:
            yield f"{round} of {run} was sealed for {len(found)} sets: {sorted(found)}"
    for name in SILOS:
        keys = partial(_keys, federation.folder / name, run)
        with suppress(AssertionError):
            until(lambda keys=keys: not keys(), "the keys of an ended run to go", TOLD_S)
        if left := keys():
            yield f"{name} has {left} of {run}, which has ended"


def _keys(home: Path, run: str) -> list[str]:
    """Name what a hospital still holds of a masked run's secrets."""
    with closing(sqlite3.connect(f"file:{home / 'silo.db'}?mode=ro", uri=True)) as db:
        row = db.execute("SELECT state, agree, sign, chains FROM secagg_runs WHERE run_id = ?", (run,)).fetchone()
        rounds = db.execute("SELECT count(*) FROM secagg_rounds WHERE run_id = ?", (run,)).fetchone()[0]
    if row is None:
        return ["no row"]
    state, *secrets = row
    return [*([] if state == "gone" and not any(secrets) else ["keys"]), *(["rounds"] if rounds else [])]


def _staged(home: Path, run: str) -> int:
    with closing(sqlite3.connect(f"file:{home / 'silo.db'}?mode=ro", uri=True)) as db:
        query = "SELECT count(*) FROM tasks WHERE run_id = ? AND closed IS NULL AND staged IS NOT NULL"
        return int(db.execute(query, (run,)).fetchone()[0])


def of_processes(federation: Federation) -> Iterator[str]:
    """Check what the running processes hold, and what they have said."""
    for name, process in federation.running.items():
        system = Path(f"/proc/{process.pid}")
        threads, files = len(list((system / "task").iterdir())), len(list((system / "fd").iterdir()))
        if threads > THREADS or files > FILES:
            yield f"{name} has {threads} threads and {files} open files"
    yield from federation.died
    for name in (COORDINATOR, *SILOS):
        if "Traceback" in federation.log(name):
            yield f"{name} logged a traceback: see {federation.folder / name}.log"
