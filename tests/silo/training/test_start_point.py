"""A hospital in a run that goes on from another: it starts from the model that the manifest names, and pays anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.rounds.manifest import StartPoint
from fl_core.types import tensor_maps
from privacy.accounting.accountant import aggregated
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.hospital import Watched
from tests.support.privacy import TRAIN, budgeted, private


def going_on(run, state, **changed):
    model = tensor_maps.digest(state["w"])
    return replace(run, start=replace(StartPoint("run-1", 2, model, {"w": model}), **changed))


def another(state):
    return {"w": {name: v + 1.0 for name, v in state["w"].items()}}


@pytest.mark.fault("a coordinator", "starts a run from another model than it named", "refused with E-RUN-33, uncharged")
@pytest.mark.parametrize("changed", [{}, {"broadcast": {}}, {"model": "0" * 64}])
def test_a_run_that_starts_from_another_model_than_its_manifest_names_is_refused(make, tmp_path, monkeypatch, changed):
    ledger = budgeted(tmp_path / "home0")
    before = make(private()).server
    hospital = make(going_on(private(), before, **changed), folder=tmp_path / "home0")
    hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer(state={"w": before["w"]} if changed else another(before))
    assert hospital.refused().code == "E-RUN-33"
    assert watched.read == 0
    assert ledger.history(TRAIN) == []


def test_a_run_that_starts_from_the_model_that_its_manifest_names_is_trained(make):
    given = another(make(manifest()).server)
    hospital = make(going_on(manifest(), given))
    hospital.start()
    hospital.offer(state=given)
    hospital.sent()
    hospital.close(0)
    hospital.settled()
    hospital.offer(1, state=another(given))  # later rounds begin with what the first one made
    hospital.sent(2)


@pytest.mark.fault("a lead", "goes on from a private run for more epsilon", "charged in full; the ledger adds both up")
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
