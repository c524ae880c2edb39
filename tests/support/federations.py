"""Small federations in this process: models, problem Q, made-up images, manifests, the round loop; rounds of any method
over a few silos, with cohorts and lost updates; small problems whose answer is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consilium.research.engines.in_process import InProcessSilo, RoundHistory, SiloShare, local_ports, simulate
from consilium.testing.federation import NAMES as NAMES
from consilium.testing.federation import SCHEMA as SCHEMA
from consilium.testing.federation import MadeUp as Given  # noqa: F401
from consilium.testing.federation import manifest as manifest
from consilium.testing.federation import same as same
from consilium.testing.federation import same_bundle as same_bundle
from consilium.testing.federation import shares
from consilium.testing.federation import total_of as total_of
from consilium.testing.methods import CONTEXT as CONTEXT
from consilium.testing.methods import TRAIN as TRAIN
from fl_core.converter import Option
from fl_core.errors import UnavailableError
from fl_core.methods.disjoint.fedcd import FedCD
from fl_core.methods.fedavg import FedAvg
from fl_core.models import MODELS, SplitModel, build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.memory_need import StepMemory, measure_step
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.training.schedule import effective_steps
from fl_core.types.computed_tensors import BLOCK
from fl_core.types.enums import Split, TaskKind
from fl_core.types.interfaces import RoundData, SiloPort
from fl_core.types.records import RoundRecord, Schema, TrainConfig
from fl_core.types.values import (
    AS_SCHEDULED,
    Bundle,
    LocalResult,
    LossFn,
    Part,
    PartSpec,
    Query,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)
from privacy.compiled_run import CompiledRun
from protos.wire import codec
from protos.wire.codec import BundleFile

METHOD_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "fedmr": {"mu1": 1e-4, "mu2": 0.5},
    "fedcd": {"restarts": 2, "steps": 3},
    "fedrep": {"head_epochs": 2},
    "ditto": {"lambda_v": 0.5},
    "fedrod": {"variant": "hyper", "hidden": 8},
    "fedproto": {"weights": "uniform"},
    "fednova": {"mu": 0.1, "server_momentum": 0.5, "prototypes": "mixture"},
    "feddyn": {"alpha": 0.1, "prototypes": "mixture"},
    "feddc": {"alpha": 0.1, "prototypes": "additive"},
    "fedgen": {"alpha": 1.0, "beta": 1.0, "made": 4, "noise": 3, "hidden": 8, "steps": 2},
    "creff": {"features": 3, "feature_steps": 2, "epochs": 1, "batch": 5},
}
"""Settings under which a method is quick and all of its parts are at work."""


MODEL_SHAPES = dict.fromkeys((name for name in MODELS if name != "frozen"), (3, 32, 32)) | {
    "digits_cnn": (1, 8, 8),
    "digits_mlp": (1, 8, 8),
    "digits_linear": (1, 8, 8),
    "lenet": (1, 28, 28),
    "mlp_net": (1, 28, 28),
    "table_mlp": (17,),
    "wrn28_10": (3, 8, 8),
    "resnet50": (3, 16, 16),
    "resnet56": (3, 16, 16),
    "efficientnet_b0": (3, 64, 64),
    "efficientnet_lite0": (3, 64, 64),
    "efficientnet_lite2": (3, 64, 64),
    "char_lstm": (12,),
    "spiral_mlp": (2,),
}
"""Of the models that need no file."""


def schema(shape: tuple[int, ...], classes: int = 10) -> Schema:
    return Schema(shape, tuple(map(str, range(classes))))


def small(name: str, seed: int = 0, **options: object) -> SplitModel:
    return build_model(name, options, schema(MODEL_SHAPES[name]), seed)


class Scalar(nn.Module):
    """One trainable number, in float64."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))


