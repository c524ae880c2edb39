"""Kills one side of a small private run before or in the middle of a write, starts it again, and looks at the end.

A library that is loaded before libc counts what a process writes below its home: bytes, new lengths, new files, new and
removed names. At the write of its turn it kills the process, lets half of the bytes through first, or lets the disk be
full for that write and the next two. The processes are forked from one that has imported everything. Coordinator and
hospitals are real, over mutual TLS, and so are their workers. Victims are in turn the coordinator, the worker of its
run, one of the hospitals, and its worker; the other hospitals must notice nothing.

python -m tests.faults --writes [--masked] [--every N] [--minutes M]   each N-th write; of databases and the run's
                                                                       worker, each N/8-th
python -m tests.faults --writes --commands [--every N]   `tests.interrupted` alone, which is part of both
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import ctypes  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sqlite3  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch  # noqa: E402

from consilium.research.simulate import runner  # noqa: E402
from coordinator.api.server import CoordinatorServer  # noqa: E402
from coordinator.config.hydra_config import compose_spec  # noqa: E402
from coordinator.pki.authority import Authority  # noqa: E402
from coordinator.runs.workers import ProcessWorker  # noqa: E402
from coordinator.storage.records import RunState, StoredRun  # noqa: E402
from coordinator.storage.store import OBJECTS, CoordinatorStore  # noqa: E402
from fl_core import datasets  # noqa: E402
from fl_core.aggregation.fixed_point import FixedPointFormat  # noqa: E402
from fl_core.errors import FederationError, UnavailableError  # noqa: E402
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members  # noqa: E402
from fl_core.types.secagg import Secagg  # noqa: E402
from privacy.ledger.ledger import Ledger  # noqa: E402
from privacy.ledger.registration import register  # noqa: E402
from service_core.storage.generation import open_read_only  # noqa: E402
from silo.storage.home import Home  # noqa: E402
from silo.storage.store import SiloStore  # noqa: E402
from tests import interrupted  # noqa: E402
from tests.support import forked_workers  # noqa: E402
from tests.support.coordinator import FAST, World, enrolled, when_due  # noqa: E402
from tests.support.fake_coordinator import manifest  # noqa: E402
from tests.support.federation import COLLECTION, Hospital  # noqa: E402
from tests.support.processes import ROOT, free_port  # noqa: E402

COORDINATOR = "coordinator"
DATA = {"north": "digits/p3c4/0", "east": "digits/p3c4/1", "west": "digits/p3c4/2"}
RUN_WORKER = f"{COORDINATOR} worker"
VICTIMS = (COORDINATOR, RUN_WORKER, "north", "north worker")
"""A worker is the process that computes for a side, and writes in the same home."""
_SETTINGS = replace(FAST, start_worker=ProcessWorker)
_WORKERS = 4
KILL, TEAR, FILL = "killed before it", "torn", "disk full"
QUIET, AT_MOST, LOST = 120.0, 1200.0, 3
"""Seconds without a line in any log, and in all, after which a trial hangs; how often a process may end by itself on a
full disk."""
_DATABASES = ("coordinator.sqlite", "silo.db", "ledger.db")
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { GO, HALF, REFUSE };
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char home[PATH_MAX];
static long count, at;
static char how;
static int databases, note = -1;

static ssize_t (*real_write)(int, const void *, size_t);
static void *find(const char *name) { return dlsym(RTLD_NEXT, name); }

/* how: k kill, t tear, f fill   databases: count writes to the files of databases alone */
void watch_writes(const char *folder, long number, char kind, int only_databases, int log) {
    real_write = find("write");
    snprintf(home, sizeof home, "%s/", folder);
    at = number; how = kind; databases = only_databases; note = log;
}

static int ends(const char *text, const char *end) {
    size_t a = strlen(text), b = strlen(end);
    return a >= b && !strcmp(text + a - b, end);
}

static int mine(const char *path) {
    return *home && !strncmp(path, home, strlen(home)) && !ends(path, "-shm");
}

static int named(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return mine(path);
}

static int step(const char *what, const char *path, size_t size) {
    if (databases && !ends(path, ".db") && !ends(path, ".sqlite")) return GO;
    if (how == 't' && size <= 512) return GO; /* a sector is written whole */
    char line[PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%ld\t%s\t%zu\t%s\n", ++count, what, size, path + strlen(home));
    if (note >= 0 && real_write(note, line, n) < 0) return GO;
    if (how == 'f') return at && count >= at && count < at + 3 ? REFUSE : GO;
    if (count != at) return GO;
    if (how == 't') return HALF;
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define GUARDED(TYPE, CONDITION, WHAT, PATH, SIZE, CALL, PART)                    \
    if (!*home || !(CONDITION)) return CALL;                                      \
    pthread_mutex_lock(&turn);                                                    \
    TYPE result = -1;                                                             \
    switch (step(WHAT, PATH, SIZE)) {                                             \
    case REFUSE: pthread_mutex_unlock(&turn); errno = ENOSPC; return -1;          \
    case HALF: PART; kill(getpid(), SIGKILL); for (;;) pause();                   \
    default: result = CALL;                                                       \
    }                                                                             \
    pthread_mutex_unlock(&turn);                                                  \
    return result;

ssize_t write(int file, const void *data, size_t size) {
    ssize_t (*real)(int, const void *, size_t) = find("write");
    char path[PATH_MAX];
    GUARDED(ssize_t, named(file, path), "write", path, size, real(file, data, size),
            (void)!real(file, data, size / 2 & ~(size_t)511))
}

static ssize_t placed(const char *name, int file, const void *data, size_t size, off64_t where) {
    ssize_t (*real)(int, const void *, size_t, off64_t) = find(name);
    char path[PATH_MAX];
    GUARDED(ssize_t, named(file, path), "write", path, size, real(file, data, size, where),
            (void)!real(file, data, size / 2 & ~(size_t)511, where))
}
ssize_t pwrite(int file, const void *data, size_t size, off_t where) {
    return placed("pwrite", file, data, size, where);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t where) {
    return placed("pwrite64", file, data, size, where);
}

static int cut(const char *name, int file, off64_t length) {
    int (*real)(int, off64_t) = find(name);
    char path[PATH_MAX];
    GUARDED(int, named(file, path), "length", path, 0, real(file, length), (void)0)
}
int ftruncate(int file, off_t length) { return cut("ftruncate", file, length); }
int ftruncate64(int file, off64_t length) { return cut("ftruncate64", file, length); }

static int changes(const char *path, int flags) {
    if (!mine(path)) return 0;
    int there = !access(path, F_OK);
    return ((flags & O_CREAT) && !there) || ((flags & O_TRUNC) && there);
}
static int opened(const char *name, const char *path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = find(name);
    GUARDED(int, changes(path, flags), "open", path, 0, real(path, flags, mode), (void)0)
}
#define MODE va_list more; va_start(more, flags); mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; va_end(more)
int open(const char *path, int flags, ...) { MODE; return opened("open", path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; return opened("open64", path, flags, mode); }

#define ON_NAME(NAME)                                                             \
    int NAME(const char *path) {                                                  \
        int (*real)(const char *) = find(#NAME);                                  \
        GUARDED(int, mine(path), #NAME, path, 0, real(path), (void)0)             \
    }
#define ON_NAMES(NAME)                                                            \
    int NAME(const char *from, const char *path) {                                \
        int (*real)(const char *, const char *) = find(#NAME);                    \
        GUARDED(int, mine(path), #NAME, path, 0, real(from, path), (void)0)       \
    }
ON_NAME(unlink)
ON_NAME(rmdir)
ON_NAMES(rename)
ON_NAMES(link)
int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = find("mkdir");
    GUARDED(int, mine(path) && access(path, F_OK), "mkdir", path, 0, real(path, mode), (void)0)
}
"""


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def run(words: Sequence[str]) -> int:
    """Build the library and start the enumeration under it."""
    if (cc := compiler()) is None:
        print("expected a C compiler (cc or gcc) on the PATH, found none: install one")
        return 2
    with tempfile.TemporaryDirectory(prefix="consilium-writes-") as folder:
        library = Path(folder) / "watch.so"
        command = [cc, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-", "-ldl", "-lpthread"]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        env = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        mine = [sys.executable, "-m", "tests.writes", folder, *words]
        return subprocess.run(mine, env=env, cwd=ROOT, check=False).returncode


@dataclass(frozen=True)
class Plan:
    """What is run: two hospitals' private run, or the same of three under masks."""

    masked: bool

    @property
    def data(self) -> dict[str, str]:
        return DATA if self.masked else dict(list(DATA.items())[:2])

    def agreed(self) -> RunManifest:
        """Freeze a private run of one round, with repeatable noise."""
        names = tuple(self.data)
        return manifest(
            members=make_members(names, 3, 1.0, [1000] * len(names)),
            rounds=1,
            grid=FixedPointFormat("ring64", len(names)),
            privacy=NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0, "reserve_rounds": 2}),
            **({"secagg": Secagg(1), "aggregator": NamedOptions("mean")} if self.masked else {}),
        )


