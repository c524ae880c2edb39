"""The coordinator's database, in one file; each method of its stores is one transaction, on disk on return."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from coordinator.storage.attestations import AttestationStore
from coordinator.storage.contributions import ContributionStore
from coordinator.storage.members import MemberStore
from coordinator.storage.runs import RunStore
from coordinator.storage.schema import MIGRATIONS, metadata
from coordinator.storage.secagg import MaskedRunStore
from coordinator.storage.steering import SteeringStore
from service_core.storage.object_store import count_objects
from service_core.storage.private_files import FolderLock, private_home
from service_core.storage.sqlite import Database

FILE = "coordinator.sqlite"
OBJECTS = "blobs/objects"
WEIGHTS = "blobs/weights"
"""Unfinished uploads of leads."""
LOCK_FILE = "service.lock"
"""Locks a home for its one service."""


def lock_home(home: Path) -> FolderLock:
    """Lock a home for the one service or command that may change it; raises as `FolderLock`."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return FolderLock(home, LOCK_FILE, "another coordinator")


class CoordinatorStore:
    """The coordinator's database, for many threads and a second process (the command line) at the same time."""

    def __init__(
        self,
        home: Path,
        clock: Callable[[], float] = time.time,
        accept_loss: bool = False,
        rehearsal: bool = False,
    ) -> None:
        """Open a home's database; accept_loss, rehearsal: as for `Database`."""
        if not rehearsal:
            private_home(home)
        self.database = Database(
            home / FILE,
            metadata,
            MIGRATIONS,
            contents=lambda: count_objects(home / OBJECTS),
            accept_loss=accept_loss,
            rehearsal=rehearsal,
            wal=True,
        )
        self.members = MemberStore(self.database, clock)
        self.runs = RunStore(self.database, clock)
        self.contributions = ContributionStore(self.database, clock)
        self.steering = SteeringStore(self.database)
        self.attestations = AttestationStore(self.database)
        self.secagg = MaskedRunStore(self.database, clock)

    def close(self) -> None:
        self.database.close()
