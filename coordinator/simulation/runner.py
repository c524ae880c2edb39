"""`coordinator simulate`: the same manifest, worker and round loop as in the real federation, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from coordinator.config.manifest_builder import IMAGES, manifest_from
from coordinator.config.run_spec import RunSpec
from coordinator.simulation.engine import SimulationEngine
from fl_core import datasets
from fl_core.errors import ConfigError
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.simulation.fine_tuning import BestHistory, FineTuned, fine_tuned
from fl_core.simulation.global_test import GlobalTestEvaluator
from fl_core.simulation.in_process import SiloShare
from fl_core.training.devices import choose_device
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord, fairness
from fl_core.types.values import RoundContext, State
from privacy.accounting.record_config import round_to_two_digits
from privacy.compiled_run import CompiledRun
from privacy.dp_sgd.class_sums import PrivacyUnits
from privacy.release_log import InMemoryReleaseLog
from privacy.reports import uncertainty
from privacy.reports.uncertainty import Estimate, RunNoise, Sums

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The records of a simulation's rounds and the digest of its final model.

    noise: which results are noisy   measured: the records with the counts of all silos' test sets, where a round's
    record covers only its cohort
    """

    manifest: RunManifest
    noise: RunNoise
    records: Sequence[RoundRecord]
    model_digest: str
    tuned: FineTuned | None = None
    privacy: Mapping[str, object] | None = None
    measured: Sequence[RoundRecord] = ()

    @property
    def accuracies(self) -> list[float]:
        """Return the global accuracy after 0, 1, ..., T rounds, -1 where there is none or noise hides it."""
        return [-1.0 if e.point is None else e.point for e in self.estimates]

    @property
    def estimates(self) -> list[Estimate]:
        """Return the global accuracy after 0, 1, ..., T rounds: over all silos' test sets where that was measured."""
        return [uncertainty.accuracy(*sums) for sums in self._sums()]

    @property
    def best(self) -> Estimate:
        """Return the best global accuracy after 1, ..., T rounds."""
        return uncertainty.best(self._sums()[1:])

    def by_class(self) -> dict[str, Estimate]:
        last = self.records[-1]
        found = uncertainty.by_class(last.correct, last.examples, self.noise.of(last.included))
        return dict(zip(self.manifest.schema.classes, found, strict=True))

    def _sums(self) -> list[Sums]:
        noise = self.noise
        return [(r.correct, r.examples, noise.of(r.included)) for r in self.measured or self.records]

    def summary(self) -> dict[str, object]:
        """Return what `coordinator simulate --json` prints; a noisy number has its interval beside it, or is null."""
        last, estimates = self.records[-1], self.estimates
        noisy = self.noise.of(last.included)
        return {
            "method": self.manifest.method.name,
            "data": self.manifest.data,
            "rounds": self.manifest.rounds,
            "seed": self.manifest.seed,
            "silos": [m.name for m in self.manifest.members],
            **uncertainty.accuracy(last.correct, last.examples, noisy).facts("global_accuracy"),
            **self.best.facts("best_global_accuracy", "best_"),
            **uncertainty.balanced(last.correct, last.examples, noisy).facts("balanced_accuracy", "balanced_"),
            "class_accuracy": {name: e.point for name, e in self.by_class().items()},
            "accuracy_by_round": [e.point for e in estimates],
            **self._intervals(estimates),
            **self._of_cohorts(),
            "clipped": sum(r.clipped for r in self.records),
            "model_digest": self.model_digest,
            "manifest_digest": self.manifest.digest(),
            **self.personal(),
            **({"pa_fine_tuned": self.tuned.pa, "fairness_fine_tuned": self.tuned.fairness} if self.tuned else {}),
            **({"privacy": self.privacy} if self.privacy else {}),
            **({"private_form": dict(self.manifest.private_form)} if self.manifest.private_form else {}),
        }

    def _intervals(self, estimates: Sequence[Estimate]) -> dict[str, object]:
        """Return the intervals by class and by round of noisy evaluations; null: withheld."""
        if self.noise.evaluation is None:
            return {}
        return {
            "class_accuracy_interval": {name: _ends(e) for name, e in self.by_class().items()},
            "accuracy_interval_by_round": [_ends(e) for e in estimates],
        }

    def _of_cohorts(self) -> dict[str, object]:
        """Return what a federation would see: accuracies over the test sets of each round's cohort."""
        if not self.measured:
            return {}
        found = [uncertainty.accuracy(r.correct, r.examples, self.noise.of(r.included)) for r in self.records]
        return {"cohort_accuracy_by_round": [e.point for e in found]}

    def personal(self) -> dict[str, object]:
        """Return the last, best and all scores of personal models; empty where none was measured.

        The best are chosen by test accuracy, as papers report them. Means of noisy shares are null and named.
        """
        measured = [r.personal for r in self.records if r.personal]
        if not measured:
            return {}
        hidden = self.noise.scores
        scores = [uncertainty.shown_scores(s, hidden) for s in measured]
        names = [name for name in ("pa", "pm_l", "pm_v", "ga") if name in measured[-1]]
        withheld = [name for name in names if name in hidden]
        return {
            **{name: scores[-1].get(name) for name in names},
            **{f"best_{name}": max((s[name] for s in scores if name in s), default=None) for name in names},
            "fairness": None if "pm_l" in withheld else fairness(scores[-1]),
            "personal_by_round": scores,
            **({"withheld_scores": withheld} if withheld else {}),
        }


