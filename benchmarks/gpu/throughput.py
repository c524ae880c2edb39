"""Images per second of a silo's training on a device, beside a bare loop of PyTorch that does the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from benchmarks import timing
from fl_core.datasets.examples import TensorExamples
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training import optimizers
from fl_core.training.devices import choose_device, cudnn_benchmark, move_to_device
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Examples, RoundContext

CLASSES = tuple("abcdefghij")
SMALL, LARGE = ("digits_cnn", (1, 8, 8), 64, 32, 1), ("resnet18", (3, 32, 32), 6400, 128, 5)
"""Model, shape of an example, examples, batch, measured turns."""


WORDS: Sequence[Mapping[str, object]] = (
    {},
    {"channels_last": True},
    {"amp": "bf16"},
    {"amp": "bf16", "channels_last": True},
    {"amp": "bf16", "channels_last": True, "cudnn_benchmark": True},
    {"amp": "bf16", "channels_last": True, "cudnn_benchmark": True, "compile": True},
)
"""What is measured: words of a run's `train`."""


def measure(device: str, small: bool, left: Callable[[], float] = lambda: math.inf) -> dict[str, object]:
    """Measure ResNet18 on CIFAR10's shape (a small network on the digits'), by words for speed; left: seconds."""
    chosen = choose_device(device)
    name, shape, n, batch, turns = SMALL if small else LARGE
    schema, draw = Schema(shape, CLASSES), torch.Generator().manual_seed(0)
    examples = TensorExamples(torch.rand(n, *shape, generator=draw), torch.randint(10, (n,), generator=draw))
    placed, _ = move_to_device(examples, chosen, 1 << 40)
    found: dict[str, object] = {}
    for words in WORDS:
        if left() <= 0:
            return {"complete": False, "images_per_second": found}
        config = replace(TrainConfig(batch_size=batch, epochs=1), **words)
        ways = {
            "silo": _silo(name, schema, config, placed, chosen),
            "bare": _bare(name, schema, config, placed, chosen),
        }
        timed = timing.interleaved(ways, turns, device=chosen)
        rates = {f"{way}_per_second": round(n / median(t.wall)) for way, t in timed.items()}
        found[_called(words)] = {**rates, **timing.ratio(timed["silo"], timed["bare"])}
        print(_called(words), found[_called(words)], flush=True)
    return {"model": name, "batch": batch, "images_per_second": found}


def _called(words: Mapping[str, object]) -> str:
    return ", ".join(str(v) if name == "amp" else name for name, v in words.items()) or "as written"


def _silo(
    name: str, schema: Schema, config: TrainConfig, examples: Examples, device: torch.device
) -> Callable[[], object]:
    model, context = build_model(name, {}, schema, 0).to(device), RoundContext(1, 10).for_silo(0, 0)
    return lambda: PlainLocalData(RoundData(examples, examples, config, context, device)).sgd(model, FedAvg.loss)


def _bare(
    name: str, schema: Schema, config: TrainConfig, examples: Examples, device: torch.device
) -> Callable[[], object]:
    model = build_model(name, {}, schema, 0).to(device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    half = config.amp != "off"
    forward = torch.compile(model) if config.compile else model

    def epoch() -> None:
        with cudnn_benchmark(config.cudnn_benchmark):
            steps()

    def steps() -> None:
        optimizer = optimizers.make_optimizer(model.parameters(), config.lr, replace(config))
        model.train()
        for index in torch.split(torch.randperm(len(examples)), config.batch_size):
            x, y = (v.to(device) for v in examples.batch(index))
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = cross_entropy(forward(x.contiguous(memory_format=layout)), y)
            loss.backward()
            optimizer.step()

    return epoch
