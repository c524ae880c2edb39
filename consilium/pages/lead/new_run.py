"""The forms that start a run: a lead's input becomes the words of a command, and is handled like the command."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from consilium.pages.lead.service_watch import ServiceSnapshot
from consilium.web.site import Parameters
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError
from fl_core.kinds import kind_of
from fl_core.methods import METHODS
from fl_core.suggest import suggest
from fl_core.types.survey import QUESTIONS
from protos.consilium.v1 import federation_pb2 as pb

KINDS = ("survey", "analytic", "training", "evaluation")
OWN = ("folder", "manifest", "table")
"""Data whose classes the hospitals define, so that a run must list them."""
ASKED = ("classes", "images", "patients")
"""Questions that are ticked in a new survey form."""
_TYPED = ("kind", "data", "classes", "rounds", "method", "model", "epsilon", "run", "hospitals", "more")
_CHARS = 2000
_REQUEST = re.compile(r"[0-9a-f]{32}-[a-z]{1,20}")


@dataclass(frozen=True, slots=True)
class ServedData:
    """A data set that online hospitals serve. classes: all that they declare, sorted."""

    name: str
    hospitals: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def shown_classes(self) -> str:
        return ", ".join(self.classes) if self.name in OWN else ""


def served_data(snapshot: ServiceSnapshot) -> Mapping[str, ServedData]:
    """Return the data sets that online hospitals serve, by name."""
    online = [silo for silo in snapshot.silos if silo.state == "online" and silo.data.name]
    return {
        name: ServedData(
            name,
            tuple(sorted(silo.name for silo in online if silo.data.name == name)),
            tuple(
                sorted({c for silo in online if silo.data.name == name for c in silo.data.holds or silo.data.classes})
            ),
        )
        for name in sorted({silo.data.name for silo in online})
    }


def audience_digest(snapshot: ServiceSnapshot) -> str:
    """Return a digest of the online hospitals, so that a form starts runs only at hospitals that it showed."""
    online = sorted([s.name, s.fingerprint, s.data.name] for s in snapshot.silos if s.state == "online")
    return hashlib.sha256(json.dumps(online).encode()).hexdigest()


def form_facts(snapshot: ServiceSnapshot, typed: Parameters) -> Mapping[str, object]:
    """Return the data of the forms. typed: refused input to correct."""
    measured = [run for run in snapshot.runs if run.model_object and kind_of(run.method, run.rounds).trains]
    return {
        "served": list(served_data(snapshot).values()),
        "online": sorted(silo.name for silo in snapshot.silos if silo.state == "online"),
        "runs": [run.run_id for run in measured[:100]],
        "methods": [name for name in METHODS if name != "analytic"],
        "questions": list(QUESTIONS),
        "asked": [name for name in QUESTIONS if typed.get(f"ask-{name}")] if typed.get("kind") == "survey" else ASKED,
        "typed": {name: typed.get(name, "") for name in _TYPED},
        "digest": audience_digest(snapshot),
        "request": secrets.token_hex(16),
    }


def again(form: Parameters) -> str:
    """Return the address of the forms, with the input of one of them."""
    kept = {name: text[:_CHARS] for name, text in form.items() if name in _TYPED or name.startswith("ask-")}
    return f"/new?{urlencode(kept)}#{form.get('kind', '') if form.get('kind') in KINDS else ''}"


def words_of(form: Parameters, served: Mapping[str, ServedData]) -> list[str]:
    """Convert a form's input to the command's words, without the command's name.

    Raises ConfigError: E-CFG-01 on an unknown name, E-CFG-02 on an invalid number or setting.
    """
    kind = _chosen(form, "kind", KINDS)
    words = []
    if kind == "survey":
        words += [name for name in QUESTIONS if form.get(f"ask-{name}") == "yes"]
        if not words:
            raise ConfigError("E-CFG-02", "a survey needs at least one question: tick one")
    elif kind == "analytic":
        words += ["method=analytic"]
    elif kind == "training":
        words += [f"method={_chosen(form, 'method', METHODS)}"]
        words += [f"rounds={_number(form, 'rounds', 1, 10_000):.0f}"]
    if kind != "evaluation":
        words += _data_words(form, served)
    if kind in ("analytic", "training") and form.get("model"):
        words += [f"model={_model(form['model'])}"]
    if kind != "evaluation" and form.get("epsilon"):
        words += ["privacy=dp_record", f"privacy.epsilon={_number(form, 'epsilon', 0, 1e6):g}"]
    return [*words, *_more(form.get("more", ""))]


def start(client: LeadClient, form: Parameters, snapshot: ServiceSnapshot) -> pb.RunInfo:
    """Submit a form's run. The same form never starts a second run. Raises as the commands."""
    from coordinator.cli.evaluation import evaluation_request, named_hospitals
    from coordinator.cli.survey import survey_request
    from coordinator.lead.submission import RunSubmission, spec_of

    if not _REQUEST.fullmatch(form.get("request", "")):
        raise ConfigError("E-CFG-02", "expected a form of this page, found another: reload the page")
    words, kind = words_of(form, served_data(snapshot)), form["kind"]
    if kind == "evaluation":  # only names of runs: the command would also read a file
        _chosen(form, "run", [run.run_id for run in snapshot.runs])
        names = named_hospitals(form.get("hospitals", "").replace(" ", "") or "all")
        request = evaluation_request(client, form["run"], words, names)
    elif kind == "survey":
        request = survey_request(words)
    else:
        request = RunSubmission.of(spec_of(words))
    return request.submit(client, form["request"])


