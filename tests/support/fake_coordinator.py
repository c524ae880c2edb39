"""A coordinator's control plane under a test's command, and a hospital that serves it."""
# ruff: noqa: N802 - gRPC names the methods

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import grpc

from fl_core import datasets
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import Option
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.records import TrainConfig
from fl_core.types.values import Layout, State
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.codec import pack_state
from service_core.pki.invitation import InvitationToken
from service_core.tls.diagnosis import Diagnosis
from service_core.version import PROTOCOL, version
from silo.events import Event
from silo.identity.identity import SiloIdentity
from silo.service.service import Service, SiloSettings
from silo.storage.home import Home
from silo.training.trainer import RunRound
from tests.support import until
from tests.support.transfers import PATIENCE, FakeTransfer, Host, authority

# ---- the control plane ---------------------------------------------------------------------------------------------


class FakeSession:
    """One session as the coordinator sees it."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.received: list[pb.SiloMessage] = []
        self.over = threading.Event()
        self._out: queue.SimpleQueue[pb.CoordinatorMessage | None] = queue.SimpleQueue()

    def send(self, **body: object) -> None:
        self._out.put(pb.CoordinatorMessage(**body))

    def end(self) -> None:
        self._out.put(None)

    def messages(self) -> Iterator[pb.CoordinatorMessage]:
        while (message := self._out.get()) is not None:
            yield message

    def got(self, kind: str) -> list:
        return [getattr(m, kind) for m in list(self.received) if m.WhichOneof("body") == kind]


class FakeControl(rpc.ControlServicer):
    """Sessions under a test's control. greet: what is sent after the welcome."""

    def __init__(self, pulse_s: float = 0.5, recycle_s: float = 0.0) -> None:
        self.pulse_s, self.recycle_s = pulse_s, recycle_s
        self.sessions: list[FakeSession] = []
        self.welcome: Callable[[pb.Hello], pb.CoordinatorMessage | None] = self._welcome
        self.greet: Callable[[FakeSession], None] = lambda session: None
        self.beats = True

    def _welcome(self, hello: pb.Hello) -> pb.CoordinatorMessage:
        facts = pb.Welcome(
            protocol=PROTOCOL, software="fake 1", pulse_seconds=self.pulse_s, recycle_seconds=self.recycle_s
        )
        return pb.CoordinatorMessage(welcome=facts)

    @property
    def last(self) -> FakeSession:
        return self.sessions[-1]

    def Session(self, messages, context):
        hello = next(messages).hello
        session = FakeSession(hello)

        def listen() -> None:
            try:
                for message in messages:
                    session.received.append(message)
            except grpc.RpcError:
                pass
            finally:
                session.over.set()
                session.end()

        def beat() -> None:
            while not session.over.wait(self.pulse_s):
                if self.beats:
                    session.send(pulse=pb.Pulse())

        first = self.welcome(hello)
        if first is None:
            context.add_callback(session.over.set)
            session.over.wait(20)
            return
        for body in (listen, beat):
            threading.Thread(target=body, daemon=True).start()
        self.greet(session)
        self.sessions.append(session)
        yield first
        yield from session.messages()


# ---- a hospital ----------------------------------------------------------------------------------------------------

MEMBERS = ("center0", "center1", "center2")


def enrolled(folder: Path, name: str = "center1") -> Home:
    """Give a home whose silo has joined the tests' consortium, without a network."""
    home = Home(folder).make()
    identity = SiloIdentity(home.path)
    if not identity.joined:
        material = identity.join_material(InvitationToken.decode(authority().invite(name).token))
        identity.install(authority().sign_silo(material.csr_pem, name), authority().ca_pem)
        home.write_addresses(material.addresses)
    return home


_version = cache(version)


@cache
def _layout(method: str, options: tuple[tuple[str, Option], ...]) -> Layout:
    schema = datasets.schema_of("digits")
    return derive_layout(build_method(method, dict(options)), build_model("digits_cnn", {}, schema, 3), schema)


def manifest(**other) -> RunManifest:
    """Freeze a small run on the digits."""
    schema = datasets.schema_of("digits")
    method = other.pop("method", NamedOptions("fedavg", {}))
    facts = {
        "name": "small",
        "method": method,
        "model": NamedOptions("digits_cnn", {}),
        "data": "digits",
        "schema": schema,
        "train": TrainConfig(epochs=1, batch_size=64),
        "rounds": 2,
        "seed": 3,
        "members": make_members(MEMBERS, 3, 1.0),
        "layout": _layout(method.name, tuple(sorted(method.options.items()))),
        "grid": FixedPointFormat("ring64", len(MEMBERS)),
        "privacy": NamedOptions("none", {}),
        "threads": 1,
        "software": _version(),
    }
    return RunManifest(**{**facts, **other})


class Hospital:
    """A service at work, the coordinator that it talks to, and a run."""

    def __init__(
        self,
        folder: Path,
        run: RunManifest | None = None,
        run_round: RunRound = run_silo_round,
        clock: Callable[[], float] = time.monotonic,
        **settings,
    ) -> None:
        self.run_round, self.clock = run_round, clock
        self.folder, self.settings = folder, settings
        self.control, self.transfer = FakeControl(), FakeTransfer()
        self.host = Host(self.transfer, self.control)
        self.run_id = "run-1"
        self.manifest = run or manifest()
        self.digest = self.transfer.offer(self.manifest.to_json().encode())
        self.server = RunSetup.of(self.manifest).initial_state()
        self.notices: list[Event] = []
        self.service: Service | None = None

    def start(self) -> Service:
        place = SiloSettings(enrolled(self.folder), **{"data": "digits/p3c4/1", "device": "cpu", **self.settings})
        well = Diagnosis(None, "works", "all is well")
        self.service = Service(
            place,
            self.notices.append,
            PATIENCE,
            lambda _: self.host.channel(),
            lambda _: well,
            self.run_round,
            self.clock,
        )
        before = len(self.control.sessions)
        self.service.start()
        until(lambda: len(self.control.sessions) > before)
        return self.service

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def offer_of(self, round: int = 0, kind=pb.TRAIN, state: State | None = None, **other) -> pb.Offer:
        base = pack_state(build_method("fedavg", {}).broadcast(self.server) if state is None else state)
        facts = {
            "run_id": self.run_id,
            "round": round,
            "kind": kind,
            "manifest_digest": self.digest,
            "base_digest": self.transfer.offer(base),
            "base_size": len(base),
            "cohort": len(MEMBERS),
        }
        return pb.Offer(**{**facts, **other})

    def offer(self, *args, **other) -> pb.Offer:
        offer = self.offer_of(*args, **other)
        self.control.last.send(offer=offer)
        return offer

    def close(self, round: int = 0, included: bool = True, kind=pb.TRAIN) -> None:
        closed = pb.RoundClosed(run_id=self.run_id, round=round, kind=kind, included=included)
        self.control.last.send(round_closed=closed)

    def events(self) -> list[str]:
        return [n.event for n in self.notices]

    def sent(self, times: int = 1) -> None:
        until(lambda: self.events().count("sent") >= times, what=str([n.text for n in self.notices]))

    def answers(self) -> list[pb.Answer]:
        return [a for s in self.control.sessions for a in s.got("answer")]

    def settled(self, times: int = 1) -> None:
        until(lambda: sum(len(s.got("settled")) for s in self.control.sessions) >= times)

    def refused(self) -> pb.Answer:
        until(lambda: any(not a.accepted for a in self.answers()), what=str([n.text for n in self.notices]))
        return next(a for a in self.answers() if not a.accepted)
