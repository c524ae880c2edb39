"""One private step of a method's own loss, with and without a record more: how far the clipped sum moves, by force."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from helpers_core import Given
from torch import Tensor, nn

from fl_core.methods import build_method
from fl_core.models.split_model import SplitModel, assemble
from fl_core.rounds.manifest import NamedOptions
from fl_core.training.local_data import PlainLocalData
from fl_core.types.values import AS_SCHEDULED, Coupling, LossFn, Part, RoundContext, SgdOptions, TrainConfig
from privacy import profiles
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.dp_sgd.private_data import DpSgdLocalData
from privacy.noise.sources import SeededNoise

N, CLASSES = 10, 4
CLIP = 0.1
CONDITIONS = ("as it is", "augmented", "dropout", "groups")
TREATMENTS = ("split", "micro", "off")


class Silent(SeededNoise):
    """Adds no noise; what it draws follows from contents."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)


class ByPlace(Silent):
    """The fault that was there before: what is drawn inside a unit follows from its place in the batch."""

    private = True

    def seed(self, *about: str | int) -> int:
        return 7


class Call(NamedTuple):
    """What a method asked of `sgd`: a copy of the model as it was then, and the loss with all that it holds."""

    model: nn.Module
    loss: LossFn
    options: SgdOptions


class Capturing(PlainLocalData):
    """Plain doors that write down each training before they do it."""

    calls: list[Call]

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self.calls.append(Call(copy.deepcopy(model), loss, options))
        return super().sgd(model, loss, options)


def network(dropout: bool) -> SplitModel:
    """A few thousand weights: a convolution with a norm, or two layers that drop."""
    generator_state = torch.get_rng_state()
    torch.default_generator.manual_seed(1)
    if dropout:
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.5))
    else:
        body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.AvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16, 12),
            nn.ReLU(),
        )
    made = assemble(body, 12, (), CLASSES, head_bias=True)
    torch.set_rng_state(generator_state)
    return made


def records() -> tuple[Tensor, Tensor]:
    """Ten images of four classes, the last class rare."""
    draw = torch.Generator().manual_seed(5)
    return torch.rand(N, 1, 8, 8, generator=draw), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3])


def extremes() -> list[tuple[str, Tensor, int]]:
    """Records of every kind under labels of all classes: what it is, x (1, 8, 8), y."""
    x, y = records()
    spot = x[0].clone()
    spot[0, 3, 3] = float("nan")
    kinds = {
        "zeros": torch.zeros(1, 8, 8),
        "1e30": torch.full((1, 8, 8), 1e30),
        "-1e30": torch.full((1, 8, 8), -1e30),
        "the largest float": torch.full((1, 8, 8), 3e38),
        "1e-40": torch.full((1, 8, 8), 1e-40),
        "not a number": torch.full((1, 8, 8), float("nan")),
        "a pixel that is no number": spot,
        "infinite": torch.full((1, 8, 8), float("inf")),
        "a hundred times": 100 * x[1],
        "minus": -3 * x[2],
        "a checkerboard": (torch.arange(64).view(1, 8, 8) % 2) * 50.0,
        "ordinary": 1 - x[3],
    }
    found = [(f"{kind} as {label}", image, label) for label in range(CLASSES) for kind, image in kinds.items()]
    found += [(f"a copy of {k}", x[k], int(y[k])) for k in range(N)]
    return found + [(f"a copy of {k} as another", x[k], (int(y[k]) + 1) % CLASSES) for k in range(N)]


