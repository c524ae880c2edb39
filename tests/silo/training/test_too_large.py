"""A run that does not fit a hospital's memory: refused before its model is fetched or built, and nothing is charged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.rounds.manifest import NamedOptions
from fl_core.training import memory
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.privacy import TRAIN, budgeted, private

HUGE = NamedOptions("digits_linear", {"projection": [10**9]})


@pytest.mark.fault(
    "a hospital",
    "has too little memory for a run",
    "refused before the model is fetched or anything is charged (E-RUN-38)",
)
@pytest.mark.parametrize("kind", ["plain", "private"])
def test_a_model_that_does_not_fit_is_refused_before_it_is_fetched_or_charged(make, tmp_path, kind):
    ledger = budgeted(tmp_path / "home0")
    hospital = make(private() if kind == "private" else manifest())
    hospital.digest = hospital.transfer.offer(replace(hospital.manifest, model=HUGE).to_json().encode())
    hospital.start()
    hospital.offer(base_digest="b" * 64)  # which the coordinator does not have: to fetch it would end otherwise
    refused = hospital.refused()
    assert refused.code == "E-RUN-38"
    until(lambda: not [*(tmp_path / "home0" / "objects").rglob("*")])  # nor is the manifest kept
    assert ledger.history(TRAIN) == []


def test_what_is_free_at_the_hospital_is_not_told(make, monkeypatch):
    hospital = make(manifest())
    monkeypatch.setattr(memory, "free_memory", lambda device: 123_456_789)
    hospital.digest = hospital.transfer.offer(replace(hospital.manifest, model=HUGE).to_json().encode())
    hospital.start()
    hospital.offer()
    reason = hospital.refused().reason
    assert "found less" in reason
    assert "117 MiB" not in reason
