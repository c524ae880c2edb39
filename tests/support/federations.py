"""Small federations in this process: models, problem Q, made-up images, manifests, the round loop, updates in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from consilium.testing.federation import NAMES as NAMES
from consilium.testing.federation import SCHEMA as SCHEMA
from consilium.testing.federation import MadeUp as Given  # noqa: F401
from consilium.testing.federation import manifest as manifest
from consilium.testing.federation import same as same
from consilium.testing.federation import same_bundle as same_bundle
from consilium.testing.federation import shares
from fl_core.aggregation.aggregator import BLOCK
from fl_core.converter import Option
from fl_core.errors import UnavailableError
from fl_core.models import MODELS, SplitModel, build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.memory_need import StepMemory, measure_step
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import RoundHistory, local_ports
from fl_core.training.optimizers import effective_steps
from fl_core.types.enums import Split, TaskKind
from fl_core.types.interfaces import SiloPort
from fl_core.types.records import RoundRecord, Schema, TrainConfig
from fl_core.types.values import (
    AS_SCHEDULED,
    Bundle,
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
from protos.wire.bundle_file import BundleFile

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


MODEL_SHAPES = dict.fromkeys(MODELS, (3, 32, 32)) | {
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
    "char_lstm": (12,),
    "spiral_mlp": (2,),
}


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


def measured(run: CompiledRun) -> StepMemory:
    """Measure a step of the first silo of a run."""
    manifest, cpu = run.manifest, torch.device("cpu")
    facts = len(manifest.members), len(manifest.schema.classes), manifest.rounds, 0, len(manifest.members)
    context = RoundContext(*facts).for_silo(0, manifest.seed)
    msg = run.method.broadcast(run.initial_state())
    return measure_step(run.silo_runtime(), msg, lambda n: run.profile.made_up_data(0, n, context, cpu), context, cpu)
