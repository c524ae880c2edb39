"""Rounds of which the coordinator reads sums alone: all in which they differ from plain ones.

The set of a round is on the disk before anybody is told of it, and is the only one of its round, whenever the service
ends: after a restart the same bytes go out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from coordinator.pki.membership import roster_member
from coordinator.runs.dispatcher import census_closed
from coordinator.runs.open_round import OpenRound
from coordinator.runs.preflight import ask_preflight
from coordinator.runs.services import Services
from coordinator.runs.set_opening import SetOpening
from coordinator.runs.tasks import RunTasks, unless_over
from coordinator.storage.records import Contribution, Run, RunState, Steering
from coordinator.storage.store import Store
from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.aggregation.flat_blocks import BLOCKS, CHECK_WORDS, CLASSES
from fl_core.aggregation.masked_sum import unsigned
from fl_core.errors import RefusedError, StateError, UnavailableError
from fl_core.rounds.engine import Observer, RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import MASKS
from fl_core.types.values import Part, State
from privacy.compiled_run import CompiledRun, secagg_run
from privacy.secagg.coordinator_side import SealedRound, UploadSum
from privacy.secagg.keys import Entry, Vouch, Vouched, pinned_signature, vouch
from privacy.secagg.messages import Bytes, Seal
from privacy.secagg.terms import SecaggError, SecaggRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile
from protos.wire.tasks import TO_WIRE, TaskKey
from service_core.audit_log import lines
from service_core.pki import certificates
from service_core.pki.identity import identity_of

ENTRY_BYTES = 16 << 10
"""Of one member's keys, its certificate included: nothing signs what stands around a certificate."""


