"""What methods share: options out of range, limits in which they are FedAvg, lost updates, prototypes taken along."""

from __future__ import annotations

import pytest
import torch

from fl_core.errors import ConfigError, RefusedError
from fl_core.methods import build_method
from fl_core.rounds.capabilities import check_supported
from fl_core.types.enums import Capability
from fl_core.types.records import TrainConfig
from tests.support.federations import QData, play, run_and_lose, same, simulated

pytestmark = pytest.mark.integration

WRONG = {
    "fedprox": [{"mu": -0.1}],
    "fednova": [{"mu": -1.0}, {"tau": "k"}, {"server_momentum": 1.0}],
    "scaffold": [{"server_lr": 0.0}],
    "feddyn": [{"alpha": 0.0}, {"report": "all"}],
    "feddc": [{"control": "both"}],
    "moon": [{"mu": -1.0}, {"tau": 0.0}, {"last": 0}],
    "fedmr": [
        {"mu1": -1.0},
        {"mu2": -0.1},
        {"lite": -1},
        {"intra": "papers"},
        {"negatives": "some"},
        {"lite_scope": "intra"},
        {"inter": "paired_sample", "no_margin": True},
    ],
    "fednh": [{"rho": 1.5}, {"rho": -0.1}, {"scale": 0.0}, {"fix_scaling": -1.0}, {"init": "x"}],
    "creff": [{"features": 0}, {"batch": 0}, {"feature_lr": 0.0}, {"epochs": -1}],
    "fedproc": [{"prototypes": "some"}, {"lambda_p": -1.0}, {"tau_p": 0.0}],
    "fedgela": [{"logit_scale": 0.0}, {"feature_norm": "none"}],
    "fedlc": [{"tau": -1.0}, {"form": "none"}, {"missing": "zero"}],
    "fedrs": [{"alpha": -0.1}, {"alpha": 1.1}, {"alpha": float("nan")}, {"rs": "code"}],
    "fedcd": [
        {"acla": "two_phase"},
        {"acla": "x"},
        {"alpha": 0.5},
        {"fine": 0},
        {"tau": 0.0},
        {"lam": -1.0},
        {"distill": "x"},
        {"aggregation": "x"},
        {"importance": "x"},
    ],
    "fedproto": [{"lambda_p": -1.0}, {"predict": "both"}, {"weights": "paper"}],
    "fedgen": [{"mode": "x"}, {"noise_kind": "x"}, {"alpha": -1.0}, {"made": 1}, {"hidden": 0}],
    "fedrep": [{"head_epochs": 0}, {"frozen_norm": "off"}, {"tune_epochs": -1}],
    "fedrod": [{"gamma": -1.0}, {"variant": "deep"}, {"phase": "both"}, {"hidden": -1}],
    "fedphp": [{"lam": 1.5}, {"transfer": "none"}, {"tau": 0.0}, {"kd": "js"}, {"mu_macro": -0.1}, {"mu_max": 2.0}],
    "map": [{"alpha": 2.0}, {"rs": "none"}, {"stages": "two"}, {"lam": -1.0}],
    "fedvls": [{"lam": -0.1}, {"mu": -1.0}, {"gamma": float("nan")}, {"suppression": "all"}],
    "fedloge": [{"sparsity": 1.0}, {"length": 0.0}, {"norm": -1.0}, {"classifier": "both"}],
}


@pytest.mark.parametrize(("name", "options"), [(name, wrong) for name, all_ in WRONG.items() for wrong in all_])
def test_options_out_of_range_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02"):
        build_method(name, options)


FEDAVG: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "fedprox": ({"mu": 0.0}, {"mu": 0.1}),
    "moon": ({"mu": 0.0}, {"mu": 5.0}),
    "fedmr": ({"mu1": 0.0, "mu2": 0.0}, {}),
    "fedproc": ({"prototypes": "off"}, {}),
    "fedlc": ({"tau": 0.0}, {"tau": 1.0}),
    "fedrs": ({"alpha": 1.0}, {}),
    "fedgela": ({"etf": False, "adapt": False}, {"etf": False}),
    "fedphp": ({"lam": 0.0}, {"lam": 0.5}),
    "fedvls": ({"lam": 0.0, "mu": 0.0, "gamma": 0.0}, {}),
}
"""Options under which a method is FedAvg, and others under which it is not."""


@pytest.mark.parametrize("name", FEDAVG)
def test_a_method_without_its_own_term_is_fedavg_bit_for_bit(name: str) -> None:
    without, whole = (simulated(name, options)["w"] for options in FEDAVG[name])
    plain = simulated("fedavg", {"weights": "uniform"} if name in ("fedrs", "fedphp") else {})["w"]
    assert same(without, plain)
    assert not same(whole, plain)


def test_the_global_model_of_ditto_is_fedavgs_bit_for_bit() -> None:
    ditto, fedavg = (simulated(name, model_options={"norm": "batch"})["w"] for name in ("ditto", "fedavg"))
    assert same(ditto, fedavg)


@pytest.mark.parametrize(
    ("method", "remedy"), [("scaffold", "train.optimizer=sgd"), ("fednova", ""), ("feddc", "control=none")]
)
def test_methods_that_divide_by_the_steps_refuse_an_adaptive_optimizer(method: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"E-CFG-08.*{remedy}"):
        check_supported(build_method(method, {}), [Capability.ADAPTIVE_OPTIMIZER])
    check_supported(build_method("feddc", {"control": "none"}), [Capability.ADAPTIVE_OPTIMIZER])


@pytest.mark.parametrize(
    ("method", "options", "groups"),
    [("scaffold", {}, "c"), ("feddyn", {"alpha": 0.1}, "m"), ("feddc", {"alpha": 0.1}, "mc")],
)
def test_through_ports_a_lost_update_leaves_the_mean_of_silo_states_intact(
    method: str, options: dict[str, float], groups: str
) -> None:
    """One silo fails between its upload and the close; all have equally many examples."""
    server, states = run_and_lose(method, options, lost={1: "east"})
    for group in groups:
        for name, value in server[group].items():
            mean = sum(state[group][name].double() for state in states.values()) / 3
            assert torch.allclose(value.double(), mean, atol=1e-6)
        assert any(bool(v.abs().max() > 1e-3) for v in server[group].values())


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddc"])
def test_a_silo_without_a_step_does_not_deliver(name: str) -> None:
    with pytest.raises(RefusedError, match="E-RUN-52"):
        play(build_method(name, {}), (QData(1, 0, steps=0), QData(4, 1)), 1)


@pytest.mark.parametrize("name", ["fednova", "feddyn", "feddc"])
def test_prototypes_change_training_once_known(name: str) -> None:
    train = TrainConfig(lr=0.05, batch_size=4, epochs=1)
    for rounds, differs in ((1, False), (3, True)):
        plain, *aided = (
            simulated(name, {"prototypes": form}, train=train, rounds=rounds) for form in ("off", "mixture", "additive")
        )
        for state in aided:
            assert same(plain["w"], state["w"]) is not differs
            assert bool((state["prototypes"]["known"] == 1).all())
