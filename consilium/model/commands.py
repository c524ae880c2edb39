"""`consilium calibrate`, `predict` and `page`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.web.command import Bind, Browser, serve_until_stopped
from fl_core.errors import ConfigError
from fl_core.types.class_coverage import listed
from service_core.command_line import Depends, Json, command
from service_core.console import CommandResult, KeyValues, TextTable, pluralize

if TYPE_CHECKING:
    from consilium.model.inputs import Inputs
    from consilium.model.model_file import LoadedModel
    from consilium.model.predictor import Predictor

Data = Annotated[
    str | None, typer.Option("--data", help="Labelled data, named as for `silo serve`: folder:PATH, table:FILE.")
]
Split = Annotated[str, typer.Option("--split", help="Which part of --data: train, test or all.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of named data sets. Default: $CONSILIUM_DATA_ROOT.")
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="The calibration that `calibrate` wrote. Default: the file in the model's folder, if there is one.",
    ),
]
FALSE_FLAGS = 0.1
MAX_SHOWN = 200
"""Number of rows to print; files contain all rows."""


ModelFile = Annotated[Path, typer.Argument(help="The .safetensors file of `coordinator export`.", metavar="MODEL")]


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """A model file, and the card or digest to check it against."""

    file: Path
    card: Path | None = None
    sha256: str | None = None
    extensions: Sequence[str] = ()

    def load(self) -> LoadedModel:
        from consilium.model import model_file
        from fl_core.extensions import loading

        loading.load_distributions(list(self.extensions))
        return model_file.load(self.file, self.card, self.sha256)


def _named(
    model: ModelFile,
    card: Annotated[
        Path | None, typer.Option("--card", help="The card of the model file. Default: MODEL.md in its folder.")
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option("--sha256", help="SHA-256 of the file, if it has no card (for example, after a simulation)."),
    ] = None,
    extension: Annotated[
        list[str] | None,
        typer.Option("--extension", help="An installed package with the method or model that the file names."),
    ] = None,
) -> ModelArguments:
    return ModelArguments(model, card, sha256, extension or ())


Named = Annotated[ModelArguments, Depends(_named)]


@command
def predict(
    model: ModelFile,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Images, DICOM files, folders with images, or a table.", metavar="INPUT..."),
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option("--out", help="Write predictions to FILE.csv or FILE.json. May be repeated.")
    ] = None,
    sr: Annotated[
        Path | None,
        typer.Option(
            "--sr", metavar="FOLDER", help="Write a DICOM Structured Report for each DICOM image into this folder."
        ),
    ] = None,
    calibration: CalibrationFile = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Show uncalibrated probabilities, as the hospitals' evaluation uses them.")
    ] = False,
    data: Data = None,
    split: Split = "test",
    data_root: DataRoot = None,
    *,
    named: Named,
) -> CommandResult:
    """Classify images or rows with an exported model. The exit status is 2 if any could not be classified.

    Shows probabilities and, with a calibration, a set of likely classes and whether an image belongs to none of the
    classes. With labelled data (--data) it also shows how often the answers were right, by class.
    """
    from consilium.model import output, structured_report
    from consilium.model.predictor import Predictor, tally

    output.check_out(out or ())
    if sr is not None:
        structured_report.check(sr)
    loaded = named.load()
    predictor = Predictor.of(model, loaded, calibration, raw)
    examples = _examples(loaded, inputs or (), data, split, data_root)
    predictions = predictor.predictions(examples)
    tallied = tally(predictions, loaded.facts.classes)
    whole = output.document(predictor, predictions, tallied)
    reports = None if sr is None else structured_report.write(sr, predictor, predictions)
    if reports is not None:
        files = {name: str(file) for name, file in reports.files.items()}
        whole["structured_reports"] = {"files": files, "problems": reports.problems}
    for file in out or ():
        output.write(file, predictions, whole, loaded.facts.classes)
    failed = sum(bool(p.problem) for p in predictions)
    shown: list[KeyValues | TextTable | str] = [KeyValues(_about(predictor))]
    if not out:
        shown.append(output.table(predictions[:MAX_SHOWN], loaded.facts.untaught))
        if len(predictions) > MAX_SHOWN:
            shown.append(f"and {len(predictions) - MAX_SHOWN} more: write all of them with --out")
    if tallied.classes:
        shown.append(output.tally_table(tallied, predictor.calibration is not None))
    shown += [f"wrote {file}" for file in out or ()]
    notes = [*examples.notes, *_warnings(predictor, examples)]
    if reports is not None:
        shown.append(f"wrote {pluralize(len(reports.files), 'structured report')} to {sr}")
        notes += [f"{name}: no structured report: {why}" for name, why in reports.problems.items()]
        if reports.not_dicom:
            notes.append(f"not DICOM, so without a structured report: {reports.not_dicom} of {len(predictions)}")
    if failed:
        notes.append(f"{failed} of {len(predictions)} could not be classified: see their notes")
    return CommandResult(whole, shown, notes, status=2 if failed or (reports and reports.problems) else 0)


@command
def calibrate(
    model: ModelFile,
    data: Annotated[
        str, typer.Option("--data", help="Labelled images that the model was not trained on: folder:PATH.")
    ],
    split: Split = "test",
    coverage: Annotated[
        float, typer.Option(help="Target coverage: the share of prediction sets that must contain the true class.")
    ] = 0.9,
    false_flags: Annotated[
        float | None,
        typer.Option(
            "--false-flags",
            help="Share of images of known classes that may be reported as none of the classes. Default: 0.1. Not for "
            "models that answer several labels.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. Default: in the model's folder, where `predict` finds it."),
    ] = None,
    data_root: DataRoot = None,
    *,
    named: Named,
) -> CommandResult:
    """Calibrate a model with labelled images of this hospital: probabilities, class sets, test for unknown classes.

    The file contains class means of features, but no image. Use it only at this hospital: its guarantees hold for
    images like those in the calibration.
    """
    from consilium.model import calibration, output
    from consilium.model.predictor import calibrated
    from service_core.storage.private_files import replace_file

    calibration.check_shares(coverage, false_flags)
    loaded = named.load()
    examples = _examples(loaded, (), data, split, data_root)
    several = loaded.facts.multi_label
    if several and false_flags is not None:
        raise ConfigError(
            "E-CFG-08",
            "--false-flags is not for a multi-label model, which never reports `none of the classes`: leave it out",
        )
    made = calibrated(loaded, examples, coverage, FALSE_FLAGS if false_flags is None else false_flags)
    file = out or calibration.calibration_path(model)
    replace_file(file, calibration.to_bytes(made), 0o600)
    facts = made.facts
    rows = [("temperature", f"{facts.temperature:.4g}"), ("sets", output.promise(facts, "these"))]
    if facts.false_flags is not None:
        flagged = f"reported for at most {100 * facts.false_flags:g} % of images of known classes like these"
        rows.append(("none of them", flagged))
    what = ("answers about labels", "the temperature") if several else ("images", "temperature and class means")
    rows.append((what[0], f"{sum(facts.fitted)} to fit {what[1]}, {sum(facts.held)} held out"))
    rows.append(("file", str(file)))
    value = {"file": str(file), **{name: getattr(facts, name) for name in facts.__slots__}}
    return CommandResult(value, [KeyValues(rows), output.calibration_table(facts)])


@command
def page(
    model: ModelFile,
    calibration: CalibrationFile = None,
    bind: Bind = None,
    browser: Browser = True,
    as_json: Json = False,
    *,
    named: Named,
) -> None:
    """Show a page that classifies the images you drop on it, until Ctrl-C. Only you, on this machine, can open it.

    The link works once, within ten minutes; the file always contains a new link. Images are deleted as soon as they are
    classified, and the answers when the command ends.
    """
    from consilium.model.page.site import PredictionPage
    from consilium.model.predictor import Predictor

    loaded = named.load()
    if not loaded.facts.preprocessing.takes_images:
        raise ConfigError(
            "E-CFG-23", "the page is only for image models, and this model is for other data: use `consilium predict`"
        )
    with tempfile.TemporaryDirectory(prefix="consilium-") as folder:
        shown = PredictionPage(Predictor.of(model, loaded, calibration), Path(folder))
        serve_until_stopped(shown.site(), Path(folder), bind, browser, as_json, lambda facts: [KeyValues(facts)])


def _examples(
    loaded: LoadedModel, paths: Sequence[Path], data: str | None, split: str, data_root: Path | None
) -> Inputs:
    from consilium.model.inputs import from_paths, from_reference
    from fl_core.datasets.image_loader import ImageLoader
    from fl_core.extensions import loading

    if bool(paths) == (data is not None):
        raise ConfigError("E-CFG-02", "expected either INPUT... or --data: give one of them")
    loader = ImageLoader(cache_bytes=0)
    if data is None:
        return from_paths(paths, loaded.facts, loader)
    return from_reference(loading.load_of_reference(data), split, loaded.facts, data_root, loader)


def _about(predictor: Predictor) -> list[tuple[str, str]]:
    from consilium.model import output

    facts, calibration = predictor.model.facts, predictor.calibration
    rows = [("model", f"{facts.run or 'of a simulation'} (SHA-256 {predictor.model.sha256[:16]})")]
    rows.append(("preprocessing", facts.preprocessing.sentence()))
    if calibration is not None:
        rows.append(("probabilities", f"calibrated at this hospital, temperature {predictor.temperature:.4g}"))
        rows.append(("sets", output.promise(calibration.facts, "the calibration's")))
    elif predictor.temperature != 1:
        rows.append(("probabilities", f"temperature {predictor.temperature:.4g}, estimated at export"))
    else:
        how = "of each label, " if facts.multi_label else ""
        rows.append(("probabilities", f"{how}not calibrated (see consilium calibrate)"))
    return rows


def _warnings(predictor: Predictor, examples: Inputs) -> list[str]:
    calibration, untaught = predictor.calibration, predictor.model.facts.untaught
    notes = [f"not trained: no hospital had {listed(untaught)}, so the model cannot recognise them"] if untaught else []
    if calibration is not None and examples.fingerprint and examples.fingerprint == calibration.facts.data:
        notes.append("the model was calibrated with these examples, so they cannot test its sets")
    return notes
