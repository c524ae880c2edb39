"""FedBABU: the scalar network (T-BAB-1), and a head that never moves (T-BAB-2)."""

from __future__ import annotations

import pytest
import torch

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.methods.personal.fedbabu import FedBABU
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext
from tests.support.federations import FED, SCHEMA, Pair, PairData, manifest, same, shares


def test_t_bab_1_one_step_and_one_step_of_fine_tuning() -> None:
    method, context, data = FedBABU(), RoundContext(2, 2), (PairData(1), PairData(3))
    server, models, parts = method.init_server(Pair(), context), [Pair(), Pair()], []
    for k in range(2):
        parts.append(
            method.local(models[k], method.broadcast(server), {}, data[k], context.for_silo(k, 0)).bundle["delta"]
        )
    assert [m.values for m in models] == [pytest.approx((1, 1)), pytest.approx((1.2, 1))]
    server = method.merge(server, {"delta": parts[0] + parts[1]}, context)
    assert float(server["w"]["body.w"]) == pytest.approx(1.1, abs=1e-6)
    expected = ((1.09, 0.989), (1.29, 1.209))
    for k in range(2):  # from the global body, not from the silo's own one, which `model` still holds
        own = method.personal(models[k], method.broadcast(server), {}, data[k], context.for_silo(k, 0))
        assert isinstance(own, Pair)
        assert own.values == pytest.approx(expected[k], abs=1e-6)
        assert data[k].epochs == [None, 5]


def test_t_bab_2_the_head_is_bit_identical_after_all_rounds() -> None:
    """With weight decay and momentum, at every silo and in the global model."""
    run = manifest("fedbabu", train=TrainConfig(lr=0.05, weight_decay=0.1, batch_size=4, epochs=1))
    final, initial = simulate(RunSetup.of(run), shares(), RoundHistory()), build_model("digits_cnn", {}, SCHEMA, 0)
    method, runtime = FedBABU(), RunSetup.of(run).silo_runtime()
    msg, head = (
        method.broadcast(final),
        {n: v for n, v in tensor_maps.copy_state(initial).items() if n.startswith("head")},
    )
    assert not set(head) & set(msg["w"])
    assert not set(head) & set(run.layout["delta"].shapes)
    for k, share in enumerate(shares()):
        context = FED.for_silo(k, 0)
        method.local(
            runtime.reset_model(),
            msg,
            {},
            PlainLocalData(RoundData(share.train, share.test, run.train, context)),
            context,
        )
        left = tensor_maps.copy_state(runtime.model)
        assert same({n: left[n] for n in head}, head)
        assert not same({n: left[n] for n in msg["w"]}, msg["w"])
    whole = tensor_maps.copy_state(method.global_model(initial, msg))
    assert same({n: whole[n] for n in head}, head)
    assert same(method.exported(final), whole)


@pytest.mark.parametrize("epochs", [0, 1])
def test_fine_tuning_moves_the_head_and_what_was_sent_stays(epochs: int) -> None:
    share, context, method = shares()[0], FED.for_silo(0, 0), FedBABU(finetune_epochs=epochs)
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    start = tensor_maps.copy_state(model)
    msg = {"w": {n: v for n, v in start.items() if method.shared(n)}}
    data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=4, epochs=1), context))
    outcome = method.local(model, msg, {}, data, context)
    before = {n: v.clone() for n, v in outcome.bundle["delta"].total.items()}
    own = tensor_maps.copy_state(method.personal(model, msg, outcome.state, data, context))
    assert torch.equal(own["head.weight"], start["head.weight"]) is (epochs == 0)
    assert epochs or same(own, start)  # without fine-tuning the personal model is the global one
    assert same(outcome.bundle["delta"].total, before)
    assert outcome.state == {}


def test_the_personal_model_is_that_of_the_final_body_and_is_measured_once() -> None:
    """Fine-tuned here from the final state, silo by silo, without ports, parts or a grid."""
    train = TrainConfig(lr=0.02, batch_size=4, epochs=1)
    run, history = manifest("fedbabu", train=train, rounds=2, personal=True, cohort=2), RoundHistory()
    final = simulate(RunSetup.of(run), shares(), history)
    assert [r.personal for r in history.records[:2]] == [{}, {}]
    method, runtime, found = FedBABU(), RunSetup.of(run).silo_runtime(), []
    for k, share in enumerate(shares()):
        context = RoundContext(3, 4, 2, 2, 3).for_silo(k, run.seed)
        data = PlainLocalData(RoundData(share.train, share.test, train, context))
        own = method.personal(runtime.reset_model(), method.broadcast(final), {}, data, context).eval()
        x, y = share.test.batch(torch.arange(len(share.test)))
        found.append(float((own(x).argmax(1) == y).float().mean()))
    assert history.records[2].personal["pa"] == pytest.approx(sum(found) / 3)
    plain = manifest("fedbabu", train=train, rounds=2, cohort=2)
    assert same(simulate(RunSetup.of(plain), shares(), RoundHistory())["w"], final["w"])
