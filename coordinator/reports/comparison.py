"""Several runs side by side: how their configurations differ, what they reached, and what makes them incomparable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.reports.curves import Curve, by_class, curves
from fl_core.converter import ConversionError, parse_json, shown
from fl_core.errors import ConfigError, ProtocolError
from privacy.reports.uncertainty import NOTHING, Estimate
from protos.consilium.v1 import federation_pb2 as pb

MOST_RUNS = 20
_LEVELS = 20
_GROUPS = ("method", "model", "data", "federation", "privacy", "aggregator")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs. configuration: its keys as the command line names them, with values as text.

    metrics: what its manifest has evaluations measure.
    """

    info: pb.RunInfo
    configuration: Mapping[str, str]
    members: tuple[str, ...]
    classes: tuple[str, ...]
    curves: Mapping[str, Curve]
    by_class: Mapping[str, Estimate]
    metrics: str

    @property
    def id(self) -> str:
        return self.info.run_id

    @classmethod
    def of(cls, detail: pb.RunDetail) -> ComparedRun:
        """Read a run; raises ProtocolError (E-WIRE-06) on a configuration or a manifest that is none."""
        manifest = _mapping(detail.manifest_json, "manifest")
        schema = manifest.get("schema")
        classes = _texts(schema.get("classes") if isinstance(schema, dict) else None)
        listed = manifest.get("members")
        members = [m.get("name") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        start = manifest.get("start")
        extra = {"software": str(manifest.get("software", ""))}
        if isinstance(start, dict):
            extra["--from"] = f"{start.get('run')} after round {start.get('rounds')}"
        newest = [curve.values[-1] for curve in by_class(detail.rounds[-1:])]
        return cls(
            detail.info,
            flatten(_mapping(detail.spec_json, "configuration")) | extra,
            _texts(members),
            classes,
            curves(detail.rounds),
            dict(zip(classes, newest, strict=False)),
            str(manifest.get("metrics", "")),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs in the order in which they were named.

    differences: the keys in which they differ, with a value for each run, None where a run has no such key
    notes: why their scores may not be held against each other.
    """

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[str | None, ...]]
    notes: tuple[str, ...]

    @property
    def measures(self) -> list[str]:
        """Name the measures that any of them has."""
        return list(dict.fromkeys(name for run in self.runs for name in run.curves))

    @property
    def classes(self) -> list[str]:
        """Name the classes of which any of them has an accuracy."""
        named = [name for run in self.runs for name, value in run.by_class.items() if value != NOTHING]
        return list(dict.fromkeys(named))


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare runs; raises ConfigError (E-CFG-02) unless there are 2 to 20 different ones."""
    ids = [run.id for run in runs]
    if not 2 <= len(ids) <= MOST_RUNS or len(set(ids)) < len(ids):
        raise ConfigError(
            "E-CFG-02",
            f"expected 2 to {MOST_RUNS} different runs, found {', '.join(ids[:MOST_RUNS])}: name others",
        )
    keys = sorted({key for run in runs for key in run.configuration})
    values = {key: tuple(run.configuration.get(key) for run in runs) for key in keys}
    return Comparison(tuple(runs), {key: found for key, found in values.items() if len(set(found)) > 1}, _notes(runs))


def flatten(spec: Mapping[str, object]) -> dict[str, str]:
    """Write a configuration as KEY=VALUE does: `method` for the name of that group, `method.mu1` for an option."""
    found: dict[str, str] = {}
    left: list[tuple[str, object, int]] = [(key, value, 1) for key, value in spec.items()]
    while left:
        key, value, level = left.pop()
        if isinstance(value, dict) and value and level < _LEVELS:
            left += [(f"{key}.{name}", inner, level + 1) for name, inner in value.items()]
            continue
        group, _, name = key.rpartition(".")
        found[group if name == "name" and group in _GROUPS else key] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return shown(value)


def _notes(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    notes = []
    if len({run.classes for run in runs}) > 1:
        notes.append("the runs have different classes: their accuracies are of different questions")
    elif len({frozenset(run.members) for run in runs}) > 1:
        notes.append("the runs have different hospitals: their models were measured on different test images")
    if moving := [run.id for run in runs if run.info.state in ("waiting", "running")]:
        notes.append(f"not over yet: {', '.join(moving)}")
    if halted := [f"{run.id} ({run.info.state})" for run in runs if run.info.state in ("paused", "aborted", "failed")]:
        notes.append(f"ended before their last round: {', '.join(halted)}")
    if len({run.info.rounds for run in runs}) > 1:
        notes.append("the runs have different numbers of rounds")
    notes.append("the best of many rounds is chosen on test data; the mean of the last 5 is the safer number")
    return tuple(notes)


def _mapping(text: str, what: str) -> Mapping[str, object]:
    try:
        found = parse_json(text)
    except ConversionError as error:
        raise ProtocolError("E-WIRE-06", f"the {what} of a run: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError("E-WIRE-06", f"expected the {what} of a run, found another value: upgrade the older side")
    return found


def _texts(found: object) -> tuple[str, ...]:
    return tuple(str(each) for each in found) if isinstance(found, list) else ()
