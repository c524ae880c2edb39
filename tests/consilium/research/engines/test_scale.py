"""Simulation at scale: states in files, few models in memory, devices, mixed precision."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilium.research.engines.in_process import MemoryStateStore, RoundHistory, simulate
from consilium.research.simulate.engine import FileStateStore
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.manifest import make_members
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import devices
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, Given, manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def trained(config: TrainConfig, ahead: int = 0) -> dict[str, torch.Tensor]:
    model, share = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0), shares()[0]
    data = PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0)))
    data._ahead = ahead
    data.sgd(model, FedAvg.loss)
    return tensor_maps.copy_state(model)


@pytest.mark.parametrize("method", ["moon", "scaffold", "fedavg"])
def test_states_in_files_give_the_bits_of_states_in_memory(method: str, tmp_path: Path) -> None:
    run = manifest(method, train=TRAIN, cohort=2, rounds=4)
    expected = simulate(RunSetup.of(run), shares(), RoundHistory())
    (tmp_path / "silo0.safetensors").write_bytes(b"of an earlier run")
    found = simulate(RunSetup.of(run), shares(), RoundHistory(), states=FileStateStore(tmp_path))
    assert set(found) == set(expected)
    assert all(same(found[group], expected[group]) for group in expected)


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_staged_state_is_committed_or_forgotten(kind: str, tmp_path: Path) -> None:
    states = MemoryStateStore() if kind == "memory" else FileStateStore(tmp_path)
    state = {"a": {"x": torch.tensor([1.5, -0.0]), "": torch.tensor(3)}, "empty": {}}
    assert states.get(0) is None
    states.settle(0, True)
    states.stage(0, state)
    assert states.get(0) is None
    states.settle(0, False)
    assert states.get(0) is None
    states.stage(0, state)
    states.settle(0, True)
    found = states.get(0)
    assert found is not None
    assert set(found) == {"a", "empty"}
    assert same(found["a"], state["a"])
    assert states.get(1) is None


@pytest.mark.slow
def test_a_hundred_silos_do_not_hold_a_hundred_models(tmp_path: Path) -> None:
    """Counts the numbers in living tensors after every arrival: with states in files, those of a few models."""
    names = [f"h{k}" for k in range(100)]
    run = replace(
        manifest("moon", train=TrainConfig(batch_size=4, epochs=1, max_steps=1), rounds=12, cohort=10),
        members=make_members(names, 0, 1.0),
    )
    given = [shares()[k % 3] for k in range(100)]
    size = tensor_maps.count(tensor_maps.copy_state(build_model("digits_cnn", {}, SCHEMA, 0)))

    class Counting(RoundHistory):
        peak = 0.0

        def arrived(self, name: str) -> None:
            self.peak = max(self.peak, sum(n for at, n in living().items() if at not in before) / size)

    def living() -> dict[int, int]:
        return {t.untyped_storage().data_ptr(): t.numel() for t in gc.get_objects() if type(t) in KINDS}

    KINDS = (torch.Tensor, torch.nn.Parameter)
    in_files, in_memory = Counting(), Counting()
    gc.collect()
    before = living().keys()
    simulate(RunSetup.of(run), given, in_files, states=FileStateStore(tmp_path))
    simulate(RunSetup.of(run), given, in_memory)
    assert len({name for record in in_memory.records for name in record.included}) == 100
    assert in_files.peak < 16  # the first round's ten updates wait for each other: their median bounds them
    assert in_memory.peak > 60  # without files a state per silo that took part stays


def test_reading_ahead_changes_no_bit() -> None:
    config = replace(TRAIN, augment=True)
    assert same(trained(config), trained(config, ahead=2))
    assert same(trained(TRAIN), trained(TRAIN, ahead=5))


def test_an_error_while_reading_ahead_is_raised() -> None:
    class Broken(Given):
        def batch(self, index, augment=None):  # type: ignore[no-untyped-def]
            raise ConfigError("E-CFG-02", "broken")

    share = shares()[0].train
    data = PlainLocalData(RoundData(Broken(share.x, share.labels), share, TRAIN, FED.for_silo(0, 0)))
    data._ahead = 2
    with pytest.raises(ConfigError, match="broken"):
        data.sgd(build_model("digits_cnn", {}, SCHEMA, 0), FedAvg.loss)


def test_channels_last_computes_the_same_up_to_rounding_and_leaves_the_model_in_order() -> None:
    a, b = trained(TRAIN), trained(replace(TRAIN, channels_last=True))
    assert all(torch.allclose(v, b[name], atol=1e-4) for name, v in a.items())
    assert all(v.is_contiguous() for v in b.values())


def test_with_channels_last_activations_lie_in_that_order() -> None:
    model, share = build_model("digits_cnn", {}, SCHEMA, 0), shares()[0]
    seen: list[bool] = []
    conv = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)][-1]
    conv.register_forward_hook(lambda _m, _x, out: seen.append(out.is_contiguous(memory_format=torch.channels_last)))
    for config in (TRAIN, replace(TRAIN, channels_last=True)):
        PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0))).sgd(model, FedAvg.loss)
        assert set(seen) == {config.channels_last}
        seen.clear()


def test_mixed_precision_stays_near_and_keeps_float32_weights() -> None:
    a, b = trained(TRAIN), trained(replace(TRAIN, amp="bf16"))
    assert not same(a, b)
    assert all(v.dtype == torch.float32 for v in b.values())
    assert all(torch.allclose(v, b[name], atol=0.1) for name, v in a.items())


def test_devices_by_name() -> None:
    assert devices.choose_device("cpu").type == "cpu"
    for wrong in ("gpu", "cuda:99", "cpu:1"):
        with pytest.raises(ConfigError, match="E-CFG-02"):
            devices.choose_device(wrong)
    with devices.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_examples_on_a_device_are_those_of_their_source() -> None:
    share = shares()[0].train
    there = devices.OnDevice(share, torch.device("cpu"))
    index = torch.tensor([5, 0, 3])
    assert all(torch.equal(a, b) for a, b in zip(there.batch(index), share.batch(index), strict=True))
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(there.batch(index, draws[0])[0], share.batch(index, draws[1])[0])
    assert devices.move_to_device(share, torch.device("cpu"), 10**9) == (share, 10**9)
