"""A silo's session with the coordinator, by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import grpc
from helpers_grpc import World, channel

from coordinator.runs.session import Session
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.pki.identity import Identity, Kind, PeerCertificate
from protos.version import PROTOCOL

DENIED = grpc.StatusCode.PERMISSION_DENIED


def session(name: str = "north") -> Session:
    """A silo's session without a connection."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return Session(PeerCertificate(Identity(Kind.SILO, "test", name), "1", "f", start, start + timedelta(days=90)))


class Line:
    """A session by hand."""

    def __init__(self, world: World, name: str, hello: pb.Hello | None = None, own=None, silent: bool = False) -> None:
        self._out: queue.Queue[pb.SiloMessage | None] = queue.Queue()
        self.got: list[pb.CoordinatorMessage] = []
        self.error: grpc.RpcError | None = None
        self.over = threading.Event()
        self._silent = silent
        self._channel = channel(world.port, own or world.people[name])
        if hello is not None:
            self.say(hello=hello)
        self._call = rpc.ControlStub(self._channel).Session(iter(self._out.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, **body: object) -> None:
        self._out.put(pb.SiloMessage(**body))

    def _read(self) -> None:
        try:
            for message in self._call:
                self.got.append(message)
                if message.HasField("pulse") and not self._silent:
                    self.say(pulse=pb.Pulse(activity=pb.TRAINING, done=len(self.got)))
        except grpc.RpcError as error:
            self.error = error
        self.over.set()

    def kinds(self) -> list[str]:
        return [str(m.WhichOneof("body")) for m in self.got]

    def of(self, kind: str) -> list[pb.CoordinatorMessage]:
        return [m for m in self.got if m.WhichOneof("body") == kind]

    def close(self) -> None:
        self._out.put(None)
        self._call.cancel()
        self._channel.close()
        assert self.over.wait(10)

    def failure(self) -> tuple[grpc.StatusCode, str]:
        assert self.over.wait(10)
        assert self.error is not None
        return self.error.code(), self.error.details().split(":")[0]


HELLO = pb.Hello(
    protocol_min=PROTOCOL,
    protocol_max=PROTOCOL,
    software="by hand 1.0",
    data=pb.DataOffer(name="digits", shape=[1, 8, 8]),
)


def instance(id: str, previous: str = "") -> pb.Hello:
    return pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=id, previous_instance=previous)


def online(world: World, name: str) -> Callable[[], bool]:
    return lambda: world.server.hub.live(name) is not None
