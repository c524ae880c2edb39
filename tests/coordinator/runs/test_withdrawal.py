"""Hospitals that come later and hospitals that leave: exact sums over the wire, equal to never having had somebody."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from consilium.report.lead import export
from coordinator.cli import runs as lead
from coordinator.lead.client import LeadClient
from coordinator.runs.scheduler import RunScheduler
from coordinator.runs.withdrawal import CONTEXT
from coordinator.storage.records import RunState, StoredRun
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.values import State
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.identity import parse_certificate
from tests.support import until
from tests.support.audit_log import entries
from tests.support.coordinator import World, online
from tests.support.federation import budgeted, hospitals
from tests.support.federations import same

pytestmark = pytest.mark.integration

ANALYTIC = ["secagg=off", "data=digits", "model=random_features", "model.width=48", "method=analytic", "threads=1"]
FOUR = ("north", "east", "south", "west")


def ran(
    world: World, words: Sequence[str], capsys: pytest.CaptureFixture[str], start_from: str | None = None
) -> StoredRun:
    capsys.readouterr()
    lead.run([*words], start_from=start_from, home=world.home, detach=True, as_json=True)
    return world.finished(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])


def asked(world: World, call: Callable[[LeadClient], Sequence[pb.Withdrawal]]) -> dict[str, pb.Withdrawal]:
    client = LeadClient.open(world.home)
    try:
        return {found.run_id: found for found in call(client)}
    finally:
        client.close()


def withdraw(world: World, silo: str, preview: bool = False) -> dict[str, pb.Withdrawal]:
    return asked(world, lambda client: client.withdraw(silo, preview))


def equal(one: State, other: State) -> None:
    for group in ("w", "sums"):
        assert same(one[group], other[group]), group


@pytest.mark.parametrize("options", [[], ["method.ridge=0.001"]])
def test_who_comes_later_is_added_and_who_leaves_is_taken_out_as_if_it_had_never_been_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with hospitals(tmp_path, *FOUR) as people:
        world = people.world
        words = [*ANALYTIC, *options]
        three = ran(world, [*words, "silos=[north,east,south]"], capsys)
        four = ran(world, [*words, "silos=[north,east,south,west]"], capsys)
        later = ran(world, [], capsys, start_from=three.id)
        assert later.members == ("west",)  # nobody is asked twice
        assert same(world.model(later.id)["sums"], world.model(four.id)["sums"])
        equal(world.model(later.id), world.model(four.id))
        left = ran(world, [*words, "silos=[north,south,west]"], capsys)
        before = {run.id: world.run(run.id).state_object for run in (three, four, later)}
        found = withdraw(world, "east")
        assert set(found) == {three.id, four.id, later.id}
        assert not any(one.reason for one in found.values())
        for one in found.values():
            out = world.finished(one.by)
            assert (out.members, out.accuracy) == (("east",), -1.0)
            assert world.run(one.run_id).state_object is None
            until(lambda gone=before[one.run_id]: not world.server.objects.has(gone), "the state with its sums")
        for run in (four, later):
            assert same(world.model(found[run.id].by)["sums"], world.model(left.id)["sums"])
            equal(world.model(found[run.id].by), world.model(left.id))


def from_cli(call: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    call()
    return json.loads(capsys.readouterr().out)


def test_of_a_run_by_gradients_rounds_and_readers_are_named_and_how_to_train_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path, *FOUR[:3]) as people:
        world = people.world
        words = [
            "data=digits",
            "model=digits_linear",
            "secagg=off",
            "rounds=2",
            "train.epochs=1",
            "train.lr=0.3",
            "threads=1",
        ]
        run = ran(world, words, capsys)
        on = ran(world, ["silos=[north,south]", "rounds=1"], capsys, start_from=run.id)
        export(run.id, out=tmp_path / "models", home=world.home)
        looked = withdraw(world, "east", preview=True)
        assert set(looked) == {run.id, on.id}
        assert not any(found.at_unix or found.statement for found in looked.values())
        assert world.server.store.runs.events_of(run.id, "withdrawn") == []
        export(on.id, out=tmp_path / "models", home=world.home)
        assert "withdrawn" not in (tmp_path / "models" / f"{on.id}.md").read_text()
        found = {f["run"]: f for f in from_cli(lambda: lead.withdraw("east", home=world.home, as_json=True), capsys)}
        first, second = found[run.id], found[on.id]
        assert first["updates"] == second["updates"] == [{"run": run.id, "round": 1}, {"run": run.id, "round": 2}]
        assert (first["exact"], first["taken_out"], first["taken_out_by"]) == (False, False, None)
        assert "by gradients" in first["reason"]
        assert len(first["read_by"]) == 1
        assert "lead read the state" in first["read_by"][0]
        assert first["left"] == ["north", "south"]
        command = shlex.split(first["retrain"])
        assert command[:2] == ["coordinator", "run"]
        again = ran(world, command[2:], capsys)
        assert again.members == ("north", "south")
        assert json.loads(again.spec) == {**json.loads(run.spec), "silos": ["north", "south"]}
        for parent in (run, on):
            with pytest.raises(FederationError, match=r"E-RUN-11.*no hospital has withdrawn.*found east"):
                ran(world, [], capsys, start_from=parent.id)
        shown = from_cli(lambda: lead.show(on.id, home=world.home, as_json=True), capsys)["withdrawals"]
        assert [(one["run"], one["silo"], one["taken_out"]) for one in shown] == [
            (on.id, "east", False),
            (run.id, "east", False),
        ]
        export(on.id, out=tmp_path / "models", home=world.home)
        card = (tmp_path / "models" / f"{on.id}.md").read_text()
        assert f"east withdrew from {on.id}" in card
        assert "still depends on its data" in card
        detail = asked(world, lambda client: client.show(on.id).withdrawals)
        authority = parse_certificate(world.people["lead"].ca_pem)
        for one in detail.values():
            signer = parse_certificate(one.certificate)
            assert certificates.issued_by(signer, authority)
            public = certificates.public_key(signer)
            assert certificates.verify(public, CONTEXT, one.statement.encode(), one.signature)
            other = one.statement.replace("east", "west").encode()
            assert not certificates.verify(public, CONTEXT, other, one.signature)
        about = [entry.about for entry in entries(world.home) if entry.what == "Lead/Withdraw"]
        assert any("silo=east" in one for one in about)
        with pytest.raises(FederationError, match=r"E-RUN-05.*'nobody'"):
            withdraw(world, "nobody")


def test_a_withdrawal_again_changes_nothing_and_nothing_is_taken_out_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path, *FOUR[:3]) as people:
        world = people.world
        run = ran(world, ANALYTIC, capsys)
        people["east"].stop()
        out = withdraw(world, "east")[run.id].by
        assert withdraw(world, "east")[run.id].by == out
        waits = withdraw(world, "south", preview=True)
        assert waits[run.id].reason == f"{out} is taking out another hospital's sums: once it has ended, ask again"
        state = world.model(run.id)
        world.stop()
        world.start()  # killed before the hospital has answered: the model is as it was
        assert same(world.model(run.id)["sums"], state["sums"])
        world.server.runs.abort(out)
        half = world.ended(out).state_object
        assert same(world.model(out)["sums"], state["sums"])
        people["east"].start()
        once = withdraw(world, "east")[run.id].by
        assert once != out
        world.finished(once)
        assert world.run(run.id).state_object is world.run(out).state_object is None
        until(lambda: not world.server.objects.has(half), "the copy of the state with its sums")
        assert withdraw(world, "east")[run.id].by == once
        agreed = world.run(once)
        lied = RunManifest.from_json(agreed.manifest)
        for parent in (once, run.id, ""):
            with pytest.raises(FederationError, match=r"E-CFG-08.*leave it out|E-RUN-11"):
                world.server.runs.submit(lied, agreed.spec, f"by hand {parent}", parent)
        twice = withdraw(world, "south")
        assert "was deleted when" in twice[run.id].reason
        last = world.finished(twice[once].by)
        alone = ran(world, [*ANALYTIC, "silos=[north]"], capsys)
        equal(world.model(last.id), world.model(alone.id))
        assert "no other hospital is in its sums" in withdraw(world, "north", preview=True)[last.id].reason


def test_other_sums_than_were_added_are_taken_out_of_nothing_whoever_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hospitals(tmp_path, *FOUR[:3]) as people:
        world = people.world
        run = ran(world, ANALYTIC, capsys)
        state, honest = world.model(run.id), people["east"].data
        people["east"].stop()
        people["east"].data = "digits/p4c5/3"  # records that were others then
        people["east"].start()
        out = world.ended(withdraw(world, "east")[run.id].by)
        assert out.state is RunState.PAUSED
        assert "E-RUN-47: the hospital refused" in out.reason
        assert world.server.store.contributions.arrivals(out.id) == []  # nothing of the other records has left
        assert same(world.model(run.id)["sums"], state["sums"])
        assert same(world.model(out.id)["sums"], state["sums"])
        people["east"].stop()
        people["east"].data = honest
        people["east"].start()
        until(online(world, "east"), "the hospital")
        world.server.runs.abort(out.id)
        kept, first = world.run(run.id).state_object, out.id
        out = world.run(withdraw(world, "east")[run.id].by)
        assert out.id != first
        with monkeypatch.context() as killed:  # between the end of the run and the deletion
            killed.setattr(RunScheduler, "_delete_unused", lambda *_: None)
            world.finished(out.id)
            world.stop()
        world.start()
        assert not world.server.objects.has(kept)
        assert world.run(run.id).state_object is world.run(first).state_object is None
        less = world.model(out.id)["sums"]
        people["south"].stop()
        people["south"].data = "digits/p4c5/3"
        monkeypatch.setattr("silo.training.trainer.require_expected", lambda *_: None)  # a hospital that lies
        people["south"].start()
        lied = world.ended(withdraw(world, "south")[out.id].by)
        assert lied.state is RunState.PAUSED
        assert "E-RUN-47: the sums (" in lied.reason
        assert world.server.store.contributions.arrivals(lied.id) == []
        assert same(world.model(out.id)["sums"], less)
        assert same(world.model(lied.id)["sums"], less)


def test_nobody_is_counted_twice_and_who_has_left_is_in_no_later_run_of_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path, *FOUR[:3]) as people:
        world = people.world
        run = ran(world, ANALYTIC, capsys)
        for words, code in (
            (["silos=[north]"], "E-RUN-05.*north is in its sums already"),
            ([], "E-RUN-05.*These cannot: .*east is in its sums already"),
        ):
            with pytest.raises(FederationError, match=code):
                ran(world, words, capsys, start_from=run.id)
        out = world.finished(withdraw(world, "east")[run.id].by)
        people.join("west")
        for words, code in (
            (["silos=[east]"], f"E-RUN-05.*east withdrew from {run.id}"),
            (["method.class_weights=balanced", "rounds=2", "silos=[west]"], "E-CFG-08.*class_weights=none"),
            (["privacy=dp_record", "rounds=2", "silos=[west]"], "E-CFG-08.*need exact sums"),
            (["seed=1", "silos=[west]"], "E-CFG-23.*the seed"),
            (["model.kind=relu", "silos=[west]"], "E-CFG-23.*the model"),
        ):
            with pytest.raises(FederationError, match=code):
                ran(world, words, capsys, start_from=out.id)
        later = ran(world, [], capsys, start_from=out.id)
        assert later.members == ("west",)
        equal(world.model(later.id), world.model(ran(world, [*ANALYTIC, "silos=[north,south,west]"], capsys).id))
        tuned = ran(world, ["method=fedavg", "rounds=1", "train.epochs=1"], capsys, start_from=later.id)
        assert tuned.members == ("north", "south", "west")  # who left is not asked to train it further either
        with pytest.raises(FederationError, match=r"E-RUN-11.*was deleted when.*taken out"):
            ran(world, [], capsys, start_from=run.id)
        export(later.id, out=tmp_path / "models", home=world.home)
        card = (tmp_path / "models" / f"{later.id}.md").read_text()
        assert f"east withdrew from {run.id}" in card
        assert f"taken out exactly by {out.id}" in card
        assert "still depends" not in card
        with pytest.raises(FederationError, match=r"E-RUN-11"):
            export(run.id, out=tmp_path / "models", home=world.home)


def test_balanced_sums_cannot_be_less_one_hospital_and_are_trained_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path, *FOUR[:2]) as people:
        world = people.world
        run = ran(world, [*ANALYTIC, "method.class_weights=balanced"], capsys)
        (found,) = withdraw(world, "east").values()
        assert "class counts" in found.reason
        assert "silos=[north]" in lead.anew(found)
        assert world.run(run.id).state_object is not None


PRIVATE = ["privacy=dp_record", "privacy.epsilon=8", "privacy.rng=test", "privacy.test_data=public"]
POLICY = '[privacy]\nrng = "test"\npublic_test = true\n'


def test_a_noisy_sum_is_gone_on_from_by_training_and_by_no_other_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever noise or form it has: the noise, the mean and the mixed features of one release are in its sums."""
    data = {name: f"digits/p4c5/{k}" for k, name in enumerate(FOUR[:3])}
    with budgeted(tmp_path, data, composes=True) as (world, people):
        for name, hospital in people.items():
            hospital.policy(POLICY)
            hospital.start()
            until(lambda name=name: online(world, name), name)
        parent = ran(world, [*ANALYTIC, *PRIVATE, "silos=[north,east]"], capsys)
        exact = ran(world, [*ANALYTIC, "silos=[north,east]"], capsys)
        alone = "silos=[south]"
        for before, words in (
            (parent, []),
            (parent, ["privacy.epsilon=1"]),
            (parent, ["method.mixed=8"]),
            (parent, ["method.head=ncm"]),
            (parent, ["method=analytic", "method.release=noisy", "rounds=1"]),
            (parent, ["method=analytic", "method.class_weights=balanced", "rounds=3"]),
            (parent, ["method=analytic", "privacy=none", "rounds=1"]),
            (exact, PRIVATE),
        ):
            with pytest.raises(FederationError, match=rf"E-CFG-08.*{before.id} and this run need exact sums.*noise"):
                ran(world, [*words, alone], capsys, start_from=before.id)
        with pytest.raises(FederationError, match=r"E-RUN-05.*north is in its sums already"):
            ran(world, ["privacy.epsilon=1", "silos=[north]"], capsys, start_from=parent.id)
        words = ["method=fedavg", "privacy=none", "rounds=1", "train.max_steps=1"]
        for name in people:  # a run begins with the hospitals that are online
            until(lambda name=name: online(world, name), name)
        tuned = ran(world, words, capsys, start_from=parent.id)
        assert set(tuned.members) == set(people)
        start = RunManifest.from_json(tuned.manifest).start
        assert start is not None
        assert (start.run, start.private) == (parent.id, True)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_goes_on_by_gradients_from_its_closed_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: bool
) -> None:
    with hospitals(tmp_path, *FOUR[:3]) as people:
        world = people.world
        run = ran(world, [*ANALYTIC, *(["train.freeze=features"] if frozen else [])], capsys)
        wanted = world.server.store.runs.rounds(run.id)[-1].record
        assert wanted.accuracy > 0.5
        for method in ("fedavg", "fedmr"):
            words = [f"method={method}", "rounds=1", "train.epochs=1", "train.lr=0.01", "train.freeze=none"]
            tuned = ran(world, words, capsys, start_from=run.id)
            first, last = (row.record for row in world.server.store.runs.rounds(tuned.id))
            assert (first.correct, first.examples) == (wanted.correct, wanted.examples)
            assert last.correct != first.correct
        with pytest.raises(FederationError, match=r"E-CFG-08.*whose model has others"):
            ran(world, ["method=fednh"], capsys, start_from=run.id)
