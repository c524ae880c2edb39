"""What a hospital states of its policy and its ledger: kept, signed, shown, and told again; never set here."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from fl_core.errors import RefusedError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import receipts
from service_core.version import PROTOCOL
from tests.support import until
from tests.support.coordinator import DATA, World, channel, open_request, send
from tests.support.federations import manifest

STATED = pb.Attestation(
    policy_digest="ab" * 32, ledger_seq=17, ledger_head="cd" * 32, ledger_sealed=b"sealed", ledger_restored=2
)


def greeted(world: World, name: str, policy: str = "") -> pb.Welcome:
    """Open a session, take the welcome, leave."""
    over = threading.Event()

    def say() -> Iterator[pb.SiloMessage]:
        yield pb.SiloMessage(hello=pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, policy_digest=policy))
        over.wait(20)

    with channel(world.port, world.people[name]) as line:
        welcome = next(rpc.ControlStub(line).Session(say())).welcome
        over.set()
    until(lambda: world.server.dispatcher.activity_of(name) is None, "the end of the session")
    return welcome


def open_round(world: World) -> pb.Offer:
    """Submit a run and wait for its first round; no silo is there to answer."""
    run = world.submit(manifest(rounds=1))

    def ready() -> object:
        row = world.server.store.runs.round(run.id, 0)
        return row if row is not None and row.base_digest else None

    base = until(ready, "the first round").base_digest
    return pb.Offer(run_id=run.id, round=0, kind=pb.TRAIN, manifest_digest=run.manifest_digest, base_digest=base)


def test_an_attestation_is_in_the_signed_receipt_and_in_the_next_welcome(world: World) -> None:
    assert not greeted(world, "north").HasField("attested")
    receipt = send(world.transfer("north"), "north", open_round(world), DATA, STATED)
    assert receipt.attestation == STATED, "of a silo of 0.1.0, which seals what its ledger has spent in the attestation"
    receipts.verify(receipt, world.people["north"].ca_pem, "test")
    for name, value in (("ledger_seq", 18), ("ledger_sealed", b""), ("ledger_restored", 0)):
        edited = pb.Receipt()
        edited.CopyFrom(receipt)
        setattr(edited.attestation, name, value)
        with pytest.raises(RefusedError, match="E-ID-14"):
            receipts.verify(edited, world.people["north"].ca_pem, "test")
    assert greeted(world, "north").attested == STATED
    assert not greeted(world, "south").HasField("attested")


def test_what_is_sealed_apart_is_in_the_next_welcome_and_in_no_receipt(world: World) -> None:
    request = open_request("north", open_round(world), DATA)
    request.attestation.CopyFrom(STATED)
    request.attestation.ledger_sealed = b""
    request.ledger_sealed = STATED.ledger_sealed
    stub = world.transfer("north")
    stub.Open(request)
    stub.Put(iter([pb.Chunk(object=request.contribution_id, data=DATA)]))
    receipt = stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id))
    assert receipt.attestation == request.attestation
    receipts.verify(receipt, world.people["north"].ca_pem, "test")
    assert stub.Open(request).receipt.attestation == request.attestation
    assert greeted(world, "north").attested == STATED


def test_an_update_without_an_attestation_has_a_receipt_as_before(world: World) -> None:
    receipt = send(world.transfer("north"), "north", open_round(world), DATA)
    assert not receipt.HasField("attestation")
    assert b"attestation" not in receipts.canonical_text(receipt)
    receipts.verify(receipt, world.people["north"].ca_pem, "test")


def test_what_is_no_digest_is_refused(world: World) -> None:
    request = open_request("north", open_round(world), DATA)
    request.attestation.policy_digest = "the policy"
    with pytest.raises(grpc.RpcError, match="E-WIRE-12"):
        world.transfer("north").Open(request)
    request.attestation.policy_digest = ""
    for place in (request.attestation, request):
        place.ledger_sealed = bytes((1 << 17) + 1)
        with pytest.raises(grpc.RpcError, match="E-WIRE-12"):
            world.transfer("north").Open(request)
        place.ledger_sealed = b""


def test_the_lead_sees_the_newest_policy_of_a_silo_also_when_it_is_away(world: World) -> None:
    for digest in ("ab" * 32, "cd" * 32, ""):
        greeted(world, "north", digest)
        silos = world.lead().Silos(pb.SilosRequest()).silos
        assert next(s.policy_digest for s in silos if s.name == "north") == digest


def test_a_run_names_the_lead_who_asked_for_it(world: World) -> None:
    world.manifests["spec"] = manifest()
    made = world.lead().Submit(pb.SubmitRequest(spec_json="spec", request_id="r"))
    assert RunManifest.from_json(world.run(made.run_id).manifest).lead == "lead"
    assert "lead" not in manifest().to_json()
