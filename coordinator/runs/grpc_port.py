"""A silo as the round loop sees it: offer the task, wait, and read the update from the disk when it is added."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.round_closer import RoundCloser, excluded_error
from coordinator.runs.tasks import SiloTaskKey, Task
from coordinator.runs.update_checks import UpdateChecks, checked
from coordinator.storage.store import Store
from fl_core.aggregation.update_check import MeasuredUpdate
from fl_core.errors import UnavailableError
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, RoundContext, State
from protos.wire import codec
from protos.wire.codec import BundleFile
from service_core.storage.object_store import ObjectStore

log = logging.getLogger(__name__)


class StoredObject(NamedTuple):
    """What a round broadcasts, as an object."""

    digest: str
    size: int

    @classmethod
    def stored(cls, state: State, objects: ObjectStore) -> StoredObject:
        """Store a state as an object, on the disk on return."""
        return cls(*objects.put_file(lambda file: codec.write_state(state, file)))


@dataclass(slots=True, eq=False)
class BroadcastCache:
    """What each round of one run broadcasts, stored once for the whole cohort.

    collect: deletes what the run no longer needs; called once a round's base is recorded, while silos download.
    Guarantees: a broadcast with the tensors of the state that was just stored is that object.
    """

    run_id: str
    deadline_s: float
    store: Store
    objects: ObjectStore
    collect: Callable[[str], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stored: tuple[State, StoredObject] | None = None
    _round: tuple[int, StoredObject, float] | None = None

    def remember(self, state: State, base: StoredObject) -> None:
        """Note that a state is on the disk as this object."""
        with self._lock:
            self._stored = (state, base)

    def base(self, msg: State, round: int) -> tuple[StoredObject, float]:
        """Return a round's object and its deadline (time.monotonic()); the first caller makes both."""
        with self._lock:
            if self._round is None or self._round[0] != round:
                base = self._write(msg, round)
                self._round = (round, base, time.monotonic() + self.deadline_s)
                self.collect(self.run_id)
            return self._round[1:]

    def _write(self, msg: State, round: int) -> StoredObject:
        with self.objects.lock:
            base = self._known(msg)
            if base is None:
                base = StoredObject.stored(msg, self.objects)
            self.store.runs.set_base(self.run_id, round, base.digest, base.size)
        return base

    def _known(self, msg: State) -> StoredObject | None:
        if self._stored is None or set(msg) != set(self._stored[0]):
            return None
        state, base = self._stored
        return base if all(msg[group] is state[group] for group in msg) else None


@dataclass(slots=True)
class MaskedTasks:
    """What the offers of a masked run name beside the model.

    keys, census: objects, as in the message `Offer`   base: digest of everybody's keys, which a census begins from
    census_due: time.monotonic() of its deadline.
    """

    keys: str
    base: str
    census_due: float
    census: str = ""


@dataclass(slots=True)
class GrpcPort:
    """A silo at the other end of the wire; see `fl_core.types.interfaces.SiloPort`.

    Guarantees: the bundle is the silo's, bit for bit; an update that was taken before a crash is not asked for again.
    """

    name: str
    run_id: str
    manifest_digest: str
    allowed: frozenset[torch.dtype]
    attempt: int
    closer: RoundCloser
    checks: UpdateChecks
    broadcasts: BroadcastCache
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher
    masks: MaskedTasks | None = None

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        """Ask the silo for its update and return it, to be read when it is added.

        Of a round whose set is fixed the updates of the set are taken alone, and a lost one is asked for again.
        Raises FederationError when it refuses, is revoked, excluded or given up: the round goes on without it.
        Raises RunInterrupted when the run was aborted or the service stops: the round ends unclosed.
        """
        if kind is TaskKind.CENSUS:
            assert self.masks is not None
            base, due = StoredObject(self.masks.base, 0), self.masks.census_due
        else:
            base, due = self.broadcasts.base(msg, context.round)
        key = SiloTaskKey(self.run_id, context.round, kind, self.name)
        task = Task(
            key,
            self.manifest_digest,
            base.digest,
            base.size,
            context.cohort,
            due,
            self.attempt,
            incarnation=self.store.database.incarnation,
            included_before=self.store.runs.included_before(self.run_id, self.name, context.round),
            secagg_keys_digest="" if self.masks is None else self.masks.keys,
            secagg_census_digest="" if self.masks is None else self.masks.census,
        )
        sealed = self.store.secagg.updates(self.run_id, context.round, kind) if self.masks is not None else None
        if sealed is not None and self.name not in sealed:
            raise UnavailableError("E-RUN-13", "no update: the round's set was fixed without it")
        # Pending before we look, so that a later delivery settles it; offered only after, so that no silo makes again,
        # and pays for, what is here.
        with self.dispatcher.pending_task(task) as pending:
            digest = self._taken(task)
            if digest is None:
                if sealed is None and self.name in self.closer.excluded:
                    raise excluded_error()
                self.dispatcher.offer(pending)
                digest = pending.wait()
        update = checked(BundleFile(self.objects.verified(digest)), self.allowed)
        self.closer.record_classes(self.name, update)
        measured = self.checks.measured(task.contribution_id)
        return update if measured is None else MeasuredUpdate(update, measured)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Do nothing: the close that was stored is announced to every silo."""

    def _taken(self, task: Task) -> str | None:
        """Return the digest of the update that was taken before; one that the disk has lost is asked for again."""
        found = self.store.contributions.contribution(task.contribution_id)
        if found is None or found.received is None:
            return None
        with self.objects.lock:
            if self.objects.holds(found.object_digest):
                return found.object_digest
            self.store.contributions.reopen(found)
        log.warning("the update of %s is damaged or missing here: it is asked for again", self.name)
        return None