def _ends(found: Estimate) -> tuple[float, float] | None:
    return None if found.low is None or found.high is None else (found.low, found.high)


class ReportingHistory(BestHistory):
    """A history that calls another observer as well."""

    def __init__(self, observer: Observer, measure: GlobalTestEvaluator | None) -> None:
        super().__init__(measure)
        self._observer = observer

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._observer.opened(context, kind, names)

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        self._observer.closed(record, server)


def data_reference(spec: RunSpec) -> str:
    """Return the reference of the data that is split over the silos; raises ConfigError (E-CFG-23) without a path."""
    name, path = str(spec.data["name"]), spec.data.get("path")
    if name not in IMAGES:
        return name
    if not isinstance(path, str) or not path.strip():
        file = "/data/images" if name == "folder" else "/data/images.csv"
        raise ConfigError(
            "E-CFG-23",
            f"expected data.path, where the images lie that are dealt to the silos, found none: coordinator simulate "
            f"data={name} data.path={file} federation=p5c2",
        )
    return f"{name}:{path}"


def read_silos(spec: RunSpec, data_root: Path | None, read: Callable[..., T]) -> list[T]:
    """Call `read`, which is `datasets.load` or `datasets.check`, for the data of each silo of the federation."""
    size, classes = spec.data.get("image_size"), spec.data.get("classes")
    return [
        read(
            reference,
            data_root=data_root,
            classes=[str(c) for c in classes] if isinstance(classes, list | tuple) else None,
            image_size=size if isinstance(size, int) else None,
        )
        for reference in datasets.federation(data_reference(spec), datasets.federation_text(spec.federation))
    ]


def run(
    spec: RunSpec,
    data_root: Path | None = None,
    observer: Observer | Callable[[RunManifest], Observer] | None = None,
    engine: SimulationEngine | None = None,
    fine_tune: int = 0,
) -> Result:
    """Simulate a run over all silos of the spec's federation, named hospital0, hospital1, ...

    observer: an observer of the rounds, or a function that makes one of the manifest
    fine_tune: epochs after which the best global model is evaluated at each silo
    Where a cohort is drawn, every round's model is also measured on all silos' test sets, and the best is chosen there;
    not in a private run, whose counts are released by the rounds alone.
    Guarantees: equal specs give equal model digests; the digest equals that of the same run over real silo
    processes with these names.
    """
    manifest, sets = build_simulation(spec, data_root)
    compiled = CompiledRun.of(manifest)
    logs = [InMemoryReleaseLog() for _ in manifest.members] if compiled.private else []
    factories = [compiled.profile.data_factory(k, log) for k, log in enumerate(logs)]
    shares, engine = [SiloShare(s.train, s.test, s.public) for s in sets], engine or SimulationEngine()
    global_test = 0 < manifest.cohort < len(shares) and not compiled.private
    if callable(observer):
        observer = observer(manifest)
    history = ReportingHistory(
        observer or Observer(),
        GlobalTestEvaluator(compiled, shares, choose_device(engine.device)) if global_test else None,
    )
    final = engine.simulate(compiled, shares, history, factories or None)
    tuned = fine_tuned(compiled, shares, history.best, history.best_round, fine_tune) if fine_tune else None
    spent = compiled.profile.report([log.releases for log in logs])
    return Result(
        manifest,
        compiled.profile.result_noise(),
        history.records,
        tensor_maps.digest(final["w"]),
        tuned,
        spent,
        history.measured if global_test else (),
    )


def build_simulation(spec: RunSpec, data_root: Path | None = None) -> tuple[RunManifest, list[datasets.SiloDataset]]:
    """Split the spec's data over its silos and freeze the run over them."""
    sets = read_silos(spec, data_root, datasets.load)
    if not spec.data.get("classes") and spec.data["name"] in IMAGES:
        spec = replace(spec, data={**spec.data, "classes": list(sets[0].schema.classes)})
    sizes = [round_to_two_digits(len(PrivacyUnits.of(s.train))) for s in sets]
    return manifest_from(spec, [f"hospital{k}" for k in range(len(sets))], sizes), sets
