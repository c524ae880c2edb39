"""Words for training on a GPU: cuDNN's search is on while a model trains, and examples are augmented where it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_core.datasets.augmentation import LESIONS, Augmentation
from fl_core.datasets.examples import ArrayExamples, TensorExamples
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training.devices import OnDevice
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Examples, Losses
from tests.support.data import write_image
from tests.support.federations import FED, SCHEMA, same, shares

HOW = replace(LESIONS, crop=2, shift=0.1)
TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)
N = 9


def arrays(_: Path) -> Examples:
    whole = torch.randint(256, (2 * N, *SCHEMA.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = [0.4] * SCHEMA.shape[0], [0.3] * SCHEMA.shape[0]
    return ArrayExamples(whole, torch.arange(N) * 2, torch.arange(N) % 4, HOW, mean, std)


def tensors(_: Path) -> Examples:
    x = torch.rand(N, *SCHEMA.shape, generator=torch.Generator().manual_seed(0))
    return TensorExamples(x, torch.arange(N) % 4, how=HOW)


def files(folder: Path) -> Examples:
    paths = [write_image(folder / f"{k}.png", 20 * k + 20, (24 + k, 20)) for k in range(N)]
    return ImageExamples(paths, torch.arange(N) % 4, ImageTransform(16, margin=1.25, how=HOW))


KINDS = pytest.mark.parametrize("made", [arrays, tensors, files])


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_cudnn_searches_while_a_model_trains_and_then_no_longer() -> None:
    seen, share = [], shares()[0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        seen.append(torch.backends.cudnn.benchmark)
        return FedAvg.loss(model, x, y)

    for config in (TRAIN, replace(TRAIN, cudnn_benchmark=True)):
        model = build_model("digits_mlp", {}, SCHEMA, 0)
        steps = PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0))).sgd(model, loss)
        assert seen == [config.cudnn_benchmark] * steps
        assert not torch.backends.cudnn.benchmark
        seen.clear()


@KINDS
def test_what_is_stored_and_finished_later_is_the_batch_to_the_bit(
    made: Callable[[Path], Examples], tmp_path: Path
) -> None:
    examples, index = made(tmp_path), torch.tensor([5, 0, 3])
    for augment in (lambda: None, drawn):
        assert torch.equal(examples.prepared(examples.stored(index), augment()), examples.batch(index, augment())[0])


@KINDS
def test_examples_are_finished_on_the_device_where_they_lie(made: Callable[[Path], Examples], tmp_path: Path) -> None:
    """A tensor of the device "meta" can be computed with no tensor of the CPU."""
    examples, index = made(tmp_path), torch.tensor([5, 0, 3])
    x = examples.prepared(examples.stored(index).to("meta"), drawn())
    assert (x.device.type, x.shape) == ("meta", examples.batch(index)[0].shape)


@KINDS
@pytest.mark.parametrize("as_stored", [True, False])
def test_examples_on_a_device_are_augmented_as_their_source(
    made: Callable[[Path], Examples], as_stored: bool, tmp_path: Path
) -> None:
    examples, index = made(tmp_path), torch.tensor([5, 0, 3])
    there = OnDevice(examples, torch.device("cpu"), as_stored)
    for augment in (lambda: None, drawn):
        (x, y), (expected, labels) = there.batch(index, augment()), examples.batch(index, augment())
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
        assert torch.equal(there.prepared(there.stored(index), augment()), expected)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("made", [arrays, tensors])
def test_augmentation_on_the_device_trains_the_same_model_and_reads_nothing_augmented(
    made: Callable[[Path], Examples], ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = made(tmp_path)

    def trained(config: TrainConfig) -> dict[str, Tensor]:
        model = build_model("digits_mlp", {}, SCHEMA, 0)
        data = PlainLocalData(RoundData(examples, examples, config, FED.for_silo(0, 0)))
        data._ahead = ahead
        data.sgd(model, FedAvg.loss)
        return tensor_maps.copy_state(model)

    config = replace(TRAIN, augment=True)
    expected = trained(config)
    assert not same(expected, trained(TRAIN))
    monkeypatch.setattr(examples, "batch", None)
    assert same(expected, trained(replace(config, augment_on_device=True)))


def test_examples_that_are_read_in_one_piece_cannot_be_augmented_on_the_device() -> None:
    config, share = replace(TRAIN, augment=True, augment_on_device=True), shares()[0]
    data = PlainLocalData(RoundData(share.train, share.test, config, FED.for_silo(0, 0)))
    with pytest.raises(ConfigError, match=r"E-CFG-08.*MadeUp.*augment_on_device"):
        data.sgd(build_model("digits_mlp", {}, SCHEMA, 0), FedAvg.loss)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*MadeUp.*augment_on_device"):
        share.train.prepared(torch.zeros(1, *SCHEMA.shape))


def test_no_augmentation_at_all_changes_nothing_of_what_is_stored() -> None:
    x = torch.rand(3, *SCHEMA.shape)
    plain = TensorExamples(x, torch.zeros(3), how=Augmentation())
    assert torch.equal(plain.prepared(x, drawn()), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@KINDS
def test_a_gpu_augments_as_the_cpu_does_up_to_rounding(made: Callable[[Path], Examples], tmp_path: Path) -> None:
    examples, index = made(tmp_path), torch.arange(N)
    there = OnDevice(examples, torch.device("cuda"), as_stored=True)
    x, _ = there.batch(index, drawn())
    assert x.device.type == "cuda"
    assert torch.allclose(x.cpu(), examples.batch(index, drawn())[0], atol=1e-4)