def captured(name: str, options: Mapping[str, object], dropout: bool, formed: bool = True) -> list[Call]:
    """Let a method train two rounds and return the calls of the second; formed: as a private run forms it."""
    privacy = NamedOptions("dp_record" if formed else "none", {})
    chosen, _ = profiles.private_form(NamedOptions(name, dict(options)), privacy)  # type: ignore[arg-type]
    method, model = build_method(name, chosen.options), network(dropout)
    x, y = records()
    data, fed = Given(x, y), RoundContext(1, CLASSES, 4, 0, 1)
    config = TrainConfig(lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=5, epochs=1)
    start = copy.deepcopy(model.state_dict())
    server, silo, calls = method.init_server(model, fed), method.init_silo(model, fed), list[Call]()
    for t in range(2):
        model.load_state_dict(start)
        now = replace(fed, round=t)
        doors = Capturing(data, data, config, now.for_silo(0, 3))
        doors.calls = calls = []
        msg, turn = method.broadcast(server), now.for_silo(0, 3)
        bundle, silo = method.local(model, msg, silo, doors, turn)
        method.personal(model, msg, silo, doors, turn)
        alone = {n: _alone(p) if n in method.unsummed_parts else p for n, p in bundle.items()}
        server = method.merge(server, alone, now)
    return calls


def _alone(part: Part) -> Part:
    return Part({key: v.unsqueeze(0) for key, v in part.total.items()}, part.weight.unsqueeze(0))


@dataclass
class Force:
    """One step of a captured call under one treatment and condition, silent, over all records (q = 1)."""

    call: Call
    coupling: Coupling
    treatment: str = "off"
    condition: str = "as it is"
    noise: type[Silent] = Silent

    def __post_init__(self) -> None:
        terms = RecordDpConfig(
            clip=CLIP,
            coupled=self.treatment,
            microbatch=3,
            physical_batch=8,
            max_per_unit=2 if self.condition == "groups" else 0,
        )
        config = TrainConfig(
            lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=N, epochs=1, augment=self.condition == "augmented"
        )
        self.course = ReleasePlan(terms, SamplingSchedule(config, N), 1, self.coupling, (1,), 0, False)
        self.course.__dict__["noise"] = 1.0  # where solving for an epsilon would put it
        self._without: Tensor | None = None

    @property
    def accounted(self) -> float:
        """How far the accountant believes that one unit moves the sum: the noise's std over its multiplier."""
        return self.course.std / self.course.noise

    def sum(self, x: Tensor, y: Tensor, groups: list[str]) -> Tensor:
        """Return the clipped sum of one step, flat, in float64."""
        data, model = Given(x, y), copy.deepcopy(self.call.model)
        if self.condition == "groups":
            data.groups = tuple(groups)
        read: list[Tensor] = []

        def watch(done: int, total: int) -> None:
            found = [p.grad for p in model.parameters() if p.grad is not None]
            read.append(torch.cat([g.double().flatten() for g in found]))

        context = RoundContext(1, CLASSES, 4, 1, 1).for_silo(0, 0)
        spend, source = ReleaseAllowance(self.course.training(1)), self.noise(11, "force")
        doors = DpSgdLocalData(data, data, self.course.rates.train, context, self.course, spend, source, progress=watch)
        doors.sgd(
            model,
            self.call.loss,
            SgdOptions(steps=1, only=self.call.options.only, no_momentum=self.call.options.no_momentum),
        )
        micro = self.course.coupled and self.treatment == "micro"
        return read[0] * (self.course.groups if micro else self.course.batch)

    def moved(self, image: Tensor, label: int, place: int) -> float:
        """Insert a record (of a group: with an ordinary one beside it) and return how far the sum moves."""
        x, y = records()
        groups = [f"patient {i // 2}" for i in range(N)]
        if self._without is None:
            self._without = self.sum(x, y, groups)
        more = [image, 1 - x[4], image] if self.condition == "groups" else [image]
        labels = [label, 1, label][: len(more)]
        whole = torch.cat((x[:place], torch.stack(more), x[place:]))
        all_labels = torch.cat((y[:place], torch.tensor(labels), y[place:]))
        found = self.sum(whole, all_labels, [*groups[:place], *["the new patient"] * len(more), *groups[place:]])
        return float((found - self._without).norm())


def splits_of(coupling: Coupling) -> tuple[str, ...]:
    """The treatments of coupled terms that a call can be under."""
    return ("off",) if coupling is Coupling.EXAMPLE else TREATMENTS
