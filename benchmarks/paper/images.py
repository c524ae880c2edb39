"""Small image sets, cut from the user's own copies and written once to CONSILIUM_CACHE (~/.cache/consilium).

images=cifar10-200-50         the first 200 training and 50 test images per class of ROOT/cifar10-jpeg[.tar.gz], which
                              holds train/CLASS/*.jpg and test/CLASS/*.jpg
images=fmnist-200-100         the first 200 training and 100 test images per class of Fashion-MNIST: published files in
                              ROOT, ROOT/fmnist or ROOT/FashionMNIST/raw, or Debian's dataset-fashion-mnist
images=fmnist-200-val100      the same, but of the training images a fifth is set apart for validation, by the hash of
images=fmnist-200-test1000    their bytes: the first 200 of the others train; the first 100 of the fifth, or the first
                              1000 test images, of each class stand where the test images are
images=isic2019-32            Fed-ISIC2019 shrunk to squares of 36 pixels, of which 32 are seen
images=isic2019-32-200-50     of these at most 200 training and 50 test images of each class at each centre, by name
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import os
import re
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from fl_core.datasets.sources import isic2019
from fl_core.errors import ConfigError, DataError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FORMS = (
    "images=cifar10-TRAIN-TEST or images=fmnist-TRAIN-TEST (images per class; valN or testN in place of TEST sets "
    "validation images apart), images=isic2019-SIZE or images=isic2019-SIZE-TRAIN-TEST"
)
_CIFAR10 = re.compile(r"images=cifar10-(\d+)-(\d+)")
_FMNIST = re.compile(r"images=fmnist-(\d+)-(val|test|)(\d+)")
VALIDATION = 5
"""One training image in so many is a validation image, where an image set has any."""
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_ISIC2019 = re.compile(r"images=isic2019-(\d+)(?:-(\d+)-(\d+))?")


def resolved(words: Sequence[str], data_root: Path | None, *, cut: bool = True) -> list[str]:
    """Replace images=... by the words of a real data set, cutting it where that was not done before.

    cut: False looks at no image and names a folder that is not there: enough to say what a run computes.
    Raises ConfigError (E-CFG-01) on another form, DataError (E-DATA-02) where the images are not there.
    """
    found: list[str] = []
    for word in words:
        if not word.startswith("images="):
            found.append(word)
        elif match := _CIFAR10.fullmatch(word):
            path = _cifar10(_root(data_root), int(match[1]), int(match[2])) if cut else _cache("not-cut")
            found += ["data=folder", f"data.path={path}", f"data.classes=[{','.join(CIFAR10)}]", "data.image_size=32"]
        elif _FMNIST.fullmatch(word):
            found.append("data=fmnist")
        elif match := _ISIC2019.fullmatch(word):
            found += ["data=isic2019", f"data.image_size={match[1]}"]
        else:
            raise ConfigError("E-CFG-01", f"expected {FORMS}, found {word!r}")
    return found


def root_of(words: Sequence[str], data_root: Path | None) -> Path | None:
    """Return where a run's data lie: for images that were cut or shrunk the folder that holds them."""
    for word in words:
        if match := _FMNIST.fullmatch(word):
            return _fmnist(data_root, int(match[1]), match[2], int(match[3]))
        if match := _ISIC2019.fullmatch(word):
            limits = {"train": int(match[2]), "test": int(match[3])} if match[2] else {}
            return _isic2019(_root(data_root), round(int(match[1]) * 224 / 200), limits)
    return data_root


def _root(data_root: Path | None) -> Path:
    given = data_root or os.environ.get("CONSILIUM_TEST_DATA")
    if not given:
        raise DataError(
            "E-DATA-02",
            "expected the folder of your own images, found none: give --data-root FOLDER or set CONSILIUM_TEST_DATA",
        )
    return Path(given)


def _cache(name: str) -> Path:
    return Path(os.environ.get("CONSILIUM_CACHE") or Path.home() / ".cache" / "consilium") / name


def _finished(made: Path, target: Path) -> Path:
    """Move a folder into place at once, so that an interrupted cut is never taken for a whole one."""
    try:
        made.rename(target)
    except OSError:
        shutil.rmtree(made)  # another process was first
    return target


def _cifar10(root: Path, train: int, test: int) -> Path:
    target = _cache(f"cifar10-{train}-{test}")
    if target.is_dir():
        return target
    made = target.with_name(f"{target.name}.{os.getpid()}")
    archive, folder = root / "cifar10-jpeg.tar.gz", root / "cifar10-jpeg"
    if folder.is_dir():
        for split, limit in (("train", train), ("test", test)):
            for name in CIFAR10:
                (made / split / name).mkdir(parents=True)
                for file in sorted((folder / split / name).glob("*.jpg"))[:limit]:
                    shutil.copy(file, made / split / name)
    elif archive.is_file():
        _unpack(archive, made, {"train": train, "test": test})
    else:
        raise DataError("E-DATA-02", f"expected {folder} or {archive}, found neither: put CIFAR10 there as JPEG files")
    return _finished(made, target)


