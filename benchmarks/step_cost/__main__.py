"""Measure one local step of FedMR, both losses, against one of FedAvg, and against FedMR with a loop over classes.

python -m benchmarks.step_cost --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks import timing
from benchmarks.local_step import Setting, Steps, method_of
from benchmarks.step_cost.naive import LoopFedMR, intra_loop
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.losses.fedmr import IntraVariant, intra_loss
from fl_core.training.devices import choose_device


def measure(setting: Setting, turns: int, steps: int) -> timing.Found:
    """Measure whole steps, and L_intra alone (forwards and backwards) on features of the same shape."""
    examples = setting.examples()
    fedmr = method_of("fedmr")
    assert isinstance(fedmr, FedMR)
    loop = LoopFedMR(mu1=fedmr.mu1, mu2=fedmr.mu2)
    runs = {
        name: Steps(setting, examples, method)
        for name, method in {"fedavg": method_of("fedavg"), "fedmr": fedmr, "fedmr_loop": loop}.items()
    }
    taken = {name: _taking(run, steps) for name, run in runs.items()}
    whole = timing.interleaved(taken, turns, device=setting.device)
    alone = timing.interleaved(_losses(setting), 10 * turns, device=setting.device)
    by_loop = timing.ratio(whole["fedmr_loop"], whole["fedavg"])
    return {
        **timing.machine(str(setting.device)),
        "model": setting.model,
        "features": int(runs["fedavg"].model.feature_dim),
        "batch": setting.batch,
        "classes_in_batch": min(setting.n_classes, setting.batch),
        "turns": turns,
        "steps_per_turn": steps,
        **timing.milliseconds(whole, steps),
        **timing.ratio(whole["fedmr"], whole["fedavg"]),
        "loop_ratio": by_loop["ratio"],
        "loop_cpu_ratio": by_loop["cpu_ratio"],
        **timing.milliseconds(alone),
    }


def _taking(run: Steps, steps: int) -> Callable[[], object]:
    return lambda: run.take(steps)


def _losses(setting: Setting) -> dict[str, Callable[[], object]]:
    d = setting.build().feature_dim
    z = torch.randn(setting.batch, d, generator=torch.Generator().manual_seed(2)).to(setting.device).requires_grad_()
    y = (torch.arange(setting.batch) % setting.n_classes).to(setting.device)
    form = IntraVariant()
    return {
        "intra": lambda: intra_loss(z, y, setting.n_classes, form).backward(),
        "intra_loop": lambda: intra_loop(z, y, setting.n_classes, form.eps).backward(),
    }


def main() -> None:
    """Measure and print one JSON line, or a line per value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7, help="measured turns, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="steps per turn; on a GPU take 20")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    setting = Setting(batch=words.batch, device=choose_device(words.device))
    timing.show(measure(setting, words.turns, words.steps), words.json)


if __name__ == "__main__":
    main()
