"""A hospital that evaluates models and is never asked to train; its silo refuses to, whoever asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli import evaluation
from coordinator.cli import runs as lead
from coordinator.cli.survey import survey
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core import datasets
from fl_core.errors import FederationError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.identity import identity_of
from service_core.pki.invitation import InvitationToken
from silo.admission.controls import AdmissionRequest, HospitalControls
from silo.cli.status import status
from silo.identity.identity import SiloIdentity
from silo.service import enrolment
from silo.storage.home import Home
from tests.support.coordinator import World, enrolled
from tests.support.federation import Hospital, hospitals
from tests.support.federations import manifest

pytestmark = pytest.mark.integration

TRAINED = ["data=digits", "model=digits_linear", "method=fedavg", "rounds=1", "train.epochs=1", "threads=1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, Hospital]]]:
    """Two hospitals that train; one that was invited to validate, and one whose policy says so itself."""
    folder = tmp_path_factory.mktemp("world")
    with hospitals(folder, "north", "east") as people:
        people.join("invited", validation_only=True)
        people.join("unwilling", policy="[runs]\ntrain = false\n")
        yield people.world, people.hospitals


def newest(world: World):
    assert world.server is not None
    done = world.finished(world.server.store.runs.find("latest").id)
    return done, world.server.store.runs.rounds(done.id)


@pytest.mark.fault("a hospital", "joins only for validation", "it evaluates, and no run trains on its data")
def test_it_is_in_no_run_that_trains_and_in_every_evaluation_and_survey(
    world: tuple[World, dict[str, Hospital]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, sites = world
    lead.run(TRAINED, home=made.home, detach=True)
    run, _ = newest(made)
    assert set(run.members) == {"north", "east"}
    evaluation.evaluate(run.id, home=made.home, detach=True)
    measured, rounds = newest(made)
    assert set(measured.members) == {"north", "east", "invited", "unwilling"}
    assert set(rounds[0].record.included) == set(measured.members)
    sites["invited"].policy('[survey]\nallow = ["images"]\n')
    survey(["images", "data=digits"], home=made.home, as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    training, _ = told["answers"][0]["cells"]
    assert (told["hospitals"], training["held"]) == (4, 3)
    assert training["images"] == len(datasets.load("digits/p4c5/2").train)
    capsys.readouterr()
    lead.silos(home=made.home, as_json=True)
    told = json.loads(capsys.readouterr().out)["silos"]
    assert {s["name"]: s["validation_only"] for s in told} == {
        "north": False,
        "east": False,
        "invited": True,
        "unwilling": True,
    }


@pytest.mark.parametrize("name", ["invited", "unwilling"])
def test_a_run_that_names_it_for_training_is_refused(world: tuple[World, dict[str, Hospital]], name: str) -> None:
    with pytest.raises(FederationError, match=rf"E-RUN-05.*only evaluate.*{name}"):
        lead.run([*TRAINED, f"silos=[north,{name}]"], home=world[0].home)


def test_the_hospital_reads_that_it_takes_part_in_evaluations_alone(
    world: tuple[World, dict[str, Hospital]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, site in world[1].items():
        status(home=site.home.path, as_json=True)
        found[name] = json.loads(capsys.readouterr().out)["trains"]
    assert found == {"north": True, "east": True, "invited": False, "unwilling": False}


@pytest.mark.parametrize("name", ["invited", "unwilling"])
def test_its_silo_refuses_to_train_whatever_the_coordinator_says(
    world: tuple[World, dict[str, Hospital]], name: str
) -> None:
    controls = HospitalControls(world[1][name].home, world[1][name].service.store)
    with pytest.raises(RefusedError, match=r"E-POLICY-18.*only evaluates models"):
        controls.admit(AdmissionRequest("run-of-a-liar", manifest(rounds=1, names=("north", name))))


def test_a_coordinator_that_forgets_is_refused_before_round_1(
    world: tuple[World, dict[str, Hospital]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = world
    assert made.server is not None
    monkeypatch.setattr(made.server.store.members, "validation_only", set)
    lead.run([*TRAINED, "silos=[north,invited]"], home=made.home, detach=True)
    found = made.ended(made.server.store.runs.find("latest").id)
    assert found.state.value == "paused"
    assert "E-POLICY-18" in found.reason
    assert found.closed == 0


def test_a_renewal_keeps_what_the_invitation_said_and_a_new_invitation_changes_it(tmp_path: Path) -> None:
    made = World.create(tmp_path / "home", ())
    home = enrolled(made, "site", tmp_path / "site", validation_only=True)
    own = SiloIdentity(home.path)
    with closing(CoordinatorStore(made.home)) as store:
        members, asked = Membership(made.home, store), own.renewal_request()
        answer = members.renew(own.load(), asked.csr_pem, asked.proof)
        own.install(answer.certificate_pem, answer.authority_pem)
        assert home.validation_only
        assert store.members.validation_only() == {"site"}
        token = InvitationToken.decode(members.invite("site").token)
        key = certificates.new_key()
        again = members.join(identity_of(token.cert_pem), certificates.make_request(key))
        assert not again.validation_only
        assert store.members.validation_only() == set()


def test_the_silo_notes_at_its_join_what_it_joined_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, home = World.create(tmp_path / "home", ()), Home(tmp_path / "site")
    with closing(CoordinatorStore(made.home)) as store:
        members = Membership(made.home, store)
        token = members.invite("site", validation_only=True).token

        def answer(addresses: object, request: pb.JoinRequest, connect: object, *_: object) -> pb.Membership:
            return members.join(identity_of(InvitationToken.decode(token).cert_pem), request.csr_pem)

        monkeypatch.setattr(enrolment, "_first_answer", answer)
        enrolment.join(token, home)
    assert home.validation_only
