"""Results of a simulation: a table of its rounds, a plot, a model, and a folder for all of them."""

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
"""Largest result file that is read back; real ones are far smaller."""


@dataclass(frozen=True, slots=True)
class Result:
    """The records of a simulation's rounds, its final state and the digest of its final model.

    server: the final server state   compiled: the method, model and aggregator of the manifest
    counts: (train, test) examples per class of each silo
    noise: which results are noisy   measured: the records as papers measure, if they contain more than a federation
    sees: counts on the official test set or all silos' test sets, scores of all silos' personal models
    official: whether the global model was measured on the official test set, which belongs to no silo
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
        """Global accuracy after 0, 1, ..., T rounds; -1 if there is none or noise hides it."""
        return [-1.0 if e.point is None else e.point for e in self.estimates]

    @property
    def estimates(self) -> list[Estimate]:
        """Global accuracy after 0, 1, ..., T rounds, from `measured` if it exists."""
        return [uncertainty.accuracy(*sums) for sums in self.sums]

    @property
    def best(self) -> Estimate:
        """Best global accuracy of a trained model: after `first`, ..., T rounds."""
        return uncertainty.best(self.sums[self.first :])

    @property
    def first(self) -> int:
        """Number of rounds until there is a trained model: more than one for some closed forms."""
        return max(1, self.method.exchanges)

    def by_class(self) -> dict[str, Estimate]:
        estimates = uncertainty.by_class(*self.sums[-1])
        return dict(zip(self.manifest.schema.classes, estimates, strict=True))

    @property
    def clinical(self) -> ClinicalMetrics | None:
        """Clinical metrics of the final model; None if only accuracies were measured."""
        return (self.measured or self.records)[-1].clinical

    @property
    def method(self) -> Method:
        return self.run.method

    @property
    def run(self) -> RunSetup:
        return self.compiled or RunSetup(self.manifest)

    @property
    def aggregator(self) -> str:
        """The aggregator's name: the manifest's, if masks and noise leave a choice."""
        return self.run.aggregator.name

    @property
    def sums(self) -> list[Sums]:
        """Correct answers and examples per class after 0, 1, ..., T rounds, with their noise."""
        return [self.evaluation(k).sums for k in range(len(self.records))]

    def evaluation(self, k: int) -> EvaluationResult:
        """Return the evaluation after k rounds."""
        record = (self.measured or self.records)[k]
        noise = replace(self.noise, evaluation=None) if self.measured else self.noise  # `measured` has no noise
        return EvaluationResult.of(record, noise)

    def summary(self) -> dict[str, object]:
        """Return the summary that `coordinator simulate --json` prints. Noisy numbers have an interval, or are null."""
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
        """Return the intervals of noisy evaluations by class and by round; null if withheld."""
        if self.noise.evaluation is None or self.measured:
            return {}
        return {
            "class_accuracy_interval": {name: _ends(e) for name, e in self.by_class().items()},
            "accuracy_interval_by_round": [_ends(e) for e in estimates],
        }

    def _of_cohorts(self) -> dict[str, object]:
        """Return the results that a federation would see: accuracies and scores over each round's cohort."""
        if not self.measured:
            return {}
        estimates = [uncertainty.accuracy(r.correct, r.examples, self.noise.of(r.included)) for r in self.records]
        scores = [uncertainty.shown_scores(r.personal, self.noise.scores) for r in self.records if r.personal]
        return {
            "cohort_accuracy_by_round": [e.point for e in estimates],
            **({"cohort_personal_by_round": scores} if scores else {}),
        }

    def personal(self) -> dict[str, object]:
        """Return the last, best, mean and all scores of personal models; empty if none was measured.

        Scores are means over all silos, each with its newest model; in a private run, over each round's silos. The best
        are chosen by test accuracy, as in papers; the mean is over the last rounds. Noisy scores are null, and
        listed under "withheld_scores".
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
        """Return GA after each measured round, by the papers' rule (`Traits.ga_is_personal`).

        For methods with personal models, the mean over silos of their models' accuracy on the whole test set; otherwise
        the global accuracy. None if noise hides it.
        """
        if self.method.ga_is_personal:
            return [s.get("ga") for s in scores]
        return _exact(self.estimates[1:])


def _exact(estimates: Sequence[Estimate]) -> list[float | None]:
    return [e.point if e.exact else None for e in estimates]


def mean_of_last(values: Sequence[float | None], rounds: int = LAST) -> float | None:
    """Return the mean of the last `rounds` values, or of all if there are fewer; None if one of them is None."""
    measured = [v for v in values[-rounds:] if v is not None]
    return statistics.fmean(measured) if measured and len(measured) == len(values[-rounds:]) else None


def _ends(found: Estimate) -> tuple[float, float] | None:
    return None if found.low is None or found.high is None else (found.low, found.high)


# ---- tables ----------------------------------------------------------------------------------------------------------


def history(result: Result) -> list[MetricValue]:
    """List all numbers of a simulation, by round.

    | measure                           | of the model after this number of rounds                              |
    |-----------------------------------|-----------------------------------------------------------------------|
    | accuracy, balanced_accuracy       | on the test set that the summary names                                |
    | class_accuracy                    | the same, one row per class                                           |
    | macro_auc, calibration_error      | on that test set, if the run measures them (docs/metrics.md)          |
    | specificity, auc                  | the same, one row per class                                           |
    | cohort_accuracy                   | on the test sets of the round's silos, if that is another set         |
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
    done = record.round + (record.kind.trains)  # personal models are measured after the round's training
    for name, value in uncertainty.shown_scores(personal, result.noise.scores).items():
        yield MetricValue(done, name, "", value, value, value)


