"""Run a simulation: the manifest, silo code and round loop of a real federation, in this process."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from consilium.research import trackers
from consilium.research.engines.in_process import ResumePoint, SiloShare, has_official_test, with_features
from consilium.research.simulate import EVERY
from consilium.research.simulate.checkpoints import (
    Checkpoints,
    RunIdentity,
    SimulationState,
    run_with_checkpoints,
)
from consilium.research.simulate.engine import SimulationEngine, threads_of
from consilium.research.simulate.measures import BestHistory, GlobalTestEvaluator, LatestPersonal, fine_tuned
from consilium.research.simulate.results import Result, ResultFolder
from consilium.research.simulate.sweep import folder_name
from consilium.research.trackers import RunTrackers
from coordinator.config import weights
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.manifest_builder import OWN, declared_columns, manifest_from, request_of
from coordinator.config.run_spec import RunSpec
from fl_core import datasets
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.converter import shown
from fl_core.errors import ConfigError
from fl_core.rounds.capabilities import check_supported
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import Dictionary, RunManifest
from fl_core.training.devices import choose_device
from fl_core.types import tensor_maps
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.clinical import SUGGESTED_CLASSES
from fl_core.types.columns import difference
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.records import RoundRecord, Schema
from fl_core.types.targets import class_counts, trained_classes
from fl_core.types.values import RoundContext, State
from privacy import profiles
from privacy.accounting.measures import EvaluationResult
from privacy.accounting.record_config import round_to_two_digits
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.release_log import InMemoryReleaseLog
from service_core.pki.identity import NAME
from service_core.version import version

log = logging.getLogger(__name__)
T = TypeVar("T")
MakeObserver = Callable[[RunManifest], Observer]


class ReportingHistory(BestHistory):
    """A history that also calls another observer: with the measured records, or in a noisy run with the run's records.

    apart: whether `measured` differs from the records.
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
    """Return the reference of the data to divide among the silos; raises ConfigError (E-CFG-23) without a path."""
    name, path = str(spec.data["name"]), spec.data.get("path")
    if name not in OWN:
        return name
    if not isinstance(path, str) or not path.strip():
        file = {"folder": "/data/images", "manifest": "/data/images.csv"}.get(name, "/data/patients.csv")
        raise ConfigError(
            "E-CFG-23",
            "data.path is missing, the data to partition among the silos: add it, such as coordinator simulate "
            f"data={name} data.path={file} federation=p5c2",
        )
    return f"{name}:{path}"


def own_references(spec: RunSpec) -> list[str]:
    """Return the references of silos with their own paths; empty if data.path is no list.

    Raises ConfigError (E-CFG-23) unless the list consists of different paths.
    """
    name, paths = str(spec.data["name"]), spec.data.get("path")
    if name not in OWN or not isinstance(paths, list | tuple):
        return []
    if not paths or not all(isinstance(path, str) and path.strip() for path in paths) or len(set(paths)) < len(paths):
        raise ConfigError(
            "E-CFG-23", f"expected different paths in data.path, one for each silo, found {shown(paths)}: correct it"
        )
    return [f"{name}:{path}" for path in paths]


def silo_names(spec: RunSpec, n: int) -> list[str]:
    """Return names of the n silos: from their own paths if these give distinct valid names, otherwise hospital0, ...

    Uses the last path component that differs between all paths, in lower case, with dashes for invalid characters.
    """
    paths = [Path(reference.partition(":")[2]) for reference in own_references(spec)]
    parts = ([re.sub(r"\.(csv|parquet)$", "", path.name), *reversed(path.parts[:-1])] for path in paths)
    for named in zip(*parts, strict=False):
        names = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in named]
        if len(set(names)) == len(names) and all(map(NAME.fullmatch, names)):
            return names
    return [f"hospital{k}" for k in range(n)]


def read_silos(spec: RunSpec, data_root: Path | None, read: Callable[..., list[T]]) -> list[T]:
    """Call `read` (`datasets.load_all` or `datasets.check_all`) for all silos' data.

    One data.path is divided among the silos; if data.path is a list, each silo has its own path.
    """
    request = request_of(spec)
    if references := own_references(spec):
        if request.classes is None:  # the run's classes are those of all silos together
            reports = datasets.check_all(references, request, data_root=data_root)
            request = replace(request, classes=sorted({name for report in reports for name in report.classes}))
    else:
        references = datasets.federation(data_reference(spec), datasets.federation_text(spec.federation))
    return read(references, request, data_root=data_root)


