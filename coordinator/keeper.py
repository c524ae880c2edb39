"""Around a round of a real run: in the record before it begins, and stored before anybody hears of its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.blobs import Blobs
from coordinator.hub import Hub
from coordinator.ports import Base, Broadcasts
from coordinator.store import Store
from coordinator.tasks import Interrupted
from fl_core import trees
from fl_core.errors import StateError
from fl_core.rounds import RoundRecord
from fl_core.types import Federation, State, TaskKind
from protos.codec import write_state


class Keeper:
    """The observer of one run: what is closed is on the disk before any silo hears of it."""

    def __init__(
        self, run_id: str, broadcasts: Broadcasts, store: Store, blobs: Blobs, hub: Hub, collect: Callable[[str], None]
    ) -> None:
        self._run_id = run_id
        self._broadcasts = broadcasts
        self._store = store
        self._blobs = blobs
        self._hub = hub
        self._collect = collect

    def opened(self, fed: Federation, kind: TaskKind, names: Sequence[str]) -> None:
        """Note the open round before anything is sent."""
        self._in_time(lambda: self._store.runs.open_round(self._run_id, fed.round, kind, names))

    def arrived(self, name: str) -> None:
        """Do nothing: an arrival was noted with the receipt."""

    def closed(self, record: RoundRecord, server: State) -> None:
        """Store the state, close the round, tell the silos, forget the bundles: in this order."""
        close, train = self._store.runs.close_round, record.kind is TaskKind.TRAIN
        model = "" if train else trees.digest(server["w"])  # between rounds: when somebody asks, see `RunService.named`
        with self._blobs.guard:
            base = Base(*self._blobs.put_file(lambda file: write_state(server, file))) if train else None
            self._in_time(lambda: close(self._run_id, record, base, model))
        if base is not None:
            self._broadcasts.remember(server, base)
        row = self._store.runs.round(self._run_id, record.round)
        assert row is not None
        self._hub.announce_close(row)
        if record.kind is TaskKind.EVALUATE:
            self._hub.announce_end(self._store.runs.get(self._run_id))
        self._collect(self._run_id)

    def _in_time(self, write: Callable[[], object]) -> None:
        """Write, unless the run was aborted meanwhile."""
        try:
            write()
        except StateError as error:
            raise Interrupted(str(error)) from error
