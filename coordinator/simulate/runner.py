"""`coordinator simulate`: the same manifest, worker and round loop as in the real federation, in this process."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from coordinator.config import weights
from coordinator.config.manifest_builder import OWN, declared_columns, manifest_from, window_of
from coordinator.config.run_spec import RunSpec
from coordinator.simulate.checkpoints import Checkpoints, Identity, Progress, run_with_checkpoints
from coordinator.simulate.engine import SimulationEngine, threads_of
from coordinator.simulate.results import ResultFolder
from fl_core import datasets
from fl_core.errors import ConfigError
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import ResumePoint, SiloShare, has_official_test
from fl_core.simulation.measures import BestHistory, FineTuned, GlobalTestEvaluator, LatestPersonal, fine_tuned
from fl_core.training.devices import choose_device
from fl_core.types import tensor_maps
from fl_core.types.clinical import SUGGESTED_CLASSES, ClinicalMetrics
from fl_core.types.columns import Column, difference
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Method
from fl_core.types.records import RoundRecord, fairness, judgements
from fl_core.types.values import RoundContext, State
from privacy.accounting import uncertainty
from privacy.accounting.record_config import round_to_two_digits
from privacy.accounting.uncertainty import LAST, Estimate, RunNoise, Sums
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.release_log import InMemoryReleaseLog

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The records of a simulation's rounds and the digest of its final model.

    server: the final server state   compiled: what the manifest names
    counts: (train, test) examples per class of each silo
    noise: which results are noisy   measured: the records as papers measure, where a federation sees less: counts of
    the official test set or of all silos' test sets, scores of all silos' personal models
    official: whether the global model was measured on the official test set, which is no silo's
    """

    manifest: RunManifest
    noise: RunNoise
    records: Sequence[RoundRecord]
    model_digest: str
    tuned: FineTuned | None = None
    privacy: Mapping[str, object] | None = None
    measured: Sequence[RoundRecord] = ()
    official: bool = False
    server: State = field(default_factory=dict)
    counts: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    compiled: RunSetup | None = None

    @property
    def accuracies(self) -> list[float]:
        """Return the global accuracy after 0, 1, ..., T rounds, -1 where there is none or noise hides it."""
        return [-1.0 if e.point is None else e.point for e in self.estimates]

    @property
    def estimates(self) -> list[Estimate]:
        """Return the global accuracy after 0, 1, ..., T rounds, of `measured` where that was made."""
        return [uncertainty.accuracy(*sums) for sums in self.sums]

    @property
    def best(self) -> Estimate:
        """Return the best global accuracy after 1, ..., T rounds."""
        return uncertainty.best(self.sums[1:])

    def by_class(self) -> dict[str, Estimate]:
        found = uncertainty.by_class(*self.sums[-1])
        return dict(zip(self.manifest.schema.classes, found, strict=True))

    @property
    def clinical(self) -> ClinicalMetrics | None:
        """Return what else was measured of the final model; None where accuracies alone were."""
        return (self.measured or self.records)[-1].clinical

    @property
    def method(self) -> Method:
        return self.run.method

    @property
    def run(self) -> RunSetup:
        return self.compiled or RunSetup(self.manifest)

    @property
    def aggregator(self) -> str:
        """Name how updates became one: what the manifest names, where masks and noise leave a choice."""
        return self.run.aggregator.name

    @property
    def sums(self) -> list[Sums]:
        """Return correct answers and examples per class after 0, 1, ..., T rounds, with their noise."""
        if self.measured:  # counted apart from the run, without noise
            return [(r.correct, r.examples, None) for r in self.measured]
        return [(r.correct, r.examples, self.noise.of(r.included)) for r in self.records]

    def summary(self) -> dict[str, object]:
        """Return what `coordinator simulate --json` prints; a noisy number has its interval beside it, or is null."""
        estimates = self.estimates
        return {
            "method": self.manifest.method.name,
            "data": self.manifest.data,
            "rounds": self.manifest.rounds,
            "seed": self.manifest.seed,
            "silos": [m.name for m in self.manifest.members],
            "aggregator": self.aggregator,
            **judgements(self.records),
            "test_set": "official" if self.official else "silos",
            **estimates[-1].facts("global_accuracy"),
            **self.best.facts("best_global_accuracy", "best_"),
            "mean_last_global_accuracy": mean_of_last(_exact(estimates[1:])),
            "last_rounds": LAST,
            **uncertainty.balanced(*self.sums[-1]).facts("balanced_accuracy", "balanced_"),
            "clinical": self.clinical and self.clinical.facts(),
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
        if self.noise.evaluation is None or self.measured:
            return {}
        return {
            "class_accuracy_interval": {name: _ends(e) for name, e in self.by_class().items()},
            "accuracy_interval_by_round": [_ends(e) for e in estimates],
        }

    def _of_cohorts(self) -> dict[str, object]:
        """Return what a federation would see: accuracies over the test sets of each round's cohort, and its scores."""
        if not self.measured:
            return {}
        found = [uncertainty.accuracy(r.correct, r.examples, self.noise.of(r.included)) for r in self.records]
        scores = [uncertainty.shown_scores(r.personal, self.noise.scores) for r in self.records if r.personal]
        return {
            "cohort_accuracy_by_round": [e.point for e in found],
            **({"cohort_personal_by_round": scores} if scores else {}),
        }

    def personal(self) -> dict[str, object]:
        """Return the last, best, mean and all scores of personal models; empty where none was measured.

        They are means over all silos, each with its newest model; of a private run over each round's silos. The best
        are chosen by test accuracy, as papers report them; the mean is that of the last rounds. Means of noisy shares
        are null and named.
        """
        measured = [r.personal for r in self.measured or self.records if r.personal]
        if not measured:
            return {}
        hidden = self.noise.scores
        scores = [uncertainty.shown_scores(s, hidden) for s in measured]
        names = [name for name in ("pa", "pm_l", "pm_v") if name in measured[-1]]
        withheld = [name for name in names if name in hidden]
        series = {name: [s.get(name) for s in scores] for name in names} | {"ga": self.generic(scores)}
        return {
            **{name: values[-1] for name, values in series.items()},
            **{f"best_{n}": max((v for v in values if v is not None), default=None) for n, values in series.items()},
            **{f"mean_last_{name}": mean_of_last(values) for name, values in series.items()},
            "fairness": None if "pm_l" in withheld else fairness(scores[-1]),
            "personal_by_round": scores,
            **({"withheld_scores": withheld} if withheld else {}),
        }

    def generic(self, scores: Sequence[Mapping[str, float]]) -> list[float | None]:
        """Return GA after each round that was measured, by the papers' rule (`Traits.ga_is_personal`).

        Of methods whose model is personal the mean over silos of their models' accuracy on the whole test set, else the
        global accuracy; None where noise hides it.
        """
        if self.method.ga_is_personal:
            return [s.get("ga") for s in scores]
        return _exact(self.estimates[1:])


def _exact(estimates: Sequence[Estimate]) -> list[float | None]:
    return [e.point if e.exact else None for e in estimates]


def mean_of_last(values: Sequence[float | None], rounds: int = LAST) -> float | None:
    """Return the mean of the last so many values, of all where there are fewer; None where one of them is missing."""
    known = [v for v in values[-rounds:] if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values[-rounds:]) else None


def _ends(found: Estimate) -> tuple[float, float] | None:
    return None if found.low is None or found.high is None else (found.low, found.high)


class ReportingHistory(BestHistory):
    """A history that calls another observer as well, with the records as they were measured.

    apart: whether `measured` is more than what the records say.
    """

    def __init__(
        self, observer: Observer, measure: GlobalTestEvaluator | None, personal: LatestPersonal | None, noisy: bool
    ) -> None:
        super().__init__(measure, personal)
        self.apart = measure is not None
        self._observer, self._noisy = observer, noisy

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._observer.opened(context, kind, names)

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        self._observer.closed(record if self._noisy else self.measured[-1], server)


def data_reference(spec: RunSpec) -> str:
    """Return the reference of the data that is split over the silos; raises ConfigError (E-CFG-23) without a path."""
    name, path = str(spec.data["name"]), spec.data.get("path")
    if name not in OWN:
        return name
    if not isinstance(path, str) or not path.strip():
        file = {"folder": "/data/images", "manifest": "/data/images.csv"}.get(name, "/data/patients.csv")
        raise ConfigError(
            "E-CFG-23",
            f"expected data.path, where the data lie that are dealt to the silos, found none: coordinator simulate "
            f"data={name} data.path={file} federation=p5c2",
        )
    return f"{name}:{path}"


def read_silos(spec: RunSpec, data_root: Path | None, read: Callable[..., list[T]]) -> list[T]:
    """Call `read`, which is `datasets.load_all` or `datasets.check_all`, for all silos' data."""
    size, classes = spec.data.get("image_size"), spec.data.get("classes")
    return read(
        datasets.federation(data_reference(spec), datasets.federation_text(spec.federation)),
        data_root=data_root,
        classes=[str(c) for c in classes] if isinstance(classes, list | tuple) else None,
        image_size=size if isinstance(size, int) else None,
        window=window_of(spec),
    )


def run(
    spec: RunSpec,
    data_root: Path | None = None,
    observer: Observer | Callable[[RunManifest], Observer] | None = None,
    engine: SimulationEngine | None = None,
    fine_tune: int = 0,
    out: Path | None = None,
    words: Sequence[str] = (),
) -> Result:
    """Simulate a run over all silos of the spec's federation, named hospital0, hospital1, ...

    observer: an observer of the rounds, or a function that makes one of the manifest
    fine_tune: epochs after which the best global model is evaluated at each silo
    out: folder that gets the results (`results.ResultFolder`)   words: that composed the spec, for that folder
    With checkpoints (the engine's, or with `out`) the run goes on where it was.
    Where silos hold out their own test examples, every round's model is also measured on the official test set, and
    where a cohort is drawn on all silos' test sets; the best is chosen there. Personal models are then measured over
    all silos. What a private run releases is left to its rounds: there the official test set alone is looked at.
    Guarantees: equal specs give equal model digests; the digest equals that of the same run over real silo
    processes with these names; a run that goes on ends in the bits of one that was not interrupted.
    """
    compiled, sets = prepare_simulation(spec, data_root)
    manifest = compiled.manifest
    if out is not None:
        ResultFolder(out).claim(spec, manifest, words)
    logs = [InMemoryReleaseLog() for _ in manifest.members] if compiled.private else []
    factories = [compiled.profile.data_factory(k, log) for k, log in enumerate(logs)]
    shares, engine = [SiloShare(s.train, s.test, s.public) for s in sets], engine or SimulationEngine()
    if callable(observer):
        observer = observer(manifest)
    history = _history(compiled, shares, observer or Observer(), choose_device(engine.device))
    progress = Progress(history, engine.state_store(), logs, len(shares), threads_of(manifest))

    def rounds(observer: Observer, resume: ResumePoint | None) -> State:
        return engine.simulate(compiled, shares, observer, factories or None, progress.states, resume)

    checkpoints = engine.checkpoints or (Checkpoints.within(out) if out else None)
    if checkpoints is None:
        final = rounds(history, None)
    else:
        identity = Identity(json.loads(manifest.to_json()), [s.fingerprint for s in sets], engine.facts())
        final = run_with_checkpoints(checkpoints, identity, progress, rounds)
    tuned = fine_tuned(compiled, shares, history.best, history.best_round, fine_tune) if fine_tune else None
    spent = compiled.profile.report([log.releases for log in logs])
    result = Result(
        manifest,
        compiled.profile.result_noise(),
        history.records,
        tensor_maps.digest(final["w"]),
        server=final,
        counts=[_class_counts(s) for s in sets],
        compiled=compiled,
        tuned=tuned,
        privacy=spent,
        measured=history.measured if history.apart else (),
        official=has_official_test(shares),
    )
    if out is not None:
        ResultFolder(out).write(result)
    return result


def _history(
    run: CompiledRun, shares: Sequence[SiloShare], observer: Observer, device: torch.device
) -> ReportingHistory:
    manifest = run.manifest
    official, cohorts = has_official_test(shares), 0 < manifest.cohort < len(shares) and not run.private
    clinical = run.private and len(manifest.schema.classes) <= SUGGESTED_CLASSES
    return ReportingHistory(
        observer,
        GlobalTestEvaluator(run, shares, device, clinical) if official or cohorts else None,
        LatestPersonal(run, shares, device) if manifest.personal and cohorts else None,
        run.private,
    )


def _class_counts(dataset: datasets.SiloDataset) -> tuple[list[int], list[int]]:
    n = len(dataset.schema.classes)
    train, test = (
        split.labels[split.labels >= 0].bincount(minlength=n).tolist() for split in (dataset.train, dataset.test)
    )
    return train, test


def build_simulation(spec: RunSpec, data_root: Path | None = None) -> tuple[RunManifest, list[datasets.SiloDataset]]:
    """Split the spec's data over its silos and freeze the run over them."""
    compiled, sets = prepare_simulation(spec, data_root)
    return compiled.manifest, sets


def prepare_simulation(spec: RunSpec, data_root: Path | None = None) -> tuple[CompiledRun, list[datasets.SiloDataset]]:
    """Do as `build_simulation`, and fill the model with the weights of the file that the spec names, if any."""
    sets = read_silos(spec, data_root, datasets.load_all)
    if not spec.data.get("classes") and spec.data["name"] in OWN:
        spec = replace(spec, data={**spec.data, "classes": list(sets[0].schema.classes)})
    if spec.data["name"] == "table":
        spec = _with_columns(spec, sets[0].schema.columns)
    sizes = [round_to_two_digits(len(PrivacyUnits.of(s.train))) for s in sets]
    spec, taken = weights.take(spec)
    return weights.begin(manifest_from(spec, [f"hospital{k}" for k in range(len(sets))], sizes), taken), sets


def _with_columns(spec: RunSpec, own: Sequence[Column]) -> RunSpec:
    """Take the table's own schema; raises ConfigError (E-CFG-23) where the spec declares another."""
    declared = declared_columns(spec)
    if declared and (differ := difference(declared, own)):
        raise ConfigError("E-CFG-23", f"expected data.schema as the table's own beside it, found another: {differ}")
    return replace(spec, data={**spec.data, "schema": [asdict(column) for column in own]})
