"""A hospital in a run that goes on from another: it starts from the model that the manifest names, and pays anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_core.rounds.manifest import StartPoint, Weights
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from privacy.accounting.accountant import aggregated
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import pack_state
from service_core.storage import digests
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.hospital import Watched
from tests.support.privacy import TRAIN, budgeted, private


def going_on(run, state, **changed):
    model = tensor_maps.digest(state["w"])
    return replace(run, start=replace(StartPoint("run-1", 2, model, {"w": model}), **changed))


def another(state):
    return {"w": {name: v + 1.0 for name, v in state["w"].items()}}


@pytest.mark.fault(
    "a coordinator", "starts a run from another model than it named", "refused with E-RUN-33, without a charge"
)
@pytest.mark.parametrize("changed", [{}, {"broadcast": {}}, {"model": "0" * 64}])
def test_a_run_that_starts_from_another_model_than_its_manifest_names_is_refused(
    make, started, tmp_path, monkeypatch, changed
):
    ledger = budgeted(tmp_path / "home0")
    before = make(private()).server
    hospital = started(going_on(private(), before, **changed), folder=tmp_path / "home0")
    watched = Watched(monkeypatch)
    hospital.offer(state={"w": before["w"]} if changed else another(before))
    assert hospital.refused().code == "E-RUN-33"
    assert watched.read == 0
    assert ledger.history(TRAIN) == []


def test_a_run_that_starts_from_the_model_that_its_manifest_names_is_trained(make, started):
    given = another(make(manifest()).server)
    hospital = started(going_on(manifest(), given))
    hospital.offer(state=given)
    hospital.sent()
    hospital.close(0)
    hospital.settled()
    hospital.offer(1, state=another(given))  # later rounds begin with what the first one made
    hospital.sent(2)


@pytest.mark.integration
@pytest.mark.fault("a lead", "continues a private run for more epsilon", "charged in full; the ledger adds both")
def test_a_private_run_that_goes_on_from_another_is_charged_beside_it(make, tmp_path):
    ledger = budgeted(tmp_path / "home0", epsilon=100.0)
    first = make(private(), folder=tmp_path / "home0")
    first.start()
    spent = []
    for run_id in ("run-1", "run-2"):
        first.run_id = run_id
        for round in range(2):
            first.offer(round)
            first.sent(len(spent) * 2 + round + 1)
            first.close(round)
            first.settled(len(spent) * 2 + round + 1)
        spent.append(ledger.history(TRAIN))
        following = going_on(private(), first.server, private=True)
        first.digest = first.transfer.offer(following.to_json().encode())
    once, both = spent
    steps = [m for m in once if m.rate < 1]
    assert steps
    assert aggregated([m for m in both if m.rate < 1]) == aggregated(steps + steps)


def test_whoever_decides_about_a_run_by_hand_reads_where_it_starts(make, tmp_path):
    hospital = make(going_on(manifest(), make(manifest()).server))
    (tmp_path / "home1").mkdir(mode=0o700)
    (tmp_path / "home1" / "policy.toml").write_text('[runs]\napprove = "by hand"\n')
    service = hospital.start()
    hospital.offer()
    until(lambda: service.pulse().activity == pb.AWAITING_APPROVAL)
    (asked,) = service.store.approvals.all()
    model = hospital.manifest.start.model[:16]
    assert f"going on from run-1 after round 2 (model {model}, trained without differential privacy)" in asked.about


# ---- weights that were trained elsewhere -----------------------------------------------------------------------------


def pretrained(run, tensors, **changed):
    """A run that begins with these tensors, the object that holds them, and the state of its first round."""
    data = pack_state({"weights": tensors})
    named = Weights(digests.digest(data), len(data), "f" * 64, "elsewhere", ("head",))
    begun = RunSetup.of(replace(run, start=StartPoint(weights=named))).with_weights(tensors)
    state = begun.initial_state()
    start = begun.pinned_start(state, begun.manifest.start)
    return replace(run, start=replace(start, weights=replace(named, **changed))), data, state


def body(run):
    tensors = tensor_maps.copy_state(RunSetup.of(replace(run, seed=run.seed + 1)).model)
    return {name: v for name, v in tensors.items() if not name.startswith("head.")}


def asked(make, run, data, folder=None):
    """A hospital that is offered the first round of a run; its coordinator has only what belongs to it."""
    hospital = make(manifest(), folder=folder)
    hospital.manifest = run
    hospital.digest = hospital.transfer.offer(run.to_json().encode())
    if data is not None:
        hospital.transfer.offer(data)
    hospital.start()
    return hospital


def test_a_hospital_fetches_weights_by_digest_and_makes_the_model_that_the_coordinator_made(make):
    run, data, state = pretrained(manifest(), body(manifest()))
    hospital = asked(make, run, data)
    hospital.offer(state=state)
    hospital.sent()


LIES = {
    "NaN": lambda t: {n: torch.full_like(v, torch.nan) for n, v in t.items()},
    "1e38": lambda t: {n: torch.full_like(v, 1e38) for n, v in t.items()},
    "another shape": lambda t: {n: v.reshape(-1) for n, v in t.items()},
    "no tensor": lambda t: {},
    "a tensor less": lambda t: dict(list(t.items())[1:]),
    "the head, too": lambda t: t | {"head.weight": torch.zeros(10, 64), "head.bias": torch.zeros(10)},
    "another name": lambda t: {f"x{n}": v for n, v in t.items()},
}


@pytest.mark.fault(
    "a coordinator", "names weights that do not fit the model", "refused with E-WIRE-06 before any record is read"
)
@pytest.mark.parametrize("what", LIES)
def test_weights_that_do_not_fit_are_refused_before_any_example_is_read(make, monkeypatch, what):
    run, _, state = pretrained(manifest(), body(manifest()))
    data = pack_state({"weights": LIES[what](body(manifest()))})
    lying = replace(run.start.weights, object=digests.digest(data), size=len(data))
    hospital = asked(make, replace(run, start=replace(run.start, weights=lying)), data)
    watched = Watched(monkeypatch)
    hospital.offer(state=state)
    assert hospital.refused().code == "E-WIRE-06"
    assert watched.read == 0


def test_a_server_state_in_the_place_of_weights_and_weights_of_another_start_are_refused(make):
    run, data, state = pretrained(manifest(), body(manifest()))
    other = pack_state(state)
    lying = replace(run.start.weights, object=digests.digest(other), size=len(other))
    hospital = asked(make, replace(run, start=replace(run.start, weights=lying)), other)
    hospital.offer(state=state)
    assert hospital.refused().code == "E-WIRE-06"
    second = asked(make, run, data)
    second.offer(state=another(state))
    assert second.refused().code == "E-RUN-33"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"size": 1 << 40}, "E-CFG-02"),
        ({"object": "../../etc/passwd"}, "E-CFG-02"),
        ({"source": "a\x1b[2Jb"}, "E-CFG-02"),
        ({"source": "y" * 5000}, "E-CFG-02"),
        ({"fresh": ()}, "E-WIRE-06"),
    ],
)
def test_a_manifest_whose_weights_are_none_is_refused(make, changed, code):
    run, data, state = pretrained(manifest(), body(manifest()), **changed)
    hospital = asked(make, run, data)
    hospital.offer(state=state)
    assert hospital.refused().code == code