@dataclass(slots=True, eq=False)
class MaskedRounds:
    """The rounds of a masked run.

    All members say that they are ready, with their keys, which are then fixed as one object; classes are counted in a
    round of its own, the census. A round's sum is opened for one set of updates, by the answers of its members.

    Guarantees: once keys are stored they stay what they are; one set is ever sent for a round, it is on the disk before
    it is, and of its updates a lost one alone is asked for again; nothing is opened otherwise.
    """

    run: Run
    compiled: CompiledRun
    services: Services
    tasks: RunTasks
    _secagg: SecaggRun = field(init=False)
    _keys: Vouched = field(init=False)
    _open: OpenRound = field(init=False)

    def __post_init__(self) -> None:
        self._secagg = secagg_run(self.run.id, self.compiled.manifest)

    @property
    def masks(self) -> Mapping[str, str]:
        """What an offer names beside the model."""
        store = self.services.store.secagg
        return {
            "secagg_keys_digest": store.keys(self.run.id) or "",
            "secagg_census_digest": store.census(self.run.id) or "",
        }

    # ---- keys ------------------------------------------------------------------------------------------------------

    def prepare(self, steering: Steering) -> ClassCoverage | None:  # noqa: ARG002 - masks need all members
        """Have the keys of all members on the disk, once they say that they can do their part.

        They are asked until they were asked beside the list of members that is in force then: one that renewed its
        certificate meanwhile signs its keys with an identity that only that list names. Raises as `ask_preflight`.
        """
        store = self.services.store.secagg
        while store.keys(self.run.id) is None:
            roster = self.services.roster()
            asked = self.run, self.compiled.manifest, self.services.dispatcher, self.tasks
            ready = ask_preflight(*asked, check=self._check_keys, roster=roster)
            if self.services.roster() == roster:
                self.keep_keys({name: pending.entry for name, pending in ready.items() if pending.entry is not None})
        self._keys = self._stored_keys()
        return None

    def _check_keys(self, name: str, sent: pb.SecaggEntry | None) -> None:
        """Check what came with a member's answer.

        Raises RefusedError: E-WIRE-01 where nothing did, E-ID-33 on keys that the member's certificate did not sign.
        """
        if sent is None:
            raise RefusedError(
                "E-WIRE-01",
                "expected the hospital's keys for a run with masks, found none: its software is from before them; "
                "upgrade it, or submit the run with secagg=off",
            )
        if (size := sent.ByteSize()) > ENTRY_BYTES:
            raise SecaggError("E-ID-33", f"expected keys of at most {ENTRY_BYTES} bytes, found {size}")
        entry = _entry(name, sent)
        if not self._trust()(entry, entry.message(self._secagg)):
            raise SecaggError(
                "E-ID-33", f"expected keys of {name} for this run under its certificate here, found another signature"
            )

    def keep_keys(self, entries: Mapping[str, pb.SecaggEntry]) -> None:
        """Fix the keys of all members as one object; raises SecaggError (E-ID-33) as `vouch`."""
        keys = pb.SecaggKeys(entries=[entries[name] for name in self.run.members])
        self._vouch(keys, self._trust())
        raw, objects = keys.SerializeToString(deterministic=True), self.services.objects
        with objects.lock:
            text = f"the keys of {len(entries)} hospitals are fixed for this run"
            self.services.store.secagg.keep_keys(self.run.id, objects.put(raw), len(raw), text)

    def _stored_keys(self) -> Vouched:
        """Read the keys that are stored; raises StateError (E-STATE-22) when they cannot be read."""
        raw = self.services.objects.verified(self.masks["secagg_keys_digest"]).read_bytes()
        try:
            return self._vouch(pb.SecaggKeys.FromString(raw), lambda *_: True)  # as it was when they were stored
        except DecodeError as error:
            raise StateError("E-STATE-22", f"expected the keys of {self.run.id}, found other bytes") from error

    def _vouch(self, keys: pb.SecaggKeys, trusted: Vouch) -> Vouched:
        entries = zip(self.run.members, keys.entries, strict=True)
        return vouch(self._secagg, [_entry(name, entry) for name, entry in entries], trusted)

    def _trust(self) -> Vouch:
        members = {s.name: roster_member(s) for s in self.services.store.members.silos() if not s.revoked}
        pins = {name: member.fingerprint for name, member in members.items()}
        consortium = identity_of(self.services.signer().cert_pem).identity.consortium
        return lambda entry, message: pinned_signature(entry, message, consortium, pins, members)

    # ---- the census ------------------------------------------------------------------------------------------------

    @property
    def _floor(self) -> bool:
        """Whether rows of classes are left out by the census: then the run cannot begin without."""
        return self.compiled.updates.floor is not None

    def begin(self, loop: RoundLoop, observer: Observer, server: State) -> tuple[State, ClassCoverage | None]:
        """Hold the census before round 0; return the state with what rounds need of it, and what it says of classes.

        Raises UnavailableError where the run needs it and not all hospitals answer.
        """
        if not self.compiled.counts_classes or self.run.closed:
            return server, None
        counted = self._census(loop, observer)
        if counted is None:
            return server, self.compiled.coverage((), why="not all hospitals were there when it was counted")
        if self._floor:
            server = {**server, HOSPITALS: {HOSPITALS: counted}}
        return server, self.compiled.coverage(counted.int().tolist())

    def _census(self, loop: RoundLoop, observer: Observer) -> Tensor | None:
        """Return how many hospitals each class has (C,): as it was counted before, or counted now.

        None where the run can do without, and not all hospitals answer, or a round has begun before it.
        """
        store, run = self.services.store, self.run
        digest = store.secagg.census(run.id)
        if digest is not None:
            proof = pb.SecaggCensus.FromString(self.services.objects.verified(digest).read_bytes())
            return torch.tensor(proof.hospitals, dtype=torch.float64)
        begun = store.runs.round(run.id, 0)
        if not self._floor and (run.coverage is not None or (begun and begun.record.kind.trains)):
            return None
        try:
            counted = loop.census(observer)[HOSPITALS]
        except UnavailableError:
            if self._floor or self.fixed_set(0, TaskKey.census(run.id).kind) is not None:
                raise
            store.secagg.drop_census(run.id)
            return None
        for name in run.members:
            self.services.dispatcher.send(name, census_closed(run.id))
        return counted

    def _keep_census(self, asked: SetOpening, sums: Mapping[str, Tensor], updates: Mapping[str, Contribution]) -> None:
        """Store what proves how many hospitals each class has: every silo finds it the same."""
        state, objects = asked.state, self.services.objects
        assert asked.opened is not None
        proof = pb.SecaggCensus(
            seal=asked.seal,
            confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in state.confirmations],
            uploads=[objects.path(updates[self.run.members[u]].object_digest).read_bytes() for u in state.inside],
            seeds=[pb.OpenedSeed(block=b, member=u, seed=s) for (b, u), s in asked.opened.own_seeds.items()],
            hospitals=[int(n) for n in sums[CLASSES][CHECK_WORDS:]],
        )
        raw, text = proof.SerializeToString(deterministic=True), "all hospitals are counted, class by class"
        with objects.lock:
            self.services.store.secagg.keep_census(self.run.id, objects.put(raw), len(raw), text)

    # ---- a round ---------------------------------------------------------------------------------------------------

    def base(self, kind: TaskKind) -> str:
        """Name what a round begins from, where that is no model: a census from everybody's keys."""
        return self._keys.digest.hex() if kind.census else ""

    def opened(self, now: OpenRound) -> None:
        """Take note of the round that is open."""
        self._open = now

    def needed(self, loop: RoundLoop, kind: TaskKind, cohort: int) -> int:
        """Return how many updates of a cohort close a round; a census that the run needs takes all."""
        return cohort if kind.census and self._floor else loop.needed(cohort)

    def fixed_set(self, round: int, kind: TaskKind) -> Mapping[str, str] | None:
        """Return whose updates alone are taken, by digest; None: everybody's, until the set is fixed."""
        return self.services.store.secagg.updates(self.run.id, round, kind)

    def classes_in(self, update: Mapping[str, Part]) -> frozenset[str] | None:
        """Name the classes of which an update counts an example; masks hide them."""
        del update
        return None

    def unmask(
        self,
        number: int,
        kind: TaskKind,
        sums: Mapping[str, Tensor],
        members: Collection[str],
        blocks: Collection[str],
    ) -> None:
        """Fix the set of a round, unless it is, ask its members, and take the masks off (`MaskedSum.unmask`).

        Raises UnavailableError (E-RUN-45) where too few confirm or answer, or an update of the set is missing;
        SecaggError (E-RUN-48) where masks do not cancel or a dealer's shares are wrong, E-RUN-51 on too small a set;
        RunInterrupted when the run was aborted or the service stops.
        """
        run, store, names = self._secagg, self.services.store, self.run.members
        row = store.runs.round(run.run_id, number)
        assert row is not None
        cohort, base = [names.index(name) for name in row.cohort], bytes.fromhex(row.base_digest)
        round = run.round(self._keys.digest, kind.value, number, base, cohort)
        updates = {u.silo: u for u in store.contributions.arrivals(run.run_id, number)}
        kept = {names.index(name): self._envelope(updates[name]) for name in members}
        total = UploadSum.of(round, [unsigned(sums[block]) for block in BLOCKS], kept)
        message = self._fix(total, kind, members)
        state = SealedRound(total, _seal_of(message, kind), self._keys.sign)
        if {BLOCKS[block] for block, _, _ in round.opened(state.inside)} != set(blocks):
            raise ValueError(f"expected to open what the members answer for, found {sorted(blocks)}")
        deadline_s = self.compiled.manifest.deadline_s
        asked = SetOpening(self.services, self.tasks, round, kind, state, message, deadline_s)
        self._open.set_fixed(asked.waiting)
        with self.tasks.asking(asked):
            asked.open()
        if kind.census:
            self._keep_census(asked, sums, updates)

    def _envelope(self, update: Contribution) -> tuple[bytes, Bytes, Bytes, Bytes]:
        """Read what an upload holds beside its words: its digest, salt, commitments and packages."""
        part = BundleFile(self.services.objects.path(update.object_digest))[MASKS].total
        salt, commitments, packages = (part[name].numpy() for name in ("salt", "commitments", "packages"))
        return bytes.fromhex(update.object_digest), salt, commitments, packages

    def _fix(self, total: UploadSum, kind: TaskKind, members: Collection[str]) -> pb.SecaggSeal:
        """Return the stored set; where there is none, store that of what was added."""
        services, number = self.services, total.round.number
        message = services.store.secagg.seal(self.run.id, number, kind)
        if message is None:
            own = services.signer()
            key = certificates.load_key(own.key_pem, "the key in force")
            seal = total.seal(lambda text: certificates.sign(key, Seal.CONTEXT, text))
            text = f"{len(members)} of {total.round.n} updates are its set; {total.round.t} hospitals must answer"
            made = _message_of(seal, kind, own.cert_pem)
            message = unless_over(lambda: services.store.secagg.keep_seal(made, kind, text))
            own_name = identity_of(own.cert_pem).identity.uri
            about = f"run={self.run.id} round={number + 1} set={', '.join(sorted(members))}"
            services.record(lines.Entry(own_name, "sealed", about))
        inside = {self.run.members[update.index] for update in message.updates}
        if lost := sorted(inside - set(members)):
            raise UnavailableError(
                "E-RUN-45",
                f"round {number + 1}: expected the updates of its set, found none here of {', '.join(lost)}: they "
                "were lost after the set was fixed, and it stays as it is; start these hospitals, then resume the run",
            )
        return message


