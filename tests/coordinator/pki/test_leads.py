"""Leads: listed, added, renewed and revoked; names that nobody else may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from coordinator.api.limits import Limits
from coordinator.cli.main import program
from coordinator.lead.client import LeadClient
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import identity_of
from tests.support.coordinator import DENIED, World, credentials, open_round, running
from tests.support.federations import NAMES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "coordinator", ["north"]) as made:
        yield made


def leads(world: World) -> Leads:
    assert world.server is not None
    return Leads(world.home, world.server.store)


def asked(world: World, name: str) -> str:
    """Call as a lead; return the code of the refusal, or nothing."""
    world.people["lead"] = world.people[name]
    try:
        world.lead().Runs(pb.RunsRequest(), timeout=10)
    except grpc.RpcError as error:
        return str(error.details()).split(":")[0] if error.code() is DENIED else str(error.code())
    return ""


def test_a_lead_is_added_used_and_revoked_and_the_others_go_on(world: World) -> None:
    first = world.people["lead"]
    leads(world).add("anna")
    world.people["anna"] = Authority.open(world.home).lead_credentials("anna")
    assert asked(world, "anna") == ""
    leads(world).revoke("anna", "has left")
    assert asked(world, "anna") == "E-ID-12"
    world.people["first"] = first
    assert asked(world, "first") == ""
    assert [(lead.name, lead.revoked) for lead in leads(world).all()] == [("anna", "has left"), ("lead", None)]
    with closing(LeadClient.open(world.home)) as client:  # as a lead that is left
        assert client.runs() == []
    leads(world).add("anna")
    world.people["anna"] = Authority.open(world.home).lead_credentials("anna")
    assert asked(world, "anna") == ""


@pytest.mark.fault("a lead", "uses a certificate that was renewed", "refused with E-ID-28; leads see it")
def test_a_renewed_lead_ends_its_predecessor_at_the_successors_first_use(tmp_path: Path) -> None:
    now = [1e9]
    home = World.create(tmp_path / "c", []).home
    with closing(CoordinatorStore(home, lambda: now[0])) as store:
        people = Leads(home, store)
        people.adopt()
        old = identity_of(Authority.open(home).lead_credentials("lead").cert_pem)
        assert store.members.leads.status(old).member
        now[0] = old.not_before.timestamp() + 7200
        people.renew("lead")
        new = identity_of(Authority.open(home).lead_credentials("lead").cert_pem)
        now[0] += 3600
        assert store.members.leads.status(old).renewed_at is None  # the successor was not used: it may be lost
        assert store.members.leads.status(new).member
        now[0] += 10
        assert store.members.leads.status(old).renewed_at is None  # calls that are under way
        now[0] += 60
        assert store.members.leads.status(old).renewed_at is not None
        assert store.members.leads.status(new).renewed_at is None


def test_a_lead_that_no_list_has_is_refused(world: World) -> None:
    world.people["minted"] = Authority.open(world.home).make_lead("minted")
    assert asked(world, "minted") == "E-ID-13"
    world.people["other"] = Authority.open(world.home).make_lead("lead")  # under a known name
    assert asked(world, "other") == "E-ID-13"


@pytest.mark.fault(
    "a lead", "invites a hospital under a lead's name, or a lead under a hospital's", "refused with E-ID-30"
)
def test_nobody_is_named_like_a_lead_and_no_lead_like_a_hospital(world: World) -> None:
    assert world.server is not None
    members = Membership(world.home, world.server.store)
    with pytest.raises(ConfigError, match="E-ID-30"):
        members.invite("lead")
    members.invite("invited")
    for name in ("north", "invited", "lead"):
        with pytest.raises(ConfigError, match="E-ID-30"):
            leads(world).add(name)
    for name in ("nobody", "north"):
        with pytest.raises(ConfigError, match="E-RUN-10"):
            leads(world).revoke(name, "")
    with pytest.raises(ConfigError, match="E-CFG-02"):
        leads(world).add("../anna")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = World.create(tmp_path / "c", []).home
    credentials(home, "north")

    def answer(*words: str) -> object:
        line = ["leads", *words, "--home", str(home), "--json"]
        program().build(line)(line, standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    assert [lead["name"] for lead in answer()] == ["lead"]
    assert answer("add", "anna")["state"] == "in force"
    assert answer("renew", "anna")["name"] == "anna"
    answer("revoke", "anna", "--reason", "has left")
    assert [(lead["name"], lead["state"], lead["reason"]) for lead in answer("list")] == [
        ("anna", "revoked", "has left"),
        ("lead", "in force", None),
    ]
    assert not (home / "pki" / "lead-anna.pem").exists()


@pytest.mark.fault("a revoked lead", "keeps watching a run", "ended within 5 s with E-ID-12")
def test_an_open_watch_of_a_revoked_lead_ends(tmp_path: Path) -> None:
    with running(tmp_path / "coordinator", NAMES) as world:
        run, _ = open_round(world)
        call = world.lead().Watch(pb.WatchRequest(run_id=run.id))
        next(call)
        leads(world).revoke("lead", "has left")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert (caught.value.code(), caught.value.details().split(":")[0]) == (DENIED, "E-ID-12")
        assert Limits().check_s < 5  # from one look whether it may to the next
