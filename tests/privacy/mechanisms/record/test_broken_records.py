"""A record that breaks in the middle of a private round adds nothing, and moves no other record's part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from fl_core.datasets import ImageLoader
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.training.broken_records import EmptyWhereBroken, without
from fl_core.types import tensor_maps
from fl_core.types.enums import Split
from fl_core.types.records import TrainConfig
from fl_core.types.values import ClassSums, Examples
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleasePlan
from privacy.mechanisms.noise.sources import SeededNoise
from tests.support.federations import SCHEMA
from tests.support.privacy import ce, private_data

IMAGES, N, BROKEN = replace(SCHEMA, shape=(3, 32, 32)), 24, 4
TRAINING = TrainConfig(lr=0.1, batch_size=16, epochs=8, augment=False)
"""Which records a step samples follows from their paths, which differ at every run of this test: 12 steps, each at a
rate of 2/3, miss the broken record twice in a million runs."""


@pytest.fixture
def whole(tmp_path: Path) -> ImageExamples:
    paths = [tmp_path / f"{k}.png" for k in range(N)]
    for k, path in enumerate(paths):
        Image.new("RGB", (32, 32), (10 * k, 200, 255 - 10 * k)).save(path)
    loader = ImageLoader(cache_bytes=0, threads=1)
    return ImageExamples(paths, torch.arange(N) % 4, ImageTransform(32), loader=loader)


def plan() -> ReleasePlan:
    model = build_model("simple_cnn", {}, IMAGES, 0)
    return ReleasePlan.of(RecordDpConfig(), TRAINING, 5, N, build_method("fedavg", {}), model, IMAGES)


def trained(data: Examples) -> str:
    model = build_model("simple_cnn", {}, IMAGES, 0)
    private_data(plan(), data, SeededNoise(3, "noise")).sgd(model, ce)  # type: ignore[arg-type]
    return tensor_maps.digest(tensor_maps.copy_state(model))


def released(data: Examples) -> torch.Tensor:
    opened = private_data(plan(), data, SeededNoise(3, "noise"))  # type: ignore[arg-type]
    query = ClassSums(lambda x, _: x.mean((2, 3)), 4)
    return opened.sum(query, bound=1.0, split=Split.TEST)["sum"]


@pytest.mark.parametrize("of", [trained, released])
def test_a_round_in_which_a_record_breaks_equals_that_of_a_hospital_that_never_had_it(whole: ImageExamples, of) -> None:  # type: ignore[no-untyped-def]
    told: list[int] = []
    before, fewer = of(whole), of(without(whole, [BROKEN]))
    whole.paths[BROKEN].write_bytes(b"no image")
    after = of(EmptyWhereBroken(whole, told.extend))
    assert set(told) == {BROKEN}
    if isinstance(after, str):
        assert after == fewer != before
    else:
        assert torch.equal(after, fewer)
        assert not torch.equal(after, before)