class QData:
    """Problem Q as a silo's data: F(w) = a/2 (w - b)^2 by full-batch gradient descent, in float64."""

    batch_size = 1

    def __init__(
        self, a: float, b: float, n: float = 1.0, steps: int = 10, lr: float = 0.1, momentum: float = 0.0
    ) -> None:
        self.a, self.b, self.n, self.steps, self.lr, self.momentum = a, b, n, steps, lr, momentum
        self.path: list[float] = []

    def planned_steps(self, epochs: float | None = None) -> int:
        return self.steps

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        return effective_steps(TrainConfig(momentum=self.momentum), steps, self.lr * mu)

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        assert isinstance(model, Scalar)
        planned = self.steps if options.steps is None else options.steps
        w, velocity = model.w.detach(), 0.0
        for _ in range(planned):
            gradient = self.a * (w - self.b)  # of a/2 (w - b)^2
            if options.penalty is not None:
                gradient += torch.autograd.grad(options.penalty(model), model.w)[0]
            if options.shift is not None:
                gradient += options.shift["w"]
            velocity = self.momentum * velocity + gradient
            w -= options.lr_scale * self.lr * velocity
            self.path.append(float(w))
        return planned

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        raise AssertionError("problem Q has no examples to sum over")

    def size(self) -> float:
        return self.n

    def class_counts(self) -> Tensor:
        raise AssertionError("problem Q has no classes")


FED = RoundContext(n_silos=3, n_classes=4, rounds=3, round=1, cohort=3)


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
    closed: Sequence[Mapping[str, float]] = (),
) -> tuple[State, Kept]:
    kept = Kept()
    ports = local_ports(RunSetup.of(run), shares()) if ports is None else ports
    final = (
        RunSetup.of(run)
        .round_loop(ports, parallel)
        .run(RunSetup.of(run).initial_state() if state is None else state, kept, start, closed)
    )
    return final, kept


SHAPES = {"large": (2, BLOCK // 2 + 3), "small": (5,), "none": (0, 3)}
LAYOUT = {"p": PartSpec(SHAPES, ())}


def drawn(seed: int, scale: float = 1.0, weight: float = 3.0) -> dict[str, Part]:
    generator = torch.Generator().manual_seed(seed)
    return {"p": Part.of({k: torch.randn(s, generator=generator) * scale for k, s in SHAPES.items()}, weight)}


def stored(bundle: Bundle, folder: Path, name: str = "bundle") -> BundleFile:
    codec.write_bundle(bundle, folder / name)
    return BundleFile(folder / name)


def measured(run: CompiledRun, trains: bool = True) -> StepMemory:
    """Measure a step of the first silo of a run."""
    manifest, cpu = run.manifest, torch.device("cpu")
    facts = len(manifest.members), len(manifest.schema.classes), manifest.rounds, 0, len(manifest.members)
    context = RoundContext(*facts).for_silo(0, manifest.seed)
    msg = run.method.broadcast(run.initial_state())
    opened = run.profile.made_up_step(0, context, cpu).opened
    return measure_step(run.silo_runtime(), msg, opened, context, cpu, trains)


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


def simulated(
    method: str = "fedavg",
    options: Mapping[str, Option] | None = None,
    given: Sequence[SiloShare] | None = None,
    **more: Any,
) -> State:
    """Run `manifest(method, options, **more)` in this process; return the server's last state."""
    run = RunSetup.of(manifest(method, options, **more))
    return simulate(run, shares() if given is None else given, RoundHistory())


class Factor(nn.Module):
    """Multiplies by one trainable number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Pair(nn.Module):
    """u and v, both 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Factor(), Factor()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y

    @property
    def values(self) -> tuple[float, float]:
        return float(self.body.w.detach()), float(self.head.w.detach())


class PairData:
    """One example, x = 1 and y: every pass is one step of size 0.1 on (v u - y)^2 / 2."""

    lr, batch_size = 0.1, 1

    def __init__(self, y: float) -> None:
        self.y = y
        self.epochs: list[float | None] = []

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self.epochs.append(options.epochs)
        chosen = [p for name, p in model.named_parameters() if options.only is None or options.only(name)]
        objective = 0.5 * (model(torch.ones((), dtype=torch.float64)) - self.y).square()
        with torch.no_grad():
            for p, g in zip(chosen, torch.autograd.grad(objective, chosen), strict=True):
                p.sub_(self.lr * g)
        return 1

    def size(self) -> float:
        return 1.0


FEDCD_TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def fedcd_model(seed: int = 0) -> SplitModel:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def played(method: FedCD, k: int = 0, server: State | None = None, t: int = 0) -> tuple[State, LocalResult]:
    """Train one silo for one round."""
    share, context = shares()[k], replace(FED, round=t).for_silo(k, 0)
    msg = method.broadcast(method.init_server(fedcd_model(), FED) if server is None else server)
    return msg, method.local(
        fedcd_model(), msg, {}, PlainLocalData(RoundData(share.train, share.test, FEDCD_TRAIN, context)), context
    )
