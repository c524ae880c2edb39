"""Runs written into the coordinator's store, with the scores that a test chooses: nobody trains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.storage.records import Run, RunState
from coordinator.storage.store import Store
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from protos.consilium.v1 import federation_pb2 as pb
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
    store: Store,
    run_id: str,
    accuracies: Sequence[float],
    *,
    spec: Mapping[str, object] | None = None,
    agreed: RunManifest | None = None,
    missing: Mapping[str, str] | None = None,
    finished: bool = True,
    reason: str = "",
) -> Run:
    """Write a run whose global model had these accuracies after 0, 1, ... rounds; the last one is the evaluation's.

    finished: else its last round is still open, or, with a reason, it has failed for that reason.
    """
    rounds = len(accuracies) - 1
    made = replace(agreed or manifest(rounds=max(rounds, 1)), name=run_id)
    names = tuple(member.name for member in made.members)
    text, asked = made.to_json(), json.dumps(spec or SPEC)
    run = Run(run_id, run_id, run_id, asked, text, made.digest(), made.method.name, made.data, made.rounds, names)
    store.runs.add(run, len(text))
    store.runs.begin(run_id, "0" * 64, 5)
    for number, accuracy in enumerate(accuracies):
        kind = TaskKind.EVALUATE if finished and number == rounds else TaskKind.TRAIN
        store.runs.open_round(run_id, number, kind, names)
        if number == rounds and not finished:
            break
        included = tuple(name for name in names if name not in (missing or {}))
        record = RoundRecord(number, kind, sums(accuracy), EXAMPLES, included, dict(missing or {}))
        store.runs.close_round(run_id, record, None if kind is TaskKind.EVALUATE else ("1" * 64, 5), f"{number}" * 64)
    if reason:
        store.runs.end(run_id, RunState.FAILED, reason, [RunState.RUNNING])
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
