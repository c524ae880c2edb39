"""What a simulation leaves: a table of its rounds, a picture, a model, and a folder with all of it."""

from __future__ import annotations

import csv
import io
import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from safetensors.torch import save

from consilium.model.model_file import ModelFileFacts
from consilium.report.curves import COLUMNS, MetricValue, estimate_row, evaluation_rows
from consilium.research.simulate.measures import FineTuned
from coordinator.config.run_spec import RunSpec
from fl_core.converter import shown
from fl_core.errors import ConfigError, StateError
from fl_core.errors.extras import require
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import intervals
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.interfaces import Method
from fl_core.types.records import PERSONAL_SCORES, RoundRecord, fairness, update_outcomes
from fl_core.types.values import State
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import EvaluationResult
from privacy.accounting.uncertainty import LAST, Estimate, RunNoise, Sums
from service_core.console import printable
from service_core.storage import private_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG, MANIFEST, SUMMARY, MODEL, PLOT = "config.yaml", "manifest.json", "summary.json", "model.safetensors", "plot.png"
HISTORY, PARQUET = "history", "*.parquet"
_MAX_BYTES = 64 << 20
"""Bytes of a file of results that is read back; ours are far smaller."""


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
    coverage: ClassCoverage = field(default_factory=ClassCoverage)

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
        return uncertainty.best(self.sums[self.first :])

    @property
    def first(self) -> int:
        """Return after how many rounds there is a trained model: more than one of some closed forms."""
        return max(1, self.method.exchanges)

    def by_class(self) -> dict[str, Estimate]:
        estimates = uncertainty.by_class(*self.sums[-1])
        return dict(zip(self.manifest.schema.classes, estimates, strict=True))

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
        return [self.evaluation(k).sums for k in range(len(self.records))]

    def evaluation(self, k: int) -> EvaluationResult:
        """Return what was measured after k rounds."""
        record = (self.measured or self.records)[k]
        noise = replace(self.noise, evaluation=None) if self.measured else self.noise  # counted apart, without noise
        return EvaluationResult.of(record, noise)

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
            **update_outcomes(self.records),
            "test_set": "official" if self.official else "silos",
            **self.best.facts("best_global_accuracy", "best_"),
            "mean_last_global_accuracy": mean_of_last(_exact(estimates[self.first :])),
            "last_rounds": LAST,
            **{("global_" * (n == "accuracy")) + n: v for n, v in measures.as_json(self.evaluation(-1)).items()},
            "classes": self.coverage.as_json(),
            "clinical": self.clinical and intervals.facts(self.clinical),
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
        estimates = [uncertainty.accuracy(r.correct, r.examples, self.noise.of(r.included)) for r in self.records]
        scores = [uncertainty.shown_scores(r.personal, self.noise.scores) for r in self.records if r.personal]
        return {
            "cohort_accuracy_by_round": [e.point for e in estimates],
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
        names = [name for name in PERSONAL_SCORES if name in measured[-1]]
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
    measured = [v for v in values[-rounds:] if v is not None]
    return statistics.fmean(measured) if measured and len(measured) == len(values[-rounds:]) else None


def _ends(found: Estimate) -> tuple[float, float] | None:
    return None if found.low is None or found.high is None else (found.low, found.high)


# ---- tables ----------------------------------------------------------------------------------------------------------


def history(result: Result) -> list[MetricValue]:
    """List all numbers of a simulation, by round.

    | measure                           | of the model after so many rounds                                    |
    |-----------------------------------|-----------------------------------------------------------------------|
    | accuracy, balanced_accuracy       | on the test set that the summary names                                |
    | class_accuracy                    | the same, one row per class                                           |
    | macro_auc, calibration_error      | on that test set, where the run measures them (docs/metrics.md)       |
    | specificity, auc                  | the same, one row per class                                           |
    | cohort_accuracy                   | on the test sets of the round's silos, where that is another set      |
    | pa, pm_l, pm_v, ga (and ..._std)  | of personal models, mean and standard deviation over silos            |
    """
    return [row for k in range(len(result.records)) for row in _of_round(result, k)]


def _of_round(result: Result, k: int) -> Iterator[MetricValue]:
    record, evaluation = result.records[k], result.evaluation(k)
    yield from evaluation_rows(k, evaluation, result.manifest.schema.classes)
    if result.measured:
        noise = result.noise.of(record.included)
        yield estimate_row(k, "cohort_accuracy", "", uncertainty.accuracy(record.correct, record.examples, noise))
    personal = (result.measured or result.records)[k].personal
    done = record.round + (record.kind.trains)  # personal models are those after the round's training
    for name, value in uncertainty.shown_scores(personal, result.noise.scores).items():
        yield MetricValue(done, name, "", value, value, value)


def by_silo(result: Result) -> list[dict[str, object]]:
    """List how many examples of each class each silo had: silo, split, class, examples."""
    classes = result.manifest.schema.classes
    return [
        {"silo": member.name, "split": split, "class": name, "examples": n}
        for member, counts in zip(result.manifest.members, result.counts, strict=True)
        for split, of_split in zip(("train", "test"), counts, strict=True)
        for name, n in zip(classes, of_split, strict=True)
    ]


# ---- a folder --------------------------------------------------------------------------------------------------------


class ResultFolder:
    """The folder of `coordinator simulate --out`.

    config.yaml     the composed configuration, under the words that composed it
    manifest.json   the run's manifest, whose digest the summary names
    summary.json    what `--json` prints
    history.csv     the rounds (`history`), and history.parquet where pyarrow is there
    silos.csv       examples per silo and class
    model.safetensors   what the method needs to classify (Method.exported)
    plot.png        accuracy by round, where matplotlib is there
    checkpoints/    from which the same command goes on (`checkpoints.Checkpoints`)

    Guarantees: results of another configuration are never overwritten; each file is whole or not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, spec: RunSpec, manifest: RunManifest, words: Sequence[str] = ()) -> None:
        """Write configuration and manifest before the first round.

        Raises ConfigError (E-CFG-08) where the folder holds another configuration, with the keys that differ, and
        (E-CFG-02) where it is none; StateError (E-STATE-22) where its configuration cannot be read.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError("E-CFG-02", f"--out: expected a folder, found the file {self.folder}: name another place")
        if differ := self.differences(spec):
            raise ConfigError(
                "E-CFG-08",
                f"--out: expected a new folder or results of this configuration in {self.folder}, found another one "
                f"({', '.join(differ)}): name another folder",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        said = f"# coordinator simulate {printable(shlex.join(words))}\n" if words else ""
        self._write(CONFIG, said + yaml.safe_dump(plain(spec)))
        self._write(MANIFEST, manifest.to_json() + "\n")

    def differences(self, spec: RunSpec) -> list[str]:
        """Name the keys in which the folder's configuration differs from `spec`, with both values; none without one."""
        lines = self.configuration()
        if lines is None:
            return []
        if isinstance(model := lines.get("model"), dict) and "adapter" in spec.model:
            model.setdefault("adapter", "none")  # of a folder from before it existed
        return differences(lines, plain(spec))

    def configuration(self) -> Mapping[str, object] | None:
        """Read the configuration in the folder; raises StateError (E-STATE-22) on a damaged one."""
        file = self.folder / CONFIG
        if not file.exists():
            return None
        try:
            raw = _plain_yaml(_read(file))
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            raise _damaged(file) from error
        if not isinstance(raw, dict):
            raise _damaged(file)
        return {str(key): value for key, value in raw.items()}

    def finished(self, spec: RunSpec, software: str) -> Mapping[str, object] | None:
        """Return the summary of a run that this version finished here under this configuration; None without one."""
        if self.configuration() is None or self.differences(spec) or not (self.folder / SUMMARY).exists():
            return None
        try:
            summary = json.loads(_read(self.folder / SUMMARY))
            made = json.loads(_read(self.folder / MANIFEST))["software"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(self.folder / SUMMARY) from error
        return summary if made == software and isinstance(summary, dict) else None

    def write(self, result: Result) -> list[str]:
        """Write the results, the summary last, and return the names of the files."""
        rows, written = [dict(zip(COLUMNS, row, strict=True)) for row in history(result)], [CONFIG, MANIFEST]
        written += write_table(self.folder, HISTORY, rows)
        written += write_table(self.folder, "silos", by_silo(result))
        if result.method.has_global_model:
            private_files.write_public(self.folder / MODEL, model_bytes(result))
            written.append(MODEL)
        if PLOT not in left_out():
            private_files.write_figure(self.folder / PLOT, draw(result))
            written.append(PLOT)
        self._write(SUMMARY, json.dumps(result.summary(), sort_keys=True, indent=1) + "\n")
        return [*written, SUMMARY]

    def _write(self, name: str, text: str) -> None:
        private_files.write_public(self.folder / name, text.encode())


def plain(spec: RunSpec) -> dict[str, object]:
    """Turn a configuration into plain values, as JSON has them."""
    fields: dict[str, object] = json.loads(spec.to_json())
    return fields


def write_table(folder: Path, name: str, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Write rows of equal keys as NAME.csv and, where pyarrow is there, NAME.parquet; return the files' names."""
    text = io.StringIO()
    head = list(dict.fromkeys(key for row in rows for key in row))
    table = csv.DictWriter(text, head, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    private_files.write_public(folder / f"{name}.csv", text.getvalue().encode())
    if PARQUET in left_out():
        return [f"{name}.csv"]
    import pyarrow
    from pyarrow import parquet

    packed = io.BytesIO()
    columns = {key: [row.get(key) for row in rows] for key in head}
    parquet.write_table(pyarrow.table(columns), packed)
    private_files.write_public(folder / f"{name}.parquet", packed.getvalue())
    return [f"{name}.csv", f"{name}.parquet"]


def typed(row: Mapping[str, str]) -> dict[str, object]:
    """Give a row of history.csv its types back."""
    fields: dict[str, object] = {**row, "round": int(row["round"])}
    return fields | {name: float(row[name]) if row[name] else None for name in ("value", "low", "high")}


def left_out() -> dict[str, str]:
    """Name the files that cannot be written here, with the extra that each needs."""
    needed = {PARQUET: "pyarrow", PLOT: "matplotlib"}
    return {file: "consilium-fl[research]" for file, module in needed.items() if find_spec(module) is None}


def model_bytes(result: Result) -> bytes:
    """Write the final model as safetensors, with what is needed to build it again in the metadata."""
    facts = replace(ModelFileFacts.of(result.manifest, result.model_digest), untaught=result.coverage.untaught)
    tensors = {name: v.detach().cpu().contiguous() for name, v in result.run.exported(result.server).items()}
    return save(tensors, metadata=facts.metadata())


def draw(result: Result) -> Figure:
    """Draw accuracy and balanced accuracy by round, with the band of privacy's noise where there is one."""
    require("matplotlib", "research", "pictures")  # a second to import: only for those who draw
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    class Picture(Figure):
        """A figure that a notebook shows by itself, whatever its backend."""

        def _repr_png_(self) -> bytes:
            return private_files.png(self)

    figure = Picture(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = history(result)
    for measure in ("accuracy", "balanced_accuracy", "pa"):
        series = [row for row in rows if row.measure == measure]
        if not any(row.value is not None for row in series):
            continue
        low, middle, high = ([_percent(row[place]) for row in series] for place in (4, 3, 5))
        rounds = [row.round for row in series]
        (line,) = axes.plot(rounds, middle, linewidth=2, label=measure.replace("_", " "))
        if low != high:  # what is withheld is a gap
            axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    manifest = result.manifest
    axes.set(xlabel="rounds done", ylabel="accuracy (%)", ylim=(0, 100))
    axes.set_title(printable(f"{manifest.name}, {len(manifest.members)} silos, seed {manifest.seed}"), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(loc="lower right", frameon=False)
    return figure


def _percent(share: object) -> float:
    return 100 * share if isinstance(share, float | int) else float("nan")


def _plain_yaml(text: str) -> object:
    """Read plain values; aliases, which we never write, can make of a short file more than memory holds."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("expected plain values, found an alias")
    return yaml.safe_load(text)


def _read(file: Path) -> str:
    with file.open("rb") as stream:
        raw = stream.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return raw.decode()


def _damaged(file: Path) -> StateError:
    return StateError("E-STATE-22", f"expected what a simulation wrote, found something else in {file}: move it away")


def differences(stored: object, current: object) -> list[str]:
    """Name what differs between two nests of plain values, with both values."""
    have, wanted = _flat(stored), _flat(current)
    return [
        f"{key}: {shown(have.get(key, 'nothing'))} there, {shown(wanted.get(key, 'nothing'))} here"
        for key in sorted({*have, *wanted})
        if have.get(key) != wanted.get(key)
    ]


def _flat(raw: object, prefix: str = "") -> dict[str, object]:
    if isinstance(raw, list | tuple):
        raw = dict(enumerate(raw)) or []
    if not isinstance(raw, Mapping) or not raw:
        return {prefix.removesuffix("."): raw}
    return {k: v for name, value in raw.items() for k, v in _flat(value, f"{prefix}{name}.").items()}
