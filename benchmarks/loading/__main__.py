"""Time an epoch over large JPEG files, or how long a simulation looks at a folder before its first round.

python -m benchmarks.loading --images 600 --side 2000 --json
python -m benchmarks.loading start --images 10000 --silos 20
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks import timing
from fl_core import datasets
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.datasets.image_loader import ImageFormat, ImageLoader, cores, square

BATCH = 32
SIZE = 224
CLASSES = 10


class Files(Dataset[torch.Tensor]):
    """What a DataLoader's workers read: the same squares, the usual way."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, k: int) -> torch.Tensor:
        return torch.from_numpy(square(self.paths[k], ImageFormat(SIZE))).permute(2, 0, 1)


def write_images(folder: Path, images: int, side: int) -> list[Path]:
    """Write JPEG files with the detail of photographs: smooth noise at several scales."""
    rng, paths = np.random.default_rng(0), []
    for k in range(images):
        layers = [rng.normal(0, 40, (max(2, side // s), max(2, side // s), 3)) for s in (256, 64, 16, 4)]
        image = np.full((side, side, 3), 128.0)
        for layer in layers:
            scaled = Image.fromarray(np.clip(layer + 128, 0, 255).astype(np.uint8)).resize((side, side))
            image += (np.asarray(scaled, dtype=np.float64) - 128) / 2
        paths.append(folder / f"{k}.jpg")
        Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


def ours(paths: list[Path], loader: ImageLoader) -> None:
    examples = ImageExamples(paths, torch.zeros(len(paths), dtype=torch.int64), ImageTransform(SIZE), loader=loader)
    for index in torch.arange(len(paths)).split(BATCH):
        examples.batch(index)


def dataloader(paths: list[Path], workers: int) -> None:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (ImageTransform(SIZE).mean, ImageTransform(SIZE).std))
    for x in DataLoader(Files(paths), batch_size=BATCH, num_workers=workers):
        (x.float() / 255 - mean) / std


def measure(images: int, side: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return an epoch's seconds and seconds of processor time by the way it is read, medians; ways alternate."""
    n = cores()
    with tempfile.TemporaryDirectory() as folder:
        paths, kept = write_images(Path(folder), images, side), ImageLoader()
        ours(paths, kept)
        ways: dict[str, Callable[[], None]] = {
            "one thread": lambda: ours(paths, ImageLoader(cache_bytes=0, threads=1)),
            f"first epoch, {n} threads": lambda: ours(paths, ImageLoader()),
            f"DataLoader, {n} workers": lambda: dataloader(paths, n),
            "later epochs, from the cache": lambda: ours(paths, kept),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                began, busy = time.perf_counter(), processor_time()
                way()
                found[name].append((time.perf_counter() - began, processor_time() - busy))
    return {
        name: (statistics.median(w for w, _ in both), statistics.median(c for _, c in both))
        for name, both in found.items()
    }


def measure_start(images: int, silos: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return seconds and processor seconds of listing a folder's files, and of loading it for one silo and for many.

    Medians over turns; the files lie in the system's cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for k in range(images):
            if k < CLASSES:
                (root / f"class{k}").mkdir()
            (root / f"class{k % CLASSES}" / f"{k}.jpg").write_bytes(b"not looked at" * 8)
        many = datasets.federation(f"folder:{root}", f"iid-{silos}")
        ways: dict[str, Callable[[], object]] = {
            "os.walk and one stat per file": lambda: listing(root),
            "one silo": lambda: datasets.load(f"folder:{root}"),
            f"{silos} silos": lambda: datasets.load_all(many),
        }
        timed = timing.interleaved(ways, repeats)
    return {name: (statistics.median(t.wall), statistics.median(t.cpu)) for name, t in timed.items()}


def listing(root: Path) -> int:
    return sum(os.stat(os.path.join(at, name)).st_size for at, _, names in os.walk(root) for name in names)  # noqa: PTH116, PTH118 - the quickest way


def processor_time() -> float:
    """Return the processor seconds of this process and of the workers that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", nargs="?", choices=("epochs", "start"), default="epochs")
    asked.add_argument("--images", type=int, default=600)
    asked.add_argument("--silos", type=int, default=20)
    asked.add_argument("--side", type=int, default=2000)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--json", action="store_true")
    chosen = asked.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "start":
        found = measure_start(chosen.images, chosen.silos, chosen.repeats)
    else:
        found = measure(chosen.images, chosen.side, chosen.repeats)
    if chosen.json:
        facts = {"images": chosen.images, "side": chosen.side, "cores": cores(), "load": os.getloadavg()}
        print(json.dumps({**facts, "seconds": found}))
        return
    for name, (wall, busy) in found.items():
        print(f"{name:30} {wall:8.3f} s  {1000 * busy / chosen.images:8.3f} ms of processor time per image")


if __name__ == "__main__":
    main()
