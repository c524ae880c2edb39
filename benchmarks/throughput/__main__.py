"""Measure local training through the doors against a bare PyTorch loop that takes the same steps.

python -m benchmarks.throughput --json
python -m benchmarks.throughput --device cuda --batch 128 --batches 32 --steps 64 --amp bf16 --channels-last --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks import timing
from benchmarks.local_step import BareSteps, Setting, Steps, method_of
from fl_core.models import MODELS
from fl_core.training.devices import choose_device
from fl_core.types.records import TrainConfig


def measure(setting: Setting, methods: Sequence[str], turns: int, steps: int) -> timing.Found:
    """Measure each method's steps beside the bare loop of the same loss; ratio: throughput / the bare loop's."""
    examples, found = setting.examples(), dict[str, timing.Value]()
    for name in methods:
        method = method_of(name)
        ours, bare = Steps(setting, examples, method), BareSteps(setting, examples, method)
        timed = timing.interleaved(
            {"bare": _taking(bare, steps), "doors": _taking(ours, steps)}, turns, device=setting.device
        )
        reached = timing.ratio(timed["bare"], timed["doors"])
        found[name] = {
            **reached,
            "images_per_second": round(steps * setting.batch / median(timed["doors"].wall), 1),
            "bare_images_per_second": round(steps * setting.batch / median(timed["bare"].wall), 1),
            **timing.milliseconds(timed, steps),
        }
    return {
        **timing.machine(str(setting.device)),
        "model": setting.model,
        "batch": setting.batch,
        "amp": setting.train.amp,
        "channels_last": setting.train.channels_last,
        "turns": turns,
        "steps_per_turn": steps,
        "methods": found,
    }


def _taking(run: Steps | BareSteps, steps: int) -> Callable[[], object]:
    return lambda: run.take(steps)


def main() -> None:
    """Measure and print one JSON line, or a line per value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--model", default="resnet18", choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedmr"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2, help="batches of an epoch")
    parser.add_argument("--turns", type=int, default=7, help="measured turns, after one to warm up")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn, one call of `sgd`")
    parser.add_argument("--amp", default="off", choices=("off", "bf16", "fp16"))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    schedule = TrainConfig(amp=words.amp, channels_last=words.channels_last)
    setting = Setting(
        words.model, batch=words.batch, batches=words.batches, schedule=schedule, device=choose_device(words.device)
    )
    timing.show(measure(setting, words.methods, words.turns, words.steps), words.json)


if __name__ == "__main__":
    main()
