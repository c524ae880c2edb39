"""Every call of the service, by a hospital's certificate and by a lead's, with raw bytes and with changed messages."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from coordinator.api.limits import Limits, Rate
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import build_manifest
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole
from service_core.version import PROTOCOL
from tests.fuzz.mutations import any_bytes, changed
from tests.support.coordinator import FAST, World, channel

SERVICES = ("Enrolment", "Control", "Transfer", "Lead")
METHODS: Mapping[str, MethodDescriptor] = {
    f"{service}.{method.name}": method
    for service in SERVICES
    for method in pb.DESCRIPTOR.services_by_name[service].methods
}
DEADLINE_S, ANSWERS = 10.0, 3
MEMORY_KIB = 256 << 10
_MANY = Rate(1e6, 1_000_000)
_NO_LIMITS = Limits(
    calls=dict.fromkeys(CertificateRole, _MANY), joins=_MANY, joins_per_address=_MANY, renewals=_MANY, messages=_MANY
)
"""Else the rates would answer, and not what is behind them."""
_OURS = re.compile(r"E-[A-Z]+-\d\d: ")
_UNFORESEEN = "E-RUN-99"


class _World(World):
    """With the configuration that the service reads, not a stand-in."""

    def compose(self, spec: str, roster: list[pb.SiloInfo]) -> RunManifest:
        return build_manifest(spec, roster)


@dataclass
class Service:
    """A coordinator in this process, and raw calls to it."""

    world: World
    unforeseen: list[str]
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def call(self, name: str, peer: str, payloads: Sequence[bytes]) -> None:
        """Send bytes as the messages of a call; raises AssertionError where the answer is no answer of ours."""
        method = METHODS[name]
        line = self.channels.setdefault(peer, channel(self.world.port, self.world.people[peer]))
        kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
        send = getattr(line, kind)(f"/{method.containing_service.full_name}/{method.name}")
        try:
            answer = send(iter(payloads) if method.client_streaming else payloads[0], timeout=DEADLINE_S)
            if method.server_streaming:
                for _, _ in zip(range(ANSWERS), answer, strict=False):
                    pass
                answer.cancel()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and method.server_streaming:
                return  # it waits for news
            ours = _OURS.match(details) and not details.startswith(_UNFORESEEN)
            assert ours or _is_grpcs_own(code, details), f"{name} by {peer}: {code.name} {details}"
        finally:
            assert not self.unforeseen, self.unforeseen[-1]

    def require_alive(self) -> None:
        """Raise AssertionError unless a lead is still answered."""
        reply = self.channels.setdefault("lead", channel(self.world.port, self.world.people["lead"])).unary_unary(
            "/consilium.v1.Lead/Silos"
        )(b"", timeout=DEADLINE_S)
        assert pb.SiloList.FromString(reply).silos


def _is_grpcs_own(code: grpc.StatusCode, details: str) -> bool:
    """Tell whether the library answered: for bytes that are no message, and for a message that is too large."""
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return "deserializ" in details or "Error parsing message" in details
    return code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details


class _Unforeseen(logging.Handler):
    """Keeps what the service logs as unforeseen: a session has no answer to say it in."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def service(home: Path) -> Iterator[Service]:
    unforeseen = _Unforeseen()
    logging.getLogger("coordinator").addHandler(unforeseen)
    world = _World.create(home, ("north",), replace(FAST, limits=_NO_LIMITS))
    world.start()
    made = Service(world, unforeseen.seen)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield made
        made.require_alive()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < MEMORY_KIB, f"the service took {grown >> 10} MiB more"
    finally:
        logging.getLogger("coordinator").removeHandler(unforeseen)
        for line in made.channels.values():
            line.close()
        world.stop()


@cache
def _spec() -> str:
    return compose_spec(("method=fedavg", "data=digits", "rounds=1")).to_json()


def samples(name: str) -> list[Message]:
    """Give messages that the call might accept; of the others an empty one."""
    digest, spec = "a" * 64, _spec()
    open_ = pb.OpenRequest(run_id="run-1", manifest_digest=digest, base_digest=digest, object_digest=digest, size=10)
    hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, data=pb.DataOffer(name="digits", shape=[1, 8, 8]))
    known: Mapping[str, Sequence[Message]] = {
        "Enrolment.Join": [pb.JoinRequest(csr_pem=certificates.make_request(certificates.new_key()))],
        "Enrolment.Renew": [
            pb.RenewRequest(csr_pem=certificates.make_request(certificates.new_key()), renewal_proof=b"x")
        ],
        "Control.Session": [pb.SiloMessage(hello=hello), pb.SiloMessage(pulse=pb.Pulse())],
        "Transfer.Open": [open_],
        "Transfer.Put": [pb.Chunk(data=b"x" * 10)],
        "Transfer.Get": [pb.GetRequest(digest=digest)],
        "Lead.Submit": [pb.SubmitRequest(spec_json=spec, request_id="r")],
    }
    method = METHODS[name]
    return list(known.get(name, [getattr(pb, method.input_type.name)()]))


@st.composite
def payloads(draw: st.DrawFn, name: str) -> list[bytes]:
    """Give one to three messages of a call, changed or raw."""
    known, found = _cached_samples(name), list[bytes]()
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            found.append(changed(draw, draw(st.sampled_from(known))))
        else:
            found.append(draw(any_bytes([m.SerializeToString() for m in known])))
    return found


_cached_samples = cache(samples)
