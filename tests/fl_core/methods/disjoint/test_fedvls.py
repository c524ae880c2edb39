"""FedVLS: its loss against a slow one, what it does without its terms, and what a silo of one class learns."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_spec
from fl_core.methods.disjoint.fedlc import balanced_softmax
from fl_core.methods.disjoint.fedvls import (
    FedVLS,
    suppression_of_batch,
    suppression_of_examples,
    vacant_distillation,
)
from fl_core.models import build_model
from fl_core.models.split_model import frozen_copy
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Losses
from tests.oracles.equations import slow_suppression, slow_vacant_kl, slow_vls
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares, simulated

CLASSES = 5


def drawn(seed: int, batch: int = 6, held: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw f, g (B, C), labels of the first `held` classes, and class counts that are 0 for the others."""
    draw = torch.Generator().manual_seed(seed)
    f, g = (3.0 * torch.randn(batch, CLASSES, generator=draw, dtype=torch.float64) for _ in range(2))
    counts = torch.randint(1, 30, (CLASSES,), generator=draw).double()
    counts[held:] = 0
    return f, g, torch.randint(held, (batch,), generator=draw), counts


class Logits(nn.Module):
    """A model whose logits are its examples plus a trained shift, so that gradients are those by the logits."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Counted:
    def __init__(self, counts: Tensor) -> None:
        self._counts = counts

    def class_counts(self) -> Tensor:
        return self._counts


def objective(method: FedVLS, teacher: Tensor, f: Tensor, y: Tensor, counts: Tensor) -> tuple[Losses, Tensor]:
    """Evaluate the method's own loss where the student has logits f and the teacher f + `teacher`."""
    student = Logits(teacher.clone())
    loss = method.objective(student, {}, Counted(counts), FED)  # type: ignore[arg-type]
    student.shift = nn.Parameter(torch.zeros_like(teacher))
    found = loss(student, f, y)
    (slope,) = torch.autograd.grad(found.objective(), student.shift)
    return found, slope


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    held=st.integers(1, CLASSES),
    batch=st.integers(1, 7),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    single=st.booleans(),
)
def test_the_loss_is_the_slow_one(seed: int, held: int, batch: int, gamma: float, single: bool) -> None:
    f, g, y, counts = drawn(seed, batch, held)
    shift, weights = (g - f).mean(0), (0.3, 0.05, gamma)
    method = FedVLS(lam=0.3, mu=0.05, gamma=gamma, suppression="example" if single else "batch")
    found, slope = objective(method, shift, f, y, counts)

    def slow(logits: Tensor) -> float:
        return slow_vls(logits.tolist(), (f + shift).tolist(), y.tolist(), counts.tolist(), weights, single)

    assert float(found.objective().detach()) == pytest.approx(slow(f), rel=1e-9, abs=1e-9)
    for c in range(CLASSES):
        step = 1e-5 * torch.eye(CLASSES, dtype=torch.float64)[c]
        assert float(slope[c]) == pytest.approx((slow(f + step) - slow(f - step)) / 2e-5, rel=1e-5, abs=1e-7)


def test_two_vacant_classes_by_hand() -> None:
    """Teacher (0, 0) has a half each; student (log 3, 0) three quarters and one: KL = log 4 - log 3 / 2 - log 2."""
    f = torch.tensor([[7.0, math.log(3.0), 0.0]], dtype=torch.float64)
    vacant = torch.tensor([False, True, True])
    found = vacant_distillation(f, torch.tensor([[-2.0, 0.0, 0.0]], dtype=torch.float64), vacant)
    assert float(found) == pytest.approx(0.1438410362, abs=1e-9)
    assert slow_vacant_kl([7.0, 1.0986122887, 0.0], [-2.0, 0.0, 0.0], [5, 0, 0]) == pytest.approx(0.1438410362)


def test_suppression_by_hand() -> None:
    """Two classes of equal share: log(C pi) = 0. Each is wrong for one example of two: log((1 + e) / 2) / 2 each."""
    f, y = torch.tensor([[5.0, 1.0], [1.0, 5.0]], dtype=torch.float64), torch.tensor([0, 1])
    counts = torch.tensor([4.0, 4.0], dtype=torch.float64)
    assert float(suppression_of_batch(f, y, counts)) == pytest.approx(0.6201145070, abs=1e-9)
    assert suppression_of_examples(f, y, counts).tolist() == pytest.approx([0.5, 0.5])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), held=st.integers(1, CLASSES))
def test_suppression_of_single_examples_is_below_that_of_their_batch_and_equal_for_one(seed: int, held: int) -> None:
    f, _, y, counts = drawn(seed, held=held)
    single = suppression_of_examples(f, y, counts)
    assert float(single.mean()) <= float(suppression_of_batch(f, y, counts)) + 1e-12
    for i in range(len(f)):
        alone = float(suppression_of_batch(f[i : i + 1], y[i : i + 1], counts))
        assert float(single[i]) == pytest.approx(alone, rel=1e-12, abs=1e-12)
        assert alone == pytest.approx(slow_suppression([f[i].tolist()], [int(y[i])], counts.tolist()), abs=1e-9)


