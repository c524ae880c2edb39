"""Checkpoints of a simulation, from which the same command continues after the process was killed.

A checkpoint is a folder. `round-000010` is written after ten closed rounds. It contains the server's state, the best
state so far and every silo's state. `checkpoint.json` contains the records of all rounds, the run's identity and the
digests of the other files. The folder gets its name after everything is on disk. The newest two are kept.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from consilium.research.engines.in_process import ResumePoint, StateStore
from consilium.research.simulate import EVERY
from consilium.research.simulate.measures import BestHistory, EarlierRounds
from consilium.research.simulate.results import differences
from fl_core.converter import CONVERTER, parse_json, shown, structure
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.engine import Observer
from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Part, RoundContext, State
from privacy.accounting.release_plan import Release
from privacy.release_log import InMemoryReleaseLog
from protos.wire.codec import read_state, write_state
from service_core.storage.digests import digest, file_digest
from service_core.storage.disk import disk_errors
from service_core.storage.private_files import FolderLock, sync_path

log = logging.getLogger(__name__)
SECONDS = 60.0
"""Age of the last checkpoint after which the next round's opening writes one. Writing takes at most a second."""
KEPT = 2
_FORMAT, _FACTS = 1, "checkpoint.json"
_MAX_BYTES = 1 << 30
_NAME = re.compile(r"round-(\d{6,})")
CONVERTER.register_structure_hook(ClinicalMetrics, lambda raw, _: ClinicalMetrics.of(raw))


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Everything that a run's bits depend on.

    data: fingerprints of the silos' data   computed: device and kernels (`SimulationEngine.facts`).
    """

    manifest: Mapping[str, object]
    data: Sequence[str]
    computed: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SimulationState:
    """Progress of a simulation: its history, its silos' states and, in a private run, its releases.

    threads: CPU threads of a silo's round; they affect the last bits.
    """

    history: BestHistory
    states: StateStore
    logs: Sequence[InMemoryReleaseLog]
    silos: int
    threads: int


@dataclass(frozen=True, slots=True)
class _File:
    """The content of `checkpoint.json`. body: a `Checkpoint` as JSON   digest: of the body."""

    format: int
    digest: str
    body: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The part of a checkpoint without tensors.

    round: the next round, 0-based   silos: silos with a state; True if it is not empty and thus in a file
    files: digests of the files with tensors, by name.
    """

    round: int
    threads: int
    identity: RunIdentity
    records: Sequence[RoundRecord]
    measured: Sequence[RoundRecord]
    best_round: int
    silos: Mapping[str, bool]
    releases: Sequence[Sequence[Release]]
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint and verify every file's digest; raises OSError or ValueError on a damaged one."""
        with (folder / _FACTS).open("rb") as stream:
            file = structure(_File, parse_json(stream.read(_MAX_BYTES).decode()), _FACTS)
        if file.format != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, found {shown(file.format)}")
        if digest(file.body.encode()) != file.digest:
            raise ValueError(f"{_FACTS} has changed since it was written")
        checkpoint = structure(cls, parse_json(file.body), _FACTS)
        for name, wanted in checkpoint.files.items():
            if file_digest(folder / name) != wanted:
                raise ValueError(f"{name} has changed since it was written")
        return checkpoint

    def into(self, progress: SimulationState, folder: Path) -> ResumePoint:
        """Restore a new simulation's progress from this checkpoint, and return where it continues."""
        server, best = read_state(folder / "server"), None
        if (folder / "best").exists():
            best = read_state(folder / "best")
        personal = _bundles(read_state(folder / "personal"))
        progress.history.restore(
            EarlierRounds(self.records, self.measured, best, self.best_round, server, personal),
        )
        for name, in_file in self.silos.items():
            progress.states.stage(int(name), read_state(folder / f"silo{name}") if in_file else {})
            progress.states.settle(int(name), True)
        cached = read_state(folder / "releases")
        for k, (kept, made) in enumerate(zip(progress.logs, self.releases, strict=True)):
            kept.releases += made
            for purpose, value in cached.get(str(k), {}).items():
                kept.cache(purpose, value)
        return ResumePoint(self.round, server, [r.medians for r in self.records], self.threads)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one simulation. every: rounds between two of them.

    All are written when a round opens: after `every` rounds, before the final evaluation, or if the last one is at
    least `SECONDS` old.
    """

    folder: Path
    every: int = EVERY

    @classmethod
    def within(cls, out: Path, every: int = EVERY) -> Checkpoints:
        """Return the checkpoints in the folder of a run's results."""
        return cls(out / "checkpoints", every)

    def of(self, name: str) -> Checkpoints:
        """Return the checkpoints in a subfolder, for one of several runs."""
        return Checkpoints(self.folder / name, self.every)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                "E-CFG-02", f"--checkpoint-every: expected at least 1 round, found {self.every}: raise it"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder; raises StateError (E-STATE-20) while another simulation has it locked."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.folder, "lock", "another simulation")
        with lock:
            yield

    def resume(self, identity: RunIdentity, progress: SimulationState) -> ResumePoint | None:
        """Restore the newest undamaged checkpoint; returns None if there are none.

        Raises ConfigError (E-CFG-08) if it belongs to another run, StateError (E-STATE-22) if all are damaged.
        """
        damaged = list[str]()
        for folder in self._folders():
            try:
                checkpoint = Checkpoint.read(folder)
            except (OSError, ValueError, RecursionError) as error:  # our own errors are ValueErrors, too
                damaged.append(f"{folder.name}: {shown(str(error))}")
                continue
            if differ := differences(asdict(checkpoint.identity), asdict(identity)):
                raise ConfigError(
                    "E-CFG-08",
                    f"expected checkpoints of this run in {self.folder}, found those of another run "
                    f"({'; '.join(differ[:8])}): use that run's settings and data, or choose another folder",
                )
            for text in damaged:
                log.warning("skipped a damaged checkpoint (%s); continuing after round %d", text, checkpoint.round)
            log.info("continuing after round %d, from %s", checkpoint.round, folder)
            return checkpoint.into(progress, folder)
        if damaged:
            raise StateError(
                "E-STATE-22",
                f"expected an undamaged checkpoint in {self.folder}, found only damaged ones ({'; '.join(damaged)}): "
                "check the disk; to start again, remove that folder",
            )
        return None

    def write(self, round: int, identity: RunIdentity, progress: SimulationState) -> None:
        """Write a checkpoint after `round` closed rounds, atomically, and remove all but the newest two.

        Raises UnavailableError (E-STATE-63) if it cannot be written; earlier checkpoints then stay.
        """
        with disk_errors(self.folder):
            self._write(self.folder / f"round-{round:06d}", round, identity, progress)

    def _write(self, target: Path, round: int, identity: RunIdentity, progress: SimulationState) -> None:
        aside = self.folder / "unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        history, silos = progress.history, _write_states(aside, progress)
        checkpoint = Checkpoint(
            round,
            progress.threads,
            identity,
            history.records,
            history.measured,
            history.best_round,
            silos,
            [kept.releases for kept in progress.logs],
            {file.name: file_digest(file) for file in sorted(aside.iterdir())},
        )
        body = json.dumps(CONVERTER.unstructure(checkpoint), sort_keys=True)
        (aside / _FACTS).write_text(json.dumps(asdict(_File(_FORMAT, digest(body.encode()), body))))
        for file in aside.iterdir():
            _sync(file)
        sync_path(aside)
        if target.exists():  # a damaged one, which this run skipped
            shutil.rmtree(target)
        aside.rename(target)
        sync_path(self.folder)
        for old in self._folders()[KEPT:]:
            shutil.rmtree(old)

    def _folders(self) -> list[Path]:
        """List the checkpoints, newest first."""
        numbered = [(int(m[1]), p) for p in self.folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(numbered, reverse=True)]


