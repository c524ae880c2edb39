"""The public data sets in their published layouts: what is read, partitioned, normalised, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fl_core.datasets import DataRequest, check, federation, load
from fl_core.datasets.catalogue import CIFAR10_CLASSES, PUBLISHED
from fl_core.datasets.sources import torchvision
from fl_core.errors import DataError
from fl_core.types.enums import Split
from tests.support.data import images, real_data, write_cifar, write_emnist, write_image, write_mnist, write_svhn

N, TRAIN = 60, 40
pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    for kind in (datasets.CIFAR10, datasets.CIFAR100):
        monkeypatch.setattr(kind, "train_list", [[name, None] for name, _ in kind.train_list])
        monkeypatch.setattr(kind, "test_list", [[name, None] for name, _ in kind.test_list])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    split_list = {k: [url, name, None] for k, (url, name, _) in datasets.SVHN.split_list.items()}
    monkeypatch.setattr(datasets.SVHN, "split_list", split_list)


def write(name: str, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write a tiny copy; return the images (N, C, H, W) and classes that must be read back."""
    known = PUBLISHED[name]
    x, y = images(N, *known.shape), np.arange(N) % len(known.classes)
    if name in ("mnist", "fmnist"):
        write_mnist(root, "MNIST" if name == "mnist" else "FashionMNIST", x[:, 0], y, TRAIN)
    elif name == "emnist":
        write_emnist(root, x[:, 0], y + 1, TRAIN)
    elif name == "svhn":
        write_svhn(root, x, y, TRAIN)
    else:
        write_cifar(root, x, y, TRAIN, fine=name == "cifar100")
    return x, y


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("below", ["", "own"])
@pytest.mark.parametrize("name", torchvision.MARKS)
def test_published_files_are_read_byte_by_byte(name: str, below: str, tmp_path: Path) -> None:
    x, y = write(name, tmp_path / name if below else tmp_path)
    known = PUBLISHED[name]
    silo = load(f"{name}/iid-1/0", data_root=tmp_path)
    assert silo.schema.shape == known.shape
    assert silo.schema.classes == known.classes
    assert (len(silo.train), len(silo.test)) == (TRAIN, N - TRAIN)
    mean = np.reshape(known.mean or (0.0,), (-1, 1, 1))
    std = np.reshape(known.std or (1.0,), (-1, 1, 1))
    for examples, part in ((silo.train, slice(0, TRAIN)), (silo.test, slice(TRAIN, N))):
        got, labels = examples.batch(torch.arange(len(examples)))
        wanted = ((x[part] / 255 - mean) / std).astype(np.float32)
        ranked = np.argsort(wanted.reshape(len(wanted), -1).sum(1))  # a federation shuffles: compare in one order
        mine = np.argsort(got.numpy().reshape(len(got), -1).sum(1))
        assert np.allclose(got.numpy()[mine], wanted[ranked], atol=1e-5)
        assert np.array_equal(labels.numpy()[mine], y[part][ranked])


@pytest.mark.usefixtures("unchecked")
def test_silos_share_one_array_and_deal_it_completely(tmp_path: Path) -> None:
    write("cifar10", tmp_path)
    silos = [load(reference, data_root=tmp_path) for reference in federation("cifar10", "p5c2")]
    assert [sorted(set(s.train.labels.tolist())) for s in silos] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert sum(len(s.train) for s in silos) == TRAIN
    assert len({s.train._whole.data_ptr() for s in silos}) == 1
    assert silos[0].train._whole.dtype == torch.uint8
    assert len({s.fingerprint for s in silos}) == 5
    report = check("cifar10/p5c2/3", data_root=tmp_path)
    assert report.fingerprint == silos[3].fingerprint
    assert report.counts[Split.TRAIN][6:8] == (4, 4)