def test_only_the_published_suppression_mixes_examples_and_a_private_run_takes_the_other() -> None:
    assert FedVLS().coupling is Coupling.BATCH
    assert FedVLS(suppression="example").coupling is Coupling.EXAMPLE
    assert FedVLS(mu=0.0).coupling is Coupling.EXAMPLE
    assert FedVLS().private_form == {"suppression": "example"}
    assert FedVLS(mu=0.0).private_form == {}
    words = ["data=digits", "federation=p5c2", "method=fedvls", "privacy=dp_record", "privacy.epsilon=4"]
    run, _ = build_simulation(compose_spec([*words, "privacy.rng=test"]))
    assert run.method.options["suppression"] == "example"
    assert run.private_form == {"suppression": "batch"}


def test_an_example_changes_no_other_ones_loss_in_the_private_form() -> None:
    f, g, y, counts = drawn(3)
    other = torch.cat((f[:1], torch.randn_like(f[1:]) * 9))
    a, b = (objective(FedVLS(mu=1.0, suppression="example"), (g - f)[0], x, y, counts)[0] for x in (f, other))
    assert a.coupled is None
    assert torch.equal(a.per_example[0], b.per_example[0])


def test_counts_that_noise_made_negative_or_wrong_leave_the_loss_finite() -> None:
    """A class counted as missing may have an example after all: released counts are noisy."""
    f, g, y, _ = drawn(5)
    for counts in ([-3.5, 0.25, 6.0, -1.0, 0.0], [-1.0] * CLASSES):
        found, slope = objective(FedVLS(), (g - f)[0], f, y, torch.tensor(counts, dtype=torch.float64))
        assert bool(torch.isfinite(found.objective()))
        assert bool(torch.isfinite(slope).all())


def test_without_distillation_and_suppression_it_is_fedrods_averaged_model_bit_for_bit() -> None:
    ours, theirs = simulated("fedvls", {"lam": 0.0, "mu": 0.0}), simulated("fedrod", {})
    assert same(ours["w"], theirs["w"])
    assert not same(simulated("fedvls", {})["w"], theirs["w"])


def test_a_silo_with_all_classes_is_not_taught() -> None:
    f, g, y, counts = drawn(1, held=CLASSES)
    plain = objective(FedVLS(mu=0.0), (g - f)[0], f, y, counts)[0].per_example
    assert torch.equal(plain, balanced_softmax(f, y, counts))


def one_class(gamma: float, caplog: pytest.LogCaptureFixture) -> bool:
    """Train at a silo with one class; tell whether anything moved."""
    x = torch.rand(8, *SCHEMA.shape, generator=torch.Generator().manual_seed(0))
    only, context = Given(x, torch.full((8,), 2)), FED.for_silo(0, 0)
    config = TrainConfig(lr=0.05, batch_size=4, epochs=2, weight_decay=0.0, momentum=0.0)
    data = PlainLocalData(RoundData(only, only, config, context))
    model = build_model("digits_cnn", {"norm": "none"}, SCHEMA, 0)
    msg = {"w": tensor_maps.copy_state(model)}
    with caplog.at_level(logging.WARNING):
        FedVLS(gamma=gamma).local(model, msg, {}, data, context)
    return bool((tensor_maps.copy_state(model)["head.weight"] - msg["w"]["head.weight"]).abs().max() > 1e-4)


def test_a_silo_with_one_class_learns_nothing_as_published_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert not one_class(1.0, caplog)
    assert "method.gamma=0" in caplog.text


def test_with_plain_cross_entropy_a_silo_with_one_class_learns(caplog: pytest.LogCaptureFixture) -> None:
    assert one_class(0.0, caplog)
    assert not caplog.text


def test_the_teacher_is_the_received_model_and_stays_as_it_was() -> None:
    share, context = shares()[0], FED.for_silo(0, 0)
    data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(), context))
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    received, (x, y) = frozen_copy(model), share.train.batch(torch.arange(6))
    loss = FedVLS(lam=1.0, mu=0.0, gamma=0.0).objective(model, {}, data, context)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        model.eval()
        found, f, g = loss(model, x, y).per_example, model(x), received(x)
    vacant = data.class_counts() <= 0
    wanted = [slow_vacant_kl(a, b, (~vacant).tolist()) for a, b in zip(f.tolist(), g.tolist(), strict=True)]
    assert max(wanted) > 1e-4
    taught = found - torch.nn.functional.cross_entropy(f, y, reduction="none")
    assert taught.tolist() == pytest.approx(wanted, abs=1e-5)


def test_what_a_silo_sends_is_what_fedavg_sends() -> None:
    assert manifest("fedvls").layout == manifest("fedavg").layout
