"""Masked runs of a coordinator that was put back: they end, and say what goes on from their last model.

A hospital opens one set of a round and has deleted the keys of every round that it saw closed. Which these are, a
coordinator that comes from a backup does not know; what it asked for again would be refused, or wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.storage.records import Run, RunState
from coordinator.storage.store import Store
from fl_core.rounds.manifest import RunManifest
from privacy.compiled_run import CompiledRun

_OPEN = (RunState.WAITING, RunState.RUNNING, RunState.PAUSED, RunState.FAILED)


def end_masked_runs(store: Store, remove: Callable[[str], None]) -> list[Run]:
    """End every masked run that is not over and whose members' keys were fixed; return them, as they are now.

    remove: deletes an object that nothing needs any more, by its digest.
    """
    begun = [run for run in store.runs.all() if run.state in _OPEN and store.secagg.keys(run.id) is not None]
    ended = [store.runs.end(run.id, RunState.ABORTED, _why(run), _OPEN) for run in begun]
    for run in ended:
        store.contributions.delete_unreferenced(run.id, remove)
    return ended


def _why(run: Run) -> str:
    rounds = f"{run.closed} of {run.rounds} rounds" if run.rounds else "the evaluation"
    if run.closed == 0:
        remedy = "No round was closed: submit it again"
    elif run.closed < run.rounds:
        remedy = f"Go on from its last model, as a new run with new keys: coordinator run --from {run.id} "
        remedy += f"rounds={run.rounds - run.closed}"
    else:
        remedy = f"Every round was trained: coordinator evaluate {run.id} measures its model with new keys"
    charged = ""
    if CompiledRun.of(RunManifest.from_json(run.manifest)).private:
        charged = (
            ". What its rounds were charged stays in each hospital's ledger, also of rounds since the backup (there: "
            "silo ledger show); a new run is charged beside it"
        )
    return (
        f"E-RUN-54: the coordinator was restored, found {rounds} closed in what is left, and hospitals answer no round "
        f"of a run with secure aggregation twice. {remedy}{charged}"
    )
