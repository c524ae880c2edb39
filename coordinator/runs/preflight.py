"""The preflight: before round 0, each silo is asked whether it can do its part of the whole run."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.tasks import PendingTask, Preflight, RunTasks, no_answer
from coordinator.storage.records import StoredRun
from fl_core.errors import FederationError, RefusedError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import pluralize

GRACE_S = 30.0
"""After the first refusal the others have this long to answer, so that the lead sees all refusals at once."""
_REASON_CHARS = 200
_LOOK_S = 0.05
_NO_ANSWER = no_answer().code


def ask_preflight(
    run: StoredRun,
    manifest: RunManifest,
    dispatcher: Dispatcher,
    tasks: RunTasks,
    excluded: Collection[str] = (),
    all_answer: bool = True,
    quorum: int = 0,
    check: Callable[[str, pb.SecaggEntry | None], None] | None = None,
    roster: bytes = b"",
) -> dict[str, PendingTask]:
    """Ask the silos of a run at once; return the answers when all are ready.

    excluded: silos that are not asked   all_answer: a disconnected silo is asked when it connects, and awaited until
    the run's deadline; otherwise only connected silos are asked, and one that does not answer in time is offered its
    task
    quorum: set by the lead; the run begins with that many although others refuse; 0: a refusal stops it
    check: checks a silo's keys in a masked run; its errors count as a refusal   roster: sent with the question.

    Raises RefusedError (E-RUN-36), which names every silo that refused, with its code; UnavailableError (E-RUN-37),
    which names required silos that did not answer; RunInterrupted if the run was aborted or the service stops.
    Guarantees: no task of a run is offered before this has returned.
    """
    wait_s = manifest.deadline_s if all_answer else min(manifest.deadline_s, manifest.patience_s)
    names, due = [name for name in run.members if name not in excluded], time.monotonic() + wait_s
    away = [name for name in names if dispatcher.activity_of(name) is None]
    if not all_answer:
        names = [name for name in names if name not in away]
    text = f"preflight of {pluralize(len(names), 'silo')}" + (f"; away: {', '.join(away)}" if away else "")
    tasks.event("preflight", text=text)
    with ExitStack() as stack:
        pending_tasks = {
            name: stack.enter_context(tasks.pending_task(Preflight(run.id, name, run.manifest_digest, due, roster)))
            for name in names
        }
        for pending in pending_tasks.values():
            tasks.offer(pending)
        failures = _failures(pending_tasks, lambda name: all_answer or _works_on_it(dispatcher, name, run.id), check)
    ready = {name: pending for name, pending in pending_tasks.items() if name not in failures}
    if not all_answer:
        failures = {name: error for name, error in failures.items() if error.code != _NO_ANSWER}
    if not failures:
        return ready
    error = _combined_error(failures, len(names), run.id)
    if not 0 < quorum <= len(run.members) - len(excluded) - len(failures):
        raise error
    text = f"started with the given quorum of {quorum}, although {len(failures)} refused: {error}"
    tasks.event("warning", text=text)
    return ready


def _works_on_it(dispatcher: Dispatcher, name: str, run_id: str) -> bool:
    """Tell whether a silo may answer soon: it is connected, and its hospital has no pending decision."""
    if (activity := dispatcher.activity_of(name)) is None:
        return False
    return (activity[0].activity, activity[0].run_id) != (pb.AWAITING_APPROVAL, run_id)


def _failures(
    open_tasks: Mapping[str, PendingTask],
    awaited: Callable[[str], bool],
    check: Callable[[str, pb.SecaggEntry | None], None] | None,
) -> Mapping[str, FederationError]:
    """Wait for the answers of all awaited silos; after the first refusal only for a short time.

    Raises RunInterrupted if the run was interrupted.
    """
    failures, answered, until = dict[str, FederationError](), set[str](), math.inf
    while left := [name for name in open_tasks if name not in answered]:
        now = time.monotonic()
        over = now >= until or not any(awaited(name) for name in left)
        for name in left:
            pending = open_tasks[name]
            if over or now >= pending.task.due:
                pending.settle(no_answer())
            if not pending.settled:
                continue
            answered.add(name)
            try:
                pending.wait()
                if check is not None:
                    check(name, pending.entry)
            except FederationError as error:
                failures[name] = error
                until = min(until, now + GRACE_S)
        if len(answered) < len(open_tasks):
            time.sleep(_LOOK_S)
    return failures


def _combined_error(failures: Mapping[str, FederationError], silos: int, run_id: str) -> FederationError:
    """Combine all failures into one error: a line for each silo, and the next step on the last."""
    silent = sorted(name for name, error in failures.items() if error.code == _NO_ANSWER)
    unanswered = f"no answer yet from {', '.join(silent)}" if silent else ""
    refused = [f"{name}: {_shortened(error)}" for name, error in failures.items() if name not in silent]
    remedy = f"no round began and nothing was charged; fix the cause, then: coordinator resume {run_id}"
    if not refused:
        return UnavailableError(
            "E-RUN-37", f"all {silos} silos must report that they are ready, but {unanswered}: {remedy}"
        )
    lines = [f"all {silos} silos must be ready, but {len(refused)} refused", *sorted(refused)]
    lines += [unanswered] if unanswered else []
    explained = "`coordinator explain CODE` says what the hospital can do"
    return RefusedError("E-RUN-36", "\n  ".join([*lines, f"{explained}; {remedy}"]))


def _shortened(error: FederationError) -> str:
    return textwrap.shorten(str(error), _REASON_CHARS, placeholder=" ...")
