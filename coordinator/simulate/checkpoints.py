"""Checkpoints of a simulation, from which the same command goes on after the process was killed.

A checkpoint is a folder `round-000010`, after ten closed rounds: the server's state, the best one so far, every silo's
state, what is known of all rounds, and in `checkpoint.json` the digests of these files and what the run is. It gets its
name when all of it is on the disk. The newest two are kept.
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
from typing import Any

from torch import Tensor

from fl_core.converter import parse_json, shown, structure
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.engine import Observer
from fl_core.simulation.in_process import ResumePoint, StateStore
from fl_core.simulation.measures import BestHistory, EarlierRounds
from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Part, RoundContext, State
from privacy.accounting.release_plan import Release
from privacy.release_log import InMemoryReleaseLog
from protos.wire.codec import read_state, write_state
from service_core.storage.digests import digest, file_digest
from service_core.storage.disk import disk_errors
from service_core.storage.private_files import FolderLock, sync_folder

log = logging.getLogger(__name__)
EVERY = 10
"""Rounds between two checkpoints."""
SECONDS = 60.0
"""Between two checkpoints, where so many rounds take longer: a checkpoint costs a second at most."""
KEPT = 2
_FORMAT, _FACTS = 1, "checkpoint.json"
_LARGEST = 1 << 30
_NAME = re.compile(r"round-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is, beyond its words: what its bits depend on.

    data: fingerprints of the silos' data   computed: engine, device and kernels.
    """

    manifest: Mapping[str, object]
    data: Sequence[str]
    computed: Mapping[str, object]

    def differences(self, found: object) -> list[str]:
        """Name what differs in a checkpoint's identity, with both values."""
        here, there = _flat(asdict(self)), _flat(found)
        return [
            f"{key}: {shown(there.get(key))} there, {shown(here.get(key))} here"
            for key in sorted({*here, *there})
            if here.get(key) != there.get(key)
        ]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a simulation has come to: its history, its silos' states and, in a private run, what was released.

    threads: CPU threads of a silo's round, which decide the last bit.
    """

    history: BestHistory
    states: StateStore
    logs: Sequence[InMemoryReleaseLog]
    silos: int
    threads: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read whole. round: the next one, 0-based   silos: whether a silo's state is in a file."""

    folder: Path
    round: int
    threads: int
    records: Sequence[RoundRecord]
    measured: Sequence[RoundRecord]
    best_round: int
    silos: Mapping[str, bool]
    releases: Sequence[Sequence[Release]]

    def into(self, progress: Progress) -> ResumePoint:
        """Put what was kept into a simulation that begins, and return where it goes on."""
        server, best = read_state(self.folder / "server"), None
        if (self.folder / "best").exists():
            best = read_state(self.folder / "best")
        personal = _bundles(read_state(self.folder / "personal"))
        progress.history.restore(
            EarlierRounds(self.records, self.measured, best, self.best_round, server, personal),
        )
        for name, in_file in self.silos.items():
            progress.states.stage(int(name), read_state(self.folder / f"silo{name}") if in_file else {})
            progress.states.settle(int(name), True)
        cached = read_state(self.folder / "releases")
        for k, (kept, made) in enumerate(zip(progress.logs, self.releases, strict=True)):
            kept.releases += made
            for purpose, value in cached.get(str(k), {}).items():
                kept.cache(purpose, value)
        return ResumePoint(self.round, server, [r.medians for r in self.records], self.threads)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one simulation. every: rounds between two of them, at least one a minute beside that."""

    folder: Path
    every: int = EVERY

    @classmethod
    def within(cls, out: Path, every: int = EVERY) -> Checkpoints:
        """Take those in the folder of a run's results."""
        return cls(out / "checkpoints", every)

    def of(self, name: str) -> Checkpoints:
        """Take a folder inside, for one of several runs."""
        return Checkpoints(self.folder / name, self.every)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError("E-CFG-02", f"--checkpoint-every: expected at least 1 round, found {self.every}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; raises StateError (E-STATE-20) while another simulation does."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.folder, "lock", "another simulation")
        with lock:
            yield

    def newest(self, identity: Identity) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None where none was written.

        Raises ConfigError (E-CFG-08) on one of another run, StateError (E-STATE-22) where all are damaged.
        """
        folders, damaged = self._folders(), list[str]()
        for folder in folders:
            try:
                found, of = _read(folder)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:  # also what our errors are
                damaged.append(f"{folder.name}: {shown(str(error))}")
                continue
            if differ := identity.differences(of):
                raise ConfigError(
                    "E-CFG-08",
                    f"expected checkpoints of this run in {self.folder}, found those of another one "
                    f"({'; '.join(differ[:8])}): give the words and data of that run, or name another folder",
                )
            for text in damaged:
                log.warning("a damaged checkpoint is passed over (%s); going on after round %d", text, found.round)
            return found
        if damaged:
            raise StateError(
                "E-STATE-22",
                f"expected a whole checkpoint in {self.folder}, found damaged ones alone ({'; '.join(damaged)}): check "
                "the disk; to begin anew, remove that folder",
            )
        return None

    def write(self, round: int, identity: Identity, progress: Progress) -> None:
        """Write a checkpoint after `round` closed rounds, at once, and remove all but the newest two.

        Raises UnavailableError (E-STATE-63) where the disk takes nothing; earlier checkpoints then stay.
        """
        with disk_errors(self.folder):
            self._write(self.folder / f"round-{round:06d}", round, identity, progress)

    def _write(self, target: Path, round: int, identity: Identity, progress: Progress) -> None:
        aside = self.folder / "unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        silos = _write_states(aside, progress)
        history = progress.history
        body = {
            "round": round,
            "threads": progress.threads,
            "identity": asdict(identity),
            "records": [_plain(r) for r in history.records],
            "measured": [_plain(r) for r in history.measured],
            "best_round": history.best_round,
            "silos": silos,
            "releases": [[asdict(r) for r in kept.releases] for kept in progress.logs],
            "files": {file.name: file_digest(file) for file in sorted(aside.iterdir())},
        }
        text = json.dumps(body, sort_keys=True)
        facts = {"format": _FORMAT, "digest": digest(text.encode()), "body": text}
        (aside / _FACTS).write_text(json.dumps(facts))
        for file in aside.iterdir():
            _sync(file)
        sync_folder(aside)
        if target.exists():  # one that was damaged: this run passed over it
            shutil.rmtree(target)
        aside.rename(target)
        sync_folder(self.folder)
        for old in self._folders()[KEPT:]:
            shutil.rmtree(old)

    def _folders(self) -> list[Path]:
        """List the checkpoints, the newest first."""
        found = [(int(m[1]), p) for p in self.folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]


def run_with_checkpoints(
    checkpoints: Checkpoints,
    identity: Identity,
    progress: Progress,
    run: Callable[[Observer, ResumePoint | None], State],
) -> State:
    """Run a simulation from its newest checkpoint on, or from the beginning; raises as `Checkpoints`.

    run: does the rounds from a point on, and returns the final server state.
    """
    with checkpoints.locked():
        found = checkpoints.newest(identity)
        resume = None
        if found is not None:
            resume = found.into(progress)
            log.info("going on after round %d, from %s", found.round, found.folder)
        first = 0 if resume is None else resume.round
        return run(Checkpointer(checkpoints, identity, progress, first), resume)


@dataclass(eq=False, slots=True)
class Checkpointer(Observer):
    """Writes checkpoints between rounds, and passes everything on to the history.

    A round's results are all settled when the next one opens, so that is when they are written.
    first: the round that the simulation begins with.
    """

    checkpoints: Checkpoints
    identity: Identity
    progress: Progress
    first: int
    _written: float = field(default_factory=time.monotonic)

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        due = context.round % self.checkpoints.every == 0 or time.monotonic() - self._written >= SECONDS
        if context.round > self.first and (due or kind is TaskKind.EVALUATE):
            self.checkpoints.write(context.round, self.identity, self.progress)
            self._written = time.monotonic()
        self.progress.history.opened(context, kind, names)

    def arrived(self, name: str) -> None:
        self.progress.history.arrived(name)

    def scored(self, name: str, own: Bundle) -> None:
        self.progress.history.scored(name, own)

    def refused(self, name: str, why: str) -> None:
        self.progress.history.refused(name, why)

    def closed(self, record: RoundRecord, server: State) -> None:
        self.progress.history.closed(record, server)


def _write_states(folder: Path, progress: Progress) -> dict[int, bool]:
    """Write all tensors; return the silos that have a state, and whether there is anything in it."""
    history, silos = progress.history, dict[int, bool]()
    assert history.newest is not None
    write_state(history.newest, folder / "server")
    if history.best is not None:
        write_state(history.best, folder / "best")
    for k in range(progress.silos):
        if (state := progress.states.get(k)) is not None:
            silos[k] = bool(state)
            if state:
                write_state(state, folder / f"silo{k}")
    newest = history.personal.newest if history.personal else {}
    write_state(_tensors(newest), folder / "personal")
    write_state({str(k): kept.cached_releases for k, kept in enumerate(progress.logs)}, folder / "releases")
    return silos


def _read(folder: Path) -> tuple[Checkpoint, object]:
    """Read a checkpoint and hold every file against its digest; return it, and the identity of its run."""
    with (folder / _FACTS).open("rb") as file:
        raw = file.read(_LARGEST + 1)
    facts = _mapping(parse_json(raw.decode()))
    if facts["format"] != _FORMAT:
        raise ValueError(f"format {shown(facts['format'])}, expected {_FORMAT}")
    text = str(facts["body"])
    if digest(text.encode()) != facts["digest"]:
        raise ValueError(f"{_FACTS} is not what was written")
    body = _mapping(json.loads(text))
    for name, wanted in body["files"].items():
        if file_digest(folder / name) != wanted:
            raise ValueError(f"{name} is not what was written")
    found = Checkpoint(
        folder,
        body["round"],
        body["threads"],
        [_record(r) for r in body["records"]],
        [_record(r) for r in body["measured"]],
        body["best_round"],
        body["silos"],
        [[structure(Release, r, "release") for r in made] for made in body["releases"]],
    )
    return found, body["identity"]


def _mapping(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"names with values expected, found {shown(raw)}")
    return raw


def _plain(record: RoundRecord) -> dict[str, object]:
    return asdict(record) | {"kind": record.kind.value}


def _record(raw: Mapping[str, Any]) -> RoundRecord:
    """Read a record; numbers come back as they were, infinite ones too."""
    lists = {name: tuple(v) for name, v in raw.items() if isinstance(v, list)}
    clinical = raw.get("clinical")
    measured = {"clinical": clinical and ClinicalMetrics.of(clinical)}
    return RoundRecord(**{**raw, **lists, **measured, "kind": TaskKind(raw["kind"])})


def _tensors(bundles: Mapping[int, Bundle]) -> State:
    """Write bundles as a state: a group per silo and part."""
    return {
        f"{k}/{name}": {"weight": part.weight, **{f"total/{key}": v for key, v in part.total.items()}}
        for k, bundle in bundles.items()
        for name, part in bundle.items()
    }


def _bundles(state: State) -> dict[int, Bundle]:
    found: dict[int, dict[str, Part]] = {}
    for group, values in state.items():
        k, _, name = group.partition("/")
        total: dict[str, Tensor] = {key[len("total/") :]: v for key, v in values.items() if key != "weight"}
        found.setdefault(int(k), {})[name] = Part(total, values["weight"])
    return dict(found)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _flat(raw: object, prefix: str = "") -> dict[str, object]:
    if isinstance(raw, Mapping) and raw:
        return {k: v for name, value in raw.items() for k, v in _flat(value, f"{prefix}{name}.").items()}
    if isinstance(raw, list | tuple) and raw:
        return {k: v for i, value in enumerate(raw) for k, v in _flat(value, f"{prefix}{i}.").items()}
    return {prefix.removesuffix("."): list(raw) if isinstance(raw, tuple) else raw}
