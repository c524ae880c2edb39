"""A run's request to this hospital, as stored for its approval; readable without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fl_core.converter import structure
from fl_core.kinds import kind_of
from fl_core.types.clinical import CLINICAL
from fl_core.types.secagg import READ_ALONE
from privacy.accounting.accountant import Mechanism
from privacy.accounting.shared_noise import SharedFigures
from privacy.policy import Policy
from privacy.policy_terms import ACCURACY, NOTHING
from service_core.console import pluralize
from silo.reports.disclosure import FLOAT_BYTES, UpdateContents


class RequestLine(NamedTuple):
    """One line of a request: its subject, the run's value, and the policy's limit."""

    what: str
    requested: str
    policy: str


LEAVES, SUPPRESSED, NOT_ANSWERED = "leaves", "suppressed: too few", "suppressed: not answered"
"""Values of `SurveyRow.becomes`."""


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """One cell of a survey's question in the preview. becomes: whether its numbers leave, or why they do not."""

    question: str
    cell: str
    images: float
    patients: float
    becomes: str


@dataclass(frozen=True, slots=True)
class SurveyPreview:
    """A preview of a survey's answers. noise: standard deviation added to each number of patients; 0: none.

    digest: of the numbers; once approved, only these may leave; empty with noise, which changes them
    least: smallest number of patients, other than 0, that leaves without noise   records: the word for records
    named: whether the data name patients; if not, records are counted as patients.
    """

    rows: tuple[SurveyRow, ...]
    digest: str = ""
    noise: float = 0.0
    least: int = 0
    records: str = "images"
    named: bool = True

    @property
    def counts(self) -> str:
        return "patients" if self.named else self.records

    @property
    def head(self) -> tuple[str, str, str, str, str]:
        return "question", "cell", self.records, self.counts if self.named else f"{self.records} counted", "becomes"

    def floor(self, least: int) -> str:
        """Describe the smallest number that may leave."""
        return f"at least {least} {self.counts}" + ("" if self.named else "; the data have no patient IDs")

    def sentence(self) -> str:
        if self.noise:
            return (
                f"Numbers of {self.counts} leave with noise of standard deviation {self.noise:.3g} on each; the true "
                "ones, shown here, stay."
            )
        return f"Exactly these numbers leave. Each number other than 0 counts {self.floor(self.least)}."

    def cells(self) -> list[tuple[str, str, str, str, str]]:
        """Return the rows as text, in the columns of `head`."""
        rows = []
        for row in self.rows:
            leaves = row.becomes == LEAVES
            images = f"{row.images:.10g}" if leaves and not self.noise else "-"
            patients = f"{row.patients:.10g}" if leaves else "-"
            rows.append((row.question, row.cell, images, patients, row.becomes))
        return rows


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run's request, as a hospital decides about it.

    Attributes:
        profile: of privacy; epsilon, delta, subject only of a private one
        spends: epsilon actually spent at this hospital if no round is repeated, by the privacy loss of all releases
        rng, test_data: options of its privacy
        prototypes: whether the run takes prototypes from this hospital
        extensions: code that is not part of this software
        charges: (noise, rate, steps) of all rounds, by split, at most; None if this hospital is no member
        parts, tensors, word: as in `UpdateContents`
        masked, sums_of, others: for a masked run: bytes of a number and of additional data, hospitals in the smallest
            sum, the other members
        shared: the noise that hospitals add together; None if each adds all of it
        survey: preview of the answers to a survey; None for other runs
        models: number of models whose results on this hospital's test images leave without noise
        few: classes with fewer test images here than the policy requires; their results are not sent
    """

    method: str
    model: str
    data: str
    classes: tuple[str, ...]
    rounds: int
    hospitals: int
    lead: str = ""
    start: str = ""
    extensions: tuple[str, ...] = ()
    profile: str = "none"
    epsilon: float | None = None
    delta: float | None = None
    subject: str = ""
    rng: str = ""
    test_data: str = ""
    prototypes: bool = False
    parts: Mapping[str, int] = field(default_factory=dict)
    tensors: int = 0
    word: int = FLOAT_BYTES
    charges: Mapping[str, tuple[tuple[float, float, int], ...]] | None = None
    masked: tuple[int, ...] = ()
    sums_of: int = 0
    others: tuple[str, ...] = ()
    shared: SharedFigures | None = None
    survey: SurveyPreview | None = None
    models: int = 0
    few: tuple[str, ...] = ()
    spends: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunRequest | None:
        """Read a stored request; None for the shorter ones of earlier versions."""
        if not text:
            return None
        raw: dict[str, Any] = json.loads(text)
        charges = raw.pop("charges")
        request = structure(cls, raw, "request")
        if charges is None:
            return request
        kept = {str(k): tuple((float(z), float(q), int(n)) for z, q, n in rows) for k, rows in charges.items()}
        return cls(**{**{name: getattr(request, name) for name in cls.__slots__}, "charges": kept})

    @property
    def private(self) -> bool:
        return self.epsilon is not None

    @property
    def contents(self) -> UpdateContents:
        return UpdateContents(self.parts, self.tensors, *(self.masked or (self.word, 0)))

    def mechanisms(self) -> dict[str, list[Mechanism]]:
        return {split: [Mechanism(*row) for row in rows] for split, rows in (self.charges or {}).items()}

    def compare(self, policy: Policy, confirmed: Collection[str] = (), measured: int = 0) -> list[RequestLine]:
        """Compare the request with the policy, for display only; `Policy.check` decides whether it is allowed.

        confirmed: members whose key this hospital confirmed by its fingerprint   measured: runs that measured models
        here within a day.
        """
        floors, runs = policy.privacy, policy.runs
        most = f"epsilon {floors.epsilon:g} at delta {floors.delta:g}"
        kind = kind_of(self.method, self.rounds)
        start = f", {kind.goes_on} {self.start}" if self.start else ""
        length = kind.length(self.rounds)
        trains = "–" if runs.train else "only evaluations: nothing is trained here"
        rows = [
            RequestLine("Asked for by", self.lead or "a lead without a name", ", ".join(runs.leads) or "any lead"),
            RequestLine("Method", self.method, ", ".join(runs.methods) or "any method"),
            RequestLine("Data", f"{self.data}, {len(self.classes)} classes: {', '.join(self.classes)}", "–"),
            RequestLine("Length", f"{length}, with {self.hospitals} hospitals, {self.model}{start}", trains),
        ]
        rows.append(self._sums(policy, confirmed))
        if self.survey is not None:
            allowed = f"{', '.join(policy.survey.allow) or 'none'}; {self.survey.floor(policy.survey.min_patients)}"
            requested = ", ".join(dict.fromkeys(row.question for row in self.survey.rows))
            rows.append(RequestLine("Questions", requested, allowed))
        if self.extensions:
            allowed = ", ".join(runs.extensions) or "none"
            rows.append(RequestLine("Code of others", "; ".join(self.extensions), allowed))
        if self.epsilon is None or self.delta is None:
            requested, allowed = (
                "no differential privacy",
                f"only {floors.require}" if floors.require else "also without",
            )
            rows.append(RequestLine("Privacy", requested, allowed))
            return rows if self.survey else [*rows, self._results(policy, measured), self._prototypes(policy)]
        rows += [
            RequestLine(
                "Privacy",
                f"epsilon {self.epsilon:g} at delta {self.delta:g} for {self.subject} ({self.profile})"
                + ("" if self.spends is None else f"; {self.spends:.2f} is actually spent if no round is repeated"),
                f"at most {most}" + (f", only {floors.require}" if floors.require else ""),
            ),
            RequestLine(
                "Noise",
                "from a secret source" if self.rng == "secure" else "reproducible, which protects nothing",
                "only secret noise" if floors.rng == "secure" else "also reproducible noise",
            ),
        ]
        if self.survey is not None:
            return rows
        rows.append(
            RequestLine(
                "Test images",
                "counted exactly" if self.test_data == "public" else "counted with noise",
                "also counted exactly" if floors.public_test else "only with noise",
            )
        )
        if self.shared is not None:
            least = floors.min_noise_alone
            of_its_own = f"at least {least:g} of this hospital's own, found {self.shared.noise_alone:.3g}"
            rows.append(
                RequestLine("Noise on updates", str(self.shared), of_its_own if least < math.inf else "its own")
            )
        return [*rows, self._prototypes(policy)]

    def _sums(self, policy: Policy, confirmed: Collection[str]) -> RequestLine:
        """Describe whether updates are masked, the smallest sum that is read, and how many keys are confirmed."""
        floors, requested = policy.secagg, f"none: {READ_ALONE}"
        if self.sums_of:
            confirmed_others = len({*self.others} & {*confirmed})
            requested = f"updates under masks, only sums over at least {self.sums_of} hospitals are read; "
            requested += (
                f"{confirmed_others} of {pluralize(len(self.others), 'other member')} confirmed by this hospital"
            )
        allowed = ["required" if floors.require else "not required"]
        allowed += [f"sums over at least {floors.min_sum}"] if floors.min_sum else []
        allowed += [f"at least {floors.confirmed_peers} confirmed"] if floors.confirmed_peers else []
        return RequestLine("Secure aggregation", requested, ", ".join(allowed))

    def _results(self, policy: Policy, measured: int) -> RequestLine:
        """Describe what an exact evaluation sends about this hospital's test images."""
        limits = policy.evaluation
        accuracies = "correct answers per class"
        more = ", confusion matrix, scores and confidence in bins" if "clinical" in self.parts else ""
        leaves = {CLINICAL: "all of it leaves", ACCURACY: f"only {accuracies} leave", NOTHING: "nothing leaves"}
        allowed = leaves[limits.send]
        if "by_hospital" in self.parts:
            more += ", also shown under this hospital's name"
            allowed += "; under its name too" if limits.by_hospital else "; shown in sums alone"
        if self.models and limits.send != NOTHING:
            more += f"; {pluralize(self.models, 'model')}, counted exactly: of a class with one test image "
            more += "here, the counts reveal the model's answer for that image"
            left = f": {', '.join(self.few)}" if self.few else ""
            allowed += (
                f"; no class of fewer than {limits.min_examples} test images{left}" if limits.min_examples else ""
            )
            allowed += f"; {measured} of at most {pluralize(limits.runs_a_day, 'run')} a day evaluated models here"
        return RequestLine("Results on test images", f"{accuracies}{more}", allowed)

    def _prototypes(self, policy: Policy) -> RequestLine:
        limits = policy.prototypes
        allowed = "may leave" if limits.submit else "never leave"
        if limits.submit and limits.hidden:
            allowed += f", but not of {', '.join(limits.hidden)}"
        if limits.submit and limits.min_count:
            allowed += f", but only of classes with at least {limits.min_count:g}"
        if limits.submit and limits.min_examples and self.epsilon is None and "moments" in self.parts:
            allowed += f"; exact sums only over classes with at least {limits.min_examples} examples"
        return RequestLine("Class prototypes", "asked for" if self.prototypes else "not asked for", allowed)
