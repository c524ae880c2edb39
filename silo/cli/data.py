"""`silo data`: look at data before it is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fl_core.errors import ConfigError
from fl_core.types.enums import Split
from fl_core.types.records import Schema
from service_core import startup
from service_core.command_line import Json, command
from service_core.console import CommandResult, KeyValues, TextTable, show_reply
from service_core.storage.private_files import write_public
from silo.cli.options import AnyHome, Classes, DataRootOption, SiloHome, grey_window, label_space

if TYPE_CHECKING:
    from fl_core.datasets import CheckReport

data = typer.Typer(no_args_is_help=True, help="Check data before serving it.")
Reference = Annotated[
    str,
    typer.Argument(
        help="The data: digits/hospital2, isic2019/center3, folder:PATH, manifest:FILE.csv or dicomweb:URL?...",
        metavar="REF",
    ),
]


@data.command()
@command
def check(
    reference: Reference,
    data_root: DataRootOption = None,
    classes: Classes = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Window of DICOM grey values as CENTRE,WIDTH, as in the run.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep/--no-deep", help="Decode every image completely, and compare all of them.")
    ] = True,
    write_labels: Annotated[
        bool,
        typer.Option(
            "--write-labels",
            help="Write a labels.toml into the data's folder, with a line to fill in for each label that is not in "
            "--classes.",
        ),
    ] = False,
    as_json: Json = False,
    *,
    home: AnyHome,
) -> None:
    """Look for everything that would stop a run. The exit status is 2 if there is such a problem.

    It finds broken images, bad rows, unknown classes, and the same pixels in train and test. It also lists files that
    are not read, classes without images, and images that are stored twice.
    """
    from fl_core import datasets
    from silo.pacs.mirror import resolved

    local = resolved(home, reference)
    if write_labels:
        show_reply(_labels_written(reference, local, label_space(classes)), as_json)
        return
    report = datasets.check(
        local,
        datasets.DataRequest(label_space(classes), window=grey_window(window)),
        data_root=data_root,
        deep=deep,
    )
    show_reply(_reply(report), as_json)
    report.require_sound()


def _labels_written(reference: str, local: str, classes: Sequence[str] | None) -> CommandResult:
    """Write the table of labels to fill in. local: what reads the data.

    Raises ConfigError: E-CFG-02 without classes or files of the hospital's, E-CFG-08 where there is a table.
    """
    from fl_core import datasets
    from fl_core.datasets import label_dictionary
    from silo.pacs.reference import parse

    place = datasets.parse(local)
    if place.path is None or classes is None:
        raise ConfigError(
            "E-CFG-02",
            "--write-labels needs a folder, a list or a table of this hospital, and --classes (the classes of the "
            "run): give both",
        )
    folder, then = (place.path if place.source == "folder" else place.path.parent), "check again"
    if (listed := parse(reference)) is not None:
        folder, then = listed.table[0].parent, "fetch and check again (silo data fetch)"
    file = folder / label_dictionary.FILE
    report = datasets.check(local)
    totals = [sum(column) for column in zip(*report.counts.values(), strict=True)]
    counts = dict(zip(report.classes, totals, strict=True))
    names = sorted(set(counts) - set(classes))
    if names:
        if file.exists():
            raise ConfigError(
                "E-CFG-08",
                f"{file} exists and is not overwritten: add a line for {', '.join(names[:5])}",
            )
        write_public(file, label_dictionary.to_fill_in(counts, classes).encode())
    records = sum(counts[name] for name in names)
    message = f"wrote {file}: {len(names)} names of {records} records to fill in, then {then}"
    facts = {"file": str(file) if names else None, "names": {name: counts[name] for name in names}, "then": then}
    return CommandResult(facts, [message if names else "every name is a class of the run: nothing to fill in"])


@data.command()
@command
def describe(
    reference: Reference, data_root: DataRootOption = None, classes: Classes = None, *, home: AnyHome
) -> CommandResult:
    """Show shape, classes and counts per split."""
    from fl_core import datasets
    from silo.pacs.mirror import resolved

    reference = resolved(home, reference)
    loaded = datasets.load(reference, datasets.DataRequest(label_space(classes)), data_root=data_root)
    report = datasets.check(reference, datasets.DataRequest(label_space(classes)), data_root=data_root)
    return _reply(report, loaded.schema)


@data.command()
@command
def fetch(reference: Reference, *, home: SiloHome) -> CommandResult:
    """List the images of a PACS, or of a folder with labels in a table, and what is left out.

    New images of a PACS are fetched into the home.

    Run it before the first `data check` or `ledger register`. A running service fetches by itself.
    """
    from privacy.policy_terms import REQUIRED
    from silo.admission import policy_in_force
    from silo.cancellation import CancelToken
    from silo.pacs.mirror import Mirror

    startup.end_on_interrupt()
    caged = lambda: policy_in_force.in_force(home).worker.isolation == REQUIRED  # noqa: E731
    say = lambda told: typer.echo(told.text, err=True) if told.event == "queue" else None  # noqa: E731
    if (mirror := Mirror.of(home.make(), reference, emit=say, patient=False, caged=caged)) is None:
        raise ConfigError(
            "E-CFG-01",
            f"expected dicomweb:URL?... or folder:PATH?labels=..., found {reference[:80]!r}: other data need no "
            "`fetch`",
        )
    with home.locked():
        listed = mirror.refresh(CancelToken(), lambda *_: None)
    facts = {**listed._asdict(), "left_out": dict(listed.left_out), "file": str(listed.file)}
    shown = [(mirror.reference.public, part) for part in listed.sentence().split("; ")]
    return CommandResult(facts, [KeyValues(shown)])


UNNAMED = (
    "none: there are no patient IDs, so each record counts as one patient. Put the ID in the `group` column of the "
    "image list, or in the column declared as `group` in the table's schema"
)


def _reply(report: CheckReport, schema: Schema | None = None) -> CommandResult:
    return CommandResult(report_json(report, schema), _shown(report, schema))


def report_json(report: CheckReport, schema: Schema | None = None) -> Mapping[str, object]:
    return {
        "origin": report.origin,
        "classes": list(report.classes),
        "shape": None if schema is None else list(schema.shape),
        "counts": {split.value: list(counts) for split, counts in report.counts.items()},
        "groups": report.groups,
        "fingerprint": report.fingerprint,
        "notes": list(report.notes),
        "problems": [
            {"code": p.code, "what": p.what, "count": p.count, "first": list(p.first), "remedy": p.remedy}
            for p in report.problems
        ],
        "unread": dict(report.unread),
        "sizes": [{"width": w, "height": h, "images": n} for (w, h), n in report.sizes.items()],
    }


def _shown(report: CheckReport, schema: Schema | None) -> Iterator[KeyValues | TextTable]:
    facts = [("data", report.origin)]
    if schema is not None:
        facts.append(("shape", " x ".join(map(str, schema.shape))))
    facts.append(("groups", UNNAMED if report.groups is None else str(report.groups)))
    facts.append(("fingerprint", report.fingerprint))
    facts += [("note", note) for note in report.notes]
    if report.unread:
        kinds = ", ".join(f"{kind}: {n}" for kind, n in report.unread.items())
        facts.append(("not read", f"{sum(report.unread.values())} files ({kinds})"))
    yield KeyValues(facts)
    for problem in report.problems:
        more = [f"and {problem.names - len(problem.first)} more"] if problem.names > len(problem.first) else []
        where = [(problem.code, name) for name in (*problem.first, *more)]
        yield TextTable(f"{problem.what}: {problem.count}. {problem.remedy}", ("code", "where"), where)
    train, test = (report.counts.get(split, (0,) * len(report.classes)) for split in (Split.TRAIN, Split.TEST))
    rows = [(c, str(a), str(b)) for c, a, b in zip(report.classes, train, test, strict=True)]
    yield TextTable("Examples", ("class", "train", "test"), [*rows, ("all", str(sum(train)), str(sum(test)))])
