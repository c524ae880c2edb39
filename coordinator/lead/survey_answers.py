"""Answers to a survey, for tables, JSON, pictures and the lead's page. Imports no torch.

A number is the sum over the hospitals that released theirs, shown with how many suppressed it: a suppressed number is
missing, not 0. With noise each number of patients has an interval, which may reach below 0. Quantiles are bins,
computed from the released numbers, without records that do not state the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.table import Table

from fl_core.types.survey import SurveyAnswer
from service_core.console import make_table, pluralize

ROUNDING = 0.01


class AnswerTable(NamedTuple):
    """A table of texts; "-": no hospital released the number."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class SurveyAnswers:
    """The answers of a run.

    Attributes:
        document: the digest of the question document
        hospitals: how many answered
        epsilon, delta: guaranteed to each patient, or record if the data have no patient IDs; None without noise
        answers: of all hospitals together   by_hospital: of each hospital, in a run that asked for them
        implausible: cells with impossible numbers: a hospital sent wrong ones
        records: the word for records, "images" or "rows"
    """

    document: str
    hospitals: int
    epsilon: float | None
    delta: float | None
    answers: tuple[SurveyAnswer, ...]
    by_hospital: Mapping[str, tuple[SurveyAnswer, ...]]
    implausible: tuple[str, ...] = ()
    records: str = "images"

    def as_json(self) -> dict[str, object]:
        """Return plain values; a number that no hospital released is null, never 0."""
        return asdict(self)

    def lines(self) -> Iterator[str | Table]:
        """Yield the text for a terminal."""
        for part in self.parts():
            yield part if isinstance(part, str) else make_table(*part)

    def parts(self) -> Iterator[str | AnswerTable]:
        """Yield sentences and tables in order."""
        yield (
            f"{pluralize(self.hospitals, 'hospital')} answered; questions {self.document[:16]}. Suppressed counts are "
            "missing, not zero."
        )
        if self.epsilon is not None:
            yield (
                f"with noise: epsilon {self.epsilon:g} at delta {self.delta:g} for each patient (or each record, if "
                "the data have no patient IDs), spent once by each hospital; numbers with their 95 % interval"
            )
        if unnamed := max((cell.unnamed for answer in self.answers for cell in answer.cells), default=0):
            whose = (
                "No hospital has" if unnamed == self.hospitals else f"{unnamed} of {self.hospitals} hospitals have no"
            )
            yield f"{whose} patient IDs: their records count as one patient each, also for the smallest number shown."
        yield from self._tables(self.answers, self.hospitals, "")
        for name, answers in sorted(self.by_hospital.items()):
            yield from self._tables(answers, 1, f", {name}")
        for where in self.implausible:
            yield f"the numbers of {where} are impossible: a hospital sent wrong ones"

    def _tables(self, answers: Sequence[SurveyAnswer], hospitals: int, whose: str) -> Iterator[str | AnswerTable]:
        for answer in answers:
            unit = f", {answer.unit}" if answer.unit else ""
            images = () if self.epsilon is not None else (self.records,)
            counts = f"{answer.counts} counted" if answer.counts == self.records and images else answer.counts
            shown = [cell for cell in answer.cells if cell.held or cell.images or cell.patients or not answer.unit]
            rows = [
                (
                    cell.name,
                    *([_number(cell.images)] if images else ()),
                    _number(cell.patients) + (f" ± {cell.half_width:.0f}" if cell.half_width else ""),
                    f"{cell.held} of {hospitals}" if cell.held else "-",
                )
                for cell in shown
            ]
            title = f"{answer.title}{unit}{whose}"
            if all(cell.held == hospitals for cell in answer.cells):
                yield f"{title}: suppressed by {'all hospitals' if hospitals > 1 else 'it'}"
                continue
            yield AnswerTable(title, ("", *images, counts, "suppressed by"), rows)
            if answer.quantiles:
                shares = sorted(answer.quantiles.items(), key=lambda each: float(each[0].rstrip(" %")))
                yield f"quantiles, to a bin: {', '.join(f'{name} {text}' for name, text in shares)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value - round(value)) < ROUNDING else f"{value:.1f}"
