"""Runs, rounds, events and hospitals as JSON objects: the output of `--json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from coordinator.lead import accuracy, hospital_results
from coordinator.lead.withdrawals import withdrawal_json
from fl_core.types import intervals
from fl_core.types.records import RoundRecord, refused, update_outcomes
from privacy.accounting import measures
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import kind_word

_RUN_FIELDS = (
    "name",
    "state",
    "reason",
    "method",
    "data",
    "rounds",
    "closed",
    "bytes_up",
    "bytes_down",
    "manifest_digest",
)


def run_json(info: pb.RunInfo) -> Mapping[str, object]:
    """Convert a run; numbers hidden by noise are null, others have the interval of their noise."""
    return {
        "run": info.run_id,
        **{name: getattr(info, name) for name in _RUN_FIELDS},
        **accuracy.newest(info).facts("global_accuracy"),
        **accuracy.best(info).facts("best_global_accuracy", "best_"),
        **accuracy.newest_balanced(info).facts("balanced_accuracy", "balanced_"),
        "chance": accuracy.chance(info),
        "classes": accuracy.coverage(info).as_json(),
        "created": info.created_unix,
        "ended": info.ended_unix or None,
        "model_digest": info.model_digest or None,
        "excluded": list(info.excluded),
        "waiting": waiting_json(info.waiting) if info.HasField("waiting") else None,
    }


def waiting_json(waiting: pb.Waiting) -> Mapping[str, object]:
    """Convert an open round."""
    return {
        "round": waiting.round,
        "there": waiting.there,
        "needed": waiting.needed,
        "sealed": waiting.sealed,
        "silos": [
            {"name": s.name, "left": s.left_s, "online": s.online, "offline": s.offline_s, "classes": list(s.classes)}
            for s in waiting.silos
        ],
    }


_OWN_FORM = {"kind", "correct", "examples", "personal", "medians", "clinical", "added", "by_hospital", "own"}
"""Fields of a round's record with another form in the JSON; all others are copied, except the data of withdrawals."""


def round_json(info: pb.RoundInfo) -> Mapping[str, object]:
    """Convert a round. correct, examples: the released sums, with noise of standard deviation noise_std."""
    clinical = accuracy.clinical_of(info)
    return {
        **{f.name: _plain(getattr(info, f.name)) for f in fields(RoundRecord) if f.name not in _OWN_FORM},
        "kind": kind_word(info.kind),
        "refused": refused(info.missing),
        "norm_medians": dict(info.medians),
        **accuracy.sums_json(info.correct, info.examples, accuracy.noise_of(info)),
        **measures.as_json(accuracy.result_of(info)),
        "clinical": clinical and intervals.facts(clinical),
        **by_hospital_json(info),
        "opened": info.opened_unix,
        "closed": info.closed_unix or None,
        **measures.personal_json(info.personal, info.withheld),
    }


def _plain(value: Any) -> object:  # noqa: ANN401 - of a message
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | float) else list(value)


def by_hospital_json(info: pb.RoundInfo) -> Mapping[str, object]:
    """Convert results of single hospitals, and of their local models; empty in runs that ask for neither."""
    results = accuracy.results_of(info)
    local = accuracy.own_of(info)
    return {
        **({"by_hospital": hospital_results.facts(results, several_labels=info.several_labels)} if results else {}),
        **({"own_models": hospital_results.own_facts(local)} if local is not None else {}),
    }


def silo_json(info: pb.SiloInfo) -> Mapping[str, object]:
    return {
        **{name: getattr(info, name) for name in ("name", "state", "fingerprint", "round", "software")},
        "certificate_until": info.certificate_until_unix,
        "last_seen": info.last_seen_unix or None,
        "data": info.data.name or None,
        "classes": list(info.data.classes),
        "nominal_size": info.data.nominal_size,
        "validation_only": info.data.validation_only,
        "labels": info.data.label_source or None,
        "activity": activity(info),
        "run": info.run_id or None,
        "policy_digest": info.policy_digest or None,
        "alarm": info.alarm or None,
    }


def activity(silo: pb.SiloInfo) -> str:
    """Return the word for a silo's activity; unknown ones, of a later version, count as none."""
    activity = silo.activity if silo.activity in pb.Activity.values() else pb.ACTIVITY_UNSPECIFIED
    return pb.Activity.Name(activity).lower()


def software_json(builds: Mapping[str, str]) -> Mapping[str, object]:
    """Convert the software of a run's sides. builds: as in `RunDetail`."""
    return {"coordinator": builds.get(""), "silos": {name: text for name, text in sorted(builds.items()) if name}}


def silos_json(listed: pb.SiloList) -> dict[str, object]:
    invitations = [{"name": i.name, "expires": i.expires_unix} for i in listed.invitations]
    return {"silos": [silo_json(s) for s in listed.silos], "invitations": invitations}


def detail_json(detail: pb.RunDetail) -> Mapping[str, object]:
    """Convert a run with all its rounds."""
    return {
        **run_json(detail.info),
        "aggregator": detail.aggregator or None,
        **update_outcomes(detail.rounds),
        "start": start_json(detail.manifest_json),
        "round": [round_json(r) for r in detail.rounds],
        "manifest": detail.manifest_json,
        "software": software_json(detail.software),
        "withdrawals": [withdrawal_json(one) for one in detail.withdrawals],
    }


def event_json(event: pb.Event) -> dict[str, object]:
    optional = {"silo": event.silo, "text": event.text}
    return {
        **{"event": event.kind, "number": event.number, "at": event.at_unix, "run": event.run_id, "round": event.round},
        **{name: value for name, value in optional.items() if value},
        **({"closed": round_json(event.closed)} if event.HasField("closed") else {}),
    }


def start_json(manifest: str) -> Mapping[str, object] | None:
    """Return the run or weights that a run started from; None for fresh weights. manifest: JSON."""
    start = json.loads(manifest).get("start")
    names = ("run", "rounds", "model", "private", "weights")
    return start and {name: start[name] for name in names if name in start}
