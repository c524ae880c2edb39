"""The worker's end of the pipes: answers the service's calls, and calls the service from the arithmetic."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import astuple
from pathlib import Path

from coordinator.runs.exchange import ERRORS, Place, Rounds, Setup, Update, Written, open_request_of_json, seeds_of_json
from coordinator.worker.work import RunWork
from fl_core.extensions import loading
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext
from privacy.secagg.coordinator_side import OpenedSeeds
from service_core.workers.calls import Calls, Later
from service_core.workers.lines import Line


def serve(place: Place, line: Line) -> None:
    """Answer the service until it closes its pipe; then end this process at once, also in the middle of its work.

    If an extension cannot be loaded, send the error and return.
    """
    try:
        loaded = loading.load_distributions(place.extensions)
    except Exception as error:
        line.send(failed=ERRORS.write(error))
        return
    work = RunWork(place)
    calls = Calls(
        line,
        {
            "build": work.build,
            "open": lambda *facts: work.open(open_request_of_json(facts)),
            "require_quorum": work.require_quorum,
            "take": lambda *facts: work.take(Setup(*facts)),
            "check": lambda *facts: work.check(Update(*facts)),
            "initial": work.initial,
            "census": work.census,
            "run": lambda *facts: work.run(Rounds(*facts)),
        },
        ERRORS,
    )
    work.service = _Service(calls)
    line.send(ready=[f"{package.kind} {package}" for package in loaded])
    calls.listen()
    os._exit(0)


class _Service:
    """The service at the other end of the pipes (`coordinator.runs.exchange.RunService`)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str], needed: int) -> None:
        self._calls.call("opened", astuple(context), kind.value, names, needed)

    def broadcast(self, round: int, written: Written | None) -> None:
        self._calls.call("broadcast", round, written)

    def ask(self, silo: str, context: RoundContext, kind: TaskKind) -> Later[tuple[str, Path]]:
        answer = self._calls.begin("ask", silo, astuple(context), kind.value)

        def read() -> tuple[str, Path]:
            update_id, path = answer.result()
            return update_id, Path(path)

        return Later(answer, read)

    def arrived(self, silo: str, classes: Collection[str] | None) -> None:
        self._calls.call("arrived", silo, None if classes is None else sorted(classes))

    def refused(self, silo: str, why: str) -> None:
        self._calls.call("refused", silo, why)

    def unmask(self, round: int, kind: TaskKind, members: Collection[str], blocks: Collection[str]) -> OpenedSeeds:
        return seeds_of_json(self._calls.call("unmask", round, kind.value, sorted(members), sorted(blocks)))

    def counted(self, hospitals: Sequence[int]) -> None:
        self._calls.call("counted", hospitals)

    def closed(self, record: RoundRecord, written: Written | None, model: str) -> None:
        self._calls.call("closed", record.to_dict(), written, model)