def run(
    spec: RunSpec,
    data_root: Path | None = None,
    observer: Observer | MakeObserver | None = None,
    engine: SimulationEngine | None = None,
    fine_tune: int = 0,
    out: Path | None = None,
    words: Sequence[str] = (),
) -> Result:
    """Simulate a run over all silos of the spec's federation, named hospital0, hospital1, ... or as `silo_names` says.

    observer: an observer of the rounds, or a function that makes one from the manifest
    fine_tune: epochs of fine-tuning the best global model at each silo, before it is evaluated there
    out: folder for the results (`results.ResultFolder`)   words: that composed the spec, written to that folder
    With checkpoints (the engine's, or in `out`), an interrupted run continues.
    If silos hold out their own test examples, every round's model is also measured on the official test set; if rounds
    draw a cohort, on all silos' test sets. The best model is chosen there. With a cohort, personal models are measured
    over all silos. A private run measures only the official test set, because anything else would be a release.
    Guarantees: equal specs give equal model digests; the digest equals that of the same run over real silo
    processes with these names; a resumed run ends with the same bits as an uninterrupted one.
    """
    compiled, sets = prepare_simulation(spec, data_root)
    manifest = compiled.manifest
    if out is not None:
        ResultFolder(out).claim(spec, manifest, words)
    logs = [InMemoryReleaseLog() for _ in manifest.members] if compiled.private else []
    factories = [compiled.profile.data_factory(k, log) for k, log in enumerate(logs)]
    engine = engine or SimulationEngine()
    silo_shares = [SiloShare(s.train, s.test, s.public) for s in sets]
    shares = with_features(compiled, silo_shares, choose_device(engine.device), threads_of(manifest))
    if callable(observer):
        observer = observer(manifest)
    coverage = _coverage(compiled, sets)
    if observer is not None:
        observer.counted(coverage)
    history = _history(compiled, shares, observer or Observer(), choose_device(engine.device))
    progress = SimulationState(history, engine.state_store(), logs, len(shares), threads_of(manifest))

    def rounds(observer: Observer, resume: ResumePoint | None) -> State:
        return engine.simulate(compiled, shares, observer, factories or None, progress.states, resume)

    checkpoints = engine.checkpoints or (Checkpoints.within(out) if out else None)
    if checkpoints is None:
        final = rounds(history, None)
    else:
        identity = RunIdentity(json.loads(manifest.to_json()), [s.fingerprint for s in sets], engine.facts())
        final = run_with_checkpoints(checkpoints, identity, progress, rounds)
    tuned = fine_tuned(compiled, shares, history.best, history.best_round, fine_tune) if fine_tune else None
    spent = compiled.profile.report([log.releases for log in logs])
    result = Result(
        manifest,
        compiled.profile.noise(),
        history.records,
        tensor_maps.digest(final["w"]),
        server=final,
        counts=[_class_counts(s) for s in sets],
        compiled=compiled,
        coverage=coverage.with_tested(() if compiled.private else history.measured[-1].examples),
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


def _coverage(run: CompiledRun, sets: Sequence[datasets.SiloDataset]) -> ClassCoverage:
    """Count for each class the hospitals that train it, as a census does."""
    total = torch.zeros(len(run.manifest.schema.classes), dtype=torch.int64)
    for member, dataset in zip(run.manifest.members, sets, strict=True):
        if member.prototypes or not run.updates.class_rows:
            total += trained_classes(dataset.train.labels, len(total))
    return run.coverage(total.tolist() if run.manifest.rounds else ())


def _class_counts(dataset: datasets.SiloDataset) -> tuple[list[int], list[int]]:
    n = len(dataset.schema.classes)
    train, test = (class_counts(split.labels, n).tolist() for split in (dataset.train, dataset.test))
    return train, test


def build_simulation(spec: RunSpec, data_root: Path | None = None) -> tuple[RunManifest, list[datasets.SiloDataset]]:
    """Divide the spec's data among its silos; return the run's manifest and the silos' data."""
    compiled, sets = prepare_simulation(spec, data_root)
    return compiled.manifest, sets


def prepare_simulation(spec: RunSpec, data_root: Path | None = None) -> tuple[CompiledRun, list[datasets.SiloDataset]]:
    """Prepare as in `build_simulation`, and load the model weights that the spec names, if any."""
    sets = read_silos(spec, data_root, datasets.load_all)
    if not spec.data.get("classes") and spec.data["name"] in OWN:
        spec = replace(spec, data={**spec.data, "classes": list(sets[0].schema.classes)})
    if spec.data["name"] == "manifest":  # its lists decide
        spec = replace(spec, data={**spec.data, "multi_label": sets[0].schema.multi_label})
    if spec.data["name"] == "table":
        spec = _with_columns(spec, sets[0].schema)
    sizes = [round_to_two_digits(len(PrivacyUnits.of(s.train))) for s in sets]
    examples = [DeclaredSize(*(round_to_two_digits(len(half)) for half in (s.train, s.test))) for s in sets]
    spec, taken = weights.take(spec)
    names = silo_names(spec, len(sets))
    dictionaries = {name: Dictionary(s.dictionary.digest, s.coarse) for name, s in zip(names, sets, strict=True)}
    dictionaries = {name: of for name, of in dictionaries.items() if of.labels}
    run = weights.begin(manifest_from(spec, names, sizes, examples=examples, dictionaries=dictionaries), taken)
    if any(s.coarse for s in sets):
        check_supported(run.method, {Capability.COARSE_LABELS})
    return run, sets


def _with_columns(spec: RunSpec, schema: Schema) -> RunSpec:
    """Use the table's own schema; raises ConfigError (E-CFG-23) if the spec declares another."""
    table_columns, declared = schema.columns, declared_columns(spec)
    several = {"multi_label": True} if schema.multi_label else {}
    if declared and (differ := difference(declared, table_columns)):
        raise ConfigError(
            "E-CFG-23", f"expected data.schema to equal the table's own, found a difference ({differ}): leave it out"
        )
    return replace(spec, data={**spec.data, "schema": [asdict(column) for column in table_columns], **several})


# ---- for the command line --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """Options of a simulation apart from its words, for one run or for each run of a sweep.

    out: folder of the results   every: rounds between two checkpoints in it   trackers: as in `tracked`
    """

    engine: SimulationEngine = field(default_factory=SimulationEngine)
    data_root: Path | None = None
    config_dir: Path | None = None
    fine_tune: int = 0
    out: Path | None = None
    every: int = EVERY
    trackers: Sequence[str] = ()

    def run(self, words: Sequence[str], observer: MakeObserver | None = None) -> Result:
        spec, engine = compose_simulation(words, self.config_dir), self.engine
        if self.out is not None:
            engine = replace(engine, checkpoints=Checkpoints.within(self.out, self.every))
        with tracked(self.trackers, observer, log.warning) as observed:
            return run(spec, self.data_root, observed, engine, self.fine_tune, out=self.out, words=words)

    def run_of_sweep(self, keys: Sequence[str], words: Sequence[str]) -> Mapping[str, object]:
        """Simulate one run of a sweep over these keys, in its own folder, and return its summary.

        A run that this version already finished in its folder is not run again.
        """
        out, engine = self.out and self.out / folder_name(words, keys), self.engine
        if out and (finished := ResultFolder(out).finished(compose_simulation(words, self.config_dir), version())):
            return finished
        if engine.spill:
            engine = replace(engine, spill=engine.spill / "_".join(words).replace("/", "-"))
        return replace(self, out=out, engine=engine).run(words).summary()


# ---- trackers --------------------------------------------------------------------------------------------------------


def run_id(manifest: RunManifest) -> str:
    """Return a simulation's id for trackers. It depends on the manifest, so a resumed run keeps it."""
    method = re.sub(r"[^a-z0-9]+", "-", manifest.method.name.lower()).strip("-")[:40]
    return f"simulation-{method}-{manifest.digest()[:16]}"


@contextmanager
def tracked(
    where: Sequence[str], observer: MakeObserver | None, warn: Callable[[str], object]
) -> Iterator[MakeObserver | None]:
    """Yield a function that makes an observer which also logs rounds to trackers. Closes the trackers at the end.

    where: `tensorboard:DIR` or `mlflow:URI`   observer: makes the observer to call first
    Raises as `trackers.open_tracker`: on a wrong form at once, otherwise before the first round.
    """
    for place in where:
        trackers.parsed(place)
    begun: list[RunTrackers] = []

    def make(manifest: RunManifest) -> Observer:
        about = {
            "name": manifest.name,
            "method": manifest.method.name,
            "data": manifest.data,
            "manifest": manifest.digest(),
        }
        opened = [trackers.open_tracker(place, run_id(manifest), about) for place in where]
        begun.append(RunTrackers(opened, warn, "simulate again with --tracker"))
        return _Tracked(begun[-1], manifest, observer(manifest) if observer else Observer())

    state = "failed"
    try:
        yield make if where else observer
        state = "finished"
    except KeyboardInterrupt:
        state = "aborted"
        raise
    finally:
        for tracking in begun:
            tracking.end(state)


class _Tracked(Observer):
    """Calls another observer, then logs the round's measures to the trackers."""

    def __init__(self, tracking: RunTrackers, manifest: RunManifest, first: Observer) -> None:
        self._tracking, self._first = tracking, first
        self._noise = profiles.result_noise(manifest)

    def counted(self, coverage: ClassCoverage) -> None:
        self._first.counted(coverage)

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._first.opened(context, kind, names)

    def closed(self, record: RoundRecord, server: State) -> None:
        self._first.closed(record, server)
        values, tags = trackers.values_from(len(record.included), EvaluationResult.of(record, self._noise))
        self._tracking.log(record.round, values, tags)
