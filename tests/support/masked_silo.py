"""Silos of masked runs, made of the protocol's silo side with the least code, and masked runs for them."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from consilium.research.engines.in_process import SiloShare
from fl_core.aggregation.flat_blocks import CLASSES, MODEL, WORDS
from fl_core.aggregation.masked_sum import unsigned
from fl_core.rounds import sampling
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import MASKS, Secagg
from fl_core.types.values import Bundle, Part
from privacy.compiled_run import secagg_run
from privacy.secagg import silo_side
from privacy.secagg.keys import KEYS_CONTEXT, Entry, OwnKeys, RunKeys
from privacy.secagg.messages import Opening, Seal
from privacy.secagg.silo_side import RoundRow
from privacy.secagg.terms import Round, SecaggError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.tasks import TaskKey
from service_core.pki import certificates
from service_core.pki.identity import parse_certificate
from service_core.storage import digests
from tests.support.coordinator import World, fetch, ready
from tests.support.federations import NAMES, manifest, shares
from tests.support.hospital import Entry as Sent
from tests.support.hospital import Memory, ScriptedSilo

FOUR = (*NAMES, "west")


def shares_of(names: Sequence[str]) -> dict[str, SiloShare]:
    return dict(zip(names, [*shares(0), *shares(1)], strict=False))


def masked(names: Sequence[str] = NAMES, terms: Secagg = Secagg(1), **more: object) -> RunManifest:  # noqa: B008
    """Freeze a run under masks, on ring64, in which every silo counts by the examples that it has."""
    plain = manifest(names=names, **more)  # type: ignore[arg-type]
    units = [len(share.train) for share in shares_of(names).values()]
    members = tuple(replace(m, units=u) for m, u in zip(plain.members, units, strict=True))
    return replace(plain, members=members, secagg=terms, aggregator=NamedOptions("mean"))


@dataclass
class MaskedMemory(Memory):
    """What a hospital's disk would hold; outlives the silo object."""

    own: dict[str, OwnKeys] = field(default_factory=dict)
    keys: dict[str, RunKeys] = field(default_factory=dict)
    agreed: dict[str, RunManifest] = field(default_factory=dict)
    rows: dict[tuple[str, TaskKind, int], RoundRow] = field(default_factory=dict)
    confirmed: dict[TaskKey, set[bytes]] = field(default_factory=dict)


Says = Callable[[pb.SiloMessage], Sequence[pb.SiloMessage]]


