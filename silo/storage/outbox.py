"""The outbox: a finished update is whole on disk before anybody signs for it, and stays until its round is closed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, State
from protos.storage.object_store import ObjectStore
from protos.wire import codec
from protos.wire.tasks import TaskKey, contribution_id
from silo.storage.store import Store
from silo.storage.tasks import Attestation, Evaluation, OutboxEntry


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What training gives: the bundle that may leave, the state that stays, and what was measured on the way.

    server_tracks_state: the method's server keeps a sum of such states: this one counts only if the bundle is included.
    """

    bundle: Bundle
    state: State
    evaluation: Evaluation
    server_tracks_state: bool


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A finished update whose files are written, and on their way to the disk; it is entered as soon as they are there.

    Its bytes may be sent meanwhile: until they are committed the coordinator takes another update in their place, so a
    crash here costs the training and nothing else. `finish` comes before the commit.
    """

    entry: OutboxEntry
    _entered: Future[None]

    def finish(self) -> None:
        """Wait until the update is on the disk and entered. Raises OSError as fsync does."""
        self._entered.result()


@dataclass(frozen=True, slots=True)
class Outbox:
    """Finished updates of one silo. Files first, then the one row that makes them count."""

    store: Store
    objects: ObjectStore
    silo: str

    def stage(
        self,
        key: TaskKey,
        manifest_digest: str,
        base_digest: str,
        done: TrainingResult,
        attested: Attestation | None = None,
    ) -> OutboxEntry:
        """Write bundle and next state to the disk (fsync, rename), then the entry; attested: what goes with it.

        Guarantees: when this returns, a crash loses nothing; a crash before leaves no entry, only files to sweep.
        """
        staging = self.begin(key, manifest_digest, base_digest, done, attested)
        staging.finish()
        return staging.entry

    def begin(
        self,
        key: TaskKey,
        manifest_digest: str,
        base_digest: str,
        done: TrainingResult,
        attested: Attestation | None = None,
        on_entered: Callable[[OutboxEntry], None] = lambda _: None,
    ) -> PendingEntry:
        """Write bundle and next state, and have a thread bring them to the disk; see `PendingEntry`.

        on_entered: called once the update is entered.
        """
        staged = None
        if key.kind is TaskKind.TRAIN:
            staged, _ = self.objects.put_file(lambda file: codec.write_state(done.state, file), sync=False)
        bundle, size = self.objects.put_file(lambda file: codec.write_bundle(done.bundle, file), sync=False)
        entry = OutboxEntry(
            key,
            manifest_digest,
            base_digest,
            contribution_id(key.run_id, key.round, key.kind, self.silo, base_digest),
            bundle,
            size,
            staged,
            mirrored=done.server_tracks_state,
            attested=attested or Attestation(),
        )

        def enter() -> None:
            self.objects.sync(*(d for d in (staged, bundle) if d is not None))
            self.store.stage(entry, done.evaluation)
            on_entered(entry)

        executor = ThreadPoolExecutor(1, thread_name_prefix="stage")
        entered = executor.submit(enter)
        executor.shutdown(wait=False)
        return PendingEntry(entry, entered)

    def find(self, key: TaskKey, base_digest: str) -> OutboxEntry | None:
        """Return the update that was made for this task from this base, if there is one."""
        entry = self.store.entry(key)
        return entry if entry and entry.base_digest == base_digest else None

    def bundle(self, entry: OutboxEntry) -> Path:
        """Give the file to send; raises StateError (E-STATE-63) when the disk no longer holds what was written."""
        return self.objects.verified(entry.object_digest)

    def state(self, run_id: str) -> State | None:
        """Read the committed state of a run; None before its first included round."""
        found = self.store.committed(run_id)
        return None if found is None else codec.read_state(self.objects.verified(found[0]))

    def sweep(self) -> int:
        """Delete the files that nothing refers to any more; call only where nothing is being written."""
        return self.objects.sweep(self.store.referenced())