@pytest.mark.usefixtures("unchecked")
def test_a_label_space_is_mapped_by_name_and_a_lacking_class_is_refused(tmp_path: Path) -> None:
    write("cifar10", tmp_path)
    turned = tuple(reversed(CIFAR10_CLASSES))
    silo = load("cifar10/p5c2/0", DataRequest(classes=turned), data_root=tmp_path)
    assert sorted(set(silo.train.labels.tolist())) == [8, 9]
    with pytest.raises(DataError, match=r"E-DATA-05.*'airplane': 6") as caught:
        load("cifar10/p5c2/0", DataRequest(classes=CIFAR10_CLASSES[1:]), data_root=tmp_path)
    assert caught.value.code == "E-DATA-05"


@pytest.mark.usefixtures("unchecked")
def test_a_held_out_fifth_is_the_silo_s_test_and_the_official_test_set_is_public(tmp_path: Path) -> None:
    write("cifar10", tmp_path)
    silos = [load(reference, data_root=tmp_path) for reference in federation("cifar10", "map-2")]
    for silo in silos:
        assert len(silo.test) == max(1, int(0.2 * (len(silo.train) + len(silo.test))))
        assert silo.public is not None
        assert len(silo.public) == N - TRAIN
        assert not set(silo.train._index.tolist()) & set(silo.test._index.tolist())
    assert load("cifar10/p5c2/0", data_root=tmp_path).public is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_data_set_names_its_owner_and_the_folders_searched(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(f"{name}/iid-2/0", data_root=tmp_path)
    assert caught.value.code == "E-DATA-02"
    assert "http" in PUBLISHED[name].publisher
    assert PUBLISHED[name].publisher in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_files_that_are_not_the_published_ones_are_refused(tmp_path: Path) -> None:
    write("cifar10", tmp_path)  # tiny: its checksum is another
    with pytest.raises(DataError, match="Extract the publisher's original archive") as caught:
        load("cifar10/p5c2/0", data_root=tmp_path)
    assert caught.value.code == "E-DATA-04"
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(DataError, match="Extract the publisher's original archive"):
        load("mnist/p5c2/0", data_root=tmp_path)


# ---- trees of image files


def write_tree(root: Path, splits: tuple[str, ...], suffix: str) -> None:
    for split in splits:
        for k, label in enumerate(CIFAR10_CLASSES):
            for n in range(3):
                write_image(root / split / label / f"{n}{suffix}", 20 * k + n, (32, 32))


@pytest.mark.parametrize("below", ["", "cifar10", "cifar10-jpeg"])
def test_cifar10_as_folders_of_jpegs(below: str, tmp_path: Path) -> None:
    write_tree(tmp_path / below, ("train", "test"), ".jpg")
    silos = [load(reference, data_root=tmp_path) for reference in federation("cifar10", "p5c2")]
    assert [len(s.train) for s in silos] == [6] * 5
    x, y = silos[2].train.batch(torch.arange(6))
    assert x.shape == (6, 3, 32, 32)
    assert sorted(set(y.tolist())) == [4, 5]
    assert silos[0].schema.classes == CIFAR10_CLASSES
    gray = silos[4].test.batch(torch.tensor([5]))[0][0].mean((1, 2)) * torch.tensor(PUBLISHED["cifar10"].std)
    assert torch.allclose(gray + torch.tensor(PUBLISHED["cifar10"].mean), torch.full((3,), 182 / 255), atol=0.02)


def test_cinic10_leaves_valid_out(tmp_path: Path) -> None:
    write_tree(tmp_path / "CINIC-10", ("train", "valid", "test"), ".png")
    silos = [load(reference, data_root=tmp_path) for reference in federation("cinic10", "iid-3")]
    assert sum(len(s.train) for s in silos) == sum(len(s.test) for s in silos) == 30
    assert not any("valid" in p.parts for s in silos for p in (*s.train.paths, *s.test.paths))
    assert silos[0].fingerprint != silos[1].fingerprint
    held = load("cinic10/map-2/0", data_root=tmp_path)
    assert all("train" in p.parts for p in held.test.paths)
    assert held.public is not None
    assert len(held.public) == 30


def write_tiny(root: Path) -> Path:
    wnids = [f"n{9 - k:08d}" for k in range(4)]  # listed out of order
    folder = root / "tiny-imagenet-200"
    for wnid in wnids:
        for n in range(3):
            write_image(folder / "train" / wnid / "images" / f"{wnid}_{n}.JPEG", 10, (64, 64))
    rows = []
    for k, wnid in enumerate(wnids * 2):
        write_image(folder / "val" / "images" / f"val_{k}.JPEG", 10, (64, 64))
        rows.append(f"val_{k}.JPEG\t{wnid}\t0\t0\t63\t63")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_tinyimagenet_is_tested_on_val_and_numbers_its_sorted_classes(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    silo = load("tinyimagenet/iid-1/0", data_root=tmp_path)
    assert silo.schema.shape == (3, 64, 64)
    assert len(silo.schema.classes) == 200
    assert torch.bincount(silo.train.labels).tolist() == [3] * 4
    assert torch.bincount(silo.test.labels).tolist() == [2] * 4
    first = silo.train.paths[silo.train.labels.tolist().index(0)]
    assert first.name.startswith("n00000006")
    assert silo.train.batch(torch.arange(2))[0].shape == (2, 3, 64, 64)


def test_tinyimagenet_that_contradicts_itself(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    (folder / "val" / "images" / "val_3.JPEG").unlink()
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_9.JPEG\tn99999999\t0\t0\t1\t1\n")
    report = check("tinyimagenet/iid-1/0", data_root=tmp_path)
    assert {(p.code, p.first) for p in report.problems} == {
        ("E-DATA-07", ("val_9.JPEG: 'n99999999'",)),
        ("E-DATA-04", ("val_3.JPEG",)),
    }


# ---- the spiral


def test_the_spiral_has_one_arm_per_class() -> None:
    silo = load("spiral/iid-1/0")
    x, y = silo.train.batch(torch.arange(len(silo.train)))
    assert x.shape == (2000, 2)
    assert torch.bincount(y).tolist() == [400] * 5
    assert torch.bincount(silo.test.labels).tolist() == [100] * 5
    radius, angle = x.norm(dim=1), torch.atan2(x[:, 0], x[:, 1]) % (2 * torch.pi)
    offset = (angle - (y + (radius - 1) / 9) / 5 * 2 * torch.pi) % (2 * torch.pi)
    assert ((offset < 0.5 + 1e-4) | (offset > 2 * torch.pi - 1e-4)).all()  # jitter, up to rounding at 0
    assert radius.min() > 1 - 1e-4
    assert radius.max() < 10 + 1e-4
    again, _ = load("spiral/iid-1/0").train.batch(torch.arange(2000))
    assert torch.equal(again, x)


@pytest.mark.integration
def test_real_cifar10_is_read_and_partitioned(tmp_path: Path) -> None:
    """The real archive of JPEGs, a few images of each class of it."""
    import tarfile

    archive = real_data("cifar10-jpeg.tar.gz")
    if archive is None:
        pytest.skip("no real CIFAR10 images: set CONSILIUM_TEST_DATA")
    wanted = {f"{s}/{c}/{n:04d}.jpg" for s in ("train", "test") for c in CIFAR10_CLASSES for n in range(12)}
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, [m for m in tar if m.name in wanted], filter="data")
    silos = [load(reference, data_root=tmp_path) for reference in federation("cifar10", "p10c2")]
    assert sum(len(s.train) for s in silos) == 120
    x, _ = silos[0].train.batch(torch.arange(len(silos[0].train)))
    assert 0.2 < x.std() < 2.5
    assert check("cifar10/p10c2/0", data_root=tmp_path, deep=True).sizes == {
        (32, 32): len(silos[0].train) + len(silos[0].test)
    }
