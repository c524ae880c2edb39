"""Masks over an update: everybody's keys with the first task of a run, then one mask for each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from fl_core.aggregation.flat_blocks import WORDS
from fl_core.aggregation.masked_sum import unsigned
from fl_core.rounds.manifest import RunManifest
from fl_core.tensors import torch
from fl_core.types.secagg import CLASSES, MASKS, MODEL
from fl_core.types.values import Bundle, Part
from privacy.secagg import silo_side
from privacy.secagg.keys import MemberKeys, RunKeys, pinned_signature
from privacy.secagg.terms import Round, SecaggError
from privacy.secagg_run import secagg_run
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey, digest_of
from silo.events import EmitEvent, event
from silo.identity.identity import SiloIdentity
from silo.storage.secagg_keys import READY, MaskedRun
from silo.storage.store import SiloStore

MAX_KEYS_BYTES = 4 << 20
"""Size limit of the file with all members' keys: 17 KiB per member of the largest masked run."""


@dataclass(frozen=True, slots=True)
class TaskMasks:
    """The masks for the update of one task, which has no update yet."""

    store: SiloStore
    key: TaskKey
    round: Round

    def cover(self, update: Bundle) -> Bundle:
        """Mask a two-block update in place, and add the data with which others help to open the sum.

        Raises SecaggError (E-RUN-49, E-RUN-50) if the task was masked, its set fixed, or its round closed since it
        began.
        """
        keys, row = self.store.secagg.masked_run(self.key.run_id).keys, self.store.secagg.row(self.key)
        model, classes = (unsigned(update[block].total[WORDS]) for block in (MODEL, CLASSES))
        made = silo_side.mask(keys, self.round, row, model, classes)
        extra = {name: torch.from_numpy(getattr(made, name).copy()) for name in ("salt", "commitments", "packages")}
        return {**update, MASKS: Part(extra, torch.zeros((), dtype=torch.uint8))}


@dataclass(frozen=True, slots=True)
class RunMasks:
    """One hospital's masks in all its runs. identity: for the pinned certificates of other members."""

    store: SiloStore
    identity: SiloIdentity

    def begin(self, offer: pb.Offer, manifest: RunManifest, fetch: Callable[[str], Path], emit: EmitEvent) -> TaskMasks:
        """Return the masks of a task that has no update yet; fetch: returns the file of an object.

        The first task of the run stores all members' keys. Raises SecaggError: E-ID-33 on keys that are not those of
        the pinned members, or that have changed; E-RUN-49 if the task was masked before; E-RUN-50 if its set is fixed,
        its round closed, its base another one, or the run's keys are gone; E-RUN-51 if rows of classes would have to be
        left out.
        """
        key = TaskKey.of(offer)
        if self.store.secagg.state(key.run_id) != READY:
            self._agree(key.run_id, offer.secagg_keys_digest, manifest, fetch, emit)
        masked_run = self.store.secagg.masked_run(key.run_id)
        if offer.secagg_keys_digest != masked_run.keys_object:
            raise SecaggError(
                "E-ID-33",
                f"run {key.run_id} began with the members' keys {masked_run.keys_object[:16]}, and this task has "
                f"others, {offer.secagg_keys_digest[:16]}: keys never change within a run",
            )
        cohort = masked_run.terms.cohort_of(key)
        round = masked_run.terms.run.round(
            masked_run.keys.keys_digest, key.kind.value, key.round, digest_of(offer.base_digest), cohort
        )
        round.place(masked_run.keys.index)
        masked_run.keys.check_open(round)
        self.store.secagg.begin_round(key)
        silo_side.require_unmasked(self.store.secagg.row(key), round)
        return TaskMasks(self.store, key, round)

    def _agree(
        self, run_id: str, digest: str, manifest: RunManifest, fetch: Callable[[str], Path], emit: EmitEvent
    ) -> None:
        private_keys = self.store.secagg.own_keys(run_id)
        if not digest:
            raise SecaggError("E-ID-33", f"the first task of run {run_id} came without the keys of all members")
        masked_run = MaskedRun.of(secagg_run(run_id, manifest), manifest)
        peers, mine = self.identity.pins().load(), self.identity.load().identity
        entries = _entries(fetch(digest), masked_run.members)
        members = peers.members()

        def trusted(entry: MemberKeys, message: bytes) -> bool:
            return pinned_signature(entry, message, mine.consortium, peers.pins, members)

        self.store.secagg.agree(
            run_id, digest, RunKeys.agree(masked_run.run, mine.name, private_keys, entries, trusted)
        )
        text = f"{run_id}: the keys of its {len(entries)} members are signed by their pinned identities"
        emit(event("keys", text, facts={"run": run_id}))


def _entries(file: Path, members: Sequence[str]) -> list[MemberKeys]:
    """Read all members' keys, in the manifest's order; raises SecaggError (E-ID-33)."""
    try:
        entries = list(pb.SecaggKeys.FromString(file.read_bytes()).entries)
    except DecodeError:
        entries = []
    if len(entries) != len(members):
        raise SecaggError(
            "E-ID-33", f"expected the keys of {len(members)} members, found {len(entries)} in their object"
        )
    return [
        MemberKeys(name, e.agree, e.sign, e.certificate_pem, e.signature)
        for name, e in zip(members, entries, strict=True)
    ]
