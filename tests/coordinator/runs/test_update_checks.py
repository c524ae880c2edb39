"""An update is read once: the round takes what it measured before its receipt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.runs import update_checks
from coordinator.runs.update_checks import UpdateChecks
from fl_core.aggregation.update_check import MeasuredUpdate
from fl_core.errors import ProtocolError
from protos.wire.codec import BundleFile
from tests.support.coordinator import DATA, World, open_request, open_round, update_bytes


def test_a_round_takes_what_was_measured_before_the_receipt_once_and_bit_for_bit(world: World, tmp_path: Path) -> None:
    contribution, file = contribution_of(world), tmp_path / "update"
    file.write_bytes(DATA)
    checks = UpdateChecks(world.server.store, world.server.runs.services.model_lock)
    checks.check(contribution, file)
    check = checks.of(contribution)
    measured = checks.measured(contribution.id)
    assert measured == check.check(BundleFile(file), contribution.silo)
    assert check.check(MeasuredUpdate(BundleFile(file), measured), contribution.silo) is measured
    assert checks.measured(contribution.id) is None, "it is kept until the round has it, and no longer"


def test_of_a_refused_update_nothing_is_remembered(world: World, tmp_path: Path) -> None:
    contribution, file = contribution_of(world), tmp_path / "update"
    file.write_bytes(update_bytes(float("nan")))
    checks = UpdateChecks(world.server.store, world.server.runs.services.model_lock)
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        checks.check(contribution, file)
    assert checks.measured(contribution.id) is None


def test_what_no_round_takes_is_forgotten_in_time(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_checks, "MEASURED", 2)
    contribution, file = contribution_of(world), tmp_path / "update"
    file.write_bytes(DATA)
    checks = UpdateChecks(world.server.store, world.server.runs.services.model_lock)
    for name in ("first", "second", "third"):
        checks.check(replace(contribution, id=name), file)
    assert [checks.measured(name) is None for name in ("first", "second", "third")] == [True, False, False]


def contribution_of(world: World) -> update_checks.Contribution:
    _, offer = open_round(world)
    request = open_request("north", offer, DATA)
    world.transfer("north").Open(request)
    found = world.server.store.contributions.contribution(request.contribution_id)
    assert found is not None
    return found
