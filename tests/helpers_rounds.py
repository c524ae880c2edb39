"""Runs of the round loop over ports in this process, and a port that fails."""

from __future__ import annotations

from collections.abc import Sequence

from helpers_core import shares

from fl_core.errors import UnavailableError
from fl_core.rounds.engine import RoundRecord
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import RoundHistory, local_ports
from fl_core.types.interfaces import SiloPort
from fl_core.types.values import Bundle, Part, RoundContext, State, TaskKind


class Kept(RoundHistory):
    """Keeps the state after every round, and what was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[State] = []
        self.seen: list[tuple[int, TaskKind, tuple[str, ...]]] = []
        self.came: list[str] = []

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self.seen.append((context.round, kind, tuple(names)))

    def arrived(self, name: str) -> None:
        self.came.append(name)

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        self.states.append(server)


class Failing:
    """A port that raises, or spoils what it sends, in some rounds."""

    def __init__(self, inner: SiloPort, rounds: Sequence[int], spoil: bool = False) -> None:
        self.name, self._inner, self._rounds, self._spoil = inner.name, inner, rounds, spoil

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        self._inner.settle(context, kind, included)

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        if context.round not in self._rounds:
            return self._inner.round(msg, context, kind)
        if not self._spoil:
            raise UnavailableError("E-NET-01", f"{self.name} is away")
        bundle = dict(self._inner.round(msg, context, kind))
        delta = bundle["delta"]
        bundle["delta"] = Part({k: v * float("nan") for k, v in delta.total.items()}, delta.weight)
        return bundle


def go(
    run: RunManifest,
    ports: Sequence[SiloPort] | None = None,
    start: int = 0,
    state: State | None = None,
    parallel: int = 1,
) -> tuple[State, Kept]:
    kept = Kept()
    ports = local_ports(RunSetup.of(run), shares()) if ports is None else ports
    final = (
        RunSetup.of(run)
        .round_loop(ports, parallel)
        .run(RunSetup.of(run).initial_state() if state is None else state, kept, start)
    )
    return final, kept
