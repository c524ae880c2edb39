"""Hospitals for tests: work that waits, an outbox by hand, silos that follow a script, a home with everything in it."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import grpc
import torch

from consilium.research.engines.in_process import SiloShare
from fl_core import datasets
from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import run_silo_round
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData, SiloPort
from fl_core.types.values import Bundle, Part, RoundContext, State
from privacy.accounting.accountant import Mechanism
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import version
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import codec, receipts
from protos.wire.tasks import FROM_WIRE, TaskKey
from service_core.audit_log import lines
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.storage import digests
from service_core.storage.object_store import ObjectStore
from service_core.version import PROTOCOL, software
from silo.admission.controls import AdmissionRequest, HospitalControls
from silo.admission.run_request import privacy_of, update_contents
from silo.identity.identity import SiloIdentity
from silo.storage.approvals import AwaitingDecisionError
from silo.storage.home import Home, ServeOptions
from silo.storage.outbox import Outbox, TrainingResult
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation, LocalEvaluation, OutboxEntry
from tests.support import until
from tests.support.coordinator import World, channel, fetch, ready, send
from tests.support.fake_coordinator import authority, enrolled, manifest
from tests.support.pki import certified, member, roster
from tests.support.privacy import DATA, TRAIN, budgeted, private

TRAINED = TaskKey("run-1", 0, TaskKind.TRAIN)


class Slow:
    """A round's arithmetic that takes steps until it is let go, and counts how often it began."""

    def __init__(self):
        self.begun, self.held, self.fail = [], True, None
        self.started, self.free = threading.Event(), threading.Event()

    def __call__(self, bench, msg, state, data, context, kind):
        self.begun.append(context.round)
        self.started.set()
        while self.held and not self.free.wait(0.002):
            data._data._progress(1, 5)  # behind what the policy withholds
        if self.fail is not None:
            raise self.fail
        return run_silo_round(bench, msg, state, data, context, kind)


class Watched:
    """Counts how often examples are read."""

    def __init__(self, monkeypatch) -> None:
        self.read = 0
        plain = datasets.TensorExamples.batch

        def batch(examples, index, augment=None):
            self.read += 1
            return plain(examples, index, augment)

        monkeypatch.setattr(datasets.TensorExamples, "batch", batch)


def first(hospital, times=1):
    """Let a hospital do a round."""
    method = build_method(hospital.manifest.method.name, hospital.manifest.method.options)
    hospital.offer(state=method.broadcast(hospital.server))
    until(lambda: hospital.events().count("sent") >= times or "refused" in hospital.events(), seconds=60)
    assert "refused" not in hospital.events(), [n.text for n in hospital.notices]


def upload(hospital) -> bytes:
    return bytes(next(iter(hospital.transfer.uploads.values())))


def rounds_equal(hospital, port: SiloPort, messages: Sequence[State]) -> None:
    """Let a hospital train twice and evaluate; each update must be the port's, byte by byte."""
    for round, (msg, kind) in enumerate(zip(messages, (pb.TRAIN, pb.TRAIN, pb.EVALUATE), strict=True)):
        hospital.transfer.uploads.clear()
        hospital.offer(round, kind, msg)
        hospital.sent(round + 1)
        assert upload(hospital) == codec.pack_bundle(port.round(msg, RoundContext(3, 10, 2, round, 3), FROM_WIRE[kind]))
        hospital.close(round, kind=kind)
        hospital.settled(round + 1)


FACTS = LocalEvaluation(("a", "b"), (1.0, 0.0), (2.0, 0.0))
M, B = "a" * 64, "b" * 64


def key(round=0, run="run-1", kind=TaskKind.TRAIN):
    return TaskKey(run, round, kind)


def finished(value: float, server_tracks_state: bool = True) -> TrainingResult:
    bundle = {
        "metrics": Part({"correct": torch.ones(2)}, torch.ones(2)),
        "delta": Part.of({"w": torch.ones(3) * value}),
    }
    return TrainingResult(bundle, {"own": {"w": torch.full((2,), value)}}, FACTS, server_tracks_state)


