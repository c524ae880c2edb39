"""Local training: problem Q (T-LOC-1), nothing on the wire, no global accuracy."""

from __future__ import annotations

import pytest
import torch

from consilium.research.engines.in_process import RoundHistory, local_ports, simulate
from consilium.research.simulate.results import Result
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from privacy.accounting.uncertainty import RunNoise
from tests.support.federations import FED, QData, Scalar, manifest, same, shares


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_t_loc_1_after_m_rounds(rounds: int) -> None:
    for a, b, rate in ((1, 0, 0.3486784401), (4, 1, 0.0060466176)):
        method, state = LocalOnly(), {"net": {"w": torch.zeros(1, dtype=torch.float64)}}
        for _ in range(rounds):
            outcome = method.local(Scalar(9.0), {"w": {}}, state, QData(a, b), FED.for_silo(0, 0))
            assert outcome.bundle == {}
            state = outcome.state
        assert float(state["net"]["w"]) == pytest.approx(b * (1 - rate**rounds), abs=1e-6)
        assert rounds > 1 or float(state["net"]["w"]) == pytest.approx(0.9939533824 * b, abs=1e-6)


def test_the_first_round_trains_as_fedavg() -> None:
    runtime, share, context = (
        RunSetup.of(manifest(model_options={"norm": "batch"})).silo_runtime(),
        shares()[0],
        FED.for_silo(0, 0),
    )
    config = TrainConfig(batch_size=4, epochs=2)
    msg = {"w": dict(runtime.initial)}
    FedAvg().local(
        runtime.reset_model(), msg, {}, PlainLocalData(RoundData(share.train, share.test, config, context)), context
    )
    expected = tensor_maps.copy_state(runtime.model)
    silo = LocalOnly().init_silo(runtime.reset_model(), FED)
    left = (
        LocalOnly()
        .local(
            runtime.reset_model(),
            {"w": {}},
            silo,
            PlainLocalData(RoundData(share.train, share.test, config, context)),
            context,
        )
        .state
    )
    assert same(left["net"], expected)


def test_only_counts_of_nothing_leave_the_silo_and_no_accuracy_is_made_up() -> None:
    run, history = manifest("local"), RoundHistory()
    assert list(run.layout) == ["metrics"]
    final = simulate(RunSetup.of(run), shares(), history)
    assert final == {"w": {}} == RunSetup.of(run).initial_state()
    assert all(not any(r.examples) and not any(r.correct) for r in history.records)
    assert history.accuracies == [-1.0] * 4
    assert history.records[-1].class_accuracy() == [None] * 4
    summary = Result(run, RunNoise(), history.records, model_digest="").summary()
    assert summary["global_accuracy"] is summary["best_global_accuracy"] is None
    assert summary["accuracy_by_round"] == [None] * 4


def test_silos_that_are_not_asked_keep_their_network() -> None:
    run = manifest("local", rounds=1, cohort=1)
    ports = local_ports(RunSetup.of(run), shares())
    ports[1].round({"w": {}}, FED, TaskKind.TRAIN)
    ports[1].settle(FED, TaskKind.TRAIN, False)
    kept = [p.state for p in ports]
    assert kept[0] is kept[2] is None
    assert kept[1] is not None
    assert not same(kept[1]["net"], RunSetup.of(run).silo_runtime().initial)


def test_there_is_no_model_to_evaluate_or_export() -> None:
    for ask in (lambda m: m.exported({"w": {}}), lambda m: m.global_model(Scalar(), {"w": {}})):
        with pytest.raises(ConfigError) as caught:
            ask(LocalOnly())
        assert caught.value.code == "E-CFG-08"
