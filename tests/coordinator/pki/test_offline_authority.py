"""An authority whose key is on another machine: requests and answers by hand, a service that can sign nothing."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from coordinator.cli import authority, consortium
from coordinator.lead.client import LeadClient
from coordinator.pki.membership import Membership
from fl_core.errors import ConfigError, RefusedError, StateError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki.identity import format_fingerprint
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import SignedRoster
from silo.cli.main import run as silo
from silo.identity.identity import SiloIdentity
from tests.support import until
from tests.support.coordinator import FAST, World, channel

DENIED = grpc.StatusCode.PERMISSION_DENIED


class Machines:
    """The authority's home, the service's, and the files that are carried between them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.home = folder / "authority"
        consortium.init("test", ["127.0.0.1:8443"], home=self.home)
        self.world = World(folder / "service", FAST)
        self.world.home.mkdir(mode=0o700)
        authority.service(out=self.world.home / "pki", home=self.home)
        capsys.readouterr()

    def silo(self, *words: str) -> int:
        return silo([*words])

    def request(self, name: str, home: str | None = None) -> Path:
        out = self.folder / f"{name}.request"
        assert self.silo("request", "--out", str(out), "--home", str(self.folder / (home or name))) == 0
        return out

    def sign(self, name: str) -> tuple[Path, str]:
        out = self.folder / f"{name}.admission"
        self._capsys.readouterr()
        authority.sign(self.folder / f"{name}.request", name, out=out, home=self.home, as_json=True)
        return out, json.loads(self._capsys.readouterr().out)["authority_fingerprint"]

    def admit(self, file: Path) -> None:
        authority.admit(file, home=self.world.home)

    def member(self, name: str) -> SiloIdentity:
        """Enrol a hospital from its request to its certificate."""
        self.request(name)
        answer, fingerprint = self.sign(name)
        self.admit(answer)
        words = ["join", "--signed", str(answer), "--authority", format_fingerprint(fingerprint)]
        assert self.silo(*words, "--home", str(self.folder / name)) == 0
        return SiloIdentity(self.folder / name)

    def call(self, silo: SiloIdentity) -> str:
        """Call the service as a silo; return how it was refused, or ""."""
        with channel(self.world.port, silo.current_credentials()) as line:
            try:
                rpc.TransferStub(line).Open(pb.OpenRequest(), timeout=10)
            except grpc.RpcError as error:
                return str(error.details())[:7] if error.code() is DENIED else ""
        return ""


@pytest.fixture
def machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = Machines(tmp_path, capsys)
    made.world.start()
    yield made
    made.world.stop()


def test_hospitals_join_by_files_and_the_service_never_holds_the_key(machines: Machines) -> None:
    assert not list(machines.world.home.rglob("ca.key"))
    north, south = machines.member("north"), machines.member("south")
    assert (machines.call(north), machines.call(south)) == ("", "")
    client = LeadClient.open(machines.world.home)  # with the lead's certificate that `ca service` wrote
    assert {s.name for s in client.silos().silos} == {"north", "south"}
    client.close()
    told = Membership(machines.world.home, machines.world.server.store).roster(seen=1)  # what a welcome brings
    assert north.update_roster(SignedRoster.unpack(told)).added == ("south",)


def test_a_service_without_the_key_says_where_to_sign(machines: Machines) -> None:
    north = machines.member("north")
    with pytest.raises(StateError, match=r"E-STATE-45.*coordinator ca sign"):
        consortium.invite("west", home=machines.world.home)
    request = north.renewal_request()
    with channel(machines.world.port, north.current_credentials()) as line, pytest.raises(grpc.RpcError) as error:
        rpc.EnrolmentStub(line).Renew(pb.RenewRequest(csr_pem=request.csr_pem, renewal_proof=request.proof))
    assert error.value.details().startswith("E-STATE-45")


def test_a_renewal_by_hand_is_followed_by_the_peers(machines: Machines) -> None:
    north, south = machines.member("north"), machines.member("south")
    before = north.fingerprint()
    machines.request("north")
    answer, _ = machines.sign("north")
    machines.admit(answer)
    assert machines.silo("join", "--signed", str(answer), "--home", str(machines.folder / "north")) == 0
    assert north.fingerprint() != before
    assert machines.call(north) == ""
    assert south.update_roster(Admission.from_json(answer.read_text()).roster).rekeyed == ("north",)


