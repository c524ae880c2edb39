"""What the coordinator knows, in one file: `members`, `runs`, `objects` and `attested`, each a set of transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from coordinator.storage.attestations import AttestationStore
from coordinator.storage.contributions import ObjectStore
from coordinator.storage.database import Database
from coordinator.storage.members import MemberStore
from coordinator.storage.runs import RunStore

FILE = "coordinator.sqlite"


class Store:
    """The coordinator's database: safe from many threads and beside a second process."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self.database = Database(home / FILE)
        self.members = MemberStore(self.database, clock)
        self.runs = RunStore(self.database, clock)
        self.objects = ObjectStore(self.database, clock)
        self.attested = AttestationStore(self.database)

    def close(self) -> None:
        """Close the file."""
        self.database.close()
