"""Estimate the accuracy of a private run by simulation, before a hospital spends any budget on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.run_spec import RunSpec
from fl_core import datasets
from fl_core.errors import ConfigError
from fl_core.training.evaluation import ConcatExamples, evaluate
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.values import RoundContext
from privacy.accounting import uncertainty
from privacy.accounting.uncertainty import Estimate

_GUESSING = 1.5
"""Balanced accuracy, as a multiple of guessing, below which a run is not worth a budget."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Results of several simulations of one configuration.

    accuracies, balanced: of the final models, without noise, on the test images of all simulated hospitals
    read: the accuracy that the lead of each run would see   chance: accuracy of guessing   sizes: training examples of
    the simulated hospitals
    """

    data: str
    sizes: Sequence[int]
    accuracies: Sequence[float]
    balanced: Sequence[float]
    read: Sequence[Estimate]
    chance: float

    @property
    def teaches(self) -> bool:
        return max(self.balanced) > _GUESSING * self.chance

    def lines(self) -> Iterator[str]:
        sentence = f"expected accuracy: {_between(self.accuracies)} %, balanced {_between(self.balanced)} %"
        made = f"{len(self.accuracies)} runs on {self.data}, divided among {len(self.sizes)} hospitals of"
        read = "; ".join(dict.fromkeys(e.text() for e in self.read))
        yield (
            f"{sentence} (guessing: {100 * self.chance:.0f} %), from {made} {min(self.sizes)} to {max(self.sizes)} "
            f"images; the lead would see: {read}"
        )
        if not self.teaches:
            yield (
                "little better than guessing: before spending a budget, try method=analytic with frozen features (one "
                "release), noise under masks (privacy.placement=distributed), a smaller model or a larger epsilon"
            )

    def facts(self) -> dict[str, object]:
        return {
            "data": self.data,
            "sizes": list(self.sizes),
            "accuracy": list(self.accuracies),
            "balanced_accuracy": list(self.balanced),
            "read": [e.facts() for e in self.read],
            "chance": self.chance,
            "teaches": self.teaches,
        }


def expect(
    spec: RunSpec, runs: int, data_root: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> Expectation:
    """Simulate a run on the spec's data `runs` times, with different seeds for partition, weights and noise.

    tell: called with a progress line after every simulation. Noise comes from a seed: equal specs give equal numbers.
    Raises ConfigError (E-CFG-08) for a method without a global model, and as `runner.run`.
    """
    spec = replace(spec, silos=None, privacy={**spec.privacy, "rng": "test"})
    answers = []
    for k in range(runs):
        answers.append(_once(_seeded(spec, spec.seed + k), data_root))
        tell(f"simulation {k + 1} of {runs} done")
    data = str(spec.data.get("path") or spec.data["name"])
    rights, of = [r for r, _, _, _ in answers], [n for _, n, _, _ in answers]
    return Expectation(
        data,
        answers[0][3],
        [uncertainty.accuracy(r, n, None).point or 0.0 for r, n in zip(rights, of, strict=True)],
        [uncertainty.balanced(r, n, None).point or 0.0 for r, n in zip(rights, of, strict=True)],
        [read for _, _, read, _ in answers],
        1 / len(rights[0]),
    )


def _seeded(spec: RunSpec, seed: int) -> RunSpec:
    partition = {"partition_seed": seed} if "partition_seed" in spec.federation else {}
    return replace(spec, seed=seed, federation={**spec.federation, **partition})


def _once(spec: RunSpec, data_root: Path | None) -> tuple[list[float], list[float], Estimate, list[int]]:
    """Simulate once; return right answers and test images by class, the lead's accuracy, and the hospitals' sizes."""
    sets = runner.read_silos(spec, data_root, datasets.load_all)
    result = runner.run(spec, data_root, engine=SimulationEngine(workers=1))
    if not result.method.has_global_model:
        raise ConfigError(
            "E-CFG-08", f"expected a method with a global model, found {result.manifest.method.name}: choose another"
        )
    tests, n_classes = ConcatExamples([s.test for s in sets]), len(result.manifest.schema.classes)
    data = PlainLocalData(RoundData(tests, tests, spec.train, RoundContext(len(sets), n_classes)))
    counts = evaluate(result.run.classifier(result.server), data, n_classes)
    right, of = counts.total["correct"].tolist(), counts.weight.tolist()
    return right, of, result.estimates[-1], [len(s.train) for s in sets]


def _between(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f} to {100 * max(values):.1f}"
