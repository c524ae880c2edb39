"""`train.compile`: the same training in compiled kernels, that they are used, and what cannot be compiled."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training import compilation
from fl_core.training.compilation import compiled
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import FED, SCHEMA, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def trained(config: TrainConfig) -> dict[str, Tensor]:
    model, share = build_model("digits_mlp", {}, SCHEMA, 0), shares()[0]
    PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0))).sgd(model, FedAvg.loss)
    return tensor_maps.copy_state(model)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put in the compiler's place what runs the traced graph as it is, and notes each run and each compilation."""
    noted: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        noted.append(0)

        def run(*values: object) -> object:
            noted.append(1)
            return graph.forward(*values)

        return run

    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", backend)
    return noted


def test_features_run_compiled_in_training_and_as_written_afterwards(runs: list[int]) -> None:
    model, share = build_model("digits_mlp", {}, SCHEMA, 0), shares()[0]
    steps = PlainLocalData(RoundData(share.train, share.test, replace(TRAIN, compile=True), FED.for_silo(0, 0))).sgd(
        model, FedAvg.loss
    )
    assert steps == runs.count(1) > 1
    model(share.train.batch(torch.arange(2))[0])
    assert runs.count(1) == steps
    assert same(trained(TRAIN), tensor_maps.copy_state(model))  # the same operations in the same order


def test_copies_of_a_model_and_later_rounds_use_what_is_compiled(runs: list[int]) -> None:
    model, x = build_model("digits_mlp", {}, SCHEMA, 0), torch.rand(4, *SCHEMA.shape)
    for _ in range(12):
        with compiled(copied := copy.deepcopy(model), True):
            copied(x)
    assert (runs.count(0), runs.count(1)) == (1, 12)


def test_without_the_word_nothing_is_compiled(runs: list[int]) -> None:
    trained(TRAIN)
    assert runs == []


def test_a_machine_without_a_compiler_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: object, _: object) -> None:
        raise RuntimeError("no compiler\nat /home/somebody")

    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", backend)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*g\+\+.*train\.compile") as caught:
        trained(replace(TRAIN, compile=True))
    assert "somebody" not in caught.value.message


def test_more_versions_than_are_kept_are_an_error_and_no_silent_change_of_kernels(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "MAX_VERSIONS", 1)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Net()
    with pytest.raises(ConfigError, match="E-CFG-08"), compiled(net, True):
        _ = net(torch.ones(2)), net(torch.ones(2, 2))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_kernels_train_the_same_model_up_to_rounding() -> None:
    def train(config: TrainConfig) -> dict[str, Tensor]:
        model, share = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0), shares()[0]
        PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0))).sgd(model, FedAvg.loss)
        return tensor_maps.copy_state(model)

    torch.compiler.reset()
    as_written, found = train(TRAIN), train(replace(TRAIN, compile=True))
    assert as_written.keys() == found.keys()
    assert all(torch.allclose(v, found[name], atol=1e-4) for name, v in as_written.items())
