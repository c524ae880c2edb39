"""How a hospital's worker starts (`--launcher`): on this machine, as a job of Slurm, or by a command such as podman's.

local                    a process of this machine
slurm --partition=gpu    srun with these options; its queue may take hours, and is asked why (squeue)
command WORDS {worker}   any command that passes standard input and output on; no shell reads it

Whatever starts it, the worker speaks over pipes (`silo.worker.exchange`), enters its cage and says where it is.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import string
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from fl_core.errors import ConfigError
from service_core.storage.shared_folder import require_unused
from service_core.workers.child import Kill, Launch, kill_group, launch, worker_words
from silo.storage.home import Home

LOCAL, SLURM, COMMAND = "local", "slurm", "command"
_PROGRAMS = ("srun", "squeue", "scancel")
_ANSWER_S = 10.0
_OF_A_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
"""With one of these srun would start a step of the service's own job, not a job."""
MODULE = "silo.worker"
launch_here: Launch = partial(launch, worker_words(MODULE))
log = logging.getLogger(__name__)


class WorkerStart(NamedTuple):
    """One start of a worker. waits: says why it has not begun, "" if nothing is known; None: it waits for nobody."""

    launch: Launch
    kill: Kill = kill_group
    waits: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the workers of one home. words: options of srun, or a template."""

    kind: str
    words: tuple[str, ...]
    home: Home

    @classmethod
    def of(cls, text: str, home: Home) -> Launcher:
        """Read `--launcher`; raises ConfigError (E-CFG-02) on what could never start a worker here."""
        try:
            kind, *words = shlex.split(text)
        except ValueError as error:
            raise _unusable(text, f"a text that cannot be read ({error})") from None
        launcher = cls(kind, tuple(words), home)
        if kind == LOCAL and not words:
            return launcher
        if kind == SLURM:
            if wrong := [word for word in words if not word.startswith("-")]:
                raise _unusable(text, f"{wrong[0]!r}, which is no option: write --partition=gpu")
            programs: Sequence[str] = _PROGRAMS
        elif kind == COMMAND and words:
            launcher._filled("name")
            programs = words[:1]
        else:
            raise _unusable(text, "something else")
        if missing := [program for program in programs if shutil.which(program) is None]:
            raise _unusable(text, f"no program {missing[0]!r} that can be run here")
        return launcher

    @property
    def local(self) -> bool:
        """Whether workers are processes of this machine."""
        return self.kind == LOCAL

    @property
    def queues(self) -> bool:
        """Whether hours may pass before a worker begins."""
        return self.kind == SLURM

    def place(self, host: str, job: str) -> str:
        """Say where a worker is, of one that is on `host`, in a job of Slurm if it says so."""
        if self.local:
            return "on this machine"
        return f"on {host}, job {job} of Slurm" if self.kind == SLURM else f"on {host}, started by {self.words[0]}"

    def start(self) -> WorkerStart:
        """Prepare one start, under a name of its own."""
        if self.local:
            return WorkerStart(launch_here)
        name = f"{self._prefix}{secrets.token_hex(4)}"
        if self.kind == COMMAND:
            return WorkerStart(partial(launch, self._filled(name)))
        words = ["srun", *self.words, "--nodes=1", "--ntasks=1", "--unbuffered", "--quiet", "--input=all"]
        words += ["--output=all", f"--job-name={name}", *worker_words(MODULE)]
        surroundings = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
        return WorkerStart(partial(launch, words, surroundings), _Job(name).end, partial(_why_pending, name))

    def take_over(self) -> None:
        """End what an earlier service left; raises StateError (E-STATE-20) where a worker stays, which may write."""
        if self.kind == SLURM:
            jobs = (line.split(maxsplit=1) for line in _ask("squeue", "--format=%i %j").splitlines())
            if left := [id for id, name in jobs if name.startswith(self._prefix)]:
                log.warning("ending jobs of an earlier service: %s", ", ".join(left))
                _end(*left)
        require_unused(self.home.worker_lock)

    @property
    def _prefix(self) -> str:
        """Begin the names of this home's jobs: all machines of a cluster see the home under this path."""
        return f"consilium-{sha256(bytes(self.home.path.resolve())).hexdigest()[:12]}-"

    def _filled(self, name: str) -> list[str]:
        """Fill the template; raises ConfigError (E-CFG-02) on braces that mean nothing."""
        several = {"worker": worker_words(MODULE), "arguments": worker_words(MODULE)[1:]}
        one = {"home": str(self.home.path.absolute()), "name": name}
        filled: list[str] = []
        starts = False
        for word in self.words:
            if (whole := word[1:-1]) in several and word == f"{{{whole}}}":
                filled += several[whole]
                starts = True
                continue
            try:
                fields = {field for _, field, *_ in string.Formatter().parse(word) if field is not None}
                if unknown := sorted(fields - set(one)):
                    raise ValueError(f"{{{unknown[0]}}}")
                filled.append(word.format(**one))
            except (ValueError, LookupError) as error:
                raise _unusable(
                    shlex.join(self.words), f"{error} in {word!r}; {{worker}} and {{arguments}} are words of their own"
                ) from None
        if not starts:
            raise _unusable(shlex.join(self.words), "neither {worker} nor {arguments}, so that no worker would start")
        return filled


def _unusable(text: str, problem: str) -> ConfigError:
    return ConfigError(
        "E-CFG-02",
        f"expected --launcher local, slurm with options of srun, or command with a template of {{worker}} (or "
        f"{{arguments}} behind a Python of its own), {{home}} and {{name}}, found {problem}, in {text[:200]!r}",
    )


# ---- Slurm -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    """A job: srun that is killed leaves it queued, or running until it notices."""

    name: str
    _ends: bool = False

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End srun, and its job, without waiting for Slurm, which may take its time."""
        kill_group(process)
        if not self._ends:
            self._ends = True
            threading.Thread(target=_end, args=(f"--name={self.name}",), name="scancel").start()


def _end(*jobs: str) -> None:
    """End jobs at once (a worker ignores SIGTERM), and forget what is queued."""
    for how in (["--signal=KILL"], []):
        _ask("scancel", *how, *jobs)


def _why_pending(name: str) -> str:
    state, _, facts = _ask("squeue", f"--name={name}", "--format=%T %r %V").partition(" ")
    reason, _, since = facts.strip().partition(" ")
    return f"waits in the queue of Slurm, reason {reason}, since {since}" if state == "PENDING" else ""


def _ask(program: str, *words: str) -> str:
    """Return what a program of Slurm answers about this user's jobs; "", and a line in the log, if it does not."""
    more = ["--noheader"] if program == "squeue" else []
    try:
        done = subprocess.run(  # noqa: S603 - of PATH, where srun is found too
            [program, *more, f"--user={os.getuid()}", *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s did not answer: %s", program, error)
        return ""
    if done.returncode:
        log.info("%s: %s", program, done.stderr.strip())
    return done.stdout
