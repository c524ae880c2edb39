"""Compare several runs: differences of their configurations, their scores, and reasons not to compare them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from consilium.report.curves import Curve, Scores, behind, by_class, curves
from coordinator.lead import accuracy
from coordinator.lead.as_json import run_json
from fl_core.converter import ConversionError, parse_json, shown
from fl_core.errors import ConfigError, ProtocolError
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import BALANCED, EvaluationResult
from privacy.accounting.uncertainty import LEVEL, NOTHING, Estimate, Sums
from protos.consilium.v1 import federation_pb2 as pb

MAX_RUNS = 20
COMPARED = BALANCED.name
"""The measure for comparing runs."""
BEHIND = "behind the best"
"""Name of the table row with each run's distance to the best in this measure."""
_LEVELS = 20
_SHOWN = 5
_GROUPS = ("method", "model", "data", "federation", "privacy", "aggregator")


class ModelEvaluation(NamedTuple):
    """One evaluation of a trained model: its hospitals and its counts."""

    hospitals: frozenset[str]
    result: EvaluationResult

    def differs(self, other: ModelEvaluation) -> str:
        """Describe how the test images differ from another evaluation's; "" if no difference is visible.

        Noisy counts show no difference.
        """
        if missing := other.hospitals ^ self.hospitals:
            return f"at other hospitals ({', '.join(sorted(missing)[:_SHOWN])} only in one of the two)"
        (_, mine, noise), (_, theirs, other_noise) = (each.result.balanced_sums for each in (self, other))
        if noise is None and other_noise is None and tuple(mine) != tuple(theirs):
            return f"on other test images ({sum(mine):.0f} and {sum(theirs):.0f}, or different counts by class)"
        return ""


class Difference(NamedTuple):
    """A run's lead over another one, as a share, with its interval."""

    point: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return self.low > 0 or self.high < 0

    def text(self) -> str:
        return f"{100 * self.point:+.1f} points (95 %: {100 * self.low:+.1f} to {100 * self.high:+.1f})"


@dataclass(frozen=True, slots=True)
class RunRanking:
    """Runs compared by one number: `COMPARED` in the last evaluation, as in `show`.

    The compared evaluations are at the same hospitals, with the same number of test images of each class.
    values: by run, for all measures   best: the run with the largest value   ahead: the best run's lead over every
    other run; both empty if a value is withheld or there is nothing to compare   excluded: runs that are not compared
    with the first measured one, with the reason.
    Guarantees: all intervals of `ahead` hold together with a probability of 95 %, over the sampling of test images and
    privacy noise. They do not cover the randomness of training, which a single run cannot show.
    """

    rounds: int
    values: Mapping[str, Mapping[str, Estimate]]
    best: str
    ahead: Mapping[str, Difference]
    excluded: Mapping[str, str]

    def headline(self, names: Mapping[str, str]) -> str:
        """Return one sentence on the best run. names: of the runs, for this sentence."""
        if not self.ahead:
            return f"{len(names)} runs side by side"
        tied = {run: lead for run, lead in self.ahead.items() if not lead.significant}
        nearest, difference = min((tied or self.ahead).items(), key=lambda item: item[1].point)
        if tied:
            all_of_them = " and ".join(names[run] for run in (self.best, *tied))
            return f"{all_of_them} do not differ significantly in balanced accuracy: {difference.text()}"
        return f"{names[self.best]} ends ahead of {names[nearest]} in balanced accuracy: {difference.text()}"

    def text(self, run: str) -> str:
        """Return a table cell with a run's distance to the best one."""
        if run in self.excluded:
            return "not compared"
        if run not in self.ahead:
            return "best" if self.ahead else "-"
        difference = self.ahead[run]
        behind = Difference(0.0 - difference.point, 0.0 - difference.high, 0.0 - difference.low)
        return behind.text() if difference.significant else f"{behind.text()}, not significant"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs. configuration: keys as on the command line, values as text.

    metrics: the manifest's setting of measures   evaluated: evaluations of its trained models, oldest first.
    """

    info: pb.RunInfo
    configuration: Mapping[str, str]
    members: tuple[str, ...]
    classes: tuple[str, ...]
    curves: Mapping[str, Curve]
    by_class: Mapping[str, Estimate]
    metrics: str
    evaluated: tuple[ModelEvaluation, ...]

    @property
    def id(self) -> str:
        return self.info.run_id

    @classmethod
    def of(cls, detail: pb.RunDetail) -> ComparedRun:
        """Read a run; raises ProtocolError (E-WIRE-06) on an invalid configuration or manifest."""
        manifest = _mapping(detail.manifest_json, "manifest")
        schema = manifest.get("schema")
        classes = _texts(schema.get("classes") if isinstance(schema, dict) else None)
        listed = manifest.get("members")
        members = [m.get("name") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        start = manifest.get("start")
        extra = {"software": str(manifest.get("software", ""))}
        if isinstance(start, dict):
            extra["--from"] = f"{start.get('run')} after round {start.get('rounds')}"
        newest = [curve.values[-1] for curve in by_class(detail.rounds[-1:])]
        return cls(
            detail.info,
            flatten(_mapping(detail.spec_json, "configuration")) | extra,
            _texts(members),
            classes,
            curves(detail.rounds),
            dict(zip(classes, newest, strict=False)),
            str(manifest.get("metrics", "")),
            tuple(
                ModelEvaluation(frozenset(r.included), accuracy.result_of(r))
                for r in detail.rounds
                if behind(r) and not r.untrained and any(r.examples)
            ),
        )


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Compared runs, in the given order.

    differences: keys that differ, with a value for each run, None if a run lacks the key   standing: the ranking
    notes: limits of the comparison.
    """

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[str | None, ...]]
    standing: RunRanking
    notes: tuple[str, ...]

    @property
    def measures(self) -> list[str]:
        """Names of the measures that any run has."""
        return list(dict.fromkeys(name for run in self.runs for name in run.curves))

    @property
    def classes(self) -> list[str]:
        """Names of the classes for which any run has an accuracy."""
        named = [name for run in self.runs for name, value in run.by_class.items() if value != NOTHING]
        return list(dict.fromkeys(named))


