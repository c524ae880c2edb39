"""The facts of a model's card: plain values, whose JSON is the signed document. `templates` contains the texts.

No fact identifies a record. None, 0 and empty mean "not known". Fields that were added after 0.1.0 have a default, so
that older cards can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fl_core.converter import ConversionError, Option, structure
from fl_core.errors import ConfigError
from fl_core.types.clinical import BinnedRange, ClinicalMetrics, ReliabilityBin, TwoByTwo
from fl_core.types.survey import SurveyAnswer

FORMAT = "consilium.card.v1"
MAX_TEXT_CHARS = 2_000
"""Maximum length of a lead's statement."""
FALSE_ALARMS = 0.01
"""False positive rate of a membership attacker: the share of non-members that it takes for members."""


def most_found(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """Return the largest share of members that any attack finds at a false positive rate a.

    It is min(e^eps a + delta, 1 - e^-eps (1 - delta - a)) (Wasserman and Zhou, JASA 105, 2010; Kairouz, Oh and
    Viswanath, ICML 2015), whatever else the attacker knows. false_alarms: a.
    """
    grown = math.exp(min(epsilon, 700.0))
    share = min(grown * false_alarms + delta, 1 - (1 - delta - false_alarms) / grown)
    return min(1.0, max(share, false_alarms))


@dataclass(frozen=True, slots=True)
class CardShare:
    """A share in [0, 1] with a 95 % interval; None: not measured. withheld: why there is no number.

    of: the source of uncertainty that the interval covers; empty without an interval.
    """

    point: float | None = None
    low: float | None = None
    high: float | None = None
    withheld: str = ""
    of: str = ""

    @property
    def possible(self) -> bool:
        numbers = [v for v in (self.low, self.point, self.high) if v is not None]
        whole = self.point is not None or not numbers
        return whole and numbers == sorted(numbers) and all(0 <= v <= 1 for v in numbers)

    def text(self) -> str:
        if self.withheld:
            return f"withheld: {self.withheld}"
        if self.point is None:
            return "not measured"
        number = f"{100 * self.point:.1f} %"
        if self.low is None or self.high is None:
            return number
        return f"{number} (95 %: {100 * self.low:.1f} to {100 * self.high:.1f} %)"


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """One class or label.

    test_examples: their number, None if withheld   declared_by: hospitals that declare to have it
    trained_at: number of hospitals that trained it; None: not known   taught: whether it was trained at all, as far as
    the run knows.
    """

    name: str
    test_examples: int | None
    recognised: CardShare
    declared_by: tuple[str, ...] = ()
    specificity: float | None = None
    auc_low: float | None = None
    auc_high: float | None = None
    trained_at: int | None = None
    taught: bool = True

    @property
    def auc(self) -> BinnedRange | None:
        return None if self.auc_low is None or self.auc_high is None else BinnedRange(self.auc_low, self.auc_high)


@dataclass(frozen=True, slots=True)
class Hospital:
    """One member of the run.

    rounds: number of training rounds with its update   missed: the other rounds, with the coordinator's reason
    size: declared training examples or groups, rounded up, 0: not declared   policy: SHA-256 of its policy file
    fingerprint: of its key   labels: digest of its label dictionary   coarse: whether that has coarse labels.
    """

    name: str
    rounds: int
    missed: tuple[str, ...] = ()
    prototypes: str = "-"
    size: float = 0.0
    policy: str = ""
    fingerprint: str = ""
    software: str = ""
    labels: str = ""
    coarse: bool = False


@dataclass(frozen=True, slots=True)
class Privacy:
    """The run's privacy guarantee.

    subject: whom epsilon protects   epsilon: the most that the run may spend on each of them   planned: spending of the
    schedule without repeated rounds, at the hospital that spends most   alone: with shared noise, epsilon from one
    hospital's noise only   collusion: with shared noise, number of hospitals that may collude without effect on epsilon
    test_data: "private" or "public"   noise_from: "secure", or "test", which protects nobody   placement: who adds the
    noise.
    """

    profile: str
    subject: str = ""
    epsilon: float | None = None
    delta: float | None = None
    planned: float | None = None
    alone: float | None = None
    collusion: int = 0
    test_data: str = ""
    noise_from: str = ""
    placement: str = ""
    options: Mapping[str, Option] | None = None

    @property
    def attack(self) -> str:
        """The largest share of members that an attacker finds, in percent, never rounded down."""
        assert self.epsilon is not None
        assert self.delta is not None
        return f"{math.ceil(most_found(self.epsilon, self.delta) * 10_000 - 1e-9) / 100:g} %"


@dataclass(frozen=True, slots=True)
class Masks:
    """Terms of secure aggregation. withstood: hospitals that may collude with the coordinator and still see only sums.

    min_contributors: least number of hospitals in the sum of a class row.
    """

    withstood: int
    min_contributors: int


@dataclass(frozen=True, slots=True)
class Updates:
    """Statistics of the updates. aggregator: the rule that combined them   clipped: values outside the grid's range."""

    aggregator: str
    refused: int
    cut: int
    rows_cut: int
    unbounded_rounds: int
    bytes_up: int
    bytes_down: int
    clipped: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A measure other than accuracy and AUC. percent: whether it is a share."""

    name: str
    label: str
    share: CardShare
    percent: bool = True

    def text(self) -> str:
        return self.share.text() if self.percent or self.share.point is None else f"{self.share.point:.3f}"


@dataclass(frozen=True, slots=True)
class Results:
    """Results of the last evaluation, on the union of the hospitals' test examples.

    best: over rounds, selected on test data   level_of_chance: of balanced accuracy   of_exported_model: False if the
    last evaluation measured the model one round before the exported one   classes_tested: with a test example
    why_no_more: why there is no specificity, AUC or calibration; "" if there is   labels: for several labels, (tn, fp,
    fn, tp) by label   reliability: by bin of confidence (test examples, right ones, sum of confidences)
    temperature: divisor of logits for calibrated probabilities, if the calibration error is large.
    """

    accuracy: CardShare
    balanced: CardShare
    best: CardShare
    test_examples: int | None
    level_of_chance: float
    of_exported_model: bool
    classes_tested: int | None = None
    calibration_error: float | None = None
    macro_auc_low: float | None = None
    macro_auc_high: float | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    why_no_more: str = ""
    labels: tuple[tuple[int, int, int, int], ...] = ()
    reliability: tuple[tuple[float, float, float], ...] = ()
    temperature: float | None = None
    others: tuple[Figure, ...] = ()

    @property
    def sureness(self) -> tuple[float, float] | None:
        """The share of right answers and the mean confidence; None if not measured."""
        n, right, sure = (math.fsum(row[k] for row in self.reliability) for k in range(3))
        return (right / n, sure / n) if n else None


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A hospital that has withdrawn. depends: whether this model still contains its data.

    statement, signature: the coordinator's signed statement (signature in base64).
    """

    hospital: str
    run: str
    at: str
    outcome: str
    depends: bool
    statement: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """The network and its origin. input: C, H, W or columns   parameters: numbers in the exported file.

    several_labels: whether a record may have several of its classes   temperature: divisor of logits in `consilium
    predict`, if the file contains one.
    """

    name: str
    options: Mapping[str, Option]
    parameters: int
    input: tuple[int, ...]
    preprocessing: str
    start: str = ""
    frozen_body: str = ""
    several_labels: bool = False
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingDescription:
    """The method. about: the algorithm in one line   training: description of local training."""

    name: str
    options: Mapping[str, Option]
    about: str
    paper: str
    training: str
    seed: int
    private_form: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run of the model. Times are ISO 8601 in UTC; empty: not known."""

    id: str
    name: str
    state: str
    rounds: int
    planned_rounds: int
    created: str
    ended: str
    data: str
    manifest_digest: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class Survey:
    """Answers to a lead's survey of the hospitals' records: sums over the hospitals that answered.

    document: digest of the questions   hospitals: number that answered   members: those of them in the run
    epsilon, delta: guaranteed to each of their patients; None without noise.
    """

    run: str
    document: str
    hospitals: int
    members: tuple[str, ...]
    epsilon: float | None
    delta: float | None
    answers: tuple[SurveyAnswer, ...]

    @property
    def possible(self) -> bool:
        cells = [cell for answer in self.answers for cell in answer.cells]
        numbers = [v for c in cells for v in (c.images, c.patients, c.half_width) if v is not None]
        return (
            len(self.members) <= self.hospitals
            and all(math.isfinite(v) for v in numbers)
            and all(0 <= c.held <= self.hospitals and c.half_width >= 0 for c in cells)
        )


@dataclass(frozen=True, slots=True)
class Card:
    """All facts of a card. intended_use, licence: the lead's statements, empty: not stated   files: name -> SHA-256.

    software: a side of the run ("coordinator", or a hospital) -> its own statement of version and build
    survey: of the hospitals' records, if the lead names one.
    """

    consortium: str
    written: str
    written_by: str
    intended_use: str
    licence: str
    run: RunFacts
    model: Model
    method: TrainingDescription
    classes: tuple[ClassFacts, ...]
    hospitals: tuple[Hospital, ...]
    results: Results
    privacy: Privacy
    masks: Masks | None
    updates: Updates
    withdrawals: tuple[Withdrawal, ...]
    software: Mapping[str, str]
    files: Mapping[str, str]
    survey: Survey | None = None
    format: str = FORMAT

    def facts(self) -> dict[str, object]:
        return asdict(self)

    @property
    def metrics(self) -> ClinicalMetrics | None:
        """The counts behind specificity, AUC and calibration; None if there are none."""
        r = self.results
        if not (r.confusion or r.labels):
            return None
        bins = tuple(ReliabilityBin(round(n), round(right), sure) for n, right, sure in r.reliability)
        labels = tuple(TwoByTwo(*counts) for counts in r.labels)
        return ClinicalMetrics(r.confusion, tuple(c.auc for c in self.classes), bins, labels)

    @classmethod
    def of(cls, raw: object) -> Card:
        """Read a card of unknown origin; raises ConfigError (E-ID-34) on one of another format or with other fields."""
        form = raw.get("format") if isinstance(raw, dict) else None
        if form != FORMAT:
            raise ConfigError(
                "E-ID-34",
                f"expected a card of the format {FORMAT}, found {str(form)[:60]!r}: read it with the version that "
                "wrote it",
            )
        try:
            card = structure(cls, raw, "card")
        except ConversionError as error:
            raise ConfigError("E-ID-34", f"{error}: read the card with the version that wrote it") from error
        card.require_possible()
        return card

    def require_possible(self) -> None:
        """Raise ConfigError (E-ID-34) on impossible numbers, since a lead can sign anything."""
        r, p, n = self.results, self.privacy, len(self.classes)
        others = [figure.share for figure in r.others if figure.percent]
        shares = [r.accuracy, r.balanced, r.best, *(c.recognised for c in self.classes), *others]
        parts = (*(c.specificity for c in self.classes), r.macro_auc_low, r.macro_auc_high, r.calibration_error)
        ranges = (*((c.auc_low, c.auc_high) for c in self.classes), (r.macro_auc_low, r.macro_auc_high))
        of_classes = (v for c in self.classes for v in (c.test_examples, c.trained_at))
        tables = (*r.confusion, *r.labels)
        counts = [r.test_examples, *of_classes, *(k for row in tables for k in row)]
        wrong = {
            "a share from 0 to 1 within its interval": not all(s.possible for s in shares),
            "a number from 0 to 1": not all(v is None or 0 <= v <= 1 for v in (*parts, r.level_of_chance)),
            "both ends of a range, in order": not all(
                low is high is None or (low is not None and high is not None and low <= high) for low, high in ranges
            ),
            "counts of 0 or more": not all(k is None or k >= 0 for k in (*counts, *(h.rounds for h in self.hospitals))),
            "a confusion matrix over its classes": r.confusion != ()
            and (len(r.confusion) != n or any(len(row) != n for row in r.confusion)),
            "counts for each of its labels": r.labels != () and len(r.labels) != n,
            "bins of confidence": not all(
                0 <= right <= of < math.inf and 0 <= sure <= of * (1 + 1e-6) for of, right, sure in r.reliability
            ),
            "a temperature above 0": not all(
                t is None or 0 < t < math.inf for t in (r.temperature, self.model.temperature)
            ),
            "possible survey answers": self.survey is not None and not self.survey.possible,
            "an epsilon above 0 with a delta from 0 to 1": (p.epsilon is None) != (p.delta is None)
            or (p.epsilon is not None and p.delta is not None and not (p.epsilon > 0 and 0 < p.delta < 1)),
        }
        for expected, broken in wrong.items():
            if broken:
                raise ConfigError("E-ID-34", f"expected {expected}, found something else: do not rely on this card")


def stated(text: str, what: str) -> str:
    """Return a lead's statement without surrounding blanks; raises ConfigError (E-CFG-02) unless it is one short line.

    what: the option, for the message.
    """
    line = text.strip()
    if len(line) > MAX_TEXT_CHARS or not line.isprintable():
        raise ConfigError(
            "E-CFG-02",
            f"expected {what} of at most {MAX_TEXT_CHARS} visible characters on one line, found {len(line)}: shorten "
            "it, and remove line breaks",
        )
    return line
