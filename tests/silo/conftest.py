"""Hospitals against a scripted coordinator and transfers against a fake one, ended with the test."""

from __future__ import annotations

import pytest

from fl_core.rounds.silo_round import run_silo_round
from tests.support.fake_coordinator import Hospital, Rig
from tests.support.hospital import Slow


@pytest.fixture
def make(tmp_path):
    made = []

    def hospital(run=None, run_round=run_silo_round, folder=None, **settings):
        made.append(Hospital(folder or tmp_path / f"home{len(made)}", run, run_round, **settings))
        return made[-1]

    yield hospital
    for one in made:
        one.end()


@pytest.fixture
def started(make):
    """Make a hospital whose service is at work."""

    def started(*given, **settings):
        hospital = make(*given, **settings)
        hospital.start()
        return hospital

    return started


@pytest.fixture
def slow():
    control = Slow()
    yield control
    control.free.set()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()
