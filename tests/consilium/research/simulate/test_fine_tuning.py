"""PA of methods without a personal model: fine-tuning the best global model."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from consilium.research.engines.in_process import SiloShare, simulate
from consilium.research.simulate.measures import BestHistory, fine_tuned
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord, TrainConfig
from tests.support.federations import Given, manifest, same, shares

RUN = manifest(rounds=3, train=TrainConfig(lr=0.05, batch_size=4, epochs=2))


def test_the_best_state_is_the_one_that_was_measured() -> None:
    """A record of round t measures the state of the close before it; the initial model does not count, ties are old."""
    best = BestHistory()
    for t, right in enumerate([9.0, 3.0, 5.0, 5.0, 4.0]):
        best.closed(RoundRecord(t, TaskKind.TRAIN, (right,), (10.0,), ("a",)), {"w": {"after": torch.tensor(float(t))}})
    assert best.best is not None
    assert (best.best_round, float(best.best["w"]["after"])) == (2, 1.0)


def test_without_epochs_it_is_the_global_model_at_each_silo() -> None:
    """The silos' accuracies, weighed by their test sizes, then give the global accuracy of that state again."""
    history = BestHistory()
    simulate(RunSetup.of(RUN), shares(), history)
    assert history.best is not None
    record = history.records[history.best_round]
    assert record.accuracy == max(history.accuracies[1:])
    found = fine_tuned(RunSetup.of(RUN), shares(), history.best, history.best_round, epochs=0)
    assert statistics.fmean(found.accuracies) == pytest.approx(record.accuracy)  # equal test sets
    assert found.fairness == pytest.approx(statistics.pstdev(found.accuracies))


def test_fine_tuning_helps_each_silo_repeats_and_touches_nothing() -> None:
    history = BestHistory()
    final = simulate(RunSetup.of(RUN), shares(), history)
    before = {name: v.clone() for name, v in final["w"].items()}
    given = [*shares()[:2], SiloShare(shares()[2].train, Given(torch.zeros(0, 1, 8, 8), torch.zeros(0).long()))]
    a, b = (fine_tuned(RunSetup.of(RUN), given, final, 3) for _ in range(2))
    assert same(final["w"], before)
    assert str(a) == str(b)
    assert math.isnan(a.accuracies[2])
    assert a.pa == pytest.approx(statistics.fmean(a.accuracies[:2]))
    assert a.pa >= fine_tuned(RunSetup.of(RUN), given, final, 3, epochs=0).pa
    assert a.pa == 1.0
    assert tensor_maps.digest(final["w"]) == tensor_maps.digest(before)