def compare(runs: Sequence[ComparedRun]) -> RunComparison:
    """Compare runs; raises ConfigError (E-CFG-02) unless there are 2 to 20 different ones."""
    ids = [run.id for run in runs]
    if not 2 <= len(ids) <= MAX_RUNS or len(set(ids)) < len(ids):
        raise ConfigError(
            "E-CFG-02",
            f"expected 2 to {MAX_RUNS} different runs, found {', '.join(ids[:MAX_RUNS]) or 'none'}: name other runs",
        )
    keys = sorted({key for run in runs for key in run.configuration})
    values = {key: tuple(run.configuration.get(key) for run in runs) for key in keys}
    differences = {key: variants for key, variants in values.items() if len(set(variants)) > 1}
    standing = _standing(runs)
    return RunComparison(tuple(runs), differences, standing, _notes(runs, standing))


def _standing(runs: Sequence[ComparedRun]) -> RunRanking:
    """Rank runs by their last evaluations. Excludes runs whose evaluation does not match the first measured run's."""
    first = next((run for run in runs if run.evaluated), runs[0])
    excluded = {run.id: why for run in runs if run is not first and (why := _excluded(run, first))}
    compared = [run for run in runs if run.id not in excluded]
    last = {run.id: run.evaluated[-1] for run in runs if run.evaluated}
    compared_measures = [measure for measure in measures.of_model() if measure.json]
    values = {
        run.id: {m.name: m.estimate(last[run.id].result) if run.id in last else NOTHING for m in compared_measures}
        for run in runs
    }
    points = {run.id: values[run.id][COMPARED].point for run in compared}
    scored = {name: point for name, point in points.items() if point is not None}
    measured = int(bool(last))
    if len(compared) < 2 or len(scored) < len(points):
        return RunRanking(measured, values, "", {}, excluded)
    best = max(scored, key=scored.__getitem__)
    share = (1 - LEVEL) / (len(compared) - 1)
    ahead = {
        name: difference
        for name in scored
        if name != best and (difference := _difference(last[best], last[name], share)) is not None
    }
    return RunRanking(measured, values, best, ahead if len(ahead) == len(compared) - 1 else {}, excluded)


def _excluded(run: ComparedRun, first: ComparedRun) -> str:
    if not run.evaluated:
        return "was not measured"
    if run.classes != first.classes:
        return "has other classes"
    difference = run.evaluated[-1].differs(first.evaluated[-1])
    return difference and f"was measured {difference}"


def _difference(mine: ModelEvaluation, theirs: ModelEvaluation, share: float) -> Difference | None:
    """Estimate the lead of one run's last evaluation over another's on the same test images.

    share: probability that the interval may be wrong. Only the numbers of right images are known, not which images. So
    the interval is that for matched pairs with the most disagreement that the counts allow: Agresti and Min, "Simple
    improved confidence intervals for comparing matched proportions", Statistics in Medicine 2005, by class. Returns
    None if noise hides a number.
    """
    level, sums = 1 - share / 4, [each.result.balanced_sums for each in (mine, theirs)]
    noisy = any(noise is not None for _, _, noise in sums)
    a, b = (uncertainty.balanced(*each, level) for each in sums)
    if a.point is None or a.low is None or a.high is None or b.point is None or b.low is None or b.high is None:
        return None
    point, centers, variances = a.point - b.point, list[float](), list[float]()
    for right, left, n in zip(*map(_shares, sums), sums[0][1], strict=False):
        if right is None or left is None:
            continue
        more, disagree = (right - left) * n / (n + 2), (min(right + left, 2 - right - left) * n + 1) / (n + 2)
        centers.append(more)
        variances.append((disagree - more * more) / (n + 2))
    if not centers:
        return None
    deviation = math.sqrt(math.fsum(variances)) / len(variances)
    half = NormalDist().inv_cdf(1 - share / (4 if noisy else 2)) * deviation
    low, high = fmean(centers) - half, fmean(centers) + half
    low, high = (
        min(low, point) + (a.low - a.point) + (b.point - b.high),
        max(high, point) + (a.high - a.point) + (b.point - b.low),
    )
    return Difference(point, max(low, -1.0), min(high, 1.0))


