"""Messages to a lead, from records of the store and the silos' sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from coordinator.lead import accuracy
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.open_round import Waiting
from coordinator.runs.run_facts import DerivedFacts
from coordinator.storage.records import Contribution, EventRow, RoundRow, Silo, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.records import RoundRecord
from privacy.accounting import uncertainty
from privacy.accounting.uncertainty import NO_NOISE, RunNoise
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TO_WIRE

_MAX_S = 1e12
"""Upper bound on deadlines in messages, since JSON has no infinity."""


def _shared_fields(record: object, message: type[Message]) -> dict[str, Any]:
    """Return the values of a record's fields that exist in a message under the same name."""
    return {name: getattr(record, name) for name in message.DESCRIPTOR.fields_by_name if hasattr(record, name)}


def run_info(run: StoredRun, store: CoordinatorStore, waiting: Waiting | None = None) -> pb.RunInfo:
    return run_infos([run], store, lambda _: waiting)[0]


def run_infos(
    runs: Sequence[StoredRun], store: CoordinatorStore, waiting: Callable[[str], Waiting | None] = lambda _: None
) -> list[pb.RunInfo]:
    """Convert runs; noisy evaluations get an interval, and a number only if the noise permits.

    waiting: returns the pending silos of a run's open round. The number of SQL statements does not depend on that of
    runs.
    """
    ids = [run.id for run in runs]
    noises = {run.id: DerivedFacts.of(run).noise for run in runs}
    excluded, newest = store.steering.excluded(ids), store.runs.newest_records(ids)
    noisy = store.runs.evaluations([id for id in ids if noises[id].evaluation is not None])
    messages = []
    for run in runs:
        stored = {"run_id": run.id, "state": run.state.value, "created_unix": run.created, "ended_unix": run.ended}
        message = pb.RunInfo(**_shared_fields(run, pb.RunInfo) | stored, excluded=excluded.get(run.id, ()))
        if run.closed and run.state_object:
            message.model_object = run.state_object
        if (awaited := waiting(run.id)) is not None:
            message.waiting.CopyFrom(waiting_info(awaited))
        noise = noises[run.id]
        if run.id in noisy:
            accuracy.set_estimates(message, [(r.correct, r.examples, noise.of(r.included)) for r in noisy[run.id]])
        if (record := newest.get(run.id)) is not None:
            right, of = record.balanced_counts
            accuracy.set_balanced(message, (right, of, noise.of(record.included)), record.several_labels)
        _set_coverage(message, run, None if noise.evaluation is not None else record)
        messages.append(message)
    return messages


def _set_coverage(message: pb.RunInfo, run: StoredRun, newest: RoundRecord | None) -> None:
    """Set the classes that a run trains and tests. newest: its newest evaluation; None if there is none, or noise."""
    coverage = ClassCoverage() if run.coverage is None else ClassCoverage.of(run.coverage)
    if newest is not None and run.kind.measures:
        whole = newest.clinical.per_class if newest.several_labels and newest.clinical else newest.examples
        coverage = coverage.with_tested(whole)
    if coverage != ClassCoverage():
        message.coverage.CopyFrom(pb.ClassCoverage(**coverage.facts()))


def waiting_info(waiting: Waiting) -> pb.Waiting:
    silos = [
        pb.AwaitedSilo(
            name=a.name,
            left_s=min(a.left, _MAX_S),
            online=a.offline is None,
            offline_s=a.offline or 0.0,
            classes=a.classes,
        )
        for a in waiting.awaited
    ]
    return pb.Waiting(
        round=waiting.round, there=waiting.received, needed=waiting.needed, silos=silos, sealed=waiting.sealed
    )


def arrivals(updates: Iterable[Contribution]) -> list[pb.Arrival]:
    return [pb.Arrival(silo=u.silo, bytes=u.size, at_unix=u.received or 0.0) for u in updates]


def declarations(run_id: str, store: CoordinatorStore) -> list[pb.Declaration]:
    """Return the attestation in each silo's newest update of a run, without the sealed part."""
    newest = sorted(store.attestations.newest_of_run(run_id).items())
    return [pb.Declaration(silo=name, round=round, stated=stated) for name, (round, stated) in newest]


def round_info(
    row: RoundRow, noise: RunNoise = NO_NOISE, came: Iterable[Contribution] = (), exchanges: int = 0
) -> pb.RoundInfo:
    """Convert a closed round. came: the received updates   exchanges: as in `DerivedFacts`."""
    record = row.record
    own: dict[str, Any] = {
        "clinical": record.clinical and accuracy.clinical_message(record.clinical),
        "kind": TO_WIRE[record.kind],
        "opened_unix": row.opened,
        "closed_unix": row.closed,
        "personal": uncertainty.shown_scores(record.personal, noise.scores),
        "withheld": sorted(noise.scores & set(record.personal)),
        "by_hospital": accuracy.result_messages(record.by_hospital),
        "own": None if record.own is None else accuracy.own_message(record.own),
        "arrivals": arrivals(came),
        "base_bytes": row.base_size,
        "untrained": record.kind.trains and record.round < exchanges,
    }
    message = pb.RoundInfo(**_shared_fields(record, pb.RoundInfo) | own)
    if (evaluation := noise.of(record.included)) is not None:
        message.noise.CopyFrom(pb.Noise(**_shared_fields(evaluation, pb.Noise)))
    return message


def silo_infos(silos: Iterable[Silo], dispatcher: Dispatcher, now: float) -> list[pb.SiloInfo]:
    store = dispatcher.store
    policies, alarms = store.attestations.policies(), store.members.alarms()  # once: there may be a thousand silos
    return [_silo_info(s, dispatcher, now, policies.get(s.name, ""), alarms.get(s.name, "")) for s in silos]


def _silo_info(silo: Silo, dispatcher: Dispatcher, now: float, policy: str, alarm: str) -> pb.SiloInfo:
    present = dispatcher.activity_of(silo.name)
    info = pb.SiloInfo(
        name=silo.name,
        state="revoked" if silo.revoked else "offline" if present is None else "online",
        fingerprint=silo.certificate.fingerprint,
        certificate_until_unix=silo.certificate.until,
        last_seen_unix=silo.last_seen if present is None else now - present[1],
        data=pb.DataOffer(**_shared_fields(silo.data, pb.DataOffer)),
        software=silo.software,
        policy_digest=policy,
        alarm=alarm or dispatcher.last_word(silo.name),
    )
    info.data.validation_only |= silo.validation_only
    if present is not None and not silo.revoked:
        info.MergeFrom(pb.SiloInfo(**_shared_fields(present[0], pb.SiloInfo)))
    return info


def event(row: EventRow, store: CoordinatorStore) -> pb.Event:
    """Convert an event; the close of a round includes its result, and milestones the run's current state."""
    message = pb.Event(at_unix=row.at, **_shared_fields(row, pb.Event))
    if row.kind == "closed" and (closed := store.runs.round(row.run_id, row.round)) is not None:
        facts = DerivedFacts.of(store.runs.get(row.run_id))
        message.closed.CopyFrom(round_info(closed, facts.noise, exchanges=facts.exchanges))
    if row.kind in ("submitted", "closed", "ended"):
        message.info.CopyFrom(run_info(store.runs.get(row.run_id), store))
    return message
