"""Services shared by all runs of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.runs.dispatcher import Dispatcher
from coordinator.storage.store import CoordinatorStore
from service_core.audit_log.lines import LogEntry
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import Credentials


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """Services that a run uses.

    signer: returns the coordinator's certificate in force   record: writes a line into the audit log   roster:
    returns the newest signed list of members.
    """

    store: CoordinatorStore
    objects: ObjectStore
    dispatcher: Dispatcher
    signer: Callable[[], Credentials]
    record: Callable[[LogEntry], object]
    roster: Callable[[], bytes]
