"""The outbox: a finished update is whole on disk before its first byte leaves, and stays until its round is closed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_core.types import Bundle, State, TaskKind
from protos import codec
from silo.objects import Objects
from silo.store import Store
from silo.tasks import Attested, Entry, Evaluation, TaskKey


@dataclass(frozen=True, slots=True)
class Finished:
    """What training gives: the bundle that may leave, the state that stays, and what was measured on the way.

    mirrored: the method's server keeps a sum of such states, so this one counts only if the bundle is included.
    """

    bundle: Bundle
    state: State
    evaluation: Evaluation
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Outbox:
    """Finished updates of one silo. Files first, then the one row that makes them count."""

    store: Store
    objects: Objects
    silo: str

    def stage(
        self, key: TaskKey, manifest_digest: str, base_digest: str, done: Finished, attested: Attested | None = None
    ) -> Entry:
        """Write bundle and next state to the disk (fsync, rename), then the entry; attested: what goes with it.

        Guarantees: when this returns, a crash loses nothing; a crash before leaves no entry, only files to sweep.
        """
        staged = None
        if key.kind is TaskKind.TRAIN:
            staged, _ = self.objects.put_file(lambda file: codec.write_state(done.state, file))
        bundle, size = self.objects.put_file(lambda file: codec.write_bundle(done.bundle, file))
        name = codec.contribution_id(key.run_id, key.round, key.kind.value, self.silo, base_digest)
        entry = Entry(
            key,
            manifest_digest,
            base_digest,
            name,
            bundle,
            size,
            staged,
            mirrored=done.mirrored,
            attested=attested or Attested(),
        )
        self.store.stage(entry, done.evaluation)
        return entry

    def find(self, key: TaskKey, base_digest: str) -> Entry | None:
        """Return the update that was made for this task from this base, if there is one."""
        entry = self.store.entry(key)
        return entry if entry and entry.base_digest == base_digest else None

    def bundle(self, entry: Entry) -> Path:
        """Give the file to send; raises StateError (E-STATE-63) when the disk no longer holds what was written."""
        return self.objects.sound(entry.object_digest)

    def state(self, run_id: str) -> State | None:
        """Read the committed state of a run; None before its first included round."""
        found = self.store.committed(run_id)
        return None if found is None else codec.read_state(self.objects.sound(found[0]))

    def sweep(self) -> int:
        """Delete the files that nothing refers to any more; call only where nothing is being written."""
        return self.objects.sweep(self.store.referenced())
