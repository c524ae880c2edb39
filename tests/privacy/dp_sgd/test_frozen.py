"""Frozen statistics: the exact gradient where they were measured, bounded and charged, and per example afterwards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers_core import FED, SCHEMA, Given, manifest, same, shares
from torch import Tensor, nn

from fl_core.errors import RefusedError
from fl_core.methods import build_method
from fl_core.methods.losses import fedmr as manifold
from fl_core.methods.losses.fedmr_frozen import DIMENSIONS, FrozenIntra, Statistics
from fl_core.models import build_model
from fl_core.rounds.manifest import Choice, RunManifest
from fl_core.simulation.in_process import History, LocalPort, bench_of, initial_state, simulate
from fl_core.training.frozen_statistics import Freezable
from fl_core.types.values import Losses, LossFn, TaskKind, Turn
from privacy.accounting.accountant import Mechanism
from privacy.data_access import doors_of
from privacy.dp_sgd.class_sums import Units, class_sums, sensitivity, unit_shares
from privacy.dp_sgd.data_opener import SimulatedBook, course_of
from privacy.dp_sgd.per_sample_gradients import per_unit
from privacy.noise import grid
from privacy.noise.sources import SeededNoise

INTRA = {"mu1": 1e-3, "mu2": 0.0}


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round sums so little that they are compared as if they were not."""
    monkeypatch.setattr(grid, "ROUNDING", 1e-12)


class Features(nn.Module):
    """Features are a linear map, so that every gradient is plain."""

    def __init__(self, d: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.map = nn.Linear(6, d, bias=False, dtype=torch.float64)
        self.head = nn.Linear(d, 3, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.map.weight.copy_(torch.randn(d, 6, generator=g, dtype=torch.float64))
        self.feature_dim, self.n_classes = d, 3

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.map(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x))
        return found


def silent(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    """Return a loss that is 0 and depends on everything."""
    return Losses(model(x).sum(1) * 0)


def examples(n: int = 60) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.arange(n) % 3


def frozen_loss(model: Features, form: FrozenIntra, x: Tensor, y: Tensor, radius: float, z: float = 0.0) -> LossFn:
    given = Given(x, y)
    sums = class_sums(form.query(model, radius), given, Units.of(given), form.norm, form.weight, z, SeededNoise(3))
    sums = {k: v.double() for k, v in sums.items()}
    return form.loss(silent, sums, radius, z * sensitivity(form.norm, form.weight))


@pytest.mark.parametrize("d", [5, 24])
def test_the_frozen_gradient_is_that_of_the_coupled_loss_where_the_statistics_were_measured(
    d: int, monkeypatch: pytest.MonkeyPatch, fine: None
) -> None:
    """Against autograd through manifold.intra_loss of all examples at once, on the projected features."""
    monkeypatch.setattr("fl_core.methods.losses.fedmr_frozen.features_of", lambda model: model)
    model, (x, y) = Features(d), examples()
    form, radius = FrozenIntra(0.7, 3, 11), 100.0
    whole = 0.7 * manifold.intra_loss(form.projected(model, x, radius), y, 3, manifold.IntraVariant(eps=0.0))
    (wanted,) = torch.autograd.grad(whole, [model.map.weight])
    loss = frozen_loss(model, form, x, y, radius)
    (found,) = torch.autograd.grad(loss(model, x, y).per_example.mean(), [model.map.weight])
    assert float(wanted.abs().max()) > 1e-2
    assert torch.allclose(found, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max()))  # sums leave as float32
    away = nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0)
    assert float(away) > 1 - 1e-6


def test_the_held_terms_of_one_example_do_not_move_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_core.methods.losses.fedmr_frozen.features_of", lambda model: model)
    model, (x, y) = Features(5), examples()
    loss = frozen_loss(model, FrozenIntra(1.0, 3, 0), x, y, 1.0)
    before = loss(model, x, y).per_example
    after = loss(model, torch.cat((x[:1], 9 * x[1:])), y).per_example
    assert torch.equal(before[0], after[0])
    assert bool((before[1:] != after[1:]).any())
    assert loss(model, x, y).coupled is None


def test_brute_force_sensitivity_of_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing any record, or any group, moves (sums, count) jointly by at most sqrt(3), and a long one by that."""
    monkeypatch.setattr("fl_core.methods.losses.fedmr_frozen.features_of", lambda model: model)
    model, (x, y) = Features(24), examples(20)
    form = FrozenIntra(1.0, 3, 0)
    query = form.query(model, 0.5)  # every feature is longer than the radius
    assert query.vectors(x, y).shape[1] == DIMENSIONS + DIMENSIONS**2
    assert sensitivity(form.norm, form.weight) == pytest.approx(math.sqrt(3))

    def joint(keep: Tensor, groups: list[str] | None) -> Tensor:
        given = Given(x[keep], y[keep])
        given.groups = None if groups is None else tuple(groups[k] for k in keep.tolist())  # type: ignore[misc]
        shares = unit_shares(query, given, Units.of(given), form.norm)
        total, count = shares.summed(shares.vectors, 4), shares.summed(shares.counts, 4)
        return torch.cat((total.flatten(), form.weight * count))

    for groups in (None, [f"g{k // 3}" for k in range(20)]):
        every = torch.arange(20)
        units = [[k] for k in range(20)] if groups is None else [[k for k in range(20) if groups[k] == g]
                                                                for g in sorted(set(groups))]  # fmt: skip
        whole = joint(every, groups)
        moved = [
            float((whole - joint(torch.tensor([k for k in range(20) if k not in u]), groups)).norm()) for u in units
        ]
        assert max(moved) <= math.sqrt(3) + 1e-9
        if groups is None:
            assert max(moved) > 1.2


def test_noise_alone_is_believed_to_be_no_variance() -> None:
    """A class of noise has deviations of the noise's own size, correlations within [-1, 1], and gradients of it."""
    g = torch.Generator().manual_seed(0)
    std, k = 8 * math.sqrt(3), 4
    sums = {"sum": torch.randn(3, k + k * k, generator=g) * std, "count": torch.tensor([200.0, 0.0, 50.0])}
    found = Statistics.of(sums, k, 1.0, std)
    assert float(found.deviation[0].min()) ** 2 >= 2 * std / 200 - 1e-6
    assert float(found.correlation.abs().max()) <= 1
    assert float(found.share[1]) == 0
    assert float(found.share[0]) == pytest.approx(250 / (2 * 200))
    assert bool(torch.isfinite(found.terms(torch.randn(6, k, generator=g).double(), torch.arange(6) % 3)).all())


