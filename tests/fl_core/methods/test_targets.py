"""Which methods learn from coarse labels and from several labels at once, and that others are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_core.errors import ConfigError
from fl_core.methods import METHODS, build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.capabilities import check_multi_label, check_supported
from fl_core.training.evaluation import evaluate_global
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import METRICS
from fl_core.types.records import TrainConfig
from fl_core.types.targets import UNKNOWN, one_of
from fl_core.types.values import LocalResult, Losses
from tests.support.federations import FED, SCHEMA, Given

LEARN = (
    "ditto",
    "fedavg",
    "fedbabu",
    "feddc",
    "feddyn",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "local",
    "moon",
    "scaffold",
)
TRAIN = TrainConfig(lr=0.1, batch_size=4, epochs=2, weight_decay=0.0)
X = torch.rand(12, *SCHEMA.shape, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 0, UNKNOWN, 1], [0, UNKNOWN, UNKNOWN, 1], [UNKNOWN, 1, UNKNOWN, 0]]).repeat(4, 1)
COARSE = torch.tensor([0, one_of([1, 3]), 2]).repeat(4)


def local(name: str, y: torch.Tensor) -> tuple[LocalResult, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Do a silo's half of the first round; return what it sends and the model before and after."""
    method, data = build_method(name, {}), Given(X, y)
    context = replace(FED.for_silo(0, 1), round=0)
    model = build_model("digits_linear", {}, SCHEMA, 0)
    before = dict(tensor_maps.copy_state(model))
    server, silo = method.init_server(model, context), method.init_silo(model, context)
    opened = PlainLocalData(RoundData(data, data, TRAIN, context))
    found = method.local(model, method.broadcast(server), silo, opened, context)
    return found, before, dict(tensor_maps.copy_state(model))


def test_the_methods_that_say_so_are_these() -> None:
    both = {Capability.COARSE_LABELS, Capability.MULTI_LABEL}
    found = [n for n in sorted(METHODS) if both <= build_method(n, {}).targets]
    assert found == sorted([*LEARN, "fedproc"])  # which knows labels, and has prototypes
    with pytest.raises(ConfigError, match="prototypes need one class for each record"):
        check_multi_label(build_method("fedproc", {}))
    assert build_method("analytic", {}).targets == {Capability.COARSE_LABELS}
    assert build_method("analytic", {"per_label": True}).targets == {Capability.MULTI_LABEL}


@pytest.mark.parametrize("name", sorted({*METHODS} - {*LEARN, "analytic", "fedproc"}))
def test_all_others_are_refused_by_name(name: str) -> None:
    for capability in (Capability.COARSE_LABELS, Capability.MULTI_LABEL):
        with pytest.raises(ConfigError, match=f"method {name} cannot be used with {capability.value}"):
            check_supported(build_method(name, {}), {capability})


@pytest.mark.parametrize("name", LEARN)
def test_a_label_that_was_not_looked_for_moves_nothing_of_its_head(name: str) -> None:
    check_multi_label(build_method(name, {}))
    _, before, after = local(name, LABELS)
    row = torch.tensor([k == 2 for k in range(4)])
    for tensor in ("head.weight", "head.bias"):
        assert torch.equal(before[tensor][row], after[tensor][row])
        frozen = name == "fedbabu"
        assert frozen or not torch.equal(before[tensor][~row], after[tensor][~row])


@pytest.mark.parametrize("name", [n for n in LEARN if n != "fedbabu"])
def test_a_coarse_label_raises_the_scores_of_its_classes_together(name: str) -> None:
    _, before, after = local(name, torch.full((12,), one_of([1, 3])))
    moved = after["head.bias"] - before["head.bias"]
    assert float(moved[[1, 3]].min()) > float(moved[[0, 2]].max())


def test_accuracies_of_labels_are_counted_over_those_who_looked() -> None:
    model, data = build_model("digits_linear", {}, SCHEMA, 0).eval(), Given(X, LABELS)
    part = evaluate_global(model, PlainLocalData(RoundData(data, data, TRAIN, FED.for_silo(0, 1))), 4, clinical=False)
    with torch.no_grad():
        found = (model(X) > 0).long()
    assert part[METRICS].weight.tolist() == [8.0, 8.0, 0.0, 12.0]
    assert part[METRICS].total["correct"].tolist() == (found == LABELS).sum(0).tolist()


def test_a_subclass_with_a_loss_of_its_own_says_again_what_it_takes() -> None:
    class Inherited(FedAvg):
        """No loss of its own."""

    class Own(FedAvg):
        """One of its own."""

        @staticmethod
        def loss(model, x, y):  # type: ignore[no-untyped-def]
            return Losses(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))

    assert Inherited.targets == FedAvg.targets
    assert not Own.targets