def command_of(form: Parameters, served: Mapping[str, ServedData]) -> str:
    """Return the command that does the same as a form."""
    verb = {"survey": "survey", "evaluation": f"evaluate {shlex.quote(form.get('run', ''))}"}.get(form["kind"], "run")
    on = f" --on {shlex.quote(form['hospitals'])}" if form["kind"] == "evaluation" and form.get("hospitals") else ""
    return " ".join(["coordinator", verb, *map(shlex.quote, words_of(form, served))]) + on


def _data_words(form: Parameters, served: Mapping[str, ServedData]) -> list[str]:
    from coordinator.config.hydra_config import written

    data = served[_chosen(form, "data", served)]
    typed = [name.strip() for name in form.get("classes", "").split(",") if name.strip()]
    classes = typed or (list(data.classes) if data.name in OWN else [])
    return [f"data={data.name}", *([f"data.classes={written(classes)}"] if classes else [])]


def _chosen(form: Parameters, name: str, of: Collection[str]) -> str:
    value = form.get(name, "")
    if value not in of:
        raise ConfigError("E-CFG-01", f"there is no {name} {value[:40]!r}: {suggest(value[:40], list(of))}")
    return value


def _model(text: str) -> str:
    """Check that this is one word. The command later checks that it names a model."""
    if not re.fullmatch(r"[\w-]{1,80}", text.strip()):
        raise ConfigError(
            "E-CFG-01", f"expected the name of a model, found {text[:40]!r}: list them with coordinator models"
        )
    return text.strip()


def _number(form: Parameters, name: str, low: float, high: float) -> float:
    text = form.get(name, "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (low == 0 and value == 0) or (name == "rounds" and not value.is_integer()):
        raise ConfigError(
            "E-CFG-02", f"{name}: expected a number from {low:g} to {high:g}, found {text[:20]!r}: correct it"
        )
    return value


def _more(text: str) -> Sequence[str]:
    """Split further settings like a shell; raises ConfigError (E-CFG-02) on a word that is not KEY=VALUE."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            "E-CFG-02", f"expected settings like train.lr=0.01, found an open quote ({error}): close it"
        ) from error
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise ConfigError("E-CFG-02", f"expected settings like train.lr=0.01, found {word[:40]!r}: correct it")
    return words
