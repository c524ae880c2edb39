"""A silo as the round loop sees it: offer the task, wait, and read the update from the disk when it is added."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.tasks import SiloTaskKey, Task
from coordinator.storage.store import Store
from fl_core.errors import ProtocolError
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, RoundContext, State
from protos.storage.object_store import ObjectStore
from protos.wire import codec
from protos.wire.bundle_file import BundleFile


class StoredObject(NamedTuple):
    """What a round broadcasts, as an object."""

    digest: str
    size: int

    @classmethod
    def stored(cls, state: State, objects: ObjectStore) -> StoredObject:
        """Store a state as an object, on the disk on return."""
        return cls(*objects.put_file(lambda file: codec.write_state(state, file)))


def checked(bundle: BundleFile, allowed: frozenset[torch.dtype]) -> BundleFile:
    """Return an update whose parts hold numbers of the kinds that this run's silos send.

    Raises ProtocolError (E-WIRE-06) when a part holds others.
    """
    for name in bundle:
        if not bundle.dtypes(name) <= allowed:
            kinds, found = (sorted(map(str, dtypes)) for dtypes in (allowed, bundle.dtypes(name)))
            raise ProtocolError("E-WIRE-06", f"part {name!r}: expected some of {kinds}, found {found}")
    return bundle


class BroadcastCache:
    """What each round of one run broadcasts: written and hashed once, for all silos of the cohort.

    collect: deletes what the run no longer needs. Called when a round's base is in the record: beside the downloads
    nobody waits for it.
    Guarantees: a broadcast whose tensors are those of a state that was just stored is that object, and costs nothing.
    """

    def __init__(
        self, run_id: str, deadline_s: float, store: Store, objects: ObjectStore, collect: Callable[[str], None]
    ) -> None:
        self._run_id = run_id
        self._deadline_s = deadline_s
        self._store = store
        self._objects = objects
        self._collect = collect
        self._lock = threading.Lock()
        self._stored: tuple[State, StoredObject] | None = None
        self._round: tuple[int, StoredObject, float] | None = None

    def remember(self, state: State, base: StoredObject) -> None:
        """Note that a state is on the disk as this object."""
        with self._lock:
            self._stored = (state, base)

    def base(self, msg: State, round: int) -> tuple[StoredObject, float]:
        """Return a round's object and its deadline (time.monotonic()).

        The first caller makes both.
        """
        with self._lock:
            if self._round is None or self._round[0] != round:
                base = self._write(msg, round)
                self._round = (round, base, time.monotonic() + self._deadline_s)
                self._collect(self._run_id)
            return self._round[1:]

    def _write(self, msg: State, round: int) -> StoredObject:
        with self._objects.lock:
            base = self._known(msg)
            if base is None:
                base = StoredObject.stored(msg, self._objects)
            self._store.runs.set_base(self._run_id, round, base.digest, base.size)
        return base

    def _known(self, msg: State) -> StoredObject | None:
        if self._stored is None or set(msg) != set(self._stored[0]):
            return None
        state, base = self._stored
        return base if all(msg[group] is state[group] for group in msg) else None


@dataclass(slots=True)
class GrpcPort:
    """A silo at the other end of the wire; see `fl_core.types.interfaces.SiloPort`.

    Guarantees: the bundle is the silo's own, bit for bit; an update that was taken before a crash is not
    asked for again.
    """

    name: str
    run_id: str
    manifest_digest: str
    allowed: frozenset[torch.dtype]
    broadcasts: BroadcastCache
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        """Ask the silo for its update and return it, to be read when it is added.

        Raises FederationError when it refuses, is revoked or misses the round's deadline: the round goes on without it.
        Raises RunInterrupted when the run was aborted or the service stops: the round ends unclosed.
        """
        base, due = self.broadcasts.base(msg, context.round)
        key = SiloTaskKey(self.run_id, context.round, kind, self.name)
        task = Task(key, self.manifest_digest, base.digest, base.size, context.cohort, due)
        with self.dispatcher.pending_task(task) as pending:  # before we look: a later delivery settles it
            digest = self._taken(task)
            if digest is None:
                self.dispatcher.offer(task)
                digest = pending.wait()
        return checked(BundleFile(self.objects.path(digest)), self.allowed)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Do nothing: the close that was stored is announced to every silo."""

    def _taken(self, task: Task) -> str | None:
        found = self.store.contributions.contribution(task.contribution_id)
        return None if found is None or found.receipt is None else found.object_digest
