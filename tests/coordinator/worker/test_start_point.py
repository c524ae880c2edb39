"""Runs that go on from the last model of another one, with the hospitals of today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch

from consilium.report.lead import export
from coordinator.cli import runs as lead
from coordinator.config.hydra_config import compose_from, compose_spec
from coordinator.storage.records import RunState, StoredRun
from coordinator.worker import start_point
from fl_core.converter import Option
from fl_core.errors import ConfigError, FederationError, ProtocolError, StateError
from fl_core.methods import METHODS
from fl_core.rounds.manifest import RunManifest, StartPoint
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import State
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from service_core.storage.object_store import ObjectStore
from tests.support import until
from tests.support.federation import federation, hospitals, manifest
from tests.support.federations import METHOD_OPTIONS, NAMES, SCHEMA, same

pytestmark = pytest.mark.integration

FOUR = (*NAMES, "west")


SMALL = [
    "secagg=off",
    "data=digits",
    "model=digits_linear",
    "method=fedproc",
    "rounds=1",
    "train.epochs=1",
    "threads=1",
]


@pytest.mark.fault(
    "a hospital", "enrols after a run was submitted", "it takes part in the run that continues from its model"
)
def test_a_hospital_that_enrols_late_takes_part_in_a_run_that_goes_on_from_the_last_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hospitals(tmp_path, "north", "east", "south") as people:
        world = people.world
        lead.run(SMALL, home=world.home, as_json=True)
        first = world.finished(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])
        ended = world.model(first.id)
        people.join("west")
        people["west"].policy('[runs]\napprove = "by hand"\n')
        lead.run(["train.lr=0.02"], start_from=first.id, home=world.home, detach=True)
        said = capsys.readouterr().err
        assert f"starts from {first.id} after round 1, model {first.model_digest}" in said
        assert "new: west; not in it: none" in said
        second = world.server.store.runs.find("latest")
        assert set(second.members) == set(FOUR)
        until(lambda: people["west"].told("approval"), "the question")
        store = people["west"].service.store
        (asked,) = store.approvals.all()
        assert f"going on from {first.id} after round 1 (model {first.model_digest[:16]}" in asked.about
        until(lambda: getattr(world.server.store.runs.round(second.id, 0), "base_digest", ""), "the first round")
        base = world.server.store.runs.round(second.id, 0).base_digest
        began = codec.read_state(world.server.objects.path(base))
        assert {group: same(values, ended[group]) for group, values in began.items()} == {"w": True, "prototypes": True}
        store.approvals.decide(second.id, True)
        done = world.finished(second.id)
        rounds = [row.record for row in world.server.store.runs.rounds(done.id)]
        assert [set(r.included) for r in rounds] == [set(FOUR)] * 2
        assert rounds[0].correct != rounds[1].correct
        lead.show(second.id, home=world.home, as_json=True)
        start = json.loads(capsys.readouterr().out)["start"]
        assert start == {"run": first.id, "rounds": 1, "model": first.model_digest, "private": False}
        export(second.id, out=tmp_path / "models", home=world.home)
        card = " ".join((tmp_path / "models" / f"{second.id}.md").read_text().split())
        assert f"Training starts from {first.id} after round 1, model {first.model_digest}; that model was" in card


def test_a_paused_or_failed_run_may_be_gone_on_from_and_one_under_way_or_unbegun_may_not(tmp_path: Path) -> None:
    with federation(tmp_path / "home", FOUR) as people:
        world = people.world
        agreed, gone = manifest(rounds=2, quorum=3), manifest(rounds=1, names=FOUR)
        world.manifests = {"next": gone, "other": replace(gone, rounds=2)}
        ask = lambda spec, request, of: world.lead().Submit(  # noqa: E731
            pb.SubmitRequest(spec_json=spec, request_id=request, start_from=of)
        )
        with pytest.raises(grpc.RpcError, match="E-RUN-10"):
            ask("next", "a", "nobody-knows-it")
        unbegun = world.submit(agreed, "unbegun")
        with pytest.raises(grpc.RpcError, match=r"E-RUN-11.*paused, failed or finished"):
            ask("next", "b", unbegun.id)
        world.server.runs.abort(unbegun.id)
        world.ended(unbegun.id)
        with pytest.raises(grpc.RpcError, match=r"E-RUN-11.*has no closed round"):
            ask("next", "c", unbegun.id)
        people.come("north", "east")
        people.come("south", refuse=lambda round, kind: "no" if round else "")
        parent = world.ended(world.submit(agreed, "parent").id)
        assert (parent.state, parent.closed) == (RunState.PAUSED, 1)
        ended = world.model(parent.id)
        people.come("west")
        info = ask("next", "d", parent.id)
        assert ask("next", "d", parent.id).run_id == info.run_id  # an answer that was lost
        for other in (("next", "d", unbegun.id), ("next", "d", ""), ("other", "d", parent.id)):
            with pytest.raises(grpc.RpcError, match=r"E-CFG-02|E-RUN-11"):
                ask(*other)
        world.stop()
        world.start()  # what a run starts from is on the disk
        people["south"].script.refuse = lambda round, kind: ""
        done = world.finished(info.run_id)
        started = RunManifest.from_json(done.manifest).start
        assert (started.run, started.rounds, started.model) == (parent.id, 1, tensor_maps.digest(ended["w"]))
        assert world.server.store.runs.rounds(done.id)[0].record.included == tuple(sorted(FOUR))
        assert world.finished(world.server.runs.resume(parent.id).id).closed == 2  # the parent is as it was


# ---- what is taken over ---------------------------------------------------------------------------------------------


def after(objects: ObjectStore, agreed: RunManifest, state: State | None = None) -> StoredRun:
    """A run that has ended in a state: in one where every number is another than at the start."""
    if state is None:
        state = {g: {n: v + 0.5 for n, v in vs.items()} for g, vs in RunSetup.of(agreed).initial_state().items()}
    digest, _ = objects.put_file(lambda file: codec.write_state(state, file))
    facts = SimpleNamespace(id="parent-1", manifest=agreed.to_json(), state=RunState.FINISHED, closed=3)
    facts.state_object = digest
    return facts  # type: ignore[return-value]


def kept(objects: ObjectStore, parent: StoredRun) -> State:
    return codec.read_state(objects.path(parent.state_object))


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def test_a_run_of_the_same_method_takes_prototypes_over_and_one_of_another_the_model_alone(
    objects: ObjectStore,
) -> None:
    parent = after(objects, manifest("fedproc"))
    before = kept(objects, parent)
    again, state = start_point.resolve(parent, manifest("fedproc", names=FOUR), objects)
    assert all(same(values, before[group]) for group, values in state.items())
    assert set(again.start.broadcast) == {"w", "prototypes"}
    other, state = start_point.resolve(parent, manifest("fedavg"), objects)
    assert list(state) == ["w"]
    assert same(state["w"], before["w"])
    assert RunManifest.from_json(other.to_json()) == other
    assert "start" not in json.loads(manifest("fedavg").to_json())


@pytest.mark.parametrize(("method", "group"), [("scaffold", "c"), ("feddyn", "m")])
def test_control_variates_begin_anew_since_hospitals_keep_none_across_runs(
    objects: ObjectStore, method: str, group: str
) -> None:
    parent = after(objects, manifest(method))
    _, state = start_point.resolve(parent, manifest(method), objects)
    assert same(state["w"], kept(objects, parent)["w"])
    assert not any(v.any() for v in state[group].values())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_of_any_method_can_be_gone_on_from(objects: ObjectStore, method: str) -> None:
    agreed = fitting(method)
    parent = after(objects, agreed)
    run, state = start_point.resolve(parent, agreed, objects)
    assert run.start.broadcast["w"] == run.start.model == tensor_maps.digest(state["w"])
    assert same(state["w"], kept(objects, parent)["w"])


def fitting(method: str) -> RunManifest:
    options: dict[str, Option] = dict(METHOD_OPTIONS.get(method, {}))
    return manifest(method, options)


OTHER_CLASSES = Schema(SCHEMA.shape, tuple(reversed(SCHEMA.classes)))


@pytest.mark.parametrize(
    ("child", "code", "says"),
    [
        (lambda: manifest(model="digits_mlp"), "E-CFG-23", "the model of parent-1"),
        (lambda: manifest(model_options={"projection": [8]}), "E-CFG-08", "whose model has others"),
        (lambda: replace(manifest(), schema=OTHER_CLASSES), "E-CFG-23", "the classes of parent-1"),
        (lambda: manifest("fedbabu"), "E-CFG-08", "method=fedavg"),
    ],
)
def test_a_run_of_another_architecture_other_classes_or_an_unfit_method_is_refused(
    objects: ObjectStore, child, code: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{code}.*{says}"):
        start_point.resolve(after(objects, manifest()), child(), objects)


def test_what_silos_make_from_the_seed_needs_the_seed_of_the_parent(objects: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="E-CFG-08: expected seed=0"):
        start_point.resolve(after(objects, manifest("fedbabu")), manifest("fedbabu", seed=1), objects)
    start_point.resolve(after(objects, manifest()), manifest(seed=1), objects)


FROZEN = TrainConfig(batch_size=5, epochs=1, freeze="features")


def test_a_run_on_frozen_features_goes_on_from_one_with_the_same_body_alone(objects: ObjectStore) -> None:
    frozen = manifest(train=FROZEN)
    run, state = start_point.resolve(after(objects, frozen), frozen, objects)
    assert set(state["w"]) == {"head.weight", "head.bias"}
    assert run.start.model == tensor_maps.digest(state["w"])
    with pytest.raises(ConfigError, match=r"E-CFG-08: expected train.freeze.*model.weights=FILE"):
        start_point.resolve(after(objects, manifest()), frozen, objects)
    parent = after(objects, frozen)
    _, thawed = start_point.resolve(parent, manifest(), objects)
    head, body = kept(objects, parent)["w"], tensor_maps.copy_state(RunSetup.of(manifest()).model)
    assert same(thawed["w"], {**body, **head})  # the body that was frozen, which the seed makes
    with pytest.raises(ConfigError, match="E-CFG-08: expected seed=0"):  # another body
        start_point.resolve(after(objects, frozen), manifest(train=FROZEN, seed=1), objects)


def test_a_model_that_diverged_or_was_damaged_is_no_start(objects: ObjectStore) -> None:
    wrong = RunSetup.of(manifest()).initial_state()
    next(iter(wrong["w"].values())).view(-1)[0] = torch.nan
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        start_point.resolve(after(objects, manifest(), wrong), manifest(), objects)
    parent = after(objects, manifest())
    path = objects.path(parent.state_object)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises((StateError, FederationError), match="E-STATE-63"):
        start_point.resolve(parent, manifest(), objects)


def test_whether_a_start_model_was_trained_in_private_is_said_of_the_whole_line(objects: ObjectStore) -> None:
    plain, _ = start_point.resolve(after(objects, manifest()), manifest(), objects)
    assert not plain.start.private
    again, _ = start_point.resolve(after(objects, plain), manifest(), objects)
    assert not again.start.private
    assert "trained without differential privacy" in str(again.start)


# ---- the configuration ----------------------------------------------------------------------------------------------


def test_the_configuration_is_the_parents_with_the_keys_that_are_given() -> None:
    parent = compose_spec(["method=fedmr", "method.mu1=0.3", "data=digits", "train.lr=0.5", "rounds=7", "silos=[a,b]"])
    assert compose_from(parent, []) == replace(parent, silos=None)
    changed = compose_from(parent, ["method.mu2=0.2", "rounds=2", "silos=[a,c]"])
    assert (changed.rounds, changed.train.lr, changed.silos) == (2, 0.5, ("a", "c"))
    assert (changed.method["mu1"], changed.method["mu2"]) == (0.3, 0.2)
    other = compose_from(parent, ["method=fedprox", "method.mu=0.7"])
    assert other.method == {**compose_spec(["method=fedprox"]).method, "mu": 0.7}
    assert other.train == parent.train
    for words in (["experiment=fedmr"], ["scale=small"], ["method.mu=1"], ["nothing=1"]):
        with pytest.raises(ConfigError, match="E-CFG-01"):
            compose_from(parent, words)


def test_a_start_point_of_a_stranger_is_read_strictly() -> None:
    raw = json.loads(replace(manifest(), start=StartPoint("r", 1, "a", {"w": "a"})).to_json())
    for wrong in ({"rounds": "1"}, {"broadcast": ["w"]}, {"model": None}, {"more": 1}):
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            RunManifest.from_json(json.dumps(raw | {"start": raw["start"] | wrong}))