def test_a_revocation_counts_at_once_at_the_service_and_by_the_next_roster_everywhere(machines: Machines) -> None:
    north, south = machines.member("north"), machines.member("south")
    consortium.revoke("north", "left", home=machines.world.home)
    assert (machines.call(north), machines.call(south)) == ("E-ID-12", "")
    machines.admit(machines.folder / "south.admission")  # the authority does not know yet: north stays out
    assert machines.call(north) == "E-ID-12"
    consortium.revoke("south", "left too", home=machines.home)
    authority.roster(out=machines.folder / "roster.admission", home=machines.home)
    machines.admit(machines.folder / "roster.admission")
    assert machines.call(south) == "E-ID-12"
    with pytest.raises(RefusedError, match="E-ID-14"):
        machines.admit(machines.folder / "south.admission")
    assert machines.call(south) == "E-ID-12"


def test_a_lost_key_needs_a_revocation_before_the_name_is_given_again(machines: Machines) -> None:
    machines.member("north")
    machines.request("north", home="another")
    with pytest.raises(ConfigError, match=r"E-ID-30.*coordinator revoke north"):
        machines.sign("north")
    consortium.revoke("north", "its machine is lost", home=machines.home)
    answer, fingerprint = machines.sign("north")
    assert machines.sign("north")[0].read_text() == answer.read_text()  # asked twice, signed once
    machines.admit(answer)
    words = ["join", "--signed", str(answer), "--authority", fingerprint, "--home", str(machines.folder / "another")]
    assert machines.silo(*words) == 0
    assert machines.call(SiloIdentity(machines.folder / "another")) == ""
    assert machines.call(SiloIdentity(machines.folder / "north")) == "E-ID-12"


def test_another_authority_is_accepted_nowhere(machines: Machines, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other"
    consortium.init("test", ["127.0.0.1:8443"], home=other)
    request = machines.request("north")
    forged = tmp_path / "forged.admission"
    authority.sign(request, "north", out=forged, home=other)
    with pytest.raises(RefusedError, match="E-ID-10"):
        machines.admit(forged)
    _, fingerprint = machines.sign("north")
    home = ["--home", str(tmp_path / "north")]
    for words in ([], ["--authority", fingerprint]):
        capsys.readouterr()
        assert machines.silo("join", "--signed", str(forged), *words, *home) == 1
        assert capsys.readouterr().err.startswith("E-ID-10")
    authority.roster(out=tmp_path / "roster.admission", home=machines.home)
    assert machines.silo("join", "--signed", str(tmp_path / "roster.admission"), *home) == 2
    assert "E-ID-31" in capsys.readouterr().err
    assert not SiloIdentity(tmp_path / "north").joined


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "consilium.request.v1"}', '{"format": "x"}'])
def test_another_file_is_refused_with_a_remedy(text: str) -> None:
    for form in (SigningRequest, Admission):
        with pytest.raises(ConfigError, match="E-ID-31"):
            form.from_json(text)


def test_files_are_read_back(machines: Machines) -> None:
    made = SigningRequest.from_json(machines.request("north").read_text())
    assert SigningRequest.from_json(made.to_json()) == made
    answer = Admission.from_json(machines.sign("north")[0].read_text())
    assert Admission.from_json(answer.to_json()) == answer


def test_the_services_certificate_is_replaced_while_it_runs(machines: Machines) -> None:
    north = machines.member("north")
    before = (machines.world.home / "pki/server.pem").read_bytes()
    authority.service(out=machines.folder / "next", home=machines.home)
    (machines.folder / "next/server.pem").replace(machines.world.home / "pki/server.pem")
    assert (machines.world.home / "pki/server.pem").read_bytes() != before
    until(lambda: machines.call(north) == "", "a handshake with the new certificate")
    assert not Membership(machines.world.home, machines.world.server.store).roster(seen=99)