class Turn(NamedTuple):
    """Which write of whom is disturbed, and how. databases: counted are the files of databases alone."""

    victim: str
    how: str
    at: int
    databases: bool


@dataclass
class Trial:
    """One run with one disturbed write. hit: the write, as the library noted it   wrong: what did not hold."""

    plan: Plan
    folder: Path
    turn: Turn
    port: int = field(default_factory=free_port)
    hit: str = ""
    digest: str = ""
    refused: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)
    _running: dict[str, int] = field(default_factory=dict)
    _ended: Counter[str] = field(default_factory=Counter)
    _repeats: Counter[str] = field(default_factory=Counter)

    def go(self) -> None:
        """Let the run come to its end, and look at what is left."""
        try:
            for name in (COORDINATOR, *self.plan.data):
                self._start(name, disturbed=name == self.turn.victim)
            self._until(lambda: all(self._mark(name).exists() for name in (COORDINATOR, *self.plan.data)))
            self._stop()
        finally:
            for process in self._running.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        if self._mark(COORDINATOR).exists():
            state, self.digest, reason = self._mark(COORDINATOR).read_text().split("\n", 2)
            if state != "finished":
                self.wrong.append(f"the run is {state}: {reason}")
        self._look()

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self, name: str, disturbed: bool = False) -> None:
        child = os.fork()
        if child:
            self._running[name] = child
            return
        code = 1
        try:
            log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR1)
            told = list[int]()  # an event's lock may be held by the very thread that a signal interrupts
            signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
            self._fork_workers(name)
            if disturbed:
                self._watch()
            (self._coordinate if name == COORDINATOR else self._train)(name, told)
            code = 0
        except BaseException:  # the child must not return into the parent's work
            traceback.print_exc()
        finally:
            os._exit(code)

    def _fork_workers(self, name: str) -> None:
        """Have workers ready for a service, of which the first is the victim where it is its worker's turn."""
        disturbed = self.turn.victim == f"{name} worker" and not (self.folder / f"{name}.began").exists()
        (self.folder / f"{name}.began").touch()
        side = forked_workers.COORDINATOR if name == COORDINATOR else forked_workers.SILO
        forked_workers.fork_workers(side, _WORKERS, self._watch if disturbed else lambda: None)

    def _is_victim(self, name: str) -> bool:
        return self.turn.victim.partition(" ")[0] == name

    def _watch(self) -> None:
        turn = self.turn
        log = os.open(self.folder / "writes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        home = self.folder / turn.victim.partition(" ")[0]
        place, how = str(home).encode(), {KILL: b"k", TEAR: b"t", FILL: b"f"}[turn.how]
        watch = ctypes.CDLL(None).watch_writes
        watch.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_char, ctypes.c_int, ctypes.c_int]
        watch(place, turn.at, how, int(turn.databases), log)

    def _coordinate(self, name: str, told: list[int]) -> None:
        server = CoordinatorServer(
            self.folder / name, f"127.0.0.1:{self.port}", lambda *_: self.plan.agreed(), _SETTINGS
        )
        server.start()
        run, resumed = None, 0
        while not told:
            time.sleep(0.02)
            try:
                run = run or server.runs.submit(self.plan.agreed(), "{}", "request")
                found = server.store.runs.get(run.id)
            except UnavailableError:  # a full disk: a lead asks again
                continue
            if self._is_resumed(found, resumed):
                server.runs.resume(run.id)
                resumed += 1
            elif found.state.ended:
                self._note(name, f"{found.state.value}\n{found.model_digest}\n{found.reason}")
        server.stop(0.5)

    def _is_resumed(self, run: StoredRun, before: int) -> bool:
        """Tell whether a lead resumes a run: who is told of the full disk, or that its worker was killed."""
        paused = run.state is RunState.PAUSED
        if self.turn.how == FILL:
            return paused or (run.state is RunState.FAILED and run.reason.startswith("E-STATE-63"))
        return paused and run.reason.startswith("E-RUN-56") and self.turn.victim == RUN_WORKER and not before

    def _train(self, name: str, told: list[int]) -> None:
        home = Home(self.folder / name)
        site = Hospital(World(self.folder / COORDINATOR, port=self.port), home, self.plan.data[name], run_round=None)
        with home.locked():
            site.start()
            assert site.service is not None
            while not told and not site.service.wait(0.02):
                known = site.service.store.history()
                if known and known[0].state == "finished" and not site.service.store.outbox():
                    self._note(name, "done")
            if site.service.error is not None:
                raise site.service.error
            site.stop()

    def _mark(self, name: str) -> Path:
        return self.folder / f"{name}.end"

    def _note(self, name: str, text: str) -> None:
        aside = self.folder / f"{name}.aside"
        aside.write_text(text)
        aside.replace(self._mark(name))

    def _patience(self) -> Callable[[], bool]:
        """Return what tells whether no process has logged anything for too long."""
        begun = since = time.monotonic()
        written = -1

        def is_over() -> bool:
            nonlocal since, written
            now = time.monotonic()
            size = sum(file.stat().st_size for file in self.folder.glob("*.log"))
            if size != written:
                since, written = now, size
            return now - since > QUIET or now - begun > AT_MOST

        return is_over

    def _until(self, condition: Callable[[], bool]) -> None:
        patience = self._patience()
        while not condition():
            for name in list(self._running):
                if (status := self._status(name)) is not None:
                    self._again(name, status)
            if patience() or self.wrong:
                for process in self._running.values():
                    os.kill(process, signal.SIGUSR1)  # say where
                time.sleep(1)
                logs = {name: self._log(name)[-6000:] for name in (COORDINATOR, *self.plan.data)}
                self.wrong += ["the run has not ended", *(f"{name}: {log}" for name, log in logs.items())]
                return
            time.sleep(0.005)

    def _status(self, name: str) -> int | None:
        process, status = os.waitpid(self._running[name], os.WNOHANG)
        if not process:
            return None
        del self._running[name]
        return os.waitstatus_to_exitcode(status)

    def _again(self, name: str, status: int) -> None:
        """Start again what ended, as a service manager would."""
        self._ended[name] += 1
        if status == -signal.SIGKILL and name == self.turn.victim and self._ended[name] == 1:
            self._repeats = self._interrupted()
        elif self.turn.victim == f"{name} worker" != RUN_WORKER and self._ended[name] == 1:
            pass  # its first worker was killed before the service began
        elif self.turn.how != FILL or not self._is_victim(name) or self._ended[name] > LOST:
            self.refused += 1
            self.wrong.append(f"{name} ended with status {status}: {self._log(name)[-1500:]}")
            return
        self._start(name)

    def _stop(self) -> None:
        for process in self._running.values():
            os.kill(process, signal.SIGTERM)
        patience = self._patience()
        while self._running and not patience():
            for name in list(self._running):
                status, hit = self._status(name), self._is_victim(name)
                if status not in (None, 0, -signal.SIGKILL if hit else 0) and not (hit and self.turn.how == FILL):
                    self.wrong.append(f"{name} stopped with status {status}: {self._log(name)[-1500:]}")
            time.sleep(0.005)
        for name, process in self._running.items():
            os.kill(process, signal.SIGUSR1)  # say where
            time.sleep(1)
            self.wrong.append(f"{name} did not stop: {self._log(name)[-6000:]}")

    def _log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- what is left -----------------------------------------------------------------------------------------------

    def _interrupted(self) -> Counter[str]:
        """Name the charges that the kill made worthless: their round has no update on the disk."""
        if self.turn.victim == COORDINATOR:
            return Counter()
        with tempfile.TemporaryDirectory(dir=self.folder) as copy:
            home = Path(copy) / "home"
            shutil.copytree(self.folder / self.turn.victim, home)
            charges, staged = self._charges(home), set[str]()
            if charges:
                with closing(open_read_only(home / "silo.db")) as db:
                    rows = db.execute("SELECT round, kind FROM tasks WHERE staged IS NOT NULL OR closed IS NOT NULL")
                    staged = {f"{round}/{kind}" for round, kind in rows}
        return Counter({key: n for key, n in charges.items() if key.partition("@")[0] not in staged})

    @staticmethod
    def _charges(home: Path) -> Counter[str]:
        """Count the charges of each round and collection."""
        ledger = Ledger(home / "ledger.db")
        ledger.verify()
        found: Counter[str] = Counter()
        for collection in ledger.collections():
            for entry, state, _ in ledger.entries(collection):
                if state not in ("REFUSED", "RELEASED_UNUSED"):
                    _, round, kind, _ = entry.split("/", 3)
                    found[f"{round}/{kind.partition(',')[0]}@{collection}"] += 1
        return found

    def _look(self) -> None:
        """Open every home once more, and count the charges."""
        lines = (self.folder / "writes").read_text().splitlines() if (self.folder / "writes").exists() else []
        if self.turn.at and len(lines) >= self.turn.at:
            self.hit = lines[self.turn.at - 1]
        try:
            CoordinatorStore(self.folder / COORDINATOR).close()
            for name in self.plan.data:
                SiloStore(self.folder / name / "silo.db").close_database()
                self._count(name)
        except (FederationError, sqlite3.Error) as error:
            self.refused += 1
            self.wrong.append(f"a home was refused: {error}")
        if self.turn.victim != COORDINATOR:  # whose worker may outlive it by the moment in which the next one sweeps
            left = [file.name for file in (self.folder / COORDINATOR / OBJECTS).glob(".*")]
            self.wrong += [f"half a file is left: {name}" for name in left]

    def _count(self, name: str) -> None:
        made = self._charges(self.folder / name)
        for key in {
            *made,
            f"0/train@{COLLECTION}/train",
            f"0/train@{COLLECTION}/test",
            f"1/evaluate@{COLLECTION}/test",
        }:
            excused = self._repeats[key] if name == self.turn.victim else 0
            if self._is_victim(name) and (self.turn.how == FILL or name != self.turn.victim):
                excused = 1
            if not 1 <= made[key] <= 1 + excused:
                self.twice += made[key] > 1
                self.wrong.append(f"{name} has {made[key]} charges of {key}, and {excused} were interrupted")