def run_of(method: str = "fedmr", options: dict[str, object] | None = None, **terms: object) -> RunManifest:
    made = manifest(method, INTRA if options is None else options)  # type: ignore[arg-type]
    members = tuple(replace(m, units=14) for m in made.members)
    facts = {"rng": "test", "epsilon": 50.0, "coupled": "frozen", **terms}
    return replace(made, members=members, privacy=Choice("dp_record", facts))  # type: ignore[arg-type]


def test_the_statistics_are_a_release_of_their_own_and_training_has_the_sensitivity_of_single_examples() -> None:
    frozen, split = course_of(run_of(), 0), course_of(run_of(coupled="split"), 0)
    releases = frozen.releases(0, True)
    assert [(r.purpose, r.mechanism) for r in releases if r.purpose == "statistics"] == [("statistics", Mechanism(8.0))]
    assert [r.purpose for r in releases].count("training") == 1
    with_prototypes = course_of(run_of(options={"mu1": 1e-3, "mu2": 0.5, "inter_weighting": "example"}), 0)
    purposes = [r.purpose for r in with_prototypes.releases(0, True)]
    assert purposes == ["evaluation", "training", "statistics", "prototypes"]
    assert frozen.std == frozen.noise * 1.0 * (1 + grid.SLACK)  # C1
    assert split.std == split.noise * 1.5 * (1 + grid.SLACK)  # C1 + 2 C2
    assert frozen.noise > split.noise  # the statistics take their part of the budget
    assert "statistics" not in [
        r.purpose for r in course_of(run_of(options={"mu1": 0.0, "mu2": 0.0}), 0).releases(0, True)
    ]


@pytest.mark.parametrize(
    "run",
    [
        run_of(options={**INTRA, "intra": "code"}),
        run_of(options={**INTRA, "mu2": 0.5, "inter": "paired_sample"}),
        run_of("fedphp", {"transfer": "mmd"}),
    ],
    ids=["the code's form", "paired samples", "fedphp"],
)
def test_a_coupled_loss_without_a_frozen_form_is_refused(run: RunManifest) -> None:
    assert build_method(run.method.name, run.method.options).coupling.name == "BATCH"
    with pytest.raises(RefusedError, match="frozen form"):
        course_of(run, 0)


def test_a_run_trains_with_frozen_statistics_and_charges_them_every_round() -> None:
    run, books = run_of(), [SimulatedBook() for _ in range(3)]
    history = History()
    end = simulate(run, shares(), history, [doors_of(run, k, b) for k, b in enumerate(books)])
    assert [r.purpose for r in books[0].releases].count("statistics") == 3
    assert history.records[-1].included
    off = run_of(coupled="off")
    other = simulate(off, shares(), History(), [doors_of(off, k, SimulatedBook()) for k in range(3)])
    assert not same(end["w"], other["w"])


def test_without_noise_and_clips_the_private_gradient_is_that_of_the_frozen_loss(fine: None) -> None:
    """Through the hooks, two forward passes of one model: against autograd on the same batch."""
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    method = build_method("fedmr", INTRA)
    msg = initial_state(run_of())
    loss = method.objective(model, msg, None, Turn(FED, 0, 0))  # type: ignore[attr-defined]
    assert isinstance(loss, Freezable)
    share = shares()[0].train
    sums = class_sums(loss.form.query(model, 1.0), share, Units.of(share), loss.form.norm, loss.form.weight, 0.0,
                      SeededNoise(0))  # fmt: skip
    held = loss.form.loss(loss.whole, sums, 1.0, 0.0)
    x, y = share.batch(torch.arange(14))
    wanted = torch.autograd.grad(held(model, x, y).per_example.sum(), list(model.parameters()))
    with per_unit(model) as engine:
        found = engine.clipped_sum(lambda: held(model, x, y).per_example, torch.arange(14), 1e9)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.float(), b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)


def test_an_infinite_epsilon_is_the_plain_run() -> None:
    run = run_of(epsilon=math.inf)
    port = [LocalPort("north", 0, shares()[0], bench_of(r), r.train, 0, True) for r in (run, manifest("fedmr", INTRA))]
    a, b = (p.round(initial_state(run), replace(FED, round=0), TaskKind.TRAIN) for p in port)
    assert same(a["delta"].total, b["delta"].total)
