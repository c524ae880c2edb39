"""Before round 0 of a private run every silo says whether it can do its part of all rounds; one that cannot stops it.

No answer is stored: after a restart all are asked again, which spends no budget.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.tasks import PendingTask, Preflight, PreflightKey, no_answer
from coordinator.storage.records import Run
from coordinator.storage.store import Store
from fl_core.errors import FederationError, RefusedError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from privacy.compiled_run import CompiledRun

GRACE_S = 30.0
"""After the first refusal the others have this long to answer, so that the lead sees all refusals at once."""
_REASON_CHARS = 200


def is_due(run: Run, compiled: CompiledRun, store: Store) -> bool:
    """Return whether the silos are asked: the run is private, and no round of it was ever opened."""
    opened = run.closed > 0 or store.runs.round(run.id, 0) is not None
    return not opened and compiled.private


def ask(run: Run, manifest: RunManifest, dispatcher: Dispatcher, excluded: Collection[str] = ()) -> None:
    """Ask all silos of a run at once, and return when all are ready; one that is away is asked when it comes.

    excluded: silos that are not asked.

    Raises RefusedError (E-RUN-36) that names every silo that refused, with its code; UnavailableError (E-RUN-37) that
    names those that did not answer by the run's deadline; RunInterrupted when the run was aborted or the service stops.
    Guarantees: no task of a run is offered before this has returned.
    """
    names, due = [name for name in run.members if name not in excluded], time.monotonic() + manifest.deadline_s
    away = [name for name in names if dispatcher.activity_of(name) is None]
    text = f"{len(names)} silos are asked whether they are ready" + (f"; away: {', '.join(away)}" if away else "")
    dispatcher.store.runs.event(run.id, "preflight", text=text)
    dispatcher.changes.notify()
    with ExitStack() as stack:
        asked = {
            name: stack.enter_context(
                dispatcher.pending_task(Preflight(PreflightKey(run.id, name), run.manifest_digest, due))
            )
            for name in names
        }
        for pending in asked.values():
            dispatcher.offer(pending)
        failures = _failures(asked)
    if failures:
        raise _combined_error(failures, len(names))


def _failures(asked: Mapping[str, PendingTask]) -> Mapping[str, FederationError]:
    """Wait for all answers, after the first refusal not much longer; raises RunInterrupted when the run was."""
    with ThreadPoolExecutor(len(asked), thread_name_prefix="preflight") as pool:
        answers: dict[str, Future[str]] = {name: pool.submit(pending.wait) for name, pending in asked.items()}
        _, left = wait(answers.values(), return_when=FIRST_EXCEPTION)
        if left:
            wait(left, GRACE_S)
            for pending in asked.values():
                pending.settle(no_answer())
        found = {name: answer.exception() for name, answer in answers.items()}
    failures: dict[str, FederationError] = {}
    for name, error in found.items():
        if isinstance(error, FederationError):
            failures[name] = error
        elif error is not None:
            raise error
    return failures


def _combined_error(failures: Mapping[str, FederationError], silos: int) -> FederationError:
    silent = sorted(name for name, error in failures.items() if error.code == "E-RUN-37")
    unanswered = f"no answer yet from {', '.join(silent)}" if silent else ""
    refused = [f"{name}: {_shortened(error)}" for name, error in failures.items() if name not in silent]
    remedy = "no round was begun and nothing charged; have it put right, then resume the run"
    if not refused:
        return UnavailableError(
            "E-RUN-37", f"expected all {silos} silos to say that they are ready, found {unanswered}: {remedy}"
        )
    listed = "; ".join([*refused, unanswered] if unanswered else refused)
    return RefusedError(
        "E-RUN-36",
        f"expected all {silos} silos to be ready, found {len(refused)} not: {listed}: {remedy}; what a hospital does "
        "about its code says `coordinator explain CODE`",
    )


def _shortened(error: FederationError) -> str:
    return textwrap.shorten(str(error), _REASON_CHARS, placeholder=" ...")