class MaskedSilo(ScriptedSilo):
    """A scripted silo that masks its updates, confirms sets and answers for them.

    says: what is sent in the place of a message about a set, or of the answer to a preflight.
    """

    memory: MaskedMemory

    def __init__(
        self, world: World, name: str, memory: MaskedMemory | None = None, *, says: Says | None = None, **script: object
    ) -> None:
        self._says = says or (lambda message: [message])
        self._offer = pb.Offer()
        self._asked: dict[str, str] = {}
        share = shares_of(FOUR)[name]
        script.setdefault("alter", self._cover)
        super().__init__(world, name, share, memory or MaskedMemory(), **script)  # type: ignore[arg-type]

    def _take(self, message: pb.CoordinatorMessage, out: queue.Queue[pb.SiloMessage | None]) -> None:
        kind = message.WhichOneof("body")
        if kind == "preflight":
            answer = ready(message.preflight)
            answer.preflight.secagg_entry.CopyFrom(self._entry(message.preflight))
            self._say(out, answer)
        elif kind == "secagg_seal":
            self._guarded(out, message.secagg_seal, self._confirm)
        elif kind == "secagg_open":
            self._guarded(out, message.secagg_open, self._answer)
        else:
            super()._take(message, out)
            if kind == "round_closed":
                closed = message.round_closed
                key = TaskKey.of(closed)
                if keys := self.memory.keys.get(key.run_id):
                    self.memory.keys[key.run_id] = keys.at(max(keys.position, key.round + 2))

    def _say(self, out: queue.Queue[pb.SiloMessage | None], message: pb.SiloMessage) -> None:
        for said in self._says(message):
            out.put(said)

    def _manifest(self, digest: str) -> RunManifest:
        with tempfile.TemporaryDirectory() as folder, self._connected(rpc.TransferStub) as stub:
            return RunManifest.from_json(fetch(stub, digest, Path(folder)).read_text())

    def _entry(self, asked: pb.Preflight) -> pb.SecaggEntry:
        mine = self.world.people[self.name]
        agreed = self.memory.agreed.setdefault(asked.run_id, self._manifest(asked.manifest_digest))
        own = self.memory.own.setdefault(asked.run_id, OwnKeys.new())
        key = certificates.load_key(mine.key_pem, self.name)
        sign = partial(certificates.sign, key, KEYS_CONTEXT)
        found = own.entry(secagg_run(asked.run_id, agreed), self.name, mine.cert_pem, sign)._asdict()
        del found["name"]
        return pb.SecaggEntry(**found)

    def _round(self, key: TaskKey, base: str) -> Round:
        agreed = self.memory.agreed[key.run_id]
        drawn = agreed.cohort if key.kind is TaskKind.TRAIN else 0
        cohort = sampling.sample_cohort(agreed.seed, key.round, len(agreed.members), drawn)
        run, keys = secagg_run(key.run_id, agreed), self.memory.keys[key.run_id]
        return run.round(keys.keys_digest, key.kind.value, key.round, bytes.fromhex(base), cohort)

    def _row(self, key: TaskKey) -> RoundRow | None:
        return self.memory.rows.get((key.run_id, key.kind, key.round))

    def _store(self, run_id: str, row: RoundRow) -> None:
        self.memory.rows[run_id, TaskKind(row.kind), row.number] = row

    # ---- masks ----

    def _train(self, stub: rpc.TransferStub, key: TaskKey, offer: pb.Offer) -> Sent:
        if key.run_id not in self.memory.keys:
            agreed = self.memory.agreed[key.run_id]
            with tempfile.TemporaryDirectory() as folder:
                raw = fetch(stub, offer.secagg_keys_digest, Path(folder)).read_bytes()
            found = pb.SecaggKeys.FromString(raw).entries
            entries = [
                Entry(m.name, e.agree, e.sign, e.certificate_pem, e.signature)
                for m, e in zip(agreed.members, found, strict=True)
            ]
            run = secagg_run(key.run_id, agreed)
            self.memory.keys[key.run_id] = RunKeys.agree(
                run, self.name, self.memory.own[key.run_id], entries, self._trusts
            )
        self._offer = offer
        made = super()._train(stub, key, offer)
        sent = bytes.fromhex(digests.digest(made.data))
        self._store(key.run_id, silo_side.uploaded(self._round(key, offer.base_digest), sent))
        return made

    def _trusts(self, entry: Entry, message: bytes) -> bool:
        theirs = self.world.people[entry.name].cert_pem
        public = certificates.public_key(parse_certificate(theirs))
        return entry.certificate_pem == theirs and certificates.verify(public, KEYS_CONTEXT, message, entry.signature)

    def _cover(self, key: TaskKey, update: Bundle) -> Bundle:
        model, classes = (unsigned(update[block].total[WORDS]) for block in (MODEL, CLASSES))
        round = self._round(key, self._offer.base_digest)
        made = silo_side.mask(self.memory.keys[key.run_id], round, self._row(key), model, classes)
        extra = {name: torch.from_numpy(getattr(made, name).copy()) for name in ("salt", "commitments", "packages")}
        return {**update, MASKS: Part(extra, torch.zeros((), dtype=torch.uint8))}

    # ---- answers ----

    def _guarded(self, out, message, act) -> None:  # type: ignore[no-untyped-def]
        key = TaskKey.of(message)
        if key.run_id not in self.memory.keys:
            return
        try:
            self._say(out, act(key, message))
        except SecaggError as error:
            about = {"run_id": key.run_id, "round": key.round, "kind": key.wire_kind}
            blamed = [] if error.blamed is None else [error.blamed]
            refusal = pb.SecaggRefusal(**about, code=error.code, reason=error.message, blamed=blamed)
            with suppress(AttributeError):
                refusal.seal_hash = message.seal_hash
            self._say(out, pb.SiloMessage(secagg_refusal=refusal))

    def _confirm(self, key: TaskKey, message: pb.SecaggSeal) -> pb.SiloMessage:
        run, keys = secagg_run(key.run_id, self.memory.agreed[key.run_id]), self.memory.keys[key.run_id]
        uploads = tuple((u.index, bytes.fromhex(u.object_digest)) for u in message.updates)
        base = bytes.fromhex(message.base_digest)
        seal = Seal(key.run_id, key.kind.value, key.round, base, message.keys_digest, uploads, message.signature)
        signer = certificates.public_key(parse_certificate(message.signer_pem))
        made = silo_side.confirm(
            run, keys, seal, self._row(key),
            cohort=self._round(key, message.base_digest).cohort,
            signed=partial(certificates.verify, signer, Seal.CONTEXT),
            store=partial(self._store, key.run_id),
        )  # fmt: skip
        self.memory.confirmed.setdefault(key, set()).add(message.SerializeToString(deterministic=True))
        about = {"run_id": key.run_id, "round": key.round, "kind": key.wire_kind}
        confirm = pb.SecaggConfirm(**about, seal_hash=made.seal_hash, signature=made.signature)
        return pb.SiloMessage(secagg_confirm=confirm)

    def _answer(self, key: TaskKey, message: pb.SecaggOpen) -> pb.SiloMessage:
        run, keys, row = (
            secagg_run(key.run_id, self.memory.agreed[key.run_id]),
            self.memory.keys[key.run_id],
            self._row(key),
        )
        given = tuple((p.index, p.salt, p.package) for p in message.packages)
        confirmed = tuple((c.index, c.signature) for c in message.confirmations)
        opening = Opening(key.run_id, key.kind.value, key.round, message.seal_hash, confirmed, given)
        cohort = () if row is None else self._round(key, row.base_digest.hex()).cohort
        found = silo_side.answer(run, keys, opening, row, cohort=cohort)
        about = {"run_id": key.run_id, "round": key.round, "kind": key.wire_kind, "seal_hash": found.seal_hash}
        shares = [pb.SecaggShare(block=b, dealer=u, slot=v, share=share) for b, u, v, share in found.shares]
        return pb.SiloMessage(secagg_shares=pb.SecaggShares(**about, shares=shares))