def run_with_checkpoints(
    checkpoints: Checkpoints,
    identity: RunIdentity,
    progress: SimulationState,
    run: Callable[[Observer, ResumePoint | None], State],
) -> State:
    """Run a simulation from its newest checkpoint, or from the beginning; raises as `Checkpoints`.

    run: runs the rounds from a resume point, and returns the final server state.
    """
    with checkpoints.locked():
        resume = checkpoints.resume(identity, progress)
        return run(Checkpointer(checkpoints, identity, progress, resume.round if resume else 0), resume)


@dataclass(eq=False, slots=True)
class Checkpointer(Observer):
    """Writes checkpoints between rounds, and forwards everything to the history.

    Writes when the next round opens, because all results of the round before are settled then.
    first: the round that the simulation starts with.
    """

    checkpoints: Checkpoints
    identity: RunIdentity
    progress: SimulationState
    first: int
    _written: float = field(default_factory=time.monotonic)

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        due = context.round % self.checkpoints.every == 0 or time.monotonic() - self._written >= SECONDS
        if context.round > self.first and (due or kind.ends_run):
            self.checkpoints.write(context.round, self.identity, self.progress)
            self._written = time.monotonic()
        self.progress.history.opened(context, kind, names)

    def arrived(self, name: str) -> None:
        self.progress.history.arrived(name)

    def scored(self, name: str, bundle: Bundle) -> None:
        self.progress.history.scored(name, bundle)

    def refused(self, name: str, why: str) -> None:
        self.progress.history.refused(name, why)

    def closed(self, record: RoundRecord, server: State) -> None:
        self.progress.history.closed(record, server)


def _write_states(folder: Path, progress: SimulationState) -> dict[str, bool]:
    """Write all tensors; return the silos that have a state, and whether it is not empty."""
    history, silos = progress.history, dict[str, bool]()
    assert history.newest is not None
    write_state(history.newest, folder / "server")
    if history.best is not None:
        write_state(history.best, folder / "best")
    for k in range(progress.silos):
        if (state := progress.states.get(k)) is not None:
            silos[str(k)] = bool(state)
            if state:
                write_state(state, folder / f"silo{k}")
    newest = history.personal.newest if history.personal else {}
    write_state(_tensors(newest), folder / "personal")
    write_state({str(k): kept.cached_releases for k, kept in enumerate(progress.logs)}, folder / "releases")
    return silos


def _tensors(bundles: Mapping[int, Bundle]) -> State:
    """Convert bundles to a state with one group per silo and part."""
    return {
        f"{k}/{name}": {"weight": part.weight, **{f"total/{key}": v for key, v in part.total.items()}}
        for k, bundle in bundles.items()
        for name, part in bundle.items()
    }


def _bundles(state: State) -> dict[int, Bundle]:
    parts: dict[int, dict[str, Part]] = {}
    for group, values in state.items():
        k, _, name = group.partition("/")
        total: dict[str, Tensor] = {key[len("total/") :]: v for key, v in values.items() if key != "weight"}
        parts.setdefault(int(k), {})[name] = Part(total, values["weight"])
    return dict(parts)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