def signed_update(round: int, restored: int = 0, sealed_in_receipt: bool = False) -> tuple[OutboxEntry, bytes]:
    """Make what a hospital with a ledger keeps of a round: an update's entry, and its receipt with a real signature."""
    attested = Attestation("c" * 64, round + 1, f"{round:064x}", bytes([round] * 1052).hex(), restored)
    made = [digests.digest(f"{what} {round}".encode()) for what in ("base", "update", "bundle", "state")]
    entry = OutboxEntry(key(round), M, *made[:3], 691_088, made[3], attested=attested, coordinator="0" * 16)
    stated = attested if sealed_in_receipt else attested.signed
    plain = pb.Receipt(**entry.facts(), silo="center1", at_unix=1.5e9 + round, attestation=stated.message())
    key_pem, cert_pem, _ = authority().server_credentials()
    return entry, receipts.sign(plain, key_pem, cert_pem).SerializeToString(deterministic=True)


def opened(home: Path) -> Outbox:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Outbox(SiloStore(home / "silo.db"), ObjectStore(home / "objects"), "center1")


def value(outbox: Outbox, run="run-1") -> float | None:
    state = outbox.state(run)
    return None if state is None else float(state["own"]["w"][0])


def stage(outbox: Outbox, round=0, value=1.0, base=B, kind=TaskKind.TRAIN):
    pending = outbox.begin(key(round, kind=kind), M, base, finished(value))
    pending.finish()
    return pending.entry


Stub = TypeVar("Stub", rpc.ControlStub, rpc.TransferStub)
_ONE_MODEL_AT_A_TIME = threading.Lock()  # training seeds torch's global generator


@dataclass
class Entry:
    """A finished update of a scripted silo."""

    offer: pb.Offer
    data: bytes
    staged: State
    receipt: pb.Receipt | None = None
    refused: str = ""


@dataclass
class Memory:
    """What a hospital's disk would hold; outlives the silo object."""

    states: dict[str, State] = field(default_factory=dict)
    outbox: dict[TaskKey, Entry] = field(default_factory=dict)
    trained: list[TaskKey] = field(default_factory=list)
    closed: dict[TaskKey, bool] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


Alter = Callable[[TaskKey, Bundle], Bundle]


