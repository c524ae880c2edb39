"""The service as a whole: enrolment over the wire, the lead's client, one service per home, health and reflection."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.api.control import ControlService
from coordinator.api.lead import LeadService
from coordinator.api.server import ADDRESS_FILE, CoordinatorServer, EnrolmentService
from coordinator.api.transfer import TransferService
from coordinator.lead.client import LeadClient
from coordinator.pki.membership import Membership
from coordinator.storage.records import RunState
from coordinator.storage.store import LOCK_FILE
from fl_core.errors import ConfigError, FederationError, StateError, UnavailableError
from fl_core.types import tensor_maps
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.codec import read_state
from service_core.pki import certificates
from service_core.pki.certificates import RENEWAL, renewal_message
from service_core.pki.identity import identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import SignedRoster, renewed_from
from service_core.storage.private_files import Credentials
from tests.support import until
from tests.support.coordinator import World, channel, running
from tests.support.federation import federation, manifest
from tests.support.federations import NAMES


def test_every_call_of_the_protocol_is_answered_by_code_of_ours() -> None:
    """The generated servicers answer UNIMPLEMENTED where nothing overrides them; nobody may meet that answer."""
    made = {"Enrolment": EnrolmentService, "Control": ControlService, "Transfer": TransferService, "Lead": LeadService}
    assert set(made) == set(pb.DESCRIPTOR.services_by_name)
    for name, service in made.items():
        methods = {m.name for m in pb.DESCRIPTOR.services_by_name[name].methods}
        assert methods <= set(vars(service)), name


def test_a_silo_enrols_and_renews_over_the_wire(tmp_path: Path) -> None:
    with running(tmp_path / "home", ()) as world:
        members = world.server.store.members
        token = InvitationToken.decode(Membership(world.home, world.server.store).invite("west").token)
        enrolment = rpc.EnrolmentStub(channel(world.port, token.credentials))
        key = certificates.new_key()
        request = pb.JoinRequest(csr_pem=certificates.make_request(key))
        made = enrolment.Join(request)
        assert enrolment.Join(request).certificate_pem == made.certificate_pem  # the first answer was lost
        with pytest.raises(grpc.RpcError, match="E-ID-24"):
            enrolment.Join(pb.JoinRequest(csr_pem=certificates.make_request(certificates.new_key())))
        with pytest.raises(grpc.RpcError, match="E-ID-31"):
            enrolment.Join(pb.JoinRequest(csr_pem=b"no request"))
        assert made.authority_pem == token.ca_pem
        assert {"document", "signature"} == set(json.loads(made.signed_roster))
        own = Credentials(key, made.certificate_pem, made.authority_pem)
        following = certificates.new_key()
        public = certificates.load_key(following, "test").public_key()
        identity = identity_of(made.certificate_pem).identity
        proof = certificates.sign(certificates.load_key(key, "test"), RENEWAL, renewal_message(identity, public))
        renewal = pb.RenewRequest(csr_pem=certificates.make_request(following), renewal_proof=proof)
        stub = rpc.EnrolmentStub(channel(world.port, own))
        with pytest.raises(grpc.RpcError, match="E-ID-13"):
            stub.Renew(pb.RenewRequest(csr_pem=renewal.csr_pem, renewal_proof=b"forged"))
        renewed = stub.Renew(renewal)
        assert stub.Renew(renewal).certificate_pem == renewed.certificate_pem
        with pytest.raises(grpc.RpcError, match="E-ID-24"):
            enrolment.Join(request)
        found = members.silo("west")
        assert found.certificate.pem.encode() == renewed.certificate_pem
        assert len(found.proofs) == 1
        third = certificates.new_key()  # joining anew, with the key in force as witness
        again = InvitationToken.decode(Membership(world.home, world.server.store).invite("west").token)
        public = certificates.load_key(third, "test").public_key()
        proof = certificates.sign(certificates.load_key(following, "test"), RENEWAL, renewal_message(identity, public))
        stub = rpc.EnrolmentStub(channel(world.port, again.credentials))
        asked = pb.JoinRequest(csr_pem=certificates.make_request(third), renewal_proof=proof)
        signed = SignedRoster.unpack(stub.Join(asked).signed_roster)
        listed = {m.name: m for m in signed.verify(token.ca_pem, "test").members}["west"]
        assert renewed_from(listed, "test", identity_of(made.certificate_pem).fingerprint)


def test_the_lead_submits_follows_and_fetches(tmp_path: Path) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        world.manifests["spec"] = manifest(rounds=2)
        client = LeadClient.open(world.home)
        info = client.submit("spec", "one")
        assert client.submit("spec", "one").run_id == info.run_id
        assert (info.method, info.rounds, info.accuracy) == ("fedavg", 2, -1)
        people.come()
        events = list(client.watch(info.run_id))
        stored = [e for e in events if not (e.kind == "silo" and e.silos)]
        numbers = [e.number for e in stored]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [e.closed.round for e in stored if e.kind == "closed"] == [0, 1, 2]
        assert (stored[-1].kind, stored[-1].info.state) == ("ended", "finished")
        assert [e.number for e in client.watch("test", after=numbers[-2])] == numbers[-1:]
        detail = client.show()
        assert [r.run_id for r in client.runs()] == [info.run_id]
        assert (len(detail.rounds), detail.info.state) == (3, "finished")
        client.fetch(detail.info.model_object, tmp_path / "state", 1 << 20)
        assert tensor_maps.digest(read_state(tmp_path / "state")["w"]) == detail.info.model_digest
        assert {s.name for s in client.silos().silos} == set(NAMES)
        with pytest.raises(StateError, match="E-RUN-11"):
            client.abort("latest")
        with pytest.raises(FederationError, match="E-RUN-10"):
            client.show("nothing")
        with pytest.raises(FederationError, match="E-WIRE-12"):
            client.fetch("0" * 64, tmp_path / "nothing", 1 << 20)
        assert not (tmp_path / "nothing").exists()
        client.close()


def test_a_watch_goes_on_over_a_restart_of_the_service(tmp_path: Path) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        client = LeadClient.open(world.home)
        run = world.submit(manifest(rounds=1))
        seen: list[pb.Event] = []
        watching = threading.Thread(target=lambda: seen.extend(client.watch(run.id)), daemon=True)
        watching.start()
        until(lambda: world.server.store.runs.round(run.id, 0), "the round")
        world.stop()
        world.start(world.port)
        people.come()
        world.finished(run.id)
        watching.join(20)
        numbers = [e.number for e in seen if not e.silos]
        assert numbers == sorted(set(numbers))
        assert seen[-1].kind == "ended"
        client.close()


def test_two_services_never_share_a_home_or_a_port(tmp_path: Path) -> None:
    with running(tmp_path / "home", ()) as world:
        about = json.loads((world.home / ADDRESS_FILE).read_text())
        assert (about["address"], about["port"]) == (f"127.0.0.1:{world.port}", world.port)
        with pytest.raises(StateError, match="E-STATE-20"):
            CoordinatorServer(world.home, "127.0.0.1:0", world.compose).start()
        other = World.create(tmp_path / "other", ())
        with pytest.raises(StateError, match="E-NET-20"):
            CoordinatorServer(other.home, f"127.0.0.1:{world.port}", world.compose).start()
        other.start()  # the failed start gave its lock back
        other.stop()
    assert not (world.home / ADDRESS_FILE).exists()
    with pytest.raises(UnavailableError, match="E-NET-01"):
        LeadClient.open(world.home)


@pytest.mark.fault(
    "an operator", "deletes the lock file under a running coordinator", "a second coordinator is refused: E-STATE-20"
)
def test_a_second_coordinator_is_refused_when_the_lock_file_of_the_first_is_gone(tmp_path: Path) -> None:
    with running(tmp_path / "home", ()) as world:
        (world.home / LOCK_FILE).unlink()
        with pytest.raises(StateError, match="E-STATE-20"):
            CoordinatorServer(world.home, "127.0.0.1:0", world.compose).start()


def test_a_lead_that_cannot_connect_is_told_why(tmp_path: Path) -> None:
    world = World.create(tmp_path / "home", ())
    (world.home / ADDRESS_FILE).write_text(json.dumps({"address": "127.0.0.1:1", "port": 1}))
    client = LeadClient.open(world.home)
    with pytest.raises(UnavailableError, match="E-TLS-01"):
        client.runs()
    client.close()
    with pytest.raises(ConfigError, match="E-ID-11"):
        LeadClient.open(world.home, "somebody")


def test_health_and_reflection_answer_any_member(tmp_path: Path) -> None:
    with running(tmp_path / "home", ("north",)) as world, channel(world.port, world.people["north"]) as ch:
        check = health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(service="consilium.v1.Transfer"))
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(reflection_pb2_grpc.ServerReflectionStub(ch).ServerReflectionInfo(iter([ask])))
        assert "consilium.v1.Control" in {s.name for s in answer.list_services_response.service}


def test_what_was_not_foreseen_shows_no_internals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "home", ()) as world:

        def broken(*_: object) -> list[object]:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(world.server.store.runs, "page", broken)
        with pytest.raises(grpc.RpcError) as error:
            world.lead().Runs(pb.RunsRequest())
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert error.value.details().startswith("E-RUN-99")
        assert "secret" not in error.value.details()
        assert "secret detail" in caplog.text


def test_a_run_that_meets_an_unforeseen_error_fails_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "home", NAMES) as world:

        def broken(*given: object) -> object:
            raise RuntimeError("a detail")

        monkeypatch.setattr("coordinator.runs.run.StoredObject.adopt", broken)
        run = world.ended(world.submit(manifest(rounds=1)).id)
        assert run.state is RunState.FAILED
        assert run.reason.startswith("E-RUN-99")
        assert "a detail" in caplog.text
