"""`silo audit`: a hospital attacks training on its own records before it takes part.

It opens no connection. Its results are about single records, and stay at the hospital.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_core.errors import ConfigError, RefusedError
from fl_core.errors.extras import require
from fl_core.suggest import suggest
from service_core.command_line import Json, command
from service_core.console import KeyValues, print_json, show
from silo.cli.options import DataRootOption, label_space

if TYPE_CHECKING:
    from consilium.audit.runner import AuditSettings, AuditVerdict
    from consilium.audit.target import AuditTarget

PIXELS = 32
"""Default side of the images, unless the data fix it. Models memorise small images sooner."""
SUMMARY = "audit.json"


@command
def audit(
    data: Annotated[str, typer.Option("--data", help="Data to attack, as for `silo serve`.", metavar="REF")],
    out: Annotated[Path, typer.Option("--out", help="A new or empty folder for the plots and audit.json.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="The epsilon that is claimed and tested.")] = 8.0,
    delta: Annotated[
        float, typer.Option("--delta", help="The delta that is claimed; less than 1 / (10 x number of records).")
    ] = 1e-5,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Audit to run; may be repeated. Default: all.", metavar="AUDIT")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="How often each audit is repeated.")] = 1,
    image_size: Annotated[
        int | None,
        typer.Option(
            "--image-size",
            help="Image width and height in pixels. Default: the data set's own size if it is fixed, otherwise "
            f"{PIXELS}.",
        ),
    ] = None,
    data_root: DataRootOption = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="The classes, if the data do not define them.", metavar="A,B,...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack training on this hospital's images, with and without privacy. The exit status is 1 if a claim is refuted.

    First a simulated coordinator that chooses the model attacks artificial records. Then four attacks use this
    hospital's images. Planted images give a lower bound on epsilon. The others measure whether losses reveal the images
    used for training, whether updates reveal classes, and whether prototypes reveal images. If no attack refutes a
    claim, that does not prove it. Nothing is sent or charged. Keep the folder at this hospital.
    """
    from consilium.audit.runner import AUDITS, AuditSettings

    chosen = list(dict.fromkeys(only or AUDITS))
    for name in chosen:
        if name not in AUDITS:
            raise ConfigError("E-CFG-02", f"--only: there is no audit {name!r}: {suggest(name, AUDITS)}")
    if seeds < 1:
        raise ConfigError("E-CFG-02", f"--seeds: expected at least 1, found {seeds}: raise it")
    if not (0 < epsilon < math.inf and 0 < delta < 1e-3):
        raise ConfigError(
            "E-PRIV-20",
            f"expected a finite epsilon > 0 and 0 < delta < 0.001, found {epsilon} and {delta}: correct them",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("E-CFG-02", f"--out: expected a new or empty folder, found files in {out}: choose another")
    require("matplotlib", "audit", "the pictures of an audit")
    target = _target(data, data_root, classes, image_size)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    out.chmod(0o700)
    setting = AuditSettings((epsilon,), delta, seeds, demanding=False, seeded=False)
    verdicts = _audited(target, setting, chosen, out, quiet=as_json)
    if as_json:
        print_json(json.loads((out / SUMMARY).read_text(encoding="utf-8")))
    elif all(v.holds is not False for v in verdicts):
        show(KeyValues([("written to", str(out)), ("keep it here", "it describes single records of this hospital")]))
    if refuted := [v.audit for v in verdicts if v.holds is False]:
        raise RefusedError(
            "E-PRIV-28",
            f"the claim was refuted by these attacks: {', '.join(refuted)}. Do not take part in private runs with "
            f"this installation, and report {out / SUMMARY} without its plots",
        )


def _target(data: str, root: Path | None, classes: str | None, image_size: int | None) -> AuditTarget:
    from consilium.audit.target import AuditTarget
    from fl_core import datasets
    from fl_core.extensions import loading

    data = loading.load_of_reference(data)
    if image_size is None and datasets.parse(data).source not in datasets.FIXED:
        image_size = PIXELS
    return AuditTarget.of(datasets.load(data, datasets.DataRequest(label_space(classes), image_size), data_root=root))


def _audited(
    target: AuditTarget, setting: AuditSettings, chosen: Sequence[str], place: Path, quiet: bool
) -> list[AuditVerdict]:
    from consilium.audit.runner import AUDITS, minutes_left, save

    verdicts: list[AuditVerdict] = []
    before = os.umask(0o077)
    try:
        about = {
            "data": target.name,
            "records": len(target.y),
            "classes": len(target.classes),
            "unit": "record",
            "epsilon": setting.epsilons[0],
            "delta": setting.delta,
            "seeds": setting.seeds,
        }
        save(place / SUMMARY, "about", about)
        began = time.monotonic()
        for k, name in enumerate(chosen):
            if not quiet:
                left = minutes_left(chosen[:k], chosen[k:], time.monotonic() - began)
                typer.echo(f"{name} ({k + 1} of {len(chosen)}), {_time_left(left)}", err=True)
            outcome = AUDITS[name](target, setting, place)
            save(place / SUMMARY, name, outcome.json())
            verdicts += outcome.verdicts
            if not quiet:
                sys.stdout.write("".join(f"{v.line()}\n" for v in outcome.verdicts))
                sys.stdout.flush()
    finally:
        os.umask(before)
    return verdicts


def _time_left(minutes: float | None) -> str:
    if minutes is None:
        return "some minutes in total"
    return f"about {math.ceil(minutes)} min left" if minutes > 1 else "less than a minute left"
