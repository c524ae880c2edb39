"""Private steps on a GPU are those on the processor: the same bounds, the same integers but for rounded sums."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.models import build_model
from fl_core.training.devices import OnDevice, choose_device
from fl_core.types import tensor_maps
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import ClassSums, Examples
from privacy.accounting.record_config import RecordDpConfig
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.record.class_sums import pad_batch
from privacy.mechanisms.record.draws import record_keys
from privacy.mechanisms.record.per_sample_gradients import MODES, PADDING, per_unit
from tests.support.data import write_image
from tests.support.federations import Given
from tests.support.privacy import NoNoise, ce, examples, plan_of, private_data

STEP = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=1000, epochs=1, max_steps=1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def exact() -> None:
    choose_device("cpu")  # without TF32


def digits(device: str) -> nn.Module:
    return build_model("digits_cnn", {}, Schema((1, 8, 8), tuple("abcd")), 0).to(device)


def step(device: str, data: Given, noise: object, **terms: object) -> Tensor:
    plan, model = plan_of(RecordDpConfig(**terms), STEP), digits(device)  # type: ignore[arg-type]
    plan.__dict__["noise"] = 1.0
    before = {name: v.double() for name, v in tensor_maps.trainable(model).items()}
    private_data(plan, data, noise, device=torch.device(device)).sgd(model, ce)
    after = tensor_maps.trainable(model)
    return torch.cat([(before[n] - after[n].double()).flatten().cpu() for n in before]) * plan.batch


@devices
def test_a_step_is_the_same_on_every_device(device: str) -> None:
    """Sums differ by the rounding of kernels, noise by nothing: it is drawn on the processor."""
    data = examples()
    assert float((step(device, data, NoNoise(0)) - step("cpu", data, NoNoise(0))).norm()) < 1e-3
    assert float((step(device, data, SeededNoise(3)) - step("cpu", data, SeededNoise(3))).norm()) < 1e-3


@devices
@pytest.mark.parametrize("files", [False, True])
def test_a_record_has_the_same_key_on_every_device(device: str, files: bool, tmp_path: Path) -> None:
    data: Examples = examples(5)
    if files:
        paths = [write_image(tmp_path / f"{k}.png", 20 * k) for k in range(5)]
        data = ImageExamples(paths, torch.arange(5) % 4, ImageTransform(8))
    assert record_keys(OnDevice(data, torch.device(device))).tolist() == record_keys(data).tolist()


@devices
def test_a_record_that_is_not_finite_adds_zero_on_every_device(device: str) -> None:
    data = examples(20)
    without = step(device, data, NoNoise(0))
    for value in (math.nan, math.inf, 3e38):
        x = torch.cat((torch.full((1, 1, 8, 8), value), data.x))
        moved = step(device, Given(x, torch.cat((torch.tensor([1]), data.labels))), NoNoise(0)) - without
        assert bool(torch.isfinite(moved).all())
        assert float(moved.norm()) <= 1 + grid.SLACK


@devices
@pytest.mark.parametrize("mode", MODES)
def test_no_record_changes_anothers_share_on_any_device(device: str, mode: str) -> None:
    """Bit for bit, in one batch shape; each share is read by a factor that leaves out the others."""
    model, (x, y) = digits(device), (examples(13).x.to(device), torch.arange(13, device=device) % 4)

    def share(x: Tensor, y: Tensor, k: int) -> list[Tensor]:
        units = torch.cat((torch.arange(len(x)), torch.full((-len(x) % 16,), PADDING))).to(device)
        honest = grid.factors
        grid.factors = lambda square, clip: honest(square, clip) * (torch.arange(len(square), device=device) == k)
        try:
            with per_unit(model, mode) as engine:
                return engine.clipped_sum(lambda: ce(model, pad_batch(x, 16), pad_batch(y, 16)).per_example, units, 1.0)
        finally:
            grid.factors = honest

    alone = share(x, y, 4)
    crowd = share(torch.cat((x[:1] * 1e3, x)), torch.cat((y[:1], y)), 5)
    assert all(torch.equal(a, b) for a, b in zip(alone, crowd, strict=True))
    assert any(bool(a.any()) for a in alone)


@devices
def test_class_sums_are_the_same_on_every_device(device: str) -> None:
    plan, data = plan_of(RecordDpConfig(), method="fedproc"), examples()
    model = digits(device)

    def vectors(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = model.to(x.device).features(x)  # type: ignore[operator]
        return found

    here = private_data(plan, data, SeededNoise(1), device=torch.device(device)).sum(ClassSums(vectors, 4))
    there = private_data(plan, data, SeededNoise(1)).sum(ClassSums(vectors, 4))
    for name, value in here.items():
        assert torch.allclose(value, there[name], atol=1e-3)
