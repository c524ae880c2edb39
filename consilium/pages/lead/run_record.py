"""The closed rounds of a run, with charts and tables. Computed once, because intervals of noisy sums take a while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from consilium.report.comparison import ComparedRun
from consilium.report.curves import Curve, by_class
from consilium.web.chart import MAX_SERIES, Chart, Series
from coordinator.lead import accuracy, tables
from fl_core.training import clinical_report
from privacy.accounting import measures
from privacy.accounting.measures import Measure
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import format_duration

MAX_ROUNDS = 60
_MAX_NAMES = 100
_MAX_PACES = _MAX_CLASSES = 4 * MAX_SERIES
_MAX_S = 1e9


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round. measured: a text for each of `WatchedRun.columns`.

    there: number of included updates   judged: (hospital, reason) for updates that are missing or were clipped.
    """

    number: str
    measured: tuple[str, ...]
    there: str
    judged: tuple[tuple[str, str], ...]
    bytes_up: int
    seconds: str


@dataclass(frozen=True, slots=True)
class Clinical:
    """Clinical metrics of the newest model.

    by_class: (row for `head`, whether it is based on few images)   confusion: rows for `confusion_head`.
    """

    sentence: str
    head: tuple[str, ...]
    by_class: tuple[tuple[tuple[str, ...], bool], ...]
    confusion_head: tuple[str, ...]
    confusion: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class WatchedRun:
    """A run as the service described it. Properties raise ProtocolError (E-WIRE-06) on impossible values."""

    detail: pb.RunDetail

    @cached_property
    def compared(self) -> ComparedRun:
        return ComparedRun.of(self.detail)

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        """Charts of the measures. A measure always has the same chart and colour, whichever others exist."""
        curves = {curve.measure.label: curve for curve in self.compared.curves.values()}
        labels = [measure.label for measure in measures.MEASURES]
        charts = [chart_of("Measured on all test images", curves, group) for group in _sixes(labels)]
        return tuple(chart for chart in charts if chart is not None)

    @cached_property
    def class_charts(self) -> tuple[Chart, ...]:
        """Charts of the accuracy by class. A class always has the same chart and colour, whichever others exist."""
        names, title = self.compared.classes, "Test images classified correctly, by class"
        curves = zip(names, by_class(self.detail.rounds, _MAX_CLASSES), strict=False)
        measured = {name: curve for name, curve in curves if curve.measured}
        charts = [chart_of(title, measured, group) for group in _sixes(names)]
        return tuple(chart for chart in charts if chart is not None)

    @cached_property
    def paces(self) -> tuple[Chart, ...]:
        """Charts of the time until each hospital's update arrived, over the rounds of training."""
        trained = [r for r in self.detail.rounds if r.kind == pb.TRAIN and r.arrivals]
        took = {r.round + 1: {a.silo: _seconds(a.at_unix - r.opened_unix) for a in r.arrivals} for r in trained}
        x, title = sorted(took), "Seconds until each hospital's update arrived"
        seconds = {name: [took[k].get(name) for k in x] for name in self.compared.members[:_MAX_PACES]}
        groups = _sixes(tuple(seconds)) if len(x) > 1 else []
        return tuple(
            Chart(title, "round", x, [Series(name, seconds[name], colour) for colour, name in enumerate(group, 1)])
            for group in groups
        )

    @cached_property
    def rounds(self) -> tuple[ClosedRound, ...]:
        """The newest rounds, the last first."""
        return tuple(_round(r, self.columns) for r in reversed(self.detail.rounds[-MAX_ROUNDS:]))

    @property
    def columns(self) -> list[Measure]:
        """Measures of the global model that any round has."""
        curves = self.compared.curves
        return [m for m in measures.of_model() if m.name in curves or m.json]

    @property
    def not_measured(self) -> str:
        """The reason why the newest model has only accuracies; "" if it has more, or the run measures no more."""
        if self.clinical is not None or not self.detail.rounds:
            return ""
        text = accuracy.no_clinical(self.detail.rounds[-1], self.compared.metrics)
        return text and f"{text[:1].upper()}{text[1:]}."

    @cached_property
    def hospitals(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Rows of hospitals that share their results, and sentences about them, as in `show`."""
        rows, said = tables.hospital_facts(self.detail)
        return rows, [f"{text[:1].upper()}{text[1:]}." for text in said]

    @cached_property
    def clinical(self) -> Clinical | None:
        classes, rounds = self.compared.classes, self.detail.rounds
        metrics = accuracy.clinical_of(rounds[-1]) if rounds else None
        if metrics is None or len(classes) != len(metrics.auc):
            return None
        sentence = clinical_report.sentence(metrics, sum(rounds[-1].examples))
        few = [n < clinical_report.FEW for n in metrics.per_class]
        return Clinical(
            sentence=f"{sentence[:1].upper()}{sentence[1:]}",
            head=clinical_report.class_head(metrics),
            by_class=tuple(zip(clinical_report.class_rows(metrics, classes), few, strict=True)),
            confusion_head=clinical_report.confusion_head(metrics, classes),
            confusion=tuple(clinical_report.confusion_rows(metrics, classes)),
        )


def _sixes(names: Sequence[str]) -> list[Sequence[str]]:
    """Divide names into groups for one chart each."""
    return [names[k : k + MAX_SERIES] for k in range(0, len(names), MAX_SERIES)]


def chart_of(title: str, found: Mapping[str, Curve], names: Sequence[str]) -> Chart | None:
    """Make a chart of curves over rounds, in percent; None if fewer than two rounds have a point that noise leaves.

    names: of all possible curves, in the order of the colours; curves with other names are left out.
    """
    drawn = [(colour, name, found[name]) for colour, name in enumerate(names, 1) if name in found]
    x = sorted({behind for _, _, curve in drawn for behind in curve.rounds})
    series = [Series(name, _at(x, dict(zip(c.rounds, _points(c), strict=True))), colour) for colour, name, c in drawn]
    if sum(any(value is not None for value in points) for points in zip(*(s.values for s in series), strict=True)) < 2:
        return None
    return Chart(f"{title} (%)", "rounds of training", x, series, limits=(0.0, 100.0))


def _points(curve: Curve) -> list[float | None]:
    return [None if value.point is None else 100 * value.point for value in curve.values]


def _at(x: Sequence[int], values: Mapping[int, float | None]) -> list[float | None]:
    return [values.get(each) for each in x]


def _round(info: pb.RoundInfo, columns: Sequence[Measure]) -> ClosedRound:
    took, result = info.closed_unix - info.opened_unix, accuracy.result_of(info)
    return ClosedRound(
        number=tables.round_text(info.round, info.kind),
        measured=tuple(measure.text(measure.estimate(result)) for measure in columns),
        there=f"{len(info.included)} of {len(info.included) + len(info.missing)}",
        judged=tuple(tables.outcome_rows(info)[:_MAX_NAMES]),
        bytes_up=sum(a.bytes for a in info.arrivals),
        seconds=format_duration(took) if info.closed_unix and took >= 0 else "",
    )


def _seconds(value: float) -> float | None:
    return value if math.isfinite(value) and 0 <= value <= _MAX_S else None
