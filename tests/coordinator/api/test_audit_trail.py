"""The coordinator's audit log, written while foreign clients call."""

from __future__ import annotations

import grpc
import pytest

from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import log_heads, receipts
from service_core.audit_log.heads import SignedHead
from tests.support.audit_log import entries, texts, verified
from tests.support.coordinator import (
    CONSORTIUM,
    DATA,
    channel,
    fetch,
    open_request,
    open_round,
    send,
    update_bytes,
)

OWN = f"coordinator://{CONSORTIUM}"


@pytest.mark.fault(
    "a hospital", "makes a lead's call, with an argument of 10,000 characters", "refused, and recorded in the audit log"
)
def test_allowed_and_refused_calls_are_lines_with_who_what_and_outcome(world, tmp_path):
    _, offer = open_round(world)
    name = next(name for name in world.people if name != "lead")
    stub = rpc.LeadStub(channel(world.port, world.people[name]))
    for _ in range(20):
        with pytest.raises(grpc.RpcError):
            stub.Abort(pb.RunQuery(run_id="\x1b[31m\n" + "x" * 10_000), timeout=20)
    world.lead().Runs(pb.RunsRequest(), timeout=20)
    send(world.transfer(name), name, offer, DATA)
    fetch(world.transfer(name), offer.base_digest, tmp_path)
    size = (tmp_path / offer.base_digest).stat().st_size
    world.stop()
    found = entries(world.home)
    silo = f"silo://{CONSORTIUM}/{name}"
    refused = [e for e in found if e.what == "Lead/Abort"]
    assert [(e.who, e.outcome, e.code, e.times) for e in refused] == [
        (silo, "refused", "E-ID-11", 1),
        (silo, "refused", "E-ID-11", 19),
    ]
    assert refused[0].serial
    assert refused[0].address.startswith("ipv4:127.0.0.1:")
    calls = [(e.who.split(":")[0], e.what, e.outcome) for e in found]
    for call in (
        ("lead", "Lead/Runs", "allowed"),
        ("silo", "Transfer/Open", "allowed"),
        ("silo", "Transfer/Put", "allowed"),
        ("silo", "Transfer/Commit", "allowed"),
        ("silo", "Transfer/Get", "allowed"),
    ):
        assert call in calls
    assert next(e.bytes for e in found if e.what == "Transfer/Get") == size
    assert next(e.bytes for e in found if e.what == "update taken") == len(DATA)
    assert all(text.isascii() for text in texts(world.home))
    assert verified(world.home).notes == ()


@pytest.mark.fault(
    "a hospital", "sends a false end of its audit log", "not stored; its update is accepted, and a line records it"
)
def test_the_ends_of_both_logs_cross_and_a_false_one_is_not_kept(world):
    _, offer = open_round(world)
    first, second = [name for name in world.people if name != "lead"][:2]
    mine = SignedHead.sign(f"silo://{CONSORTIUM}/{first}", 9, "ab" * 32, world.people[first])
    got = {}
    for name in (first, second):  # the second one shows the first one's
        request = open_request(name, offer, update_bytes())
        request.log_head.CopyFrom(log_heads.to_message(mine))
        stub = world.transfer(name)
        stub.Open(request, timeout=20)
        got[name] = send(stub, name, offer, update_bytes())
    receipts.verify(got[first], world.people[first].ca_pem, CONSORTIUM)
    plain = pb.Receipt()
    plain.CopyFrom(got[first])
    plain.ClearField("log_head")  # what a silo of an earlier version reads
    receipts.verify(plain, world.people[first].ca_pem, CONSORTIUM)
    world.stop()
    kept = [e for e in entries(world.home) if e.what == "head"]
    assert [(e.outcome, e.code, e.head and e.head.number) for e in kept] == [
        ("allowed", "", 9),
        ("refused", "E-ID-14", None),
    ]
    heads = [log_heads.of_message(r.log_head, OWN, world.people[first].ca_pem) for r in got.values()]
    assert verified(world.home, *heads).agreed == 2
