"""Private runs for tests: a manifest, a home whose records have a budget, and a policy that accepts seeded noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from helpers_silo import MEMBERS, manifest

from fl_core import datasets
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from privacy import profiles
from privacy.accounting.record_config import round_to_two_digits
from privacy.dp_sgd.class_sums import PrivacyUnits
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from silo.storage.home import Home

TRAIN, TEST, HOSPITAL = "center1/train", "center1/test", "hospital"
DATA = "digits/p3c4/1"
SEEDED_POLICY = '[privacy]\nrng = "test"\n'


def private(method: str = "fedavg", options: dict | None = None, **terms) -> RunManifest:
    """Freeze a small private run; noise is seeded unless the test says otherwise."""
    units = round_to_two_digits(len(PrivacyUnits.of(datasets.load(DATA).train)))
    facts = {"rng": "test", "epsilon": 8.0, **terms}
    return manifest(
        method=NamedOptions(method, options or {}),
        members=make_members(MEMBERS, 3, 1.0, [units] * 3),
        privacy=NamedOptions("dp_record", facts),
    )


def hospital_level(method: str = "fedavg", options: dict | None = None, **terms) -> RunManifest:
    """Freeze a small run that hides what a whole hospital changes; the digits' network is large for it."""
    units = round_to_two_digits(len(PrivacyUnits.of(datasets.load(DATA).train)))
    choice = NamedOptions("dp_silo_small", {"rng": "test", "epsilon": 8.0, "allow_large": True, **terms})
    made = manifest(
        method=NamedOptions(method, options or {}), members=make_members(MEMBERS, 3, 1.0, [units] * 3), privacy=choice
    )
    return replace(made, layout={**made.layout, **profiles.extra_parts(choice)})


def budgeted(folder: Path, epsilon: float = 8.0, test_epsilon: float = 8.0, policy: str = SEEDED_POLICY) -> Ledger:
    """Register the tests' data in a home and give it a budget."""
    home = Home(folder).make()
    if policy:
        home.policy.write_text(policy)
    ledger = Ledger(home.ledger)
    register(ledger, datasets.load(DATA), "center1")
    ledger.set_budget(TRAIN, epsilon, 1e-5, "dpo", "test")
    ledger.set_budget(TEST, test_epsilon, 1e-5, "dpo", "test")
    return ledger
