"""Images per second of a silo's training on a device, beside a bare loop of PyTorch that does the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from benchmarks import timing
from fl_core.datasets.examples import TensorExamples
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training import optimizers
from fl_core.training.devices import choose_device, move_to_device
from fl_core.training.local_data import PlainLocalData
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Examples, RoundContext

CLASSES = tuple("abcdefghij")
SMALL, LARGE = ("digits_cnn", (1, 8, 8), 64, 32, 1), ("resnet18", (3, 32, 32), 6400, 128, 5)
"""Model, shape of an example, examples, batch, measured turns."""


def measure(device: str, small: bool) -> dict[str, object]:
    """Measure ResNet18 on CIFAR10's shape (a small network on the digits'), by precision and memory format."""
    chosen = choose_device(device)
    name, shape, n, batch, turns = (
        ("digits_cnn", (1, 8, 8), 64, 32, 1) if small else ("resnet18", (3, 32, 32), 6400, 128, 5)
    )
    schema, draw = Schema(shape, CLASSES), torch.Generator().manual_seed(0)
    examples = TensorExamples(torch.rand(n, *shape, generator=draw), torch.randint(10, (n,), generator=draw))
    placed, _ = move_to_device(examples, chosen, 1 << 40)
    found: dict[str, object] = {}
    for amp in ("off", "bf16"):
        for last in (False, True):
            config = TrainConfig(batch_size=batch, epochs=1, amp=amp, channels_last=last)
            ways = {
                "silo": _silo(name, schema, config, placed, chosen),
                "bare": _bare(name, schema, config, placed, chosen),
            }
            timed = timing.interleaved(ways, turns, device=chosen)
            rates = {f"{way}_per_second": round(n / median(t.wall)) for way, t in timed.items()}
            found[f"{amp}{', channels_last' if last else ''}"] = {**rates, **timing.ratio(timed["silo"], timed["bare"])}
    return {"model": name, "batch": batch, "images_per_second": found}


def _silo(
    name: str, schema: Schema, config: TrainConfig, examples: Examples, device: torch.device
) -> Callable[[], object]:
    model, context = build_model(name, {}, schema, 0).to(device), RoundContext(1, 10).for_silo(0, 0)
    return lambda: PlainLocalData(examples, examples, config, context, device).sgd(model, FedAvg.loss)


def _bare(
    name: str, schema: Schema, config: TrainConfig, examples: Examples, device: torch.device
) -> Callable[[], object]:
    model = build_model(name, {}, schema, 0).to(device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    half = config.amp != "off"

    def epoch() -> None:
        optimizer = optimizers.make_optimizer(model.parameters(), config.lr, replace(config))
        model.train()
        for index in torch.split(torch.randperm(len(examples)), config.batch_size):
            x, y = (v.to(device) for v in examples.batch(index))
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = cross_entropy(model(x.contiguous(memory_format=layout)), y)
            loss.backward()
            optimizer.step()

    return epoch
