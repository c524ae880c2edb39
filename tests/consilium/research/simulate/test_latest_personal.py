"""Personal models of all silos, where a round's record covers a cohort."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from consilium.research.engines.in_process import RoundHistory, simulate
from consilium.research.simulate.measures import BestHistory, LatestPersonal
from fl_core.methods import METHODS, build_method
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.sampling import sample_cohort
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext
from tests.support import some
from tests.support.federations import METHOD_OPTIONS, manifest, same, shares

TRAIN = TrainConfig(lr=0.02, batch_size=4, epochs=1)
ROUNDS = 4


def accuracy(model: nn.Module, silo: int) -> float:
    x, y = shares()[silo].test.batch(torch.arange(7))
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def test_pa_is_every_silos_newest_model_over_all_silos() -> None:
    """Against models trained here: a silo keeps what its last round made, and before it has the global model."""
    run = manifest(train=TRAIN, cohort=1, rounds=ROUNDS, personal=True)
    history = BestHistory(personal=LatestPersonal(RunSetup.of(run), shares()))
    final = simulate(RunSetup.of(run), shares(), history)
    method, model = build_method("fedavg", {}), RunSetup.of(run).silo_runtime().model
    w, newest = tensor_maps.copy_state(model), dict[int, float]()
    for t in range(ROUNDS):
        (k,) = sample_cohort(run.seed, t, 3, 1)
        tensor_maps.load_state(model, w)
        untrained = {silo: accuracy(model, silo) for silo in range(3)}
        context = RoundContext(3, 4, ROUNDS, t, 1).for_silo(k, run.seed)
        method.local(
            model, {"w": w}, {}, PlainLocalData(RoundData(shares()[k].train, shares()[k].test, TRAIN, context)), context
        )
        w = tensor_maps.copy_state(model)  # of a cohort of one the mean is the silo's
        newest[k] = accuracy(model, k)
        found = [newest.get(silo, untrained[silo]) for silo in range(3)]
        assert history.measured[t].personal["pa"] == pytest.approx(statistics.fmean(found))
        assert history.measured[t].personal["pa_std"] == pytest.approx(statistics.pstdev(found), abs=1e-5)
        assert history.records[t].personal["pa"] == pytest.approx(newest[k])
    assert all(torch.allclose(w[name], v, atol=1e-6) for name, v in final["w"].items())
    assert [r.personal["pa"] for r in history.records[:2]] != [r.personal["pa"] for r in history.measured[:2]]
    assert not history.measured[ROUNDS].personal


@pytest.mark.parametrize("name", some(METHODS))
def test_every_method_has_a_personal_model_at_silos_that_were_not_asked(name: str) -> None:
    run = manifest(name, METHOD_OPTIONS.get(name, {}), train=TRAIN, cohort=2, rounds=1, personal=True)
    history, plain = BestHistory(personal=LatestPersonal(RunSetup.of(run), shares())), RoundHistory()
    a, b = (simulate(RunSetup.of(run), shares(), observer) for observer in (history, plain))
    assert all(same(a[group], b[group]) for group in a)
    assert history.records == plain.records
    at_end = METHODS[name].personal_at_end
    scores = history.measured[1 if at_end else 0].personal
    assert set(scores) == {f"{s}{d}" for s in ("pa", "pm_l", "pm_v", "ga") for d in ("", "_std")}
    assert (scores == plain.records[1].personal) is at_end


def test_where_everybody_takes_part_the_scores_are_the_records() -> None:
    run = manifest(train=TRAIN, rounds=2, personal=True)
    history = BestHistory(personal=LatestPersonal(RunSetup.of(run), shares()))
    simulate(RunSetup.of(run), shares(), history)
    assert [r.personal for r in history.measured] == [r.personal for r in history.records]
