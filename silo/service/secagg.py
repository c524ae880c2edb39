"""The hospital's side of masked runs: keys before round 0, and answers to two kinds of messages.

The task runner makes the keys and the worker the masks. The session's thread answers a fixed set, and the opening of
its sum, even while this hospital trains for another run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from cryptography.exceptions import UnsupportedAlgorithm

from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from privacy.secagg import silo_side
from privacy.secagg.keys import KEYS_CONTEXT, OwnKeys
from privacy.secagg.messages import Opening, Seal
from privacy.secagg.terms import SecaggError
from privacy.secagg_run import secagg_run
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey, digest_of
from service_core.console import pluralize
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of, parse_certificate
from silo.events import EmitEvent, event
from silo.identity.identity import SiloIdentity
from silo.service.task_queue import Send, TaskQueue, public_reason
from silo.storage.secagg_keys import MaskedRun
from silo.storage.store import SiloStore

_REMEMBERED = 1000


@dataclass(slots=True)
class SecaggMember:
    """One hospital in its masked runs. Every message gets an answer or a refusal, which is recorded.

    min_sum: the hospital's policy, read again for each set; raises RefusedError if it cannot be read
    apply_roster: pins a newer roster, within the policy.
    """

    store: SiloStore
    identity: SiloIdentity
    min_sum: Callable[[], int]
    send: Send
    emit: EmitEvent
    apply_roster: Callable[[bytes], None]
    _offered: dict[TaskKey, bytes] = field(default_factory=dict)
    _logged: dict[object, None] = field(default_factory=dict)

    # ---- the task runner's ---------------------------------------------------------------------------------------

    def entry(self, run_id: str, manifest: RunManifest) -> pb.SecaggEntry:
        """Return this hospital's public keys for a run; repeated calls return the same.

        Raises SecaggError: E-RUN-50 if the private keys are gone, E-RUN-51 if rows of classes would
        have to be left out. Guarantees: the private keys are on the disk on return.
        """
        masked_run = MaskedRun.of(secagg_run(run_id, manifest), manifest)

        def make() -> tuple[OwnKeys, bytes]:
            private_keys, credentials = OwnKeys.new(), self.identity.current_credentials()
            key = certificates.load_key(credentials.key_pem, "this hospital's identity")
            name = identity_of(credentials.cert_pem).identity.name
            signed = private_keys.entry(
                masked_run.run, name, credentials.cert_pem, partial(certificates.sign, key, KEYS_CONTEXT)
            )
            fields = signed._asdict()
            del fields["name"]
            return private_keys, pb.SecaggEntry(**fields).SerializeToString(deterministic=True)

        return pb.SecaggEntry.FromString(self.store.secagg.entry(masked_run, make))

    def compare_answers(self, seen: int) -> None:
        """Give up masked runs if this home lacks answers that the coordinator saw: it was restored from a copy.

        A lying coordinator can end this hospital's part in masked runs this way, and nothing else.
        """
        if seen <= (answered := self.store.answers.masked_answers()):
            return
        lost = self.store.secagg.forget()
        self.store.answers.catch_up(seen)
        runs = f"absent for the rest of {', '.join(lost)}" if lost else "it was in none"
        missing = pluralize(seen - answered, "answer")
        text = (
            f"this home was restored from a copy: it lacks {missing} in masked runs that the coordinator has seen. "
            f"Its keys of masked runs are deleted: {runs}"
        )
        self.emit(event("behind", text, facts={"code": "E-RUN-50"}))

    # ---- the session's -------------------------------------------------------------------------------------------

    def note_offer(self, offer: pb.Offer) -> None:
        """Remember the base of an offered task: its set must be about that base."""
        try:
            key, base = TaskKey.of(offer), digest_of(offer.base_digest)
        except FederationError:
            return  # the task runner reports what is wrong with the offer
        self._offered.pop(key, None)
        self._offered[key] = base
        while len(self._offered) > _REMEMBERED:
            del self._offered[next(iter(self._offered))]

    def seal(self, message: pb.SecaggSeal) -> None:
        """Confirm the one set of a round; it is on the disk before the signature leaves. Raises as `TaskKey.of`."""
        key = TaskKey.of(message)
        with self._refusing(key, b""):
            masked_run = self.store.secagg.masked_run(key.run_id)
            updates = tuple((update.index, digest_of(update.object_digest)) for update in message.updates)
            base = digest_of(message.base_digest)
            seal = Seal(key.run_id, key.kind.value, key.round, base, message.keys_digest, updates, message.signature)
            before = self.store.secagg.row(key)
            confirmed = silo_side.confirm(
                masked_run.terms.run,
                masked_run.keys,
                seal,
                before,
                cohort=masked_run.terms.cohort_of(key),
                signed=partial(self._signed_by_coordinator, message.signer_pem),
                store=lambda row: self.store.secagg.confirm(key, before, row),
                offered=self._offered.get(key),
                min_sum=self.min_sum(),
            )
            if before is None or not before.seal_hash:
                text = f"{key}: signed the aggregation set of this round, {len(updates)} updates"
                self.emit(event("sealed", text, key, {"included": masked_run.keys.index in dict(updates)}))
            answer = pb.SecaggConfirm(
                run_id=key.run_id,
                round=key.round,
                kind=key.wire_kind,
                seal_hash=confirmed.seal_hash,
                signature=confirmed.signature,
                masked_answers=self.store.answers.masked_answers(),
            )
            self.send(pb.SiloMessage(secagg_confirm=answer))

    def open(self, message: pb.SecaggOpen) -> None:
        """Send the shares that open the set which was confirmed here; raises as `TaskKey.of`."""
        key = TaskKey.of(message)
        with self._refusing(key, message.seal_hash):
            masked_run = self.store.secagg.masked_run(key.run_id)
            opening = Opening(
                key.run_id,
                key.kind.value,
                key.round,
                message.seal_hash,
                tuple((c.index, c.signature) for c in message.confirmations),
                tuple((p.index, p.salt, p.package) for p in message.packages),
            )
            row, cohort = self.store.secagg.row(key), masked_run.terms.cohort_of(key)
            opened = silo_side.answer(masked_run.terms.run, masked_run.keys, opening, row, cohort=cohort)
            self._tell_once(
                (key, opened.seal_hash), "opened", f"{key}: sent the shares that open its aggregation set", key
            )
            shares = [pb.SecaggShare(block=b, dealer=u, slot=v, share=share) for b, u, v, share in opened.shares]
            answer = pb.SecaggShares(
                run_id=key.run_id, round=key.round, kind=key.wire_kind, seal_hash=opened.seal_hash, shares=shares
            )
            self.send(pb.SiloMessage(secagg_shares=answer))

    @contextmanager
    def _refusing(self, key: TaskKey, seal_hash: bytes) -> Iterator[None]:
        """Turn an error about a message into a refusal, and record it once."""
        try:
            yield
        except FederationError as error:
            blamed = [error.blamed] if isinstance(error, SecaggError) and error.blamed is not None else []
            refusal = pb.SecaggRefusal(
                run_id=key.run_id,
                round=key.round,
                kind=key.wire_kind,
                seal_hash=seal_hash,
                code=error.code,
                reason=public_reason(error),
                blamed=blamed,
            )
            if self.store.secagg.state(key.run_id):  # nothing is stored about runs of others
                facts = {"code": error.code}
                self._tell_once((key, error.code, seal_hash), "refused", f"{key}: {error}", key, facts)
            self.send(pb.SiloMessage(secagg_refusal=refusal))

    def _tell_once(
        self, about: object, kind: str, text: str, key: TaskKey, facts: dict[str, str] | None = None
    ) -> None:
        if about in self._logged:
            return
        self._logged[about] = None
        while len(self._logged) > _REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self.emit(event(kind, text, key, facts))

    def _signed_by_coordinator(self, signer_pem: bytes, message: bytes, signature: bytes) -> bool:
        """Tell whether the consortium's coordinator signed a set; never raises, whatever the bytes are."""
        try:
            signer, authority = parse_certificate(signer_pem), self.identity.authority_pem()
            wanted = Identity(CertificateRole.COORDINATOR, self.identity.load().identity.consortium)
            if identity_of(signer).identity != wanted:
                return False
            if not certificates.issued_by(signer, certificates.load_certificate(authority, "the pinned authority")):
                return False
            return certificates.verify(certificates.public_key(signer), Seal.CONTEXT, message, signature)
        except (FederationError, ValueError, UnsupportedAlgorithm):
            return False


@dataclass(frozen=True, slots=True)
class SessionHandler:
    """Passes each message of the coordinator to the part that handles it."""

    queue: TaskQueue
    member: SecaggMember

    def offer(self, offer: pb.Offer) -> None:
        self.member.note_offer(offer)
        self.queue.offer(offer)

    def preflight(self, request: pb.Preflight) -> None:
        self.queue.preflight(request)

    def round_closed(self, closed: pb.RoundClosed) -> None:
        self.queue.round_closed(closed)

    def run_ended(self, ended: pb.RunEnded) -> None:
        self.queue.run_ended(ended)

    def secagg_seal(self, seal: pb.SecaggSeal) -> None:
        self.member.seal(seal)

    def secagg_open(self, opening: pb.SecaggOpen) -> None:
        self.member.open(opening)

    def pulse(self) -> pb.Pulse:
        return self.queue.pulse()