def _entry(name: str, sent: pb.SecaggEntry) -> Entry:
    return Entry(name, sent.agree, sent.sign, sent.certificate_pem, sent.signature)


def _message_of(seal: Seal, kind: TaskKind, signer_pem: bytes) -> pb.SecaggSeal:
    updates = [pb.SealedUpdate(index=u, object_digest=digest.hex()) for u, digest in seal.uploads]
    return pb.SecaggSeal(
        run_id=seal.run_id,
        round=seal.round,
        kind=TO_WIRE[kind],
        base_digest=seal.base_digest.hex(),
        keys_digest=seal.keys_digest,
        updates=updates,
        signer_pem=signer_pem,
        signature=seal.signature,
    )


def _seal_of(message: pb.SecaggSeal, kind: TaskKind) -> Seal:
    uploads = tuple((u.index, bytes.fromhex(u.object_digest)) for u in message.updates)
    base = bytes.fromhex(message.base_digest)
    return Seal(message.run_id, kind.value, message.round, base, message.keys_digest, uploads, message.signature)


# ---- after a restoration ---------------------------------------------------------------------------------------------


def end_masked_runs(store: Store, remove: Callable[[str], None]) -> list[Run]:
    """End every masked run that is not over and whose members' keys were fixed; return them, as they are now.

    For a coordinator that comes from a backup: a hospital opens one set of a round and has deleted the keys of every
    round that it saw closed, and which these are the backup does not know.

    remove: deletes an object that nothing needs any more, by its digest.
    """
    open_runs = [run for run in store.runs.all() if run.state in RunState.ABORTED.comes_from]
    begun = [run for run in open_runs if store.secagg.keys(run.id) is not None]
    ended = [store.runs.end(run.id, RunState.ABORTED, _why(run)) for run in begun]
    for run in ended:
        store.contributions.delete_unreferenced(run.id, remove)
    return ended


def _why(run: Run) -> str:
    rounds = f"{run.closed} of {run.rounds} rounds" if run.rounds else "the evaluation"
    if run.closed == 0:
        remedy = "No round was closed: submit it again"
    elif run.closed < run.rounds:
        remedy = f"Go on from its last model, as a new run with new keys: coordinator run --from {run.id} "
        remedy += f"rounds={run.rounds - run.closed}"
    else:
        remedy = f"Every round was trained: coordinator evaluate {run.id} measures its model with new keys"
    charged = ""
    if CompiledRun.of(RunManifest.from_json(run.manifest)).private:
        charged = (
            ". What its rounds were charged stays in each hospital's ledger, also of rounds since the backup (there: "
            "silo ledger show); a new run is charged beside it"
        )
    return (
        f"E-RUN-54: the coordinator was restored, found {rounds} closed in what is left, and hospitals answer no round "
        f"of a run with secure aggregation twice. {remedy}{charged}"
    )
