"""Rounds of a method with silo state on problem Q, with cohorts and lost updates; and a silo that solves exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from helpers_core import QData, Scalar, manifest, shares

from fl_core.converter import Option
from fl_core.errors import UnavailableError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import InProcessSilo, RoundHistory, local_ports
from fl_core.types.values import AS_SCHEDULED, Bundle, RoundContext, State, TaskKind, TrainConfig


class Exact(QData):
    """Minimises a/2 (w - b)^2 + penalty by Newton's method: one step, the objective is a parabola."""

    def sgd(self, model, loss, options=AS_SCHEDULED):  # type: ignore[no-untyped-def]
        assert isinstance(model, Scalar)
        assert options.shift is None
        objective = 0.5 * self.a * (model.w - self.b).square().sum() + (
            options.penalty(model) if options.penalty else 0.0
        )
        (slope,) = torch.autograd.grad(objective, model.w, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), model.w)
        with torch.no_grad():
            model.w -= slope / curve
        return 1


@dataclass
class Played:
    """What a run left: the reported model, server state, silo states and locally trained models after each round."""

    path: list[float] = field(default_factory=list)
    servers: list[State] = field(default_factory=list)
    silos: list[dict[int, State]] = field(default_factory=list)
    trained: list[dict[int, float]] = field(default_factory=list)

    def state(self, t: int, group: str) -> list[float]:
        """Read one group of every silo's state after round t."""
        return [float(state[group]["w"]) for _, state in sorted(self.silos[t].items())]

    def server(self, t: int, group: str) -> float:
        """Read one group of the server's state after round t."""
        return float(self.servers[t][group]["w"])


def total_of(bundles: Sequence[Bundle]) -> Bundle:
    """Add bundles part by part."""
    total = dict(bundles[0])
    for bundle in bundles[1:]:
        total = {name: part + bundle[name] for name, part in total.items()}
    return total


def play(
    method: FedAvg,
    silos: Sequence[QData],
    rounds: int,
    *,
    asked: Callable[[int], Collection[int]] | None = None,
    lost: Mapping[int, Collection[int]] | None = None,
    commit_anyway: bool = False,
) -> Played:
    """Play rounds; `lost` names by round the silos whose update does not arrive.

    commit_anyway: what must not be done, a silo keeps its new state whether or not its update was included.
    """
    context, played = RoundContext(len(silos), 2), Played()
    server = method.init_server(Scalar(), context)
    states = {k: method.init_silo(Scalar(), context) for k in range(len(silos))}
    for t in range(rounds):
        arrived, trained = [], {}
        for k in asked(t) if asked else range(len(silos)):
            model = Scalar()
            outcome = method.local(model, method.broadcast(server), states[k], silos[k], context.for_silo(k, 0))
            trained[k] = float(model.w.detach())
            missing = k in (lost or {}).get(t, ())
            if not missing:
                arrived.append(outcome.bundle)
            if not missing or commit_anyway:
                states[k] = outcome.state
        if arrived:
            server = method.merge(server, total_of(arrived), context)
        played.path.append(float(server["w"]["w"]))
        played.servers.append(server)
        played.silos.append(dict(states))
        played.trained.append(trained)
    return played


def alternating(t: int) -> list[int]:
    """Ask the two silos in turn."""
    return [t % 2]


class Lossy:
    """A port whose update of given rounds is made and then does not arrive."""

    def __init__(self, inner: InProcessSilo, rounds: Collection[int]) -> None:
        self.name, self.inner, self.rounds = inner.name, inner, rounds

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        """Do the work, and lose it in the rounds given."""
        bundle = self.inner.round(msg, context, kind)
        if context.round in self.rounds and kind is TaskKind.TRAIN:
            raise UnavailableError("E-RUN-03", f"{self.name} was lost after its upload")
        return bundle

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Pass the close on."""
        self.inner.settle(context, kind, included)


def run_and_lose(
    method: str, options: Mapping[str, Option], lost: Mapping[int, str], rounds: int = 4
) -> tuple[State, dict[str, State]]:
    """Run the three silos with images; `lost` names by round the silo that fails. Return server and silo states."""
    train = TrainConfig(lr=0.05, batch_size=4, epochs=1)
    run = manifest(method, options, train=train, rounds=rounds, quorum=2)
    ports = [
        Lossy(port, [t for t, name in lost.items() if name == port.name])
        for port in local_ports(RunSetup.of(run), shares())
    ]
    history = RoundHistory()
    server = RunSetup.of(run).round_loop(ports, 1).run(RunSetup.of(run).initial_state(), history)
    for record in history.records[:rounds]:
        assert list(record.missing) == ([lost[record.round]] if record.round in lost else [])
    states = {port.name: port.inner.state for port in ports}
    assert all(state is not None for state in states.values())
    return server, {name: state for name, state in states.items() if state is not None}
