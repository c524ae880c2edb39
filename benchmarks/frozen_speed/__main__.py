"""Time a hospital's round on kept features and through the body, and count the bytes that a round sends.

python -m benchmarks.frozen_speed --images 128 --turns 3
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.timing import Value
from consilium.research.engines.in_process import InProcessSilo, SiloShare
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.datasets import TensorExamples
from fl_core.methods import all_options
from fl_core.models.split_model import body_rows
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.frozen_features import with_rows
from fl_core.types.enums import TaskKind
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Examples, RoundContext
from protos.wire.codec import pack_bundle, pack_state
from silo.storage.feature_cache import Block, FeatureCache, FeatureKey

CPU = torch.device("cpu")
NAMES = ("north", "south")
CLASSES = 10


class ThroughBody(Examples):
    """Examples whose features are made each time they are read."""

    def __init__(self, examples: Examples, body: nn.Module) -> None:
        self.labels, self._examples, self._body = examples.labels, examples, body

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x, y = self._examples.batch(index, augment)
        return body_rows(self._body, x), y


def manifest(model: str, side: int, batch_size: int, freeze: str) -> RunManifest:
    chosen, schema = NamedOptions("fedavg", all_options("fedavg", {})), Schema((3, side, side), tuple("abcdefghij"))
    made = RunManifest(
        name="speed",
        method=chosen,
        model=NamedOptions(model, {}),
        data="made-up",
        schema=schema,
        train=TrainConfig(batch_size=batch_size, epochs=1, freeze=freeze),
        rounds=1,
        seed=0,
        members=make_members(NAMES, 0, 1.0),
        layout={},
        grid=FixedPointFormat("ring64", len(NAMES)),
        privacy=NamedOptions("none"),
        threads=torch.get_num_threads(),
    )
    run = RunSetup(made)
    return replace(made, layout=derive_layout(run.method, run.new_model(), run.schema))


def images(n: int, side: int) -> TensorExamples:
    x = torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0))
    return TensorExamples(x, torch.arange(n) % CLASSES)


def kept(run: RunSetup, examples: Examples, cache: FeatureCache, split: str) -> Examples:
    """Make the features of a hospital's examples on the disk, and read them from there."""

    def blocks() -> Iterator[Block]:
        for batch in run.features(examples, CPU, train=split == "train"):
            yield Block(batch.positions.tolist(), batch.rows.flatten(1).numpy())

    found = cache.get(FeatureKey("made-up", "1", "", split, ""), len(examples), blocks)
    return with_rows(examples, torch.arange(len(examples)), torch.from_numpy(found.rows).unsqueeze(1))


def measure(model: str, side: int, n: int, batch_size: int, turns: int) -> dict[str, Value]:
    whole, frozen = (RunSetup.of(manifest(model, side, batch_size, freeze)) for freeze in ("none", "features"))
    train, test, context = images(n, side), images(max(1, n // 5), side), RoundContext(2, CLASSES, 1, 0, 2)
    with tempfile.TemporaryDirectory() as folder:
        cache, pass_ = FeatureCache(Path(folder) / "features", 1 << 30), timing.Timed()
        shares: dict[str, tuple[RunSetup, SiloShare]] = {}

        def build() -> None:
            shares["kept"] = frozen, SiloShare(kept(frozen, train, cache, "train"), kept(frozen, test, cache, "test"))

        pass_.add(build)
        body = frozen.network.body
        shares["through_body"] = frozen, SiloShare(ThroughBody(train, body), ThroughBody(test, body))
        shares["whole_model"] = whole, SiloShare(train, test)
        ports = {
            name: InProcessSilo(run.manifest, 0, share, run.silo_runtime()) for name, (run, share) in shares.items()
        }
        sent = {name: run.method.broadcast(run.initial_state()) for name, (run, _) in shares.items()}
        up = {name: port.round(sent[name], context, TaskKind.TRAIN) for name, port in ports.items()}
        timed = timing.interleaved(
            {name: lambda name=name: ports[name].round(sent[name], context, TaskKind.TRAIN) for name in ports},  # type: ignore[misc]
            turns,
        )
        cache.close()
    pairs = [(v, up["through_body"]["delta"].total[k]) for k, v in up["kept"]["delta"].total.items()]
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)  # batches of other sizes round otherwise
    bytes_of = {name: len(pack_state(sent[name])) + len(pack_bundle(up[name])) for name in up}
    return {
        "model": model,
        "images": f"{n} of {side} pixels, {len(test)} to test",
        **timing.milliseconds(timed),
        "pass_ms": round(1e3 * pass_.wall[0]),
        "pass_cpu_ms": round(1e3 * pass_.cpu[0]),
        **{f"body_{key}": value for key, value in timing.ratio(timed["through_body"], timed["kept"]).items()},
        **{f"whole_{key}": value for key, value in timing.ratio(timed["whole_model"], timed["kept"]).items()},
        "pass_rounds": round(pass_.cpu[0] / median(timed["through_body"].cpu), 2),
        "bytes_head": bytes_of["kept"],
        "bytes_whole": bytes_of["whole_model"],
        "bytes_ratio": round(bytes_of["whole_model"] / bytes_of["kept"]),
        "same_update": same,
        **timing.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    timing.show(measure(given.model, given.side, given.images, given.batch_size, given.turns), given.json)


if __name__ == "__main__":
    main()
