"""FedDyn on problem Q (T-DYN-1 to T-DYN-5), lost updates, the two models, and prototypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.methods.drift.feddyn import FedDyn, pull
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.records import TrainConfig
from fl_core.types.values import Part, RoundContext
from tests.support.federations import (
    SCHEMA,
    Exact,
    QData,
    Scalar,
    alternating,
    manifest,
    play,
    same,
    shares,
    simulated,
)

EXACT = (Exact(1, 0), Exact(4, 1))
TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=1)


def cloud(alpha: float) -> FedDyn:
    return FedDyn(alpha=alpha, report="cloud")


def test_t_dyn_1_exact_solves_with_alpha_2() -> None:
    played = play(cloud(2), EXACT, 120)
    assert played.path[:3] == pytest.approx([2 / 3, 7 / 9, 22 / 27], abs=1e-6)
    assert played.path[9] == pytest.approx(0.8006094515, abs=1e-6)
    assert played.path[-1] == pytest.approx(0.8, abs=1e-6)
    assert [played.trained[0][k] for k in (0, 1)] == pytest.approx([0, 2 / 3], abs=1e-6)
    assert [played.trained[1][k] for k in (0, 1)] == pytest.approx([4 / 9, 2 / 3], abs=1e-6)
    linear = [[-2 * m for m in played.state(t, "m")] for t in (0, 1, -1)]  # the paper's g_k = -alpha m_k
    assert linear[0] == pytest.approx([0, -4 / 3], abs=1e-6)
    assert linear[1] == pytest.approx([4 / 9, -4 / 3], abs=1e-6)
    assert linear[2] == pytest.approx([0.8, -0.8], abs=1e-6)
    h = [-2 * played.server(t, "m") for t in (0, 1, -1)]
    assert h == pytest.approx([-2 / 3, -4 / 9, 0], abs=1e-6)


def test_t_dyn_1_alpha_1_is_there_after_one_round() -> None:
    played = play(cloud(1), EXACT, 5)
    assert played.path == pytest.approx([0.8] * 5, abs=1e-6)
    trained = [[played.trained[t][k] for k in (0, 1)] for t in range(3)]
    assert [v for pair in trained for v in pair] == pytest.approx([0, 0.8, 0.4, 0.8, 0.6, 0.8], abs=1e-6)


def test_t_dyn_1_small_alpha_overshoots_first() -> None:
    path = play(cloud(0.1), EXACT, 250).path
    assert path[:3] == pytest.approx([0.9756097561, 0.5764966741, 0.5667622086], abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)


def test_t_dyn_2_alternating_silos() -> None:
    path = play(cloud(2), EXACT, 80, asked=alternating).path
    assert path[:4] == pytest.approx([0, 1, 5 / 6, 5 / 6], abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)


def test_t_dyn_3_sizes_enter_by_alpha() -> None:
    sized = (Exact(1, 0, n=1), Exact(4, 1, n=3))
    played = play(cloud(1), sized, 60)
    assert played.path[-1] == pytest.approx(12 / 13, abs=1e-6)
    assert played.state(-1, "m") == pytest.approx([-0.4615384615, 0.4615384615], abs=1e-6)
    uniform = play(FedDyn(alpha=1, weights="uniform"), sized, 20)
    assert uniform.path == play(FedDyn(alpha=1), EXACT, 20).path


@pytest.mark.parametrize("asked", [None, alternating])
@pytest.mark.parametrize("report", ["average", "cloud"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_t_dyn_4_m_is_the_mean_of_all_drifts_whatever_is_lost(
    asked: Callable[[int], list[int]] | None, report: str, sizes: tuple[int, int]
) -> None:
    silos = (Exact(1, 0, n=sizes[0]), Exact(4, 1, n=sizes[1]))
    played = play(FedDyn(alpha=2, report=report), silos, 20, asked=asked, lost={1: [0, 1], 3: [1], 4: [0]})
    for t in range(20):
        assert played.server(t, "m") == pytest.approx(sum(played.state(t, "m")) / 2, abs=1e-6)


def test_lost_update_committed_anyway_would_bias_the_run_for_ever() -> None:
    """Section 1.5: silo 1's update of round 2 is lost. A silo that keeps its state regardless leaves 0.8 for ever."""
    assert play(cloud(2), EXACT, 80, lost={1: [0]}).path[-1] == pytest.approx(0.8, abs=1e-6)
    wrong = play(cloud(2), EXACT, 80, lost={1: [0]}, commit_anyway=True)
    assert wrong.path[-1] == pytest.approx(0.8888888889, abs=1e-6)
    assert abs(sum(wrong.state(-1, "m")) / 2 - wrong.server(-1, "m")) > 0.1


