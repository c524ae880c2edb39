"""Checkpoints of a run: a round is in the store before it begins, and its result before any silo gets the close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.grpc_port import BroadcastCache, StoredObject
from coordinator.runs.round_closer import RoundCloser
from coordinator.runs.tasks import RunInterrupted
from coordinator.storage.store import Store
from fl_core.errors import StateError
from fl_core.rounds.engine import Observer
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State
from protos.storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class RunCheckpointer(Observer):
    """Observes the rounds of one run; a closed round is on disk before its close is announced.

    needed: from a cohort's size to the updates that close a round.
    """

    run_id: str
    closer: RoundCloser
    needed: Callable[[int], int]
    broadcasts: BroadcastCache
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._unless_aborted(lambda: self.store.runs.open_round(self.run_id, context.round, kind, names))
        row = self.store.runs.round(self.run_id, context.round)
        assert row is not None
        self.closer.opened(row, self.needed(len(names)))

    def arrived(self, name: str) -> None:
        """Count an update towards the quorum."""
        self.closer.accepted(name)

    def refused(self, name: str, why: str) -> None:  # noqa: ARG002
        """Note that nothing will come of a silo in this round."""
        self.closer.refused(name)

    def closed(self, record: RoundRecord, server: State) -> None:
        self.closer.closed()
        close, train = self.store.runs.close_round, record.kind is TaskKind.TRAIN
        # Between rounds it is computed when it is asked for: `RunScheduler.with_model_digest`.
        model = "" if train else tensor_maps.digest(server["w"])
        with self.objects.lock:
            base = StoredObject.stored(server, self.objects) if train else None
            self._unless_aborted(lambda: close(self.run_id, record, base, model))
        if base is not None:
            self.broadcasts.remember(server, base)
        row = self.store.runs.round(self.run_id, record.round)
        assert row is not None
        self.dispatcher.announce_close(row)
        if record.kind is TaskKind.EVALUATE:
            self.dispatcher.announce_end(self.store.runs.get(self.run_id))

    def _unless_aborted(self, write: Callable[[], object]) -> None:
        try:
            write()
        except StateError as error:
            raise RunInterrupted(str(error)) from error