def founded(plan: Plan, folder: Path) -> Path:
    """Make the homes that every trial begins with: enrolled, with registered records and a budget.

    Every certificate is due, so that each side renews its own when it starts.
    """
    world = World.create(folder / COORDINATOR, ())
    Authority.open(folder / COORDINATOR, when_due).issue_server()
    for name, data in plan.data.items():
        home = enrolled(world, name, folder / name, clock=when_due)
        home.policy.write_text('[privacy]\nrng = "test"\n')
        home.policy.chmod(0o600)
        ledger = Ledger(home.ledger)
        register(ledger, datasets.load(data), COLLECTION)
        for split in ("train", "test"):
            ledger.set_budget(f"{COLLECTION}/{split}", 100.0, 1e-5, "dpo", "test")
    return folder


def disturbed(plan: Plan, template: Path, folder: Path, turn: Turn) -> Trial:
    """Do one trial in a copy of the homes."""
    shutil.copytree(template, folder)
    trial = Trial(plan, folder, turn)
    trial.go()
    return trial


def turns(seen: dict[tuple[str, bool, str], int], every: int) -> Iterator[Turn]:
    """List what is tried, so that whatever time there is covers all kinds."""
    plans = []
    for (victim, databases, how), number in seen.items():
        stride = max(1, every // 8) if databases or victim == RUN_WORKER else every
        plans.append([Turn(victim, how, at, databases) for at in range(1, number + 1, stride)])
    longest = max(map(len, plans), default=0)
    spread = [(k * longest / len(plan), turn) for plan in plans for k, turn in enumerate(plan)]
    return (turn for _, turn in sorted(spread))


def main(words: Sequence[str]) -> int:
    """Enumerate, print the coverage, and return 0 when everything held."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults --writes")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="try each so manieth write")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, wherever that is")
    parser.add_argument("--masked", action="store_true", help="a run of three hospitals under masks")
    parser.add_argument("--commands", action="store_true", help="disturb init, join, backup and restore alone")
    asked = parser.parse_args(words)
    plan = Plan(asked.masked)
    torch.set_num_threads(1)
    simulated = ("data=digits", "federation=p3c4", "method=fedavg", "rounds=1", "train.epochs=1")
    runner.run(compose_spec((*simulated, "privacy=dp_record", "privacy.rng=test", "privacy.epsilon=8")))  # imports all
    template = founded(plan, asked.folder / "template")
    gc.freeze()
    homes = disturbed(plan, template, asked.folder / "homes", Turn(COORDINATOR, KILL, 0, databases=False))
    assert not homes.wrong, homes.wrong
    halves = interrupted.enumerate_commands(homes.folder, asked.folder, max(1, asked.every // 8))
    if asked.commands:
        return int(bool(halves))
    seen, digest, files = {}, "", Counter[str]()
    for victim in VICTIMS:
        for databases, how in ((False, KILL), (False, TEAR), (victim != RUN_WORKER, FILL), (True, KILL), (True, TEAR)):
            if victim == RUN_WORKER and databases:
                continue  # it writes none
            trial = disturbed(plan, template, asked.folder / "counted", Turn(victim, how, 0, databases))
            lines = (trial.folder / "writes").read_text().splitlines()
            seen[victim, databases, how] = len(lines)
            if how == KILL and not databases:
                files.update(_kind(victim, line) for line in lines)
            assert not trial.wrong, trial.wrong
            assert digest in ("", trial.digest), "two undisturbed runs differ"
            digest = trial.digest
            shutil.rmtree(trial.folder)
    print(f"an undisturbed run writes {sum(n for (_, d, how), n in seen.items() if how == KILL and not d)} times")
    tried = turns(seen, asked.every)
    return _enumerated(plan, asked.folder, template, tried, digest, files, 60 * asked.minutes) or int(bool(halves))


def _kind(victim: str, line: str) -> str:
    """Name the kind of file that a noted write is to."""
    path = line.rsplit("\t", 1)[1]
    name, first = Path(path).name, path.partition("/")[0]
    for database in _DATABASES:
        if name.startswith(database):
            return f"{victim}: {name if '.processes' not in name else database}"
    return f"{victim}: {first if '/' in path else 'other files'}"


def _enumerated(
    plan: Plan, folder: Path, template: Path, tried: Iterator[Turn], digest: str, files: Counter[str], seconds: float
) -> int:
    began, number, unreached, differ, refused, twice = time.monotonic(), 0, 0, 0, 0, 0
    hits: Counter[tuple[str, str]] = Counter()
    failed = []
    for turn in tried:
        if time.monotonic() - began > seconds:
            break
        trial = disturbed(plan, template, folder / f"{number}", turn)
        number += 1
        unreached += not trial.hit
        if trial.hit:
            hits[_kind(turn.victim, trial.hit), turn.how] += 1
        if trial.digest != digest:
            differ += 1
            trial.wrong.append(f"the digest is {trial.digest or 'none'}, and not {digest}")
        refused, twice = refused + trial.refused, twice + trial.twice
        if trial.wrong:
            failed.append(trial)
            print(f"{turn} at [{trial.hit}]:", *trial.wrong, sep="\n    ", flush=True)
        else:
            shutil.rmtree(trial.folder)
    print(f"\n| file | writes | {KILL} | {TEAR} | {FILL} |\n|---|---|---|---|---|")
    for kind in sorted({*files, *(k for k, _ in hits)}):
        print(f"| {kind} | {files[kind]} | {hits[kind, KILL]} | {hits[kind, TEAR]} | {hits[kind, FILL]} |")
    print(
        f"\n{number} runs in {(time.monotonic() - began) / 60:.1f} minutes, {sum(hits.values())} writes disturbed, "
        f"{unreached} not reached: homes refused {refused}, double charges {twice}, other digests {differ}, "
        f"runs with anything wrong {len(failed)}"
    )
    return int(bool(failed) or not hits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
