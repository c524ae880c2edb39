"""Private runs: manifests, homes with budgets, data behind a privacy profile, and sensitivity by brute force."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel, assemble
from fl_core.rounds.manifest import NamedOptions, RunManifest, RunMember, make_members
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, Losses, LossFn, Part, RoundContext, SgdOptions
from privacy import profiles
from privacy.accounting.record_config import RecordDpConfig, round_to_two_digits
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.release_log import ReleaseLog
from silo.storage.home import Home
from tests.support.fake_coordinator import MEMBERS, manifest
from tests.support.federations import SCHEMA, Given

TRAIN, TEST, HOSPITAL = "center1/train", "center1/test", "hospital"
DATA = "digits/p3c4/1"
SEEDED_POLICY = '[privacy]\nrng = "test"\n'


@cache
def _members() -> tuple[RunMember, ...]:
    units = round_to_two_digits(len(PrivacyUnits.of(datasets.load(DATA).train)))
    return make_members(MEMBERS, 3, 1.0, [units] * 3)


def private(method: str = "fedavg", options: dict | None = None, **terms) -> RunManifest:
    """Freeze a small private run; noise is seeded unless the test says otherwise."""
    facts = {"rng": "test", "epsilon": 8.0, **terms}
    return manifest(
        method=NamedOptions(method, options or {}),
        members=_members(),
        privacy=NamedOptions("dp_record", facts),
    )


def hospital_level(method: str = "fedavg", options: dict | None = None, **terms) -> RunManifest:
    """Freeze a small run that hides what a whole hospital changes; the digits' network is large for it."""
    choice = NamedOptions("dp_silo_small", {"rng": "test", "epsilon": 8.0, "allow_large": True, **terms})
    made = manifest(
        method=NamedOptions(method, options or {}),
        members=_members(),
        privacy=choice,
    )
    return replace(made, layout={**made.layout, **profiles.extra_parts(choice)})


def budgeted(folder: Path, epsilon: float = 8.0, test_epsilon: float = 8.0, policy: str = SEEDED_POLICY) -> Ledger:
    """Register the tests' data in a home and give it a budget."""
    home = Home(folder).make()
    if policy:
        home.policy.write_text(policy)
    ledger = Ledger(home.ledger)
    register(ledger, datasets.load(DATA), "center1")
    ledger.set_budget(TRAIN, epsilon, 1e-5, "dpo", "test")
    ledger.set_budget(TEST, test_epsilon, 1e-5, "dpo", "test")
    return ledger


CONTEXT = RoundContext(3, 4, rounds=5, round=0, cohort=3).for_silo(0, 7)
PLAIN = TrainConfig(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=1000, epochs=3)


class NoNoise(SeededNoise):
    """Samples as usual, adds nothing."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)


def examples(n: int = 24, groups: bool = False) -> Given:
    g = torch.Generator().manual_seed(n)
    made = Given(torch.rand(n, 1, 8, 8, generator=g), torch.arange(n) % 4)
    if groups:
        made.groups = tuple(f"patient {i // 3}" for i in range(n))
    return made


def model_of(seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def plan_of(
    terms: RecordDpConfig, train: TrainConfig = PLAIN, units: int = 24, method: str = "fedavg", **options: object
) -> ReleasePlan:
    return ReleasePlan.of(terms, train, 5, units, build_method(method, options), model_of(), SCHEMA)


def private_data(
    plan: ReleasePlan,
    data: Given,
    noise: object = None,
    round: int = 0,
    log: ReleaseLog | None = None,
    allowance: ReleaseAllowance | None = None,
    **more: object,
) -> DpSgdLocalData:
    """Open data under a plan. allowance: what may be released, else three times what is planned for the round."""
    context = replace(CONTEXT, round=round)
    allowance = allowance or ReleaseAllowance([r for _ in range(3) for r in plan.releases(round, True)])
    source = NoNoise(1, "sampling") if noise is None else noise
    opened = RoundData(data, data, plan.rates.train, context, **more)  # type: ignore[arg-type]
    return DpSgdLocalData(opened, plan, allowance, source, log)  # type: ignore[arg-type]


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))


N, CLASSES = 10, 4
CLIP = 0.1
CONDITIONS = ("as it is", "augmented", "dropout", "groups")
TREATMENTS = ("split", "micro", "off")


class ByPlace(NoNoise):
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
    """Plain data that write down each training before they do it."""

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


def extreme_records() -> list[tuple[str, Tensor, int]]:
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
        local_data = Capturing(RoundData(data, data, config, now.for_silo(0, 3)))
        local_data.calls = calls = []
        msg, context = method.broadcast(server), now.for_silo(0, 3)
        bundle, silo = method.local(model, msg, silo, local_data, context)
        method.personal(model, msg, silo, local_data, context)
        alone = {n: _stacked(p) if n in method.unsummed_parts else p for n, p in bundle.items()}
        server = method.merge(server, alone, now)
    return calls


def _stacked(part: Part) -> Part:
    return Part({key: v.unsqueeze(0) for key, v in part.total.items()}, part.weight.unsqueeze(0))


@dataclass
class Force:
    """One step of a captured call under one treatment and condition, without noise, over all records (q = 1)."""

    call: Call
    coupling: Coupling
    treatment: str = "off"
    condition: str = "as it is"
    noise: type[NoNoise] = NoNoise

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
        self.plan = ReleasePlan(terms, SamplingSchedule(config, N), 1, self.coupling, (1,), 0, False)
        self.plan.__dict__["noise"] = 1.0  # where solving for an epsilon would put it
        self._without: Tensor | None = None

    @property
    def accounted(self) -> float:
        """How far the accountant believes that one unit moves the sum: the noise's std over its multiplier."""
        return self.plan.std / self.plan.noise

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
        allowance, source = ReleaseAllowance(self.plan.training(1)), self.noise(11, "force")
        local_data = DpSgdLocalData(
            RoundData(data, data, self.plan.rates.train, context, progress=watch), self.plan, allowance, source
        )
        local_data.sgd(
            model,
            self.call.loss,
            SgdOptions(steps=1, only=self.call.options.only, no_momentum=self.call.options.no_momentum),
        )
        micro = self.plan.coupled and self.treatment == "micro"
        return read[0] * (self.plan.groups if micro else self.plan.batch)

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