def by_silo(result: Result) -> list[dict[str, object]]:
    """List the number of examples by silo, split and class."""
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

    config.yaml     the composed configuration, with the command as a comment
    manifest.json   the run's manifest; the summary contains its digest
    summary.json    the output of `--json`
    history.csv     the rounds (`history`); also history.parquet if pyarrow is installed
    silos.csv       examples per silo and class; also silos.parquet
    model.safetensors   the tensors that the method needs to classify (Method.exported)
    plot.png        accuracy by round, if matplotlib is installed
    checkpoints/    for resuming with the same command (`checkpoints.Checkpoints`)

    Guarantees: results of another configuration are never overwritten; each file is written completely or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, spec: RunSpec, manifest: RunManifest, words: Sequence[str] = ()) -> None:
        """Write configuration and manifest before the first round.

        Raises ConfigError: E-CFG-08 if the folder contains another configuration, with the keys that differ, E-CFG-02
        if it is a file; StateError (E-STATE-22) if its configuration cannot be read.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(
                "E-CFG-02", f"--out: expected a folder, found the file {self.folder}: choose another path"
            )
        if differ := self.differences(spec):
            raise ConfigError(
                "E-CFG-08",
                f"--out: expected a new folder or results of this configuration in {self.folder}, found another "
                f"configuration ({', '.join(differ)}): choose another folder",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        comment = f"# coordinator simulate {printable(shlex.join(words))}\n" if words else ""
        self._write(CONFIG, comment + yaml.safe_dump(plain(spec)))
        self._write(MANIFEST, manifest.to_json() + "\n")

    def differences(self, spec: RunSpec) -> list[str]:
        """List the keys in which the folder's configuration differs from `spec`, with both values."""
        lines = self.configuration()
        if lines is None:
            return []
        if isinstance(model := lines.get("model"), dict) and "adapter" in spec.model:
            model.setdefault("adapter", "none")  # folders of older versions lack it
        return differences(lines, plain(spec))

    def configuration(self) -> Mapping[str, object] | None:
        """Read the folder's configuration; None without one; raises StateError (E-STATE-22) on a damaged one."""
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
        """Return the folder's summary if this version finished a run with this configuration there, else None."""
        if self.configuration() is None or self.differences(spec) or not (self.folder / SUMMARY).exists():
            return None
        try:
            summary = json.loads(_read(self.folder / SUMMARY))
            made = json.loads(_read(self.folder / MANIFEST))["software"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(self.folder / SUMMARY) from error
        return summary if made == software and isinstance(summary, dict) else None

    def write(self, result: Result) -> list[str]:
        """Write the results, with the summary last, and return the files' names."""
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
    """Convert a configuration to plain JSON values."""
    fields: dict[str, object] = json.loads(spec.to_json())
    return fields


def write_table(folder: Path, name: str, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Write rows as NAME.csv and, if pyarrow is installed, NAME.parquet; return the files' names."""
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
    """Convert a row of history.csv to its types."""
    fields: dict[str, object] = {**row, "round": int(row["round"])}
    return fields | {name: float(row[name]) if row[name] else None for name in ("value", "low", "high")}


def left_out() -> dict[str, str]:
    """List the files that cannot be written here, with the extra that each needs."""
    needed = {PARQUET: "pyarrow", PLOT: "matplotlib"}
    return {file: "consilium-fl[research]" for file, module in needed.items() if find_spec(module) is None}


def model_bytes(result: Result) -> bytes:
    """Encode the final model as safetensors; the metadata contain everything to rebuild it."""
    facts = replace(ModelFileFacts.of(result.manifest, result.model_digest), untaught=result.coverage.untaught)
    tensors = {name: v.detach().cpu().contiguous() for name, v in result.run.exported(result.server).items()}
    return save(tensors, metadata=facts.metadata())


def draw(result: Result) -> Figure:
    """Draw accuracy, balanced accuracy and PA by round, with a band for privacy noise."""
    require("matplotlib", "research", "pictures")  # takes a second to import, so only here
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    class Picture(Figure):
        """A figure that notebooks display with any backend."""

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
        if low != high:  # withheld values are gaps
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
    """Read YAML without aliases. We never write them, and with them a short file can expand beyond memory."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("expected plain values, found an alias")
    return yaml.safe_load(text)


def _read(file: Path) -> str:
    with file.open("rb") as stream:
        raw = stream.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"expected at most {_MAX_BYTES} bytes, found more")
    return raw.decode()


def _damaged(file: Path) -> StateError:
    return StateError("E-STATE-22", f"expected a simulation's file, found other content in {file}: move it away")


def differences(stored: object, current: object) -> list[str]:
    """List the keys that differ between two nested structures of plain values, with both values."""
    have, wanted = _flat(stored), _flat(current)
    return [
        f"{key}: {shown(have.get(key, 'nothing'))} stored, {shown(wanted.get(key, 'nothing'))} now"
        for key in sorted({*have, *wanted})
        if have.get(key) != wanted.get(key)
    ]


def _flat(raw: object, prefix: str = "") -> dict[str, object]:
    if isinstance(raw, list | tuple):
        raw = dict(enumerate(raw)) or []
    if not isinstance(raw, Mapping) or not raw:
        return {prefix.removesuffix("."): raw}
    return {k: v for name, value in raw.items() for k, v in _flat(value, f"{prefix}{name}.").items()}
