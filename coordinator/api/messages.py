"""Records of the store, and what silos do now, as messages to a lead."""

from __future__ import annotations

from functools import lru_cache

from coordinator.api import measured
from coordinator.runs.dispatcher import Dispatcher
from coordinator.storage.records import EventRow, RoundRow, Run, Silo
from coordinator.storage.store import Store
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from privacy import profiles
from privacy.reports import uncertainty
from privacy.reports.uncertainty import NO_NOISE, UNKNOWN, RunNoise
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TO_WIRE


@lru_cache(maxsize=64)
def stored_result_noise(manifest: str) -> RunNoise:
    """Return which results of a run are noisy, from its manifest as JSON; all of them when it cannot be read."""
    try:
        return profiles.result_noise(RunManifest.from_json(manifest))
    except (FederationError, ValueError):  # of another version: its runs are listed all the same
        return UNKNOWN


def run_info(run: Run, store: Store) -> pb.RunInfo:
    """Convert a run; noisy evaluations get an interval, and a number only where the noise leaves one."""
    message = pb.RunInfo(
        run_id=run.id,
        name=run.name,
        state=run.state.value,
        reason=run.reason,
        method=run.method,
        data=run.data,
        rounds=run.rounds,
        closed=run.closed,
        accuracy=run.accuracy,
        best_accuracy=run.best_accuracy,
        created_unix=run.created,
        ended_unix=run.ended,
        bytes_up=run.bytes_up,
        bytes_down=run.bytes_down,
        manifest_digest=run.manifest_digest,
        model_digest=run.model_digest,
        model_object=(run.state_object or "") if run.closed else "",
    )
    noise = stored_result_noise(run.manifest)
    if noise.evaluation is not None:
        measured.describe(message, [(r.correct, r.examples, noise.of(r.included)) for r in store.runs.rounds(run.id)])
    return message


def round_info(row: RoundRow, noise: RunNoise = NO_NOISE) -> pb.RoundInfo:
    message = pb.RoundInfo(
        round=row.round,
        kind=TO_WIRE[row.kind],
        correct=row.correct,
        examples=row.examples,
        included=row.included,
        missing=row.missing,
        clipped=row.clipped,
        opened_unix=row.opened,
        closed_unix=row.closed,
        personal=uncertainty.shown_scores(row.personal, noise.scores),
        withheld=sorted(noise.scores & set(row.personal)),
    )
    if (found := noise.of(row.included)) is not None:
        message.noise.CopyFrom(pb.Noise(std=found.std, draws=found.draws, suppressed=found.suppressed))
    return message


def silo_info(silo: Silo, dispatcher: Dispatcher, now: float) -> pb.SiloInfo:
    found = dispatcher.activity_of(silo.name)
    offer = pb.DataOffer(
        name=silo.data.name, shape=silo.data.shape, classes=silo.data.classes, nominal_size=silo.data.nominal_size
    )
    info = pb.SiloInfo(
        name=silo.name,
        state="revoked" if silo.revoked else "offline" if found is None else "online",
        fingerprint=silo.certificate.fingerprint,
        certificate_until_unix=silo.certificate.until,
        last_seen_unix=silo.last_seen if found is None else now - found[1],
        data=offer,
        software=silo.software,
        policy_digest=dispatcher.store.attestations.policy(silo.name),
    )
    if found is not None and not silo.revoked:
        now_doing = found[0]
        info.activity, info.run_id, info.round = now_doing.activity, now_doing.run_id, now_doing.round
        info.done, info.total = now_doing.done, now_doing.total
    return info


def event(row: EventRow, store: Store) -> pb.Event:
    """Convert an event; the close of a round carries its result, and milestones the run as it is now."""
    message = pb.Event(
        number=row.number,
        at_unix=row.at,
        run_id=row.run_id,
        kind=row.kind,
        round=row.round,
        silo=row.silo,
        text=row.text,
    )
    if row.kind == "closed" and (found := store.runs.round(row.run_id, row.round)) is not None:
        message.closed.CopyFrom(round_info(found, stored_result_noise(store.runs.get(row.run_id).manifest)))
    if row.kind in ("submitted", "closed", "ended"):
        message.info.CopyFrom(run_info(store.runs.get(row.run_id), store))
    return message
