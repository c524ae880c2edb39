"""The questions that a survey may ask about hospitals' records: by name, with public bins.

Every question divides records into cells that are fixed before any record is read: a record has a share in each cell of
a question, 1 in total. Ranges are fixed here, so no smallest and no largest value is ever released; quantiles are read
from the bins. There are no expressions: only questions in this table can be asked.

| question  | of each record                                                     | range, bin (least bin)      |
|-----------|--------------------------------------------------------------------|-----------------------------|
| classes   | its class, of the run's label space                                |                             |
| images    | whether it is for training or for test                             |                             |
| patients  | the number of images of its patient                                |                             |
| sizes     | the shorter side of the stored image                               | 0 to 4096 pixels, 256 (64)  |
| spacing   | the pixel spacing stated in DICOM                                  | 0 to 2000 um, 100 (50)      |
| bits      | bits of a stored value                                             |                             |
| makes     | the manufacturer stated in DICOM, from a list                      |                             |
| missing   | the number of missing declared values of a table's row             |                             |
| intensity | the shares of its pixels, by grey value of 8 bits                  | 0 to 256, 16 (8)            |
| ages      | a table's column `age`, in years                                   | 0 to 120 years, 10 (5)      |
| sex       | a table's column `sex`                                             |                             |

Reading a question refuses bins narrower than the least one, at the coordinator and at the hospital.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from blake3 import blake3

from fl_core.converter import shown
from fl_core.errors import ConfigError
from fl_core.suggest import suggest

MIN_PATIENTS = 10
"""Smallest number of patients that may leave without noise; no policy can lower it."""
NOT_STATED = "not stated"
MAKES = ("Siemens", "GE", "Philips", "Canon", "Fujifilm", "Hologic", "Agfa", "Samsung", "another")
AGE_COLUMNS, SEX_COLUMNS = ("age", "age_years", "age_approx", "patient_age"), ("sex", "gender")


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal bins of a range, and a cell above it; width: the usual one   least: the narrowest that is answered."""

    low: int
    high: int
    width: int
    least: int

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that divide the range and are made of least bins."""
        span = self.high - self.low
        return tuple(w for w in range(self.least, span + 1, self.least) if span % w == 0)


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """A kind of question. cells: names of fixed cells; empty for bins and classes."""

    title: str
    cells: tuple[str, ...] = ()
    bins: Bins | None = None
    unit: str = ""


QUESTIONS: Mapping[str, QuestionKind] = {
    "classes": QuestionKind("Class"),
    "images": QuestionKind("Images", ("training", "test")),
    "patients": QuestionKind("Images per patient", ("1", "2", "3 to 4", "5 to 8", "9 to 16", "17 or more")),
    "sizes": QuestionKind("Shorter side", bins=Bins(0, 4096, 256, 64), unit="pixels"),
    "spacing": QuestionKind("Pixel spacing", bins=Bins(0, 2000, 100, 50), unit="um"),
    "bits": QuestionKind("Bits per value", ("1 to 8", "9 to 10", "11 to 12", "13 to 16", NOT_STATED)),
    "makes": QuestionKind("Device make", (*MAKES, NOT_STATED)),
    "missing": QuestionKind("Missing values per row", ("0", "1", "2", "3 to 5", "6 or more", NOT_STATED)),
    "intensity": QuestionKind("Pixels by grey value", bins=Bins(0, 256, 16, 8), unit="of 8 bits"),
    "ages": QuestionKind("Age", bins=Bins(0, 120, 10, 5), unit="years"),
    "sex": QuestionKind("Sex", ("female", "male", "another", NOT_STATED)),
}
_WORD = re.compile(r"([a-z]{1,20})(?::(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class SurveyQuestion:
    """One question. width: of its bins, 0 without bins.

    Raises ConfigError: E-CFG-01 on another name, E-CFG-02 on bins that are too narrow or do not divide the range.
    """

    name: str
    width: int = 0

    def __post_init__(self) -> None:
        if self.name not in QUESTIONS:
            raise ConfigError("E-CFG-01", f"there is no question {shown(self.name)}: {suggest(self.name, QUESTIONS)}")
        bins = self.kind.bins
        if bins is None and self.width:
            raise ConfigError("E-CFG-02", f"{self.name}: expected no width, since its bins are fixed: leave it out")
        if bins is not None and self.width not in bins.widths:
            raise ConfigError(
                "E-CFG-02",
                f"{self.name}: a bin width of {self.width} {self.kind.unit} is not allowed; choose "
                f"{' or '.join(map(str, bins.widths))}",
            )

    @classmethod
    def of(cls, word: str) -> SurveyQuestion:
        """Read `name` or `name:width`; raises as the class."""
        match = _WORD.fullmatch(word.strip())
        if match is None:
            raise ConfigError("E-CFG-01", f"expected a question like classes or ages:10, found {shown(word)}: correct")
        kind = QUESTIONS.get(match[1])
        usual = kind.bins.width if kind is not None and kind.bins is not None else 0
        return cls(match[1], int(match[2]) if match[2] else usual)

    def __str__(self) -> str:
        return f"{self.name}:{self.width}" if self.width else self.name

    @property
    def kind(self) -> QuestionKind:
        return QUESTIONS[self.name]

    def count(self, n_classes: int) -> int:
        """Return the number of cells."""
        return n_classes if self.name == "classes" else len(self.cells(()))

    def cells(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Name the cells, in order. classes: the label space."""
        bins = self.kind.bins
        if self.name == "classes":
            return tuple(classes)
        if bins is None:
            return self.kind.cells
        edges = range(bins.low, bins.high, self.width)
        return (*(f"{low} to {low + self.width}" for low in edges), f"{bins.high} or more", NOT_STATED)

    @property
    def least(self) -> SurveyQuestion:
        """The question with the narrowest bins that make up its own; shares of pixels are rounded in each."""
        bins = self.kind.bins
        return self if bins is None or self.name == "intensity" else SurveyQuestion(self.name, bins.least)

    def within(self, classes: Sequence[str]) -> dict[str, str]:
        """Map each cell of `least` to the cell of this question that contains it."""
        least, cells = self.least.cells(classes), self.cells(classes)
        times, ends = (self.width // self.least.width, 2) if self.width else (1, 0)  # two cells are no bins
        return {cell: cells[k // times if k < len(least) - ends else k - len(least)] for k, cell in enumerate(least)}

    def edges(self) -> tuple[int, ...]:
        """Return the ends of its bins; empty without bins."""
        bins = self.kind.bins
        return () if bins is None else tuple(range(bins.low, bins.high + 1, self.width))


def parse_questions(text: str) -> tuple[SurveyQuestion, ...]:
    """Read questions separated by commas, and sort them in the table's order.

    Raises ConfigError: E-CFG-02 if there are none, or one is repeated; as `SurveyQuestion.of`.
    """
    questions = [SurveyQuestion.of(word) for word in text.split(",")] if text.strip() else []
    names = [question.name for question in questions]
    if not questions or len(set(names)) != len(names):
        what = "none" if not questions else f"{max(names, key=names.count)!r} twice"
        raise ConfigError(
            "E-CFG-02", f"expected questions, each once, of {', '.join(QUESTIONS)}, found {what}: correct the list"
        )
    return tuple(sorted(questions, key=lambda question: list(QUESTIONS).index(question.name)))


def document(questions: Sequence[SurveyQuestion]) -> str:
    """Return the question document: canonical JSON, equal for equal questions."""
    return json.dumps({"questions": [asdict(q) for q in questions]}, sort_keys=True, separators=(",", ":"))


def document_digest(questions: Sequence[SurveyQuestion]) -> str:
    """Return the BLAKE3 of a question document, in hex."""
    return blake3(document(questions).encode()).hexdigest()


# ---- what comes back -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """The numbers of one cell, summed over the hospitals that released theirs; None if none did.

    images: only in answers without noise   patients: counts records at hospitals whose data name no patients
    half_width: of the 95 % interval of patients, 0 without noise   held: number of hospitals that suppressed the cell
    unnamed: number of hospitals that counted records.
    """

    name: str
    images: float | None
    patients: float | None
    half_width: float
    held: int
    unnamed: int = 0


@dataclass(frozen=True, slots=True)
class SurveyAnswer:
    """The answer to one question.

    quantiles: the bin of each quantile; empty without bins or numbers   counts: what the patient numbers count:
    patients, records by their name (images, rows), or either, if hospitals differ.
    """

    question: str
    title: str
    unit: str
    cells: tuple[Cell, ...]
    quantiles: Mapping[str, str]
    counts: str = "patients"


def records_word(columns: Sequence[object]) -> str:
    """Return the word for records: rows or images. columns: of a table; empty for images."""
    return "rows" if columns else "images"
