"""Measure local steps: FedMR against FedAvg, private against plain, and private against bare Opacus; and evaluation.

python -m benchmarks.steps --json
"""

from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial

import torch
from torch import nn

from benchmarks import timing
from benchmarks.steps.ways import Setting, ways
from fl_core.models.small import MaxPool2
from fl_core.training.devices import choose_device
from privacy.mechanisms.record import per_sample_gradients

SETTINGS = {
    "digits_cnn": Setting("digits_cnn", {}, (1, 8, 8), batch=96),
    "lenet": Setting("lenet", {"norm": "group"}, (1, 28, 28), batch=128),
    "simple_cnn": Setting("simple_cnn", {}, (3, 32, 32), batch=64),
    "resnet18": Setting("resnet18", {"norm": "group"}, (3, 32, 32), batch=32),
    "efficientnet_b0": Setting("efficientnet_b0", {"norm": "group"}, (3, 96, 96), batch=8),
}


def measure(setting: Setting, turns: int, steps: int) -> timing.Found:
    """Measure one model: ms per step of each way; to_plain and to_opacus: ratios of each other way."""
    timed = timing.interleaved(
        {name: partial(take, steps) for name, take in ways(setting).items()}, turns, device=setting.device
    )
    private = [name for name in timed if name not in ("plain", "fedmr", "opacus")]
    return {
        "batch": setting.batch,
        "mode": per_sample_gradients.mode_of(setting.build()),
        **timing.milliseconds(timed, steps),
        "to_opacus": {name: timing.ratio(timed[name], timed["opacus"]) for name in private},
        "to_plain": {name: timing.ratio(timed[name], timed["plain"]) for name in ("fedmr", *private, "opacus")},
    }


def evaluation(setting: Setting, turns: int) -> timing.Found:
    """Measure the evaluation of a batch with `MaxPool2`, relative to torch's own pooling."""
    ours, torchs = setting.build().eval(), setting.build().eval()
    for block in [m for m in torchs.modules() if isinstance(m, nn.Sequential)]:
        for place, layer in enumerate(block):
            if isinstance(layer, MaxPool2):
                block[place] = nn.MaxPool2d(2)
    images, _ = setting.examples().batch(torch.arange(setting.batch))

    def evaluate(model: nn.Module) -> None:
        with torch.inference_mode():
            model(images)

    timed = timing.interleaved(
        {"ours": partial(evaluate, ours), "torchs": partial(evaluate, torchs)}, turns, device=setting.device
    )
    return {**timing.milliseconds(timed), **timing.ratio(timed["ours"], timed["torchs"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--turns", type=int, default=7, help="measured turns, after one to warm up")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn, one call of `sgd`; on a GPU take 20")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    words = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(words.threads)
    device = choose_device(words.device)
    models: dict[str, timing.Found] = {}
    for name in words.models:
        setting = SETTINGS[name].on(device)
        models[name] = {**measure(setting, words.turns, words.steps), "evaluation": evaluation(setting, words.turns)}
        sys.stderr.write(f"{name}: {models[name]}\n")
    head = {**timing.machine(words.device), "turns": words.turns, "steps_per_turn": words.steps}
    timing.show({**head, "models": models}, words.json)


if __name__ == "__main__":
    main()
