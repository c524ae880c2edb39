"""What is computed for each number of a model when a round closes, step by step, and what naming an object takes.

python -m benchmarks.round_trip.arithmetic
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.round_trip.models import RESNET18, workload
from benchmarks.timing import Timed
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.aggregation.aggregator import Accumulator
from fl_core.aggregation.fixed_point import FixedPoint, Grid
from fl_core.simulation.in_process import initial_state
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Part, PartSpec, Tensors
from protos.wire import codec
from protos.wire.bundle_file import FileBundle
from protos.wire.chunks import CHUNK_BYTES
from protos.wire.streaming_minmax import Extremes

STEPS = ("folded", "looked at", "seen arriving", "folded unread", "added", "read and added", "BLAKE3", "SHA-256")


def once(model: Tensors, part: Part, stored: Path, timed: dict[str, Timed]) -> None:
    """Close a round of three updates, in memory and then on the disk, and name the model in two ways."""
    layout, grid = {"delta": PartSpec.of(part)}, Grid(n_max=3)
    here, there, unread = (Accumulator(layout, grid) for _ in range(3))
    known, raw = Extremes(), memoryview(stored.read_bytes())
    timed["seen arriving"].add(
        lambda: [known.update(raw[at : at + CHUNK_BYTES]) for at in range(0, len(raw), CHUNK_BYTES)]
    )
    for _ in range(3):
        timed["folded"].add(lambda: here.fold({"delta": part}))
        timed["looked at"].add(lambda: there.fold(FileBundle(stored)))
        timed["folded unread"].add(lambda: unread.fold(FileBundle(stored, known.found)))
    for sums, step in ((here, "added"), (there, "read and added")):
        total = FixedPoint(grid).incoming(sums.total(), 3, 0)["delta"]
        timed[step].add(lambda total=total: trees.add(model, total.mean()))  # type: ignore[misc]
    packed = codec.pack_state({"w": model})
    timed["BLAKE3"].add(lambda: codec.digest(packed))
    timed["SHA-256"].add(lambda: hashlib.sha256(packed).hexdigest())


def main() -> None:
    """Print the median of each step over nine rounds, after three to warm up; threads: `fl_core.blockwise.parallel`."""
    torch.set_num_threads(1)
    words = [*workload(RESNET18).overrides, "rounds=1", "method=fedavg"]
    model = initial_state(manifest_from(compose_spec(words), ["hospital0", "hospital1"]))["w"]
    part = Part.of({name: torch.randn_like(v) / 100 for name, v in model.items()}, 3.0)
    with TemporaryDirectory(prefix="consilium-bench-") as scratch:
        stored = Path(scratch) / "update"
        codec.write_bundle({"delta": part}, stored)
        for rounds in (3, 9):
            timed = {name: Timed() for name in STEPS}
            for _ in range(rounds):
                once(model, part, stored, timed)
    for name, found in timed.items():
        print(f"{name:14} {1e3 * median(found.wall):6.1f} ms")


if __name__ == "__main__":
    main()
