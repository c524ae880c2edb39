"""Predictions as CSV, as JSON, and for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from consilium.model.calibration import ANSWERS, CalibrationFacts
from consilium.model.predictor import ClassTally, LabelSet, Prediction, Predictor, Tally
from fl_core.errors import ConfigError
from service_core.console import TextTable, printable
from service_core.storage.private_files import replace_file

SUFFIXES = (".csv", ".json")
_FORMULA = ("=", "+", "-", "@", "\t")
HEAD = ("example", "answer", "probability", "set", "note")
CANNOT_TELL = "cannot tell whether it belongs to none of the classes"


def check_out(out: Sequence[Path]) -> None:
    """Raise ConfigError (E-CFG-02) unless each file is CSV or JSON in an existing folder. Call before computing."""
    for file in out:
        if file.suffix.lower() not in SUFFIXES:
            raise ConfigError("E-CFG-02", f"--out: expected a file ending in .csv or .json, found {file}: rename it")
        if not file.parent.is_dir():
            raise ConfigError("E-CFG-02", f"--out: there is no folder {file.parent}: create it")


def document(predictor: Predictor, predictions: Sequence[Prediction], counted: Tally) -> dict[str, object]:
    """Return all results for JSON. Probabilities are in the order of the classes."""
    facts, calibration = predictor.model.facts, predictor.calibration
    return {
        "model": {
            "run": facts.run,
            "sha256": predictor.model.sha256,
            "model_digest": facts.model_digest,
            "manifest_digest": facts.manifest_digest,
            "classes": list(facts.classes),
            "multi_label": facts.multi_label,
            "untaught": list(facts.untaught),
        },
        "preprocessing": facts.preprocessing.sentence(),
        "temperature": predictor.temperature,
        "calibration": None if calibration is None else asdict(calibration.facts),
        "predictions": [_entry(p) for p in predictions],
        "by_class": {name: asdict(tally) for name, tally in counted.classes.items()},
        "in_all": asdict(counted.whole) if counted.classes else None,
    }


def _entry(found: Prediction) -> Mapping[str, object]:
    return {
        "example": found.name,
        "answer": found.answer_text or None,
        "class": None if found.right else found.answer or None,
        "labels": list(found.labels) if found.right else None,
        "probabilities": list(found.probabilities) or None,
        "set": None if found.set is None else list(found.set),
        "sets": dict(found.sets) or None,
        "none_of_the_classes": found.unknown,
        "label": found.label or None,
        "problem": found.problem or None,
    }


def csv_text(predictions: Sequence[Prediction], classes: Sequence[str]) -> str:
    """Return CSV with a row per example. Cells that a spreadsheet would read as a formula get a leading apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("example", "answer", "class", "set", "none_of_the_classes", "label", "problem")
    writer.writerow([*names, *(_cell(f"p({c})") for c in classes)])
    for p in predictions:
        unknown = p.unknown if p.unknown is None else str(p.unknown).lower()
        chosen = _labels_said(p.sets) if p.sets else None if p.set is None else "; ".join(p.set)
        cells = (p.name, p.answer_text, p.answer, chosen, unknown, p.label, p.problem)
        shares = [f"{share:.9g}" for share in p.probabilities] or [""] * len(classes)
        writer.writerow([*(_cell(v or "") for v in cells), *shares])
    return text.getvalue()


def _labels_said(sets: Mapping[str, LabelSet]) -> str:
    return "; ".join(f"{label}: {answer}" for label, answer in sets.items())


def _cell(text: str) -> str:
    shown = printable(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def write(file: Path, predictions: Sequence[Prediction], whole: Mapping[str, object], classes: Sequence[str]) -> None:
    """Write a CSV or JSON file with mode 0600; raises ConfigError (E-CFG-02) if it cannot be written."""
    text = csv_text(predictions, classes) if file.suffix.lower() == ".csv" else json.dumps(whole, indent=1) + "\n"
    try:
        replace_file(file, text.encode(), 0o600)
    except OSError as error:
        raise ConfigError(
            "E-CFG-02",
            f"--out: expected a writable file, found {file} ({error.strerror}): choose another file",
        ) from error


def table(predictions: Sequence[Prediction], untaught: Collection[str] = ()) -> TextTable:
    """Return a row per example. untaught: as in `ModelFileFacts`; answers among these classes get a note."""
    return TextTable("predictions", HEAD, [_row(p, untaught) for p in predictions], headings=True)


def _row(found: Prediction, untaught: Collection[str]) -> tuple[str, ...]:
    if found.problem:
        return found.name, "-", "-", "-", found.problem
    chosen = "-" if found.set is None else ", ".join(found.set) or "empty"
    chosen = _labels_said(found.sets) or chosen
    note = (
        f"nearest: {found.answer}"
        if found.unknown
        else CANNOT_TELL
        if found.set is not None and found.unknown is None
        else ""
    )
    if wrong := found.answers_among(untaught):
        note = "; ".join([*filter(None, [note]), f"not trained: no hospital had {', '.join(wrong)}"])
    shares = [f"{100 * p:.1f} %" for p in (found.probabilities if found.right else [max(found.probabilities)])]
    return found.name, found.answer_text, ", ".join(shares), chosen, note


def tally_table(found: Tally, calibrated: bool) -> TextTable:
    """Return a row per class: how many answers were right, of examples with known labels."""
    head = ("class", "examples", "right", *(("in the set", "answers per set", "flagged") if calibrated else ()))
    rows = [*found.classes.items(), ("all", found.whole)]
    return TextTable("against the labels", head, [(name, *_counts(t, calibrated)) for name, t in rows], headings=True)


def _counts(found: ClassTally, calibrated: bool) -> Iterator[str]:
    yield str(found.examples)
    yield _share(found.right, found.examples)
    if calibrated:
        yield _share(found.covered, found.examples)
        yield f"{found.in_sets / found.examples:.2f}"
        yield _share(found.flagged, found.judged)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


WORDS = {
    "own": "its own examples",
    "together": "all classes with fewer than 49 examples, together",
    "all": "all classes: no guarantee for this class alone",
}


def promise(facts: CalibrationFacts, those: str) -> str:
    """State the guarantee of the sets, for examples like `those`."""
    share = f"{100 * facts.coverage:g} %"
    if facts.multi_label:
        return f"contain the right answer on a label for {share} of records like {those}"
    return f"contain the right class for {share} of images like {those}"


def calibration_table(facts: CalibrationFacts) -> TextTable:
    head = ("class", "to fit", "held out", "in sets from p", "quantile from", "none of the classes")
    several = facts.multi_label
    names = [f"{name}: {answer}" for name in facts.classes for answer in ANSWERS] if several else facts.classes
    rows = [
        (name, str(a), str(b), f"{1 - q:.4f}", WORDS[source], "can be decided" if judged else "too few images")
        for name, a, b, q, source, judged in zip(
            names, facts.fitted, facts.held, facts.quantiles, facts.sources, facts.judged, strict=True
        )
    ]
    if several:  # nothing is flagged
        return TextTable("calibration", ("label", *head[1:-1]), [row[:-1] for row in rows], headings=True)
    return TextTable("calibration", head, rows, headings=True)