def _shares(found: Sums) -> list[float | None]:
    """Return the share of right answers by class; None for a class without test images."""
    return [e.point for e in uncertainty.by_class(*found)]


def score_rows(found: RunComparison) -> list[tuple[str, tuple[str, ...]]]:
    """Return a table row per measure, with a text for each run. A row `BEHIND` follows the compared measure."""
    standing, rows = found.standing, list[tuple[str, tuple[str, ...]]]()
    for name in found.measures:
        values = [run.curves[name].scores.final if name in run.curves else NOTHING for run in found.runs]
        values = [standing.values[run.id].get(name, value) for run, value in zip(found.runs, values, strict=True)]
        rows.append((name, tuple(map(measures.named(name).text, values))))
        if name == COMPARED:
            rows.append((BEHIND, tuple(standing.text(run.id) for run in found.runs)))
    return rows


def flatten(spec: Mapping[str, object]) -> dict[str, str]:
    """Flatten a configuration to the keys of KEY=VALUE: `method` for a group's name, `method.mu1` for an option."""
    flat: dict[str, str] = {}
    left: list[tuple[str, object, int]] = [(key, value, 1) for key, value in spec.items()]
    while left:
        key, value, level = left.pop()
        if isinstance(value, dict) and value and level < _LEVELS:
            left += [(f"{key}.{name}", inner, level + 1) for name, inner in value.items()]
            continue
        group, _, name = key.rpartition(".")
        flat[group if name == "name" and group in _GROUPS else key] = _text(value)
    return flat


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return shown(value)


def _notes(runs: Sequence[ComparedRun], standing: RunRanking) -> tuple[str, ...]:
    notes = [f"{name} is not compared with the others: it {why}" for name, why in standing.excluded.items()]
    if len({run.classes for run in runs}) > 1:
        notes.append("the runs have different classes, so their accuracies are not comparable")
    elif len({frozenset(run.members) for run in runs}) > 1:
        notes.append("the runs have different hospitals")
    if standing.rounds:
        notes.append(
            "each run's last evaluation is compared, at the same hospitals on as many test images; the interval covers "
            "sampling of test images and privacy noise, not variation between training runs: repeat with several seeds"
        )
    if any(e.result.noise is not None for run in runs for e in run.evaluated[-1:]):
        notes.append("counts of test images are noisy: runs may have been measured on different numbers of images")
    if moving := [run.id for run in runs if run.info.state in ("waiting", "running")]:
        notes.append(f"not finished yet: {', '.join(moving)}")
    if halted := [f"{run.id} ({run.info.state})" for run in runs if run.info.state in ("paused", "aborted", "failed")]:
        notes.append(f"ended before their last round: {', '.join(halted)}")
    if len({run.info.rounds for run in runs}) > 1:
        notes.append("the runs have different numbers of rounds")
    return tuple(notes)


def _mapping(text: str, what: str) -> Mapping[str, object]:
    try:
        value = parse_json(text)
    except ConversionError as error:
        raise ProtocolError(
            "E-WIRE-06", f"expected the {what} of a run, found {error}: upgrade the older side"
        ) from error
    if not isinstance(value, dict):
        raise ProtocolError("E-WIRE-06", f"expected the {what} of a run, found another value: upgrade the older side")
    return value


def _texts(found: object) -> tuple[str, ...]:
    return tuple(str(each) for each in found) if isinstance(found, list) else ()


# ---- JSON ------------------------------------------------------------------------------------------------------------


def comparison_json(found: RunComparison) -> dict[str, object]:
    """Return a comparison as JSON values. Numbers hidden by noise are null, others have an interval."""
    return {
        "runs": [
            {
                **run_json(run.info),
                "members": list(run.members),
                "scores": {measure: _scores_json(curve.scores) for measure, curve in run.curves.items()},
                "class_accuracy": {name: value.facts() for name, value in run.by_class.items()},
            }
            for run in found.runs
        ],
        "differences": {
            key: dict(zip((run.id for run in found.runs), values, strict=True))
            for key, values in found.differences.items()
        },
        "standing": {
            "measure": COMPARED,
            "evaluations": found.standing.rounds,
            "best": found.standing.best,
            "values": {
                run: {measure: _estimate_json(value) for measure, value in values.items()}
                for run, values in found.standing.values.items()
            },
            "ahead": {
                run: {**ahead._asdict(), "told_apart": ahead.significant} for run, ahead in found.standing.ahead.items()
            },
            "not_compared": dict(found.standing.excluded),
        },
        "notes": list(found.notes),
    }


def _scores_json(scores: Scores) -> dict[str, object]:
    facts = {"final": scores.final, "best": scores.best, "mean_last": scores.last}
    return {name: _estimate_json(value) for name, value in facts.items()}


def _estimate_json(value: Estimate) -> dict[str, object]:
    return {"value": value.point, "low": value.low, "high": value.high, "withheld": bool(value.withheld)}
