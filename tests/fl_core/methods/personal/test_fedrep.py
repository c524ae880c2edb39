"""FedRep: the scalar network (T-REP-1), the frozen body (T-REP-2), and phases that do not touch each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_core.methods.personal.fedrep import FedRep
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import AS_SCHEDULED, LocalResult, RoundContext
from tests.support.federations import FED, SCHEMA, Pair, PairData, shares

CONFIG = TrainConfig(lr=0.05, momentum=0.5, weight_decay=1e-2, batch_size=4, epochs=2)


class Watched(PlainLocalData):
    """Notes the model after each pass, and the steps of it."""

    def sgd(self, model, loss, options=AS_SCHEDULED):  # type: ignore[no-untyped-def]
        steps = super().sgd(model, loss, options)
        self.seen = [*getattr(self, "seen", []), (steps, tensor_maps.copy_state(model))]
        return steps


def trained(method: FedRep, norm: str = "batch") -> tuple[nn.Module, dict[str, Tensor], Watched, LocalResult]:
    share, context = shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {"norm": norm}, SCHEMA, 0)
    start = tensor_maps.copy_state(model)
    msg = {"w": {n: v for n, v in start.items() if method.shared(n)}}
    data = Watched(RoundData(share.train, share.test, CONFIG, context))
    return model, start, data, method.local(model, msg, method.init_silo(model, FED), data, context)


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def test_t_rep_1_one_step_each() -> None:
    method, context, models, parts = FedRep(), RoundContext(2, 2), [Pair(), Pair()], []
    server = method.init_server(Pair(), context)
    for k, y in enumerate((1, 3)):
        data = PairData(y)
        silo = method.init_silo(Pair(), context)
        parts.append(
            method.local(models[k], method.broadcast(server), silo, data, context.for_silo(k, 0)).bundle["delta"]
        )
        assert data.epochs == [10, None]
    assert [m.values for m in models] == [pytest.approx((1, 1)), pytest.approx((1.216, 1.2))]
    merged = method.merge(server, {"delta": parts[0] + parts[1]}, context)
    assert float(merged["w"]["body.w"]) == pytest.approx(1.108, abs=1e-6)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_t_rep_2_phases_leave_what_is_frozen_bit_identical(norm: str) -> None:
    """With momentum and weight decay, buffers included."""
    _, start, data, outcome = trained(FedRep(head_epochs=3), norm)
    (_, first), (_, second) = data.seen
    assert moved(start, first) == {"head.weight", "head.bias"}
    assert moved(first, second) == {n for n in start if not n.startswith("head")}
    assert all(torch.equal(v, first[n]) for n, v in outcome.state["head"].items())


def test_frozen_norm_train_lets_statistics_go_on() -> None:
    _, start, data, _ = trained(FedRep(head_epochs=1, frozen_norm="train"))
    changed = moved(start, data.seen[0][1])
    assert {"head.weight", "head.bias"} < changed
    assert all("running" in n or n.startswith("head") for n in changed)


def test_epochs_of_both_phases() -> None:
    per_epoch = 4  # 14 examples in batches of 4
    assert [steps for steps, _ in trained(FedRep(head_epochs=3))[2].seen] == [3 * per_epoch, 2 * per_epoch]
    seen = trained(FedRep(head_epochs=1, body_epochs=4))[2].seen
    assert [steps for steps, _ in seen] == [per_epoch, 4 * per_epoch]


def test_the_head_goes_on_from_the_stored_one() -> None:
    method, share, context = FedRep(head_epochs=1), shares()[0], FED.for_silo(0, 0)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    msg = {"w": {n: v for n, v in tensor_maps.copy_state(model).items() if method.shared(n)}}
    far = {"head": {n: v + 3 for n, v in tensor_maps.copy_state(model).items() if not method.shared(n)}}
    after = method.local(
        model, msg, far, PlainLocalData(RoundData(share.train, share.test, CONFIG, context)), context
    ).state
    assert all(float((after["head"][n] - far["head"][n]).abs().max()) < 1 for n in far["head"])


def test_tuned_personal_model_is_the_received_body_under_a_head_trained_further() -> None:
    method = FedRep(head_epochs=1, tune_epochs=2)
    model, start, data, outcome = trained(method)
    msg = {"w": {n: v for n, v in start.items() if method.shared(n)}}
    own = tensor_maps.copy_state(method.personal(model, msg, outcome.state, data, FED.for_silo(0, 0)))
    assert moved(start, own) == {"head.weight", "head.bias"}
    assert data.seen[-1][0] == 8
    assert not torch.equal(own["head.weight"], outcome.state["head"]["head.weight"])


def test_untuned_personal_model_is_what_training_left() -> None:
    method = FedRep(head_epochs=1)
    model, start, data, outcome = trained(method)
    own = tensor_maps.copy_state(method.personal(model, {"w": start}, outcome.state, data, FED.for_silo(0, 0)))
    assert moved(own, data.seen[-1][1]) == set()