def test_t_dyn_5_gradient() -> None:
    """alpha 0.1, theta 1.5, w 2, m 0.3 -> -0.02."""
    penalty, current = pull(Scalar(2.0), {"w": torch.tensor([0.3], dtype=torch.float64)}, 0.1), Scalar(1.5)
    penalty(current).backward()
    assert float(current.w.grad) == pytest.approx(-0.02, abs=1e-12)


@pytest.mark.parametrize("cohort", [0, 2])
def test_both_reports_train_alike_and_differ_by_m(cohort: int) -> None:
    average, other = (
        simulated("feddyn", {"report": report, "alpha": 0.1}, train=TRAIN, cohort=cohort, rounds=3)
        for report in ("average", "cloud")
    )
    assert not same(average["w"], other["w"])
    start = tensor_maps.add(average["w"], average["m"])
    assert all(torch.allclose(start[name], v, atol=1e-5) for name, v in other["w"].items())


def test_average_is_the_mean_of_the_silos_models_with_their_buffers() -> None:
    """One round: avg_R is FedAvg's uniform mean of models where the pull is weak; the cloud goes twice as far."""
    options = {"norm": "batch"}
    sized = [*shares()[:2], shares(n=28)[2]]
    runs = {"fedavg": {"weights": "uniform"}, "feddyn": {"alpha": 1e-9}}
    uniform, average = (
        simulated(name, o, train=TRAIN, rounds=1, model_options=options, given=sized) for name, o in runs.items()
    )
    far = simulated(
        "feddyn", {"alpha": 1e-9, "report": "cloud"}, train=TRAIN, rounds=1, model_options=options, given=sized
    )
    weighed = simulated("fedavg", train=TRAIN, rounds=1, model_options=options, given=sized)["w"]
    start = RunSetup.of(manifest("feddyn", model_options=options)).initial_state()["w"]
    for name, w in average["w"].items():
        if name in average["m"]:
            assert torch.allclose(w, uniform["w"][name], atol=1e-6)
            assert torch.allclose(far["w"][name] - start[name], 2 * (w - start[name]), atol=1e-6)
        else:
            assert "running" in name
            assert torch.allclose(w, weighed[name], atol=1e-6)
            assert not torch.allclose(w, uniform["w"][name], atol=1e-6)
            assert torch.equal(far["w"][name], w)


def test_what_goes_down_fits_the_report() -> None:
    for report, groups in (("average", {"w", "m", "census"}), ("cloud", {"w", "census"})):
        method, model = FedDyn(report=report), build_model("digits_cnn", {}, SCHEMA, 0)
        msg = method.broadcast(method.init_server(model, RoundContext(3, 4)))
        assert set(msg) == groups
    run = manifest("feddyn", {"alpha": 0.1}, train=TRAIN, rounds=2)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    evaluated = FedDyn(alpha=0.1).global_model(
        RunSetup.of(run).silo_runtime().reset_model(), FedDyn(alpha=0.1).broadcast(final)
    )
    assert same(tensor_maps.copy_state(evaluated), final["w"])
    assert same(dict(FedDyn().exported(final)), final["w"])


def test_an_empty_round_moves_nothing_even_under_drift() -> None:
    method = cloud(2)
    server = play(method, EXACT, 2).servers[-1]
    assert float(server["m"]["w"]) > 0.1
    zero = torch.zeros(1)
    nothing = {
        "delta": Part({"w": zero}, torch.zeros(())),
        "buffers": Part({}, torch.zeros(())),
        "census": Part({"n": zero}, torch.zeros(())),
    }
    assert method.merge(server, nothing, RoundContext(2, 2)) is server


def test_momentum_is_an_ordinary_matter() -> None:
    silos = (QData(1, 0, lr=0.02, momentum=0.5), QData(4, 1, lr=0.02, momentum=0.5))
    assert play(cloud(1), silos, 80).path[-1] == pytest.approx(0.8, abs=1e-6)
