"""The same small runs on a device and on the CPU: they agree as far as each kind of run promises."""

from __future__ import annotations

from collections.abc import Mapping

from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.results import Result
from coordinator.config.hydra_config import compose_simulation
from fl_core.rounds.run_setup import RunSetup

BASE = ("data=digits", "federation=iid-4", "rounds=3", "train.max_steps=8", "seed=1", "threads=1")
PRIVATE = ("privacy=dp_record", "privacy.rng=test", "privacy.epsilon=50")
HALF = ("train.amp=bf16", "train.channels_last=true")
SPEED = ("train.channels_last=true", "train.cudnn_benchmark=true", "train.augment_on_device=true")
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, object], float]] = {
    "plain": (("method=fedmr",), (), {}, 0.02),
    "bf16": (("method=fedavg",), HALF, {}, 0.3),
    "words for speed": (("method=fedavg", "train.augment=true"), SPEED, {}, 0.02),
    "private": (("method=fedavg", *PRIVATE), (), {}, 0.02),
    "deterministic": (("method=moon",), (), {"exact": True}, 0.02),
    "compiled": (("method=fedavg",), ("train.compile=true",), {}, 0.02),
}
"""Words of both runs, more words and options of the engine on the device, and how far the models may be apart, as a
share of what training moved.

Float32 sums of other kernels differ in the seventh digit, and three rounds of ReLU networks let that grow; bfloat16 has
three digits.
"""


def check(name: str, device: str) -> dict[str, object]:
    """Return how far a kind of run is from the CPU's, and whether that is too far or does not repeat."""
    words, more, options, most = KINDS[name]
    here = runner.run(compose_simulation([*BASE, *words]), engine=SimulationEngine(workers=1))
    spec = compose_simulation([*BASE, *words, *more])
    there = runner.run(spec, engine=SimulationEngine(device=device, workers=1, **options))  # type: ignore[arg-type]
    apart, wrong = _apart(here, there), list[str]()
    if not apart <= most:
        wrong.append(f"{name}: {apart:.3g} from the CPU's model, expected at most {most}")
    if options.get("exact"):
        again = runner.run(spec, engine=SimulationEngine(device=device, workers=1, **options))  # type: ignore[arg-type]
        if again.model_digest != there.model_digest:
            wrong.append(f"{name}: two runs end in different bits")
    return {"apart": round(apart, 6), "most": most, "wrong": wrong}


def _apart(here: Result, there: Result) -> float:
    """Return the distance of two final models as a share of how far training moved one."""
    start = RunSetup.of(here.manifest).initial_state()["w"]
    pairs = [(v, there.server["w"][name], start[name]) for name, v in here.server["w"].items()]
    moved = sum(float((a - s).square().sum()) for a, _, s in pairs)
    return (sum(float((a - b).square().sum()) for a, b, _ in pairs) / moved) ** 0.5
