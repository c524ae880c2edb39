"""In which order a hospital prepares, admits and notes a task: what is refused leaves nothing noted and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from silo.storage.schema import answers, bases, run_data
from silo.training.data_source import DataSource
from tests.silo.service.test_census import Counted
from tests.silo.service.test_lost_state import SCAFFOLD, asked
from tests.support import until
from tests.support.fake_coordinator import Hospital, manifest
from tests.support.privacy import budgeted, private

pytestmark = pytest.mark.integration

Make = Callable[..., Hospital]
BY_HAND = '\n[runs]\napprove = "by hand"\n'


def noted(hospital: Hospital, table) -> list:
    with hospital.service.store.database.read() as db:
        return db.execute(select(table)).all()


@pytest.mark.parametrize("run", [manifest(), private()], ids=["plain", "private"])
def test_a_run_that_a_person_must_decide_about_while_its_data_load_waits_and_is_not_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunManifest
) -> None:
    folder = tmp_path / "home0"
    budgeted(folder)
    policy, load = folder / "policy.toml", DataSource.as_begun

    def changed(source: DataSource, began):
        if BY_HAND not in policy.read_text():
            policy.write_text(policy.read_text() + BY_HAND)
        return load(source, began)

    hospital = make(run, folder=folder)
    hospital.start()
    monkeypatch.setattr(DataSource, "as_begun", changed)
    hospital.offer()
    until(lambda: {"approval", "refused", "sent"} & {*hospital.events()})
    assert hospital.events()[-1] == "approval"
    assert [a.code for a in hospital.answers() if not a.accepted] == []


def test_other_data_are_refused_before_the_task_is_accepted_and_nothing_is_fetched_or_noted(make: Make) -> None:
    hospital = make(manifest())
    hospital.start()
    hospital.train()
    hospital.settle()
    before = noted(hospital, bases), noted(hospital, answers)
    hospital.stop()
    hospital.settings["data"] = "digits/p3c4/0"
    hospital.transfer.calls.clear()
    hospital.start()
    sent = build_method("fedavg", {}).broadcast(hospital.server)
    hospital.offer(1, state={group: {name: v + 1 for name, v in part.items()} for group, part in sent.items()})
    assert hospital.refused().code == "E-DATA-10"
    assert [a.accepted for a in hospital.answers() if a.round == 1] == [False]
    assert hospital.transfer.calls == []
    assert (noted(hospital, bases), noted(hospital, answers)) == before


def test_a_task_that_cannot_begin_takes_no_place_of_the_day(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "home0"
    folder.mkdir(mode=0o700)
    (folder / "policy.toml").write_text("[evaluation]\nruns_a_day = 1\n")
    hospital = make(SCAFFOLD, folder=folder)
    hospital.start()
    asked(hospital, 0, included_before=7)
    assert hospital.refused().code == "E-STATE-24"
    assert hospital.service.store.answers.measured_today() == 0
    assert noted(hospital, answers) == []
    assert noted(hospital, run_data) == []


def test_a_census_is_kept_and_told_with_the_first_task_that_is_admitted(tmp_path: Path) -> None:
    counted = Counted(tmp_path / "home0")
    try:
        counted.begin([n + 1 if k == 4 else n for k, n in enumerate(counted.holders)])
        assert counted.refused().code == "E-RUN-48"
        assert counted.service.store.secagg.coverages() == {}
        counted.begin(counted.holders)
        until(lambda: counted.events().count("sent") == 2)
        assert "census" in counted.events()
    finally:
        counted.end()


def test_a_private_round_that_the_plan_does_not_have_is_recorded_whatever_is_sent_with_it(
    make: Make, tmp_path: Path
) -> None:
    ledger = budgeted(tmp_path / "home0")
    hospital = make(private(), folder=tmp_path / "home0")
    hospital.start()
    hospital.offer(7, state={"w": {}})
    assert hospital.refused().code == "E-RUN-33"
    assert ledger.events()[-1][2] == "REFUSED"