class ScriptedSilo:
    """A silo that follows docs/protocol.md with the least code, for what a real service does not do.

    It outlives a coordinator whose power is cut in the middle of a write, sends an update that comes too late, and says
    what a test says about masks. Whole runs with real services: `federation.py`.
    alter: changes a bundle before it is packed. refuse: says why an offer is refused, or "".
    """

    def __init__(
        self,
        world: World,
        name: str,
        share: SiloShare,
        memory: Memory | None = None,
        *,
        alter: Alter | None = None,
        refuse: Callable[[pb.Offer], str] = lambda offer: "",
    ) -> None:
        self.world, self.name, self.share = world, name, share
        self.memory = memory or Memory()
        self._alter, self._refuse = alter, refuse
        self._stop = threading.Event()
        self._offers: queue.Queue[pb.Offer | None] = queue.Queue()
        self.received: list[pb.CoordinatorMessage] = []
        self.errors: list[Exception] = []
        self._lock = threading.Lock()
        self._channels: set[grpc.Channel] = set()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._sessions, self._work)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._offers.put(None)
        with self._lock:
            for ch in self._channels:
                ch.close()  # ends every call over it, also one that nobody will ever answer
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @contextmanager
    def _connected(self, make: Callable[[grpc.Channel], Stub]) -> Iterator[Stub]:
        ch = channel(self.world.port, self.world.people[self.name])
        with self._lock:  # a stub that is made over a channel while another thread closes it ends the process
            self._channels.add(ch)
            stub = make(ch)
            if self._stop.is_set():
                ch.close()
        try:
            yield stub
        except ValueError as error:  # a call over a channel that `stop` has closed
            if not self._stop.is_set():
                raise
            self.errors.append(error)
        finally:
            with self._lock:
                self._channels.discard(ch)
            ch.close()

    # ---- control ----

    def _sessions(self) -> None:
        while not self._stop.is_set():
            with self._connected(rpc.ControlStub) as stub:
                try:
                    self._session(stub)
                except grpc.RpcError as error:
                    self.errors.append(error)
                    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                        return
            self._stop.wait(0.05)

    def _session(self, stub: rpc.ControlStub) -> None:
        out: queue.Queue[pb.SiloMessage | None] = queue.Queue()
        staged = [k.ref for k in self.memory.outbox]
        out.put(
            pb.SiloMessage(
                hello=pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, software=software(), staged=staged)
            )
        )
        call = stub.Session(iter(out.get, None))
        try:
            for message in call:
                self.received.append(message)
                self._take(message, out)
                if self._stop.is_set():
                    return
        finally:
            out.put(None)
            call.cancel()

    def _take(self, message: pb.CoordinatorMessage, out: queue.Queue[pb.SiloMessage | None]) -> None:
        kind = message.WhichOneof("body")
        if kind == "pulse":
            out.put(pb.SiloMessage(pulse=pb.Pulse(activity=pb.IDLE)))
        elif kind == "preflight":
            out.put(ready(message.preflight))
        elif kind == "offer":
            offer = message.offer
            why = self._refuse(offer)
            ref = {"run_id": offer.run_id, "round": offer.round, "kind": offer.kind}
            out.put(
                pb.SiloMessage(answer=pb.Answer(**ref, accepted=not why, code="E-RUN-14" if why else "", reason=why))
            )
            if not why:
                self._offers.put(offer)
        elif kind == "round_closed":
            closed = message.round_closed
            key = TaskKey.of(closed)
            entry = self.memory.outbox.pop(key, None)
            self.memory.closed[key] = closed.included
            if entry is not None and closed.included and key.kind is TaskKind.TRAIN:
                self.memory.states[key.run_id] = entry.staged
        elif kind == "run_ended":
            self.memory.ended[message.run_ended.run_id] = message.run_ended.state

    # ---- data ----

    def _work(self) -> None:
        while (offer := self._offers.get()) is not None and not self._stop.is_set():
            try:
                self._task(offer)
            except grpc.RpcError as error:
                self.errors.append(error)

    def _task(self, offer: pb.Offer) -> None:
        key = TaskKey.of(offer)
        if key in self.memory.closed:
            return
        with self._connected(rpc.TransferStub) as stub:
            if key not in self.memory.outbox:
                self.memory.outbox[key] = self._train(stub, key, offer)
            entry = self.memory.outbox.get(key)
            if entry is not None:
                entry.receipt = send(stub, self.name, entry.offer, entry.data)

    def _train(self, stub: rpc.TransferStub, key: TaskKey, offer: pb.Offer) -> Entry:
        folder = self.world.home.parent / "silos" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        manifest = RunManifest.from_json(fetch(stub, offer.manifest_digest, folder).read_text())
        assert manifest.digest() == offer.manifest_digest
        msg = codec.read_state(fetch(stub, offer.base_digest, folder))
        me = manifest.index(self.name)
        fed = RoundContext(
            len(manifest.members), len(manifest.schema.classes), manifest.rounds, key.round, offer.cohort
        )
        turn = fed.for_silo(me, manifest.seed, manifest.members[me].prototypes, manifest.masked_units(me))
        data = PlainLocalData(RoundData(self.share.train, self.share.test, manifest.train, turn))
        with _ONE_MODEL_AT_A_TIME:
            outcome = run_silo_round(
                RunSetup.of(manifest).silo_runtime(), msg, self.memory.states.get(key.run_id), data, turn, key.kind
            )
        self.memory.trained.append(key)
        bundle = outcome.bundle if self._alter is None else self._alter(key, outcome.bundle)
        return Entry(offer, codec.pack_bundle(bundle), outcome.state)


POLICY = '[runs]\napprove = "by hand"\n[privacy]\nepsilon = 8\n'
RUN = "fedavg-digits-11aa"


