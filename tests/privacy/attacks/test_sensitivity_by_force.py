"""Sensitivity by brute force: one record more never moves a step's clipped sum by more than is accounted.

Every method that runs privately, every option that enters its loss, with augmentation, dropout and groups; records of
every kind (zeros, 1e30, not a number, copies of others, all labels) in front, in the middle and at the end. The losses
are the methods' own, as `local` gives them to its data in the second round, when prototypes and earlier models are
there. The exhaustive grid is slow; `make test` runs a diagonal of it through every case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods import METHODS, build_method
from fl_core.types.enums import Coupling
from fl_core.types.values import AS_SCHEDULED, Losses
from tests.support.privacy import CLIP, CONDITIONS, ByPlace, Call, Force, N, captured, extreme_records, splits_of

pytestmark = pytest.mark.integration

INTER = {"mu1": 1e-2, "mu2": 1.0}
CASES: dict[str, list[dict[str, object]]] = {
    "fedavg": [{}],
    "fedprox": [{"mu": 0.1}, {"prototypes": "mixture"}, {"prototypes": "additive", "lambda_p": 5.0, "tau_p": 0.1}],
    "scaffold": [{}],
    "fednova": [{}, {"prototypes": "mixture"}],
    "feddyn": [{}, {"prototypes": "additive"}],
    "feddc": [{}, {"prototypes": "mixture"}],
    "moon": [{"mu": 5.0, "tau": 0.1, "last": 2}, {"prototypes": "additive"}],
    "fedproc": [{}, {"prototypes": "additive"}],
    "fedlc": [{"form": f, "missing": m, "tau": 2.0} for f in ("calibrated", "published") for m in ("mask", "floor")],
    "fedrs": [{"rs": "hard", "alpha": 0.0}, {"rs": "soft"}],
    "fedphp": [{"lam": 0.9}, {"kd": "ce_asym"}, {"kd_tau2": False, "tau": 0.1}, {"transfer": "mmd", "lam": 0.5}],
    "map": [
        {"lam": 0.9, "rs": "soft", "alpha": 0.1},
        {"transfer": "mmd", "stages": "code"},
        {"kd_tau2": False},
        {"kd": "ce_asym", "tau": 9.0},
    ],
    "local": [{}],
    "fedper": [{}],
    "fedrep": [{"head_epochs": 1}, {"head_epochs": 1, "frozen_norm": "train", "tune_epochs": 1}],
    "fedbabu": [{"finetune_epochs": 1}],
    "ditto": [{}],
    "fedgen": [
        {"beta": 5.0, "hidden": 8, "made": 4, "steps": 1},
        {"noise_kind": "uniform", "mode": "secagg", "noise": 4, "hidden": 8, "made": 4, "steps": 1},
    ],
    "fedrod": [{"gamma": 2.0}, {"phase": "separate", "private_init": "zero"}, {"variant": "hyper", "gamma": 0.0}],
    "creff": [{"features": 2, "feature_steps": 1, "epochs": 1}],
    "fedproto": [{"lambda_p": 5.0}],
    "fedmr": [
        dict(INTER),
        {**INTER, "intra": "code"},
        {**INTER, "paper_literal_std": True, "eps": 1e-3},
        {**INTER, "inter": "paired_sample"},
        {**INTER, "negatives": "observed"},
        {**INTER, "no_margin": True},
        {**INTER, "warmup": 3},
        {**INTER, "prototypes": False},
        {"mu1": 0.0, "mu2": 5.0},
        {**INTER, "lite": 4, "lite_scope": "both"},
    ],
    "fedgela": [{}, {"etf": False}, {"adapt": False, "logit_scale": 1000.0}, {"feature_norm": "batch"}],
    "fedvls": [{"suppression": "example", "lam": 5.0, "mu": 5.0, "gamma": 2.0}],
    "fedloge": [{}, {"sparsity": 0.3, "length": 2.0, "norm": 0.5, "classifier": "frame"}],
    "fednh": [{}, {"fix_scaling": 30.0, "init": "orthogonal"}, {"scale": 20.0}],
}
OUTSIDE = {
    "weights",
    "server_lr",
    "server_momentum",
    "report",
    "control",
    "mu_macro",
    "mu_max",
    "recompute_bn",
    "recompute_first",
    "least_steps",
    "body_epochs",
    "lambda_v",
    "personal_epochs",
    "diversity",
    "lr",
    "weight_decay",
    "personal_body",
    "feature_lr",
    "batch",
    "predict",
    "own_classes",
    "mask_missing",
    "rho",
    "fednova.mu",
    "fednova.tau",
    "feddyn.alpha",
    "feddc.alpha",
    "fedrod.hidden",
    "fedgen.alpha",
}
"""Options that enter no loss of examples: averages, the server's half, terms without examples, personal models."""
DECIDED = {"draws", "inter_weighting"}
"""Options that the private form decides."""
ELSEWHERE = {"lambda_p", "tau_p"}
"""Strengths of the prototypes' contrast, which is one function for all methods; another value is fedprox's."""
ALL = [(name, k) for name, options in CASES.items() for k in range(len(options))]
PLACES = (0, N // 2, N)


def cells(name: str, k: int) -> Iterator[tuple[str, Force]]:
    """List the steps of one case: each training of the round, under each treatment and condition."""
    options = CASES[name][k]
    coupling = build_method(name, options).coupling
    for condition in CONDITIONS:
        for number, call in enumerate(captured(name, options, condition == "dropout")):
            for treatment in splits_of(coupling):
                where = f"{name} {options}, training {number}, {treatment}, {condition}"
                yield where, Force(call, coupling, treatment, condition)


def check(where: str, force: Force, chosen: list[int]) -> float:
    """Insert the chosen extreme_records, each at one place, and return the furthest that the sum was moved."""
    everything, furthest = extreme_records(), 0.0
    for k in chosen:
        kind, image, label = everything[k]
        place = PLACES[k // 3 % len(PLACES)]
        if force.condition == "groups":
            place -= place % 2  # a group stays together
        moved = force.moved(image, label, place)
        assert moved <= force.accounted, f"{where}: {kind} at {place} moves {moved / force.accounted:.4f} of the bound"
        furthest = max(furthest, moved)
    return furthest


@pytest.mark.parametrize(("name", "k"), ALL)
def test_no_record_moves_a_step_further_than_accounted(name: str, k: int) -> None:
    """The diagonal: each case in one condition and treatment, with a few records that differ from case to case."""
    found = list(cells(name, k))
    where, force = found[(3 * ALL.index((name, k)) + 1) % len(found)]
    count = len(extreme_records())
    start = 5 * ALL.index((name, k))
    furthest = check(where, force, [(start + 7 * j) % count for j in range(6)])
    assert furthest > 0.05 * CLIP, f"{where}: nothing moved"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), ALL)