def _unpack(archive: Path, made: Path, limits: dict[str, int]) -> None:
    with tarfile.open(archive) as tar:
        by_class: dict[tuple[str, str], list[tarfile.TarInfo]] = {}
        for member in tar.getmembers():
            if member.isfile() and (match := re.search(r"(train|test)/(\w+)/[^/]+\.jpg$", member.name)):
                by_class.setdefault((match[1], match[2]), []).append(member)
        for (split, name), members in by_class.items():
            (made / split / name).mkdir(parents=True)
            for member in sorted(members, key=lambda m: m.name)[: limits[split]]:
                content = tar.extractfile(member)
                assert content is not None
                (made / split / name / Path(member.name).name).write_bytes(content.read())


def is_validation(image: npt.NDArray[np.uint8]) -> bool:
    """Tell whether a training image is set apart for validation: equal images are on the same side."""
    return int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big") % VALIDATION == 0


def _fmnist(data_root: Path | None, train: int, kind: str, test: int) -> Path:
    """Cut Fashion-MNIST: files of the publisher's form, which torchvision reads, with the first images per class.

    kind: val or test, where validation images are set apart: what the test files hold   train, test: images per class
    """
    target = _cache(f"fmnist-{train}-{kind}{test}")
    if target.is_dir():
        return target
    given = data_root or os.environ.get("CONSILIUM_TEST_DATA")
    places = [Path(given) / below for below in ("", "fmnist", "FashionMNIST/raw")] if given else []
    source = next((p for p in (*places, _DEBIAN) if any(p.glob("train-images-idx3-ubyte*"))), None)
    if source is None:
        raise DataError(
            "E-DATA-02",
            f"expected Fashion-MNIST's four files (train-images-idx3-ubyte.gz ...) in {given or 'the data root'} or "
            f"{_DEBIAN}, found none: give --data-root FOLDER, or install Debian's package dataset-fashion-mnist",
        )
    made = target.with_name(f"{target.name}.{os.getpid()}")
    (made / "FashionMNIST/raw").mkdir(parents=True)
    for name, limit in (("train", train), ("t10k", test)):
        read = "train" if kind == "val" else name
        images, labels = (_idx(source, f"{read}-{part}") for part in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if kind and read == "train":
            half = np.array([is_validation(image) for image in images]) == (name == "t10k")
            images, labels = images[half], labels[half]
        kept = np.sort(np.concatenate([np.flatnonzero(labels == c)[:limit] for c in range(10)]))
        for part, values in (("images-idx3-ubyte", images[kept]), ("labels-idx1-ubyte", labels[kept])):
            head = b"\0\0\x08" + bytes([values.ndim]) + np.asarray(values.shape, ">i4").tobytes()
            (made / "FashionMNIST/raw" / f"{name}-{part}").write_bytes(head + values.tobytes())
    return _finished(made, target)


def _idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """Read one file of the publisher's form: two zeros, type, dimensions, their sizes, then bytes."""
    packed = folder / f"{name}.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else (folder / name).read_bytes()
    sizes = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(sizes)


def _isic2019(root: Path, side: int, limits: Mapping[str, int]) -> Path:
    """Shrink the images of Fed-ISIC2019; with limits, only so many of each class per centre and split."""
    target = _cache("-".join(["isic2019", str(side), *map(str, limits.values())]))
    if target.is_dir():
        return target
    source = next((f for f in (root / "isic2019", root) if (f / isic2019.SPLIT_FILE).is_file()), None)
    if source is None:
        raise DataError("E-DATA-02", f"expected Fed-ISIC2019 in FLamby's layout in {root}, found none: put it there")
    made = target.with_name(f"{target.name}.{os.getpid()}")
    (made / isic2019.IMAGES).mkdir(parents=True)
    files = sorted((source / isic2019.IMAGES).glob("*.jpg"))
    if limits:
        kept = _first(source / isic2019.SPLIT_FILE, made / isic2019.SPLIT_FILE, limits)
        files = [file for file in files if file.stem in kept]
    else:
        shutil.copy(source / isic2019.SPLIT_FILE, made)
    if (source / isic2019.GROUP_FILE).is_file():
        shutil.copy(source / isic2019.GROUP_FILE, made)
    for file in files:
        with Image.open(file) as image:
            image.draft("RGB", (2 * side, 2 * side))
            small = ImageOps.fit(image.convert("RGB"), (side, side), method=Image.Resampling.BILINEAR)
        small.save(made / isic2019.IMAGES / file.name, quality=95)
    return _finished(made, target)


def _first(source: Path, target: Path, limits: Mapping[str, int]) -> set[str]:
    """Write the rows of the first images by name, per centre, split and class; return the images' names."""
    counts: Counter[tuple[str, str, str]] = Counter()
    kept = set[str]()
    with source.open(newline="") as text, target.open("w", newline="") as out:
        rows = csv.DictReader(text)
        lines = csv.DictWriter(out, rows.fieldnames or (), lineterminator="\n")
        lines.writeheader()
        for row in sorted(rows, key=lambda r: r["image"]):
            place = row["center"], row["fold"], row["target"]
            counts[place] += 1
            if counts[place] <= limits[row["fold"]]:
                lines.writerow(row)
                kept.add(row["image"])
    return kept


if __name__ == "__main__":  # python -m benchmarks.paper.images images=fmnist-250-test1000 says where they lie
    print(root_of(sys.argv[1:], None))
