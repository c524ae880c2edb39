"""Runs in the coordinator's store with scores that a test chooses: nobody trains. Some have noise that is larger than
their signal, and their figures are read as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.api.messages import event, round_info, run_info
from coordinator.runs.run_facts import DerivedFacts
from coordinator.storage.records import RunState, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.fake_coordinator import MEMBERS
from tests.support.federations import NAMES, SCHEMA, manifest

SPEC = {"method": {"name": "fedavg"}, "data": {"name": "made-up"}, "rounds": 6, "train": {"lr": 0.1}}
EXAMPLES = (10.0, 20.0, 30.0, 40.0)


def sums(accuracy: float, examples: Sequence[float] = EXAMPLES) -> tuple[float, ...]:
    """Return correct answers per class: those of the first class are wrong as long as others can be right."""
    left, right = accuracy * sum(examples), [0.0]
    for n in examples[1:]:
        right.append(min(n, left))
        left -= right[-1]
    return (left, *right[1:])


def record_run(
    store: CoordinatorStore,
    run_id: str,
    accuracies: Sequence[float],
    *,
    spec: Mapping[str, object] | None = None,
    agreed: RunManifest | None = None,
    missing: Mapping[str, str] | None = None,
    finished: bool = True,
    reason: str = "",
    model: tuple[str, int] = ("1" * 64, 5),
) -> StoredRun:
    """Write a run whose global model had these accuracies after 0, 1, ... rounds; the last one is the evaluation's.

    model: digest and bytes of the object that every round leaves
    finished: else its last round is still open, or, with a reason, it has failed for that reason.
    """
    rounds = len(accuracies) - 1
    made = replace(agreed or manifest(rounds=max(rounds, 1)), name=run_id)
    names = tuple(member.name for member in made.members)
    text, asked = made.to_json(), json.dumps(spec or SPEC)
    run = StoredRun(run_id, run_id, run_id, asked, text, made.digest(), made.method.name, made.data, made.rounds, names)
    store.runs.add(run, len(text))
    store.runs.begin(run_id, "0" * 64, 5)
    for number, accuracy in enumerate(accuracies):
        kind = TaskKind.EVALUATE if finished and number == rounds else TaskKind.TRAIN
        store.runs.open_round(run_id, number, kind, names)
        if number == rounds and not finished:
            break
        included = tuple(name for name in names if name not in (missing or {}))
        record = RoundRecord(number, kind, sums(accuracy), EXAMPLES, included, dict(missing or {}))
        store.runs.close_round(run_id, record, None if kind is TaskKind.EVALUATE else model, f"{number}" * 64)
    if reason:
        store.runs.end(run_id, RunState.FAILED, reason)
    return store.runs.get(run_id)


def detail(
    run_id: str, rounds: Sequence[pb.RoundInfo], spec: Mapping[str, object] | None = None, **info: object
) -> pb.RunDetail:
    """Make what the service answers about a run."""
    agreed = {"schema": {"classes": list(SCHEMA.classes)}, "members": [{"name": name} for name in NAMES]}
    return pb.RunDetail(
        info=pb.RunInfo(run_id=run_id, name=run_id, state="finished", method="fedavg", rounds=len(rounds), **info),
        manifest_json=json.dumps(agreed),
        spec_json=json.dumps(spec or SPEC),
        rounds=rounds,
    )


def measured(accuracies: Sequence[float], **more: object) -> list[pb.RoundInfo]:
    """Make rounds in which the global model had these accuracies; the last is the evaluation."""
    last = len(accuracies) - 1
    return [
        pb.RoundInfo(round=k, kind=pb.EVALUATE if k == last else pb.TRAIN, correct=sums(a), examples=EXAMPLES, **more)
        for k, a in enumerate(accuracies)
    ]


CLASSES = 10
PERSONAL = {"pa": 0.97, "pa_std": 0.02, "pm_l": 0.5, "pm_l_std": 0.1, "pm_v": 0.4, "pm_v_std": 0.1}
SUMS = {
    "right on 70 of 39": (70.3, 39.1),
    "-4 %": (-4.0, 100.0),
    "642 %": (642.0, 100.0),
    "nothing passed": (0.0, 0.0),
    "negative count": (3.0, -55.0),
    "minus one": (-100.0, 100.0),
    "zeros": (-0.0, -0.0),
    "huge": (1e38, 1e-40),
}
PER_CENT = re.compile(r"(-?\d+(?:\.\d+)?) ?%")
OUT_OF = re.compile(r"-?\d+ of (?:about )?-?\d+ own|\d+/\d+ -?\d")


def rows(total: float) -> tuple[float, ...]:
    return (total, *[0.0] * (CLASSES - 1))


def records(correct: float, examples: float, personal: bool = True) -> list[RoundRecord]:
    """Three rounds of these sums."""
    kinds = (TaskKind.TRAIN, TaskKind.TRAIN, TaskKind.EVALUATE)
    scores = PERSONAL if personal else {}
    return [
        RoundRecord(t, kind, rows(correct), rows(examples), tuple(MEMBERS), {}, 0, scores if t < 2 else {})
        for t, kind in enumerate(kinds)
    ]


class Case:
    """A run in the coordinator's store, as its service tells of it."""

    def __init__(self, folder: Path, manifest: RunManifest, found: list[RoundRecord]) -> None:
        self.manifest, self.records = manifest, found
        self.store = CoordinatorStore(folder)
        run = StoredRun(
            "r1",
            "private",
            "q",
            "{}",
            manifest.to_json(),
            manifest.digest(),
            manifest.method.name,
            manifest.data,
            2,
            tuple(MEMBERS),
        )
        self.store.runs.add(run, 2)
        self.store.runs.begin("r1", "0" * 64, 5)
        for record in found:
            self.store.runs.open_round("r1", record.round, record.kind, MEMBERS)
            state = (f"{record.round + 1}" * 64, 5) if record.kind is TaskKind.TRAIN else None
            self.store.runs.close_round("r1", record, state, "model")

    @property
    def detail(self) -> pb.RunDetail:
        run = self.store.runs.get("r1")
        noise = DerivedFacts.of(run).noise
        closed = [round_info(row, noise) for row in self.store.runs.rounds("r1")]
        return pb.RunDetail(info=run_info(run, self.store), manifest_json=run.manifest, rounds=closed)

    @property
    def events(self) -> list[pb.Event]:
        return [event(row, self.store) for row in self.store.runs.events("r1", 0)]