def test_no_record_moves_any_step_further_than_accounted(name: str, k: int) -> None:
    """The grid: every training, treatment and condition; cells take turns in the records, a third of them each."""
    for number, (where, force) in enumerate(cells(name, k)):
        furthest = check(where, force, list(range(number % 3, len(extreme_records()), 3)))
        assert furthest > 0.3 * CLIP, f"{where}: nothing moved"


def test_every_method_that_runs_privately_and_every_option_has_a_case() -> None:
    assert set(CASES) == set(METHODS) - {"analytic", "fedcd"}
    for name, cases in CASES.items():
        known = {key for options in cases for key in options} | OUTSIDE | DECIDED | ELSEWHERE
        left = [f.name for f in fields(METHODS[name]) if not {f.name, f"{name}.{f.name}"} & known]
        assert not left, f"{name}: {left}"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedmr", {"mu1": 0.0, "mu2": 50.0}),
        ("fedmr", {"mu1": 0.0, "mu2": 50.0, "inter_weighting": "example", "lite": 4}),
        ("fedgen", {"beta": 50.0, "hidden": 8, "made": 4, "steps": 1}),
    ],
)
def test_what_the_private_form_replaces_is_moved_further(name: str, options: dict[str, object]) -> None:
    """As asked for, these methods pass their bound: the reason for the form."""
    (asked,) = captured(name, options, dropout=False, formed=False)
    force = Force(asked, Coupling.EXAMPLE)
    assert max(force.moved(image, label, 0) for _, image, label in extreme_records()[:12]) > force.accounted


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y, reduction="none")


def of_place(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(each(model, x, y) * torch.where(torch.arange(len(y)) % 2 == 0, 1.0, -1.0))


def over_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(each(model, x - x.mean(0), y))


@pytest.mark.parametrize("planted", [of_place, over_the_batch])
def test_the_measurement_sees_a_loss_that_looks_at_others(planted) -> None:  # type: ignore[no-untyped-def]
    (call,) = captured("fedavg", {}, dropout=False)
    force = Force(Call(call.model, planted, AS_SCHEDULED), Coupling.EXAMPLE)
    assert max(force.moved(image, label, 0) for _, image, label in extreme_records()[:6]) > 1.5 * force.accounted


@pytest.mark.parametrize("condition", ["augmented", "dropout"])
def test_the_measurement_sees_draws_by_place(condition: str) -> None:
    (call,) = captured("fedavg", {}, dropout=condition == "dropout")
    force = Force(call, Coupling.EXAMPLE, condition=condition, noise=ByPlace)
    force.call.model.load_state_dict({k: 4 * v for k, v in force.call.model.state_dict().items()})
    x = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    held = Force(call, Coupling.EXAMPLE, condition=condition)
    assert held.moved(x, 0, 0) <= held.accounted
    assert force.moved(x, 0, 0) > (1.2 if condition == "dropout" else 1.0) * force.accounted


def test_the_measurement_sees_a_missing_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = captured("fedavg", {}, dropout=False)
    force = Force(call, Coupling.EXAMPLE)
    monkeypatch.setattr("privacy.mechanisms.noise.grid.factors", lambda squares, bound: torch.ones_like(squares))
    assert force.moved(torch.full((1, 8, 8), 50.0), 3, 0) > force.accounted
