"""The policies and budgets of the demo's hospitals, and their spending after a run.

Does the same as `silo ledger register`, `silo ledger budget set` and `silo ledger show`, directly on the silos' files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_core import datasets
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.release_plan import TRAIN
from privacy.compiled_run import CompiledRun
from privacy.ledger import registration
from privacy.ledger.ledger import Ledger
from service_core.storage.private_files import write_private

COLLECTION = "digits"
EPSILON, DELTA = 8.0, 1e-5
POLICY = f"""\
[privacy]
epsilon = {EPSILON}
delta = {DELTA}
min_noise_alone = 0.27  # least noise of this hospital, if hospitals share the noise under masks
public_test = true  # these test images are published, so evaluation on them needs no noise
"""
LEDGER_FILE, POLICY_FILE = "ledger.db", "policy.toml"


@dataclass(frozen=True, slots=True)
class PrivateRunSpending:
    """Privacy spending of one hospital's training records in the private run, at delta.

    Attributes:
        epsilon: from the hospital's own ledger
        projected: the projection before the run
        tight: the projection by the tighter accountant
        noise: z, standard deviation over sensitivity
    """

    epsilon: float
    delta: float
    projected: float
    tight: float
    noise: float


def open_budget(home: Path, data: str) -> None:
    write_private(home / POLICY_FILE, POLICY.encode())
    ledger = Ledger(home / LEDGER_FILE)
    registration.register(ledger, datasets.load(data), COLLECTION)
    training = registration.collection(COLLECTION, TRAIN)
    ledger.set_budget(training, EPSILON, DELTA, "demo", "the one private run of the demo")


def spending(folder: Path, manifest: RunManifest) -> dict[str, PrivateRunSpending]:
    """Return each hospital's spending from its ledger, with the run's projection."""
    spent = {}
    for member, planned in zip(manifest.members, CompiledRun.of(manifest).profile.project(), strict=True):
        status = Ledger(folder / member.name / LEDGER_FILE).status(
            registration.collection(COLLECTION, TRAIN), prv=False
        )
        delta = DELTA if status.delta is None else status.delta
        spent[member.name] = PrivateRunSpending(
            status.spent_rdp, delta, planned.epsilon, planned.epsilon_tight, planned.noise
        )
    return spent