def asks(home: Home, run: RunManifest, run_id: str) -> None:
    """Let a run ask this hospital, as its service does."""
    store = SiloStore(home.database)
    try:
        with suppress(AwaitingDecisionError):
            HospitalControls(home, store).admit(AdmissionRequest(run_id, run, lambda: run.schema.classes))
    finally:
        store.close_database()


def took_part(home: Home, run: RunManifest, run_id: str = RUN, size: int = 155_244, rounds: int = 3) -> None:
    """Write what a run leaves in the database whose updates all have receipts."""
    store = SiloStore(home.database)
    digest = run.digest()
    compiled = CompiledRun.of(run)
    store.record_run(run_id, run.name, digest, leaves=update_contents(compiled).to_json(), privacy=privacy_of(compiled))
    for k in range(rounds):
        key = TaskKey(run_id, k, TaskKind.TRAIN)
        entry = OutboxEntry(key, digest, "b" * 64, "c" * 64, "d" * 64, size)
        if not compiled.private:
            fingerprint = datasets.load(DATA).fingerprint
            store.note_unprotected(key, f"{k:064}", fingerprint, ("test", "train"))
        store.stage(entry, LocalEvaluation(run.schema.classes, (1.0,) * 10, (2.0,) * 10))
        store.deliver(key, b"receipt")
        store.close(key, included=True)
    store.end_run(run_id, "finished", "")
    store.record_contact("consortium.example.org:8443", "consilium-fl 0.1.0")
    store.close_database()


def spent(ledger: Ledger, steps: int = 40) -> None:
    """Charge training records for one round."""
    data = datasets.load(DATA)
    task = LedgerTask(RUN, "m" * 64, 0, "train", version(data, "train"))
    entry = ledger.reserve(TRAIN, task, [PlannedRelease("training", Mechanism(1.1, 0.1, steps))])
    ledger.start(entry)
    ledger.commit(entry, "d" * 64)


def checked(home: Home) -> None:
    """Put down the result of a data check, with a few broken files."""
    report = {
        "origin": DATA,
        "classes": [str(k) for k in range(10)],
        "counts": {"train": [0, 178, 0, 0, 181, 0, 0, 0, 172, 0], "test": [0, 31, 0, 0, 30, 0, 0, 0, 29, 0]},
        "fingerprint": "",
        "problems": [
            {
                "code": "E-DATA-04",
                "what": "an image that cannot be read",
                "count": 2,
                "first": ["scans/0041.png", "scans/0107.png"],
                "remedy": "Restore them, or leave them out",
            }
        ],
    }
    served = home.served()
    assert served is not None
    raw = {"at": time.time(), "served": served._asdict(), "report": report}
    (home.path / "data-check.json").write_text(json.dumps(raw))


def furnished(folder: Path) -> Home:
    """Make a home with all of it."""
    home = enrolled(folder)
    ca = authority()
    identity = SiloIdentity(folder)
    mine = member(ca, identity.current_credentials().cert_pem)
    others = [member(ca, certified(ca, name)) for name in ("center0", "center2")]
    identity.update_roster(roster(ca, [mine, *others], 1))
    late = member(ca, certified(ca, "center3"))
    identity.update_roster(roster(ca, [mine, *others, late], 2), accept_additions=False)
    ledger = budgeted(folder, policy=POLICY)
    spent(ledger)
    home.note_served(ServeOptions(DATA))
    checked(home)
    took_part(home, private(rng="secure"))
    asks(
        home,
        replace(
            private("fedmr", {"inter_weighting": "example"}, epsilon=3.0, rng="secure"),
            name="skin-study-2",
            lead="anna",
        ),
        "fedmr-digits-7f3c",
    )
    asks(home, replace(manifest(), name="first-look", lead="anna", rounds=5), "fedavg-digits-90d2")
    log = AuditLog(folder / FOLDER)
    log.append(
        lines.LogEntry("silo://demo/center1", "service started"),
        lines.LogEntry("coordinator://demo", "training", f"run={RUN} round=3"),
        lines.LogEntry("silo://demo/center1", "sent", f"run={RUN} round=3", bytes=155_244),
        lines.LogEntry("coordinator://demo", "approval", "run=fedmr-digits-7f3c round=1"),
    )
    log.close()
    return home
