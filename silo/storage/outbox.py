"""The outbox: a finished update stays complete on disk until its round is closed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fl_core.errors import ProtocolError, StateError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.values import Bundle, State
from protos.wire import codec
from protos.wire.tasks import TaskKey, contribution_id
from service_core.storage.object_store import ObjectStore
from silo.cancellation import CancelledError
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation, LocalEvaluation, OutboxEntry


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The bundle that may leave, the state that stays, and local measurements.

    server_tracks_state: the server tracks the silos' states, so this one counts only if the bundle is included
    unprotected: splits whose records the bundle reveals without differential privacy   fingerprint: of the data.
    """

    bundle: Bundle
    state: State
    evaluation: LocalEvaluation
    server_tracks_state: bool
    unprotected: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A finished update that is being written; its bytes may be sent already, but not committed before `finish`.

    Guarantees: after `finish` a crash loses nothing; a crash before leaves no entry, only files to sweep.
    """

    entry: OutboxEntry
    _wait: Callable[[], None]

    def finish(self) -> None:
        """Wait until the update is on the disk and in the outbox.

        Raises StateError (E-STATE-63) if writing fails: retrying does not help at this point. Raises CancelledError if
        the task is cancelled.
        """
        try:
            self._wait()
        except CancelledError:
            raise
        except UnavailableError as error:
            raise StateError(error.code, error.message) from error


@dataclass(frozen=True, slots=True)
class Outbox:
    """Finished updates of one silo. The files are written first, then the row that makes them count."""

    store: SiloStore
    objects: ObjectStore
    silo: str

    def begin(
        self,
        key: TaskKey,
        manifest_digest: str,
        base_digest: str,
        done: TrainingResult,
        attested: Attestation | None = None,
        coordinator: str = "",
        on_entered: Callable[[OutboxEntry], None] = lambda _: None,
    ) -> PendingEntry:
        """Write bundle and next state; a thread syncs them, enters the update and calls on_entered.

        Guarantees: an unprotected update is in the list of unprotected updates when this returns.
        """
        staged = None
        if key.kind.trains:
            staged, _ = self.objects.put_file(lambda file: codec.write_state(done.state, file), sync=False)
        bundle, size = self.objects.put_file(lambda file: codec.write_bundle(done.bundle, file), sync=False)
        if done.unprotected:
            self.store.note_unprotected(key, bundle, done.fingerprint, done.unprotected)
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
            coordinator=coordinator,
        )

        def enter() -> None:
            self.objects.sync(*(d for d in (staged, bundle) if d is not None))
            self.store.stage(entry, done.evaluation)
            on_entered(entry)

        executor = ThreadPoolExecutor(1, thread_name_prefix="stage")
        entered = executor.submit(enter)
        executor.shutdown(wait=False)
        return PendingEntry(entry, entered.result)

    def find(self, key: TaskKey, base_digest: str) -> OutboxEntry | None:
        """Return the update for a task about this base; None without one. `staged` tells if it is in the outbox."""
        entry = self.store.entry(key)
        return entry if entry and entry.base_digest == base_digest else None

    def holds(self, entry: OutboxEntry) -> bool:
        """Tell whether the files of an unsent update, bundle and state, are undamaged; True once it was answered."""
        if not entry.staged:
            return False  # a sweep may delete its files at any time
        if entry.receipt is not None or entry.refused is not None:
            return True
        return all(self.objects.holds(digest) for digest in (entry.object_digest, entry.state_digest) if digest)

    def bundle(self, entry: OutboxEntry) -> Path:
        """Return the file to send; raises StateError (E-STATE-63) if it is damaged or missing."""
        return self.objects.verified(entry.object_digest)

    def state(self, run_id: str, before: int | None = None, at_least: int = -1) -> State | None:
        """Read the newest committed state of a run from a round below `before`; None if there is none.

        Raises StateError (E-STATE-24) if it is from a round below `at_least`, or damaged.
        """
        committed = self.store.committed(run_id, before)
        last = -1 if committed is None else committed[1]
        if last < at_least:
            raise _lost(run_id, at_least, "none" if committed is None else f"that of round {last + 1}")
        if committed is None:
            return None
        if not self.objects.holds(committed[0]):
            raise _lost(run_id, last, "that its file is damaged or missing")
        return codec.read_state(self.objects.path(committed[0]))

    def sweep(self) -> int:
        """Delete unreferenced files; return the bytes freed. Call it only while nothing is being written."""
        return self.objects.sweep(self.store.referenced())


@lru_cache(maxsize=1)
def read_manifest(path: Path, digest: str) -> RunManifest:
    """Read a manifest; raises ProtocolError: E-WIRE-06 on other content, E-WIRE-04 if it is not in canonical form."""
    try:
        manifest = RunManifest.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ProtocolError("E-WIRE-06", f"the manifest is not UTF-8 text: {error}") from error
    if manifest.digest() != digest:
        raise ProtocolError("E-WIRE-04", f"the manifest {digest} is not in canonical form")
    return manifest


def _lost(run_id: str, round: int, present: str) -> StateError:
    return StateError(
        "E-STATE-24",
        f"expected this hospital's state of {run_id} from round {round + 1}, found {present}: restore its home from "
        "a backup of that time; in a run with lost_state=restart, this hospital starts again",
    )
