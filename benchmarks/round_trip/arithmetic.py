"""What is computed for each number of a model when a round closes, step by step, and what naming an object takes.

python -m benchmarks.round_trip.arithmetic
"""

from __future__ import annotations

import hashlib
from statistics import median

import torch

from benchmarks.round_trip.models import RESNET18, workload
from benchmarks.timing import Timed
from coordinator.config import compose_spec
from coordinator.plan import manifest_from
from fl_core import trees
from fl_core.accumulator import Accumulator
from fl_core.fixed_point import FixedPoint, Grid
from fl_core.simulate import initial_state
from fl_core.types import Part, PartSpec, Tensors
from protos import codec

STEPS = ("first fold", "next fold", "sum read", "mean", "added", "BLAKE3", "SHA-256")


def once(model: Tensors, part: Part, timed: dict[str, Timed]) -> None:
    """Close a round of two updates and name the model, as it is done and by SHA-256 for comparison."""
    sums = Accumulator({"delta": PartSpec.of(part)}, Grid(n_max=2))
    timed["first fold"].add(lambda: sums.fold({"delta": part}))
    timed["next fold"].add(lambda: sums.fold({"delta": part}))
    total, mean = dict[str, Part](), dict[str, torch.Tensor]()
    timed["sum read"].add(lambda: total.update(FixedPoint(sums.grid).incoming(sums.total(), 2, 0)))
    timed["mean"].add(lambda: mean.update(total["delta"].mean()))
    timed["added"].add(lambda: trees.add(model, mean))
    packed = codec.pack_state({"w": model})
    timed["BLAKE3"].add(lambda: codec.digest(packed))
    timed["SHA-256"].add(lambda: hashlib.sha256(packed).hexdigest())


def main() -> None:
    """Print the median of each step over nine rounds, after three to warm up; threads are those of `fl_core.pieces`."""
    torch.set_num_threads(1)
    words = [*workload(RESNET18).overrides, "rounds=1", "method=fedavg"]
    model = initial_state(manifest_from(compose_spec(words), ["hospital0", "hospital1"]))["w"]
    part = Part.of({name: torch.randn_like(v) / 100 for name, v in model.items()}, 3.0)
    for rounds in (3, 9):
        timed = {name: Timed() for name in STEPS}
        for _ in range(rounds):
            once(model, part, timed)
    for name, found in timed.items():
        print(f"{name:12} {1e3 * median(found.wall):6.1f} ms")


if __name__ == "__main__":
    main()
