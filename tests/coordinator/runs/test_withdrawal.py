"""Hospitals that come later and hospitals that leave: exact sums over the wire, equal to never having had somebody."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coordinator.cli import runs as lead
from coordinator.lead.client import LeadClient
from coordinator.storage.records import Run
from fl_core.types.values import State
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.coordinator import World, hospitals, join
from tests.support.federations import same

ANALYTIC = ["data=digits", "model=random_features", "model.width=48", "method=analytic", "threads=1"]
FOUR = ("north", "east", "south", "west")


def ran(world: World, words: Sequence[str], capsys: pytest.CaptureFixture[str], start_from: str | None = None) -> Run:
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


@pytest.mark.parametrize("options", [[], ["method.ridge=0"], ["method.head=lda"]])
def test_who_comes_later_is_added_and_who_leaves_is_taken_out_as_if_it_had_never_been_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with hospitals(tmp_path) as (world, sites):
        join(world, sites, tmp_path, *FOUR)
        words = [*ANALYTIC, *options]
        three = ran(world, [*words, "silos=[north,east,south]"], capsys)
        four = ran(world, [*words, "silos=[north,east,south,west]"], capsys)
        later = ran(world, [], capsys, start_from=three.id)
        assert later.members == ("west",)  # nobody is asked twice
        assert same(world.model(later.id)["sums"], world.model(four.id)["sums"])
        if options != ["method.ridge=0"]:  # else it is chosen on the held-out examples of who is new
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
            if options != ["method.ridge=0"]:
                equal(world.model(found[run.id].by), world.model(left.id))
