"""Records that cannot be read: which they are, what is left without them, and when a task fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from PIL import Image

from consilium.research.engines.in_process import RoundHistory, SiloShare, simulate, with_features
from fl_core.datasets import ImageLoader
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.errors import DataError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.broken_records import EmptyWhereBroken, readable, require_few, unreadable, without
from fl_core.types import tensor_maps
from fl_core.types.records import Schema
from tests.support.fake_coordinator import manifest
from tests.support.federations import Given


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{k:03}.png" for k in range(20)]
    for k, path in enumerate(made):
        Image.new("RGB", (32, 32), (12 * k, 255 - 12 * k, 40)).save(path)
    return made


def examples(paths: list[Path], loader: ImageLoader | None = None, groups: bool = False) -> ImageExamples:
    labels = torch.tensor([int(path.stem) % 2 for path in paths])
    of_two = tuple(f"patient {int(path.stem) // 2}" for path in paths) if groups else None
    return ImageExamples(
        paths, labels, ImageTransform(32), of_two, loader=loader or ImageLoader(cache_bytes=0, threads=1)
    )


def broken(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:40])
    return path


@pytest.mark.parametrize("fault", [broken, Path.unlink, lambda path: path.write_text("<html>")])
def test_what_cannot_be_read_is_named_and_all_else_is_as_without_it(files: list[Path], fault, caplog) -> None:  # type: ignore[no-untyped-def]
    whole = examples(files, groups=True)
    kept = [k for k in range(20) if k != 7]
    expected, labels = whole.batch(torch.tensor(kept))
    fault(files[7])
    with caplog.at_level(logging.WARNING):
        assert unreadable(whole) == (7,)
        found = readable(whole)
    assert sum(str(files[7]) in record.getMessage() for record in caplog.records) == 2
    assert torch.equal(found.batch(torch.arange(19))[0], expected)
    assert torch.equal(found.labels, labels)
    assert found.groups == tuple(f"patient {k // 2}" for k in kept)


def test_one_of_a_hundred_may_be_broken_and_one_of_fewer_and_the_error_tells_no_number() -> None:
    require_few(1, 3)
    require_few(19, 1910)
    for count, n in ((2, 3), (2, 199), (20, 1910)):
        with pytest.raises(DataError, match="E-DATA-04") as caught:
            require_few(count, n)
        assert str(count) not in caught.value.message


def test_examples_in_memory_are_readable() -> None:
    given = Given(torch.zeros(4, 1, 8, 8), torch.arange(4))
    assert unreadable(given) == ()
    assert readable(given) is given


def test_only_those_that_are_asked_for_are_read(files: list[Path]) -> None:
    broken(files[3])
    told: list[tuple[int, int]] = []
    assert unreadable(examples(files), [0, 1, 2], lambda *progress: told.append(progress)) == ()
    assert unreadable(examples(files), [3, 4]) == (3,)
    assert told == [(3, 3)]


def images_run() -> RunManifest:
    schema, model = Schema((3, 32, 32), ("a", "b")), NamedOptions("simple_cnn", {})
    layout = derive_layout(build_method("fedavg", {}), build_model("simple_cnn", {}, schema, 3), schema)
    return manifest(data="folder", schema=schema, model=model, image_size=32, layout=layout)


def test_a_simulation_with_a_broken_image_is_the_simulation_without_it(files: list[Path]) -> None:
    run = RunSetup.of(images_run())
    test = examples(files[16:])

    def final(train: ImageExamples) -> str:
        shares = with_features(run, [SiloShare(train, test)] * 3)
        return tensor_maps.digest(simulate(run, shares, RoundHistory())["w"])

    whole = final(examples(files[:16]))
    fewer = final(examples([*files[:5], *files[6:16]]))
    broken(files[5])
    assert final(examples(files[:16])) == fewer != whole


def test_a_file_that_breaks_in_a_private_round_is_not_a_number_and_said(files: list[Path]) -> None:
    told: list[int] = []
    whole = examples(files)
    private = EmptyWhereBroken(whole, told.extend)
    x, y = private.batch(torch.arange(6))
    assert torch.equal(x, whole.batch(torch.arange(6))[0])
    broken(files[2])
    for generator in (None, torch.Generator().manual_seed(1)):
        found, labels = private.batch(torch.arange(6), generator)
        assert bool(torch.isnan(found[2]).all())
        assert torch.equal(labels, y)
        others = [0, 1, 3, 4, 5]
        if generator is None:
            assert torch.equal(found[others], x[others])
        assert bool(torch.isfinite(found[others]).all())
    assert told == [2, 2]


def test_without_keeps_the_state_in_which_files_were_met(files: list[Path]) -> None:
    whole = examples(files, ImageLoader(threads=1))
    x = whole.batch(torch.arange(20))[0]
    for path in files:
        path.unlink()
    assert torch.equal(without(whole, [4]).batch(torch.tensor([3, 4]))[0], x[[3, 5]])
