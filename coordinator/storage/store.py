"""The coordinator's database, in one file: `members`, `runs`, `contributions` and `attestations`.

Every method of these is one transaction, on the disk when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from coordinator.storage.attestations import AttestationStore
from coordinator.storage.contributions import ContributionStore
from coordinator.storage.members import MemberStore
from coordinator.storage.runs import RunStore
from coordinator.storage.schema import IN_EVERY_VERSION, MIGRATIONS, metadata
from protos.storage.sqlite import Database

FILE = "coordinator.sqlite"


class Store:
    """The coordinator's database, usable from many threads and beside a second process (the command line)."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.database = Database(home / FILE, metadata, MIGRATIONS, IN_EVERY_VERSION)
        self.members = MemberStore(self.database, clock)
        self.runs = RunStore(self.database, clock)
        self.contributions = ContributionStore(self.database, clock)
        self.attestations = AttestationStore(self.database)

    def close(self) -> None:
        self.database.close()