class Client:
    """What the lead's commands ask."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def close(self) -> None:
        pass

    def show(self, run: str) -> pb.RunDetail:
        return self.case.detail

    def runs(self) -> list[pb.RunInfo]:
        return [self.case.detail.info]

    def silos(self) -> pb.SiloList:
        return pb.SiloList()

    def watch(self, run: str) -> Iterator[pb.Event]:
        yield from self.case.events


def truthful(text: str, must_say: bool = True) -> None:
    """Check that a text for people has no share outside of 0 to 100 %, and says what noise left."""
    for found in PER_CENT.findall(text):
        assert 0 <= float(found) <= 100, text
    assert not OUT_OF.search(text), text
    assert "nan" not in text.lower().replace("nannan", ""), text
    assert not must_say or "withheld" in text or "95 %:" in text, text


def shares(value: object, name: str = "") -> Iterator[tuple[str, float | None]]:
    """List the accuracies and scores of a JSON object, by name."""
    if isinstance(value, dict):
        for k, v in value.items():
            inherits = "accuracy" in name or name == "personal_by_round"
            yield from shares(v, name if inherits else str(k))
    elif isinstance(value, list):
        for v in value:
            yield from shares(v, name)
    elif "accuracy" in name or name.removeprefix("best_") in ("pa", "pm_l", "pm_v", "fairness", "personal_by_round"):
        assert value is None or isinstance(value, float), (name, value)
        yield name, value


def machine(text: str, least: int = 1) -> list[tuple[str, float | None]]:
    """Check that JSON lines have shares of 0 to 1 or null alone; return them by name."""
    found = []
    for line in text.splitlines():
        found += list(shares(json.loads(line, parse_constant=pytest.fail)))
    assert len(found) >= least
    assert all(v is None or 0 <= v <= 1 for _, v in found), found
    return found
