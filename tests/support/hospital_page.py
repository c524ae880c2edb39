"""A hospital's home with everything that its page shows: a run that ended, budgets, questions, peers, a log."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from fl_core import datasets
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from privacy.accounting.accountant import Mechanism
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import version
from protos.wire.tasks import TaskKey
from service_core.audit_log.lines import Entry
from service_core.audit_log.log import FOLDER, AuditLog
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home, Served
from silo.storage.store import Store
from silo.storage.tasks import Evaluation, OutboxEntry
from silo.training.hospital_controls import HospitalControls
from silo.training.run_request import leaves_of, privacy_of
from tests.support.fake_coordinator import enrolled, manifest
from tests.support.pki import certified, member, roster
from tests.support.privacy import DATA, TRAIN, budgeted, private
from tests.support.transfers import authority

POLICY = '[runs]\napprove = "by hand"\n[privacy]\nepsilon = 8\n'
RUN = "fedavg-digits-11aa"


def asks(home: Home, run: RunManifest, run_id: str) -> None:
    """Let a run ask this hospital, as its service does."""
    store = Store(home.database)
    try:
        HospitalControls(home, store).admit(run_id, run)
    finally:
        store.close_database()


def took_part(home: Home, run: RunManifest, run_id: str = RUN, size: int = 155_244, rounds: int = 3) -> None:
    """Write what a run leaves in the database whose updates all have receipts."""
    store = Store(home.database)
    digest = run.digest()
    compiled = CompiledRun.of(run)
    store.record_run(run_id, run.name, digest, leaves=leaves_of(run).to_json(), privacy=privacy_of(compiled))
    for k in range(rounds):
        key = TaskKey(run_id, k, TaskKind.TRAIN)
        entry = OutboxEntry(key, digest, "b" * 64, "c" * 64, "d" * 64, size)
        if not compiled.private:
            fingerprint = datasets.load(DATA).fingerprint
            store.note_unprotected(key, f"{k:064}", fingerprint, ("test", "train"))
        store.stage(entry, Evaluation(run.schema.classes, (1.0,) * 10, (2.0,) * 10))
        store.deliver(key, b"receipt")
        store.close(key, included=True)
    store.end_run(run_id, "finished", "")
    store.record_contact("consortium.example.org:8443", "consilium-fl 0.1.0")
    store.close_database()


def spent(ledger: Ledger, steps: int = 40) -> None:
    """Charge training records for one round."""
    data = datasets.load(DATA)
    task = LedgerTask(RUN, "m" * 64, 0, "train", version(data, "train"))
    entry = ledger.reserve(TRAIN, task, [PlannedRelease("training", Mechanism(1.1, 0.1, steps))])
    ledger.start(entry)
    ledger.commit(entry, "d" * 64)


def checked(home: Home) -> None:
    """Put down the result of a data check, with a few broken files."""
    report = {
        "origin": DATA,
        "classes": [str(k) for k in range(10)],
        "counts": {"train": [0, 178, 0, 0, 181, 0, 0, 0, 172, 0], "test": [0, 31, 0, 0, 30, 0, 0, 0, 29, 0]},
        "fingerprint": "",
        "problems": [
            {
                "code": "E-DATA-04",
                "what": "an image that cannot be read",
                "count": 2,
                "first": ["scans/0041.png", "scans/0107.png"],
                "remedy": "Restore them, or leave them out",
            }
        ],
    }
    served = home.served()
    assert served is not None
    raw = {"at": time.time(), "served": served._asdict(), "report": report}
    (home.path / "data-check.json").write_text(json.dumps(raw))


def furnished(folder: Path) -> Home:
    """Make a home with all of it."""
    home = enrolled(folder)
    ca = authority()
    identity = SiloIdentity(folder)
    mine = member(ca, identity.current_credentials().cert_pem)
    others = [member(ca, certified(ca, name)) for name in ("center0", "center2")]
    identity.update_roster(roster(ca, [mine, *others], 1))
    late = member(ca, certified(ca, "center3"))
    identity.update_roster(roster(ca, [mine, *others, late], 2), accept_additions=False)
    ledger = budgeted(folder, policy=POLICY)
    spent(ledger)
    home.note_served(Served(DATA))
    checked(home)
    took_part(home, private(rng="secure"))
    asks(
        home,
        replace(
            private("fedmr", {"inter_weighting": "example"}, epsilon=3.0, rng="secure"),
            name="skin-study-2",
            lead="anna",
        ),
        "fedmr-digits-7f3c",
    )
    asks(home, replace(manifest(), name="first-look", lead="anna", rounds=5), "fedavg-digits-90d2")
    log = AuditLog(folder / FOLDER)
    log.append(
        Entry("silo://demo/center1", "service started"),
        Entry("coordinator://demo", "training", f"run={RUN} round=3"),
        Entry("silo://demo/center1", "sent", f"run={RUN} round=3", bytes=155_244),
        Entry("coordinator://demo", "approval", "run=fedmr-digits-7f3c round=1"),
    )
    log.close()
    return home
