"""Start a hospital's worker (`--launcher`): as a local process, a Slurm job, or with a command such as podman.

local                    a process on this machine
slurm --partition=gpu    srun with these options; a job may queue for hours, and squeue reports why
command WORDS {worker}   any command that passes standard input and output through; run without a shell

However it starts, the worker talks over pipes (`silo.worker.exchange`), enters its sandbox and reports its location.
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
"""If one of these is set, srun starts a step of the service's own job instead of a new job."""
MODULE = "silo.worker"
launch_here: Launch = partial(launch, worker_words(MODULE))
log = logging.getLogger(__name__)


class WorkerStart(NamedTuple):
    """How to start one worker. waits: returns why it is queued, "" if unknown; None if it never queues."""

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
        """Parse `--launcher`; raises ConfigError (E-CFG-02) if it could never start a worker here."""
        try:
            kind, *words = shlex.split(text)
        except ValueError as error:
            raise _unusable(text, f"text that cannot be parsed ({error})") from None
        launcher = cls(kind, tuple(words), home)
        if kind == LOCAL and not words:
            return launcher
        if kind == SLURM:
            if wrong := [word for word in words if not word.startswith("-")]:
                raise _unusable(text, f"{wrong[0]!r}, which is not an option: write --partition=gpu")
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
        """Whether workers are processes on this machine."""
        return self.kind == LOCAL

    @property
    def queues(self) -> bool:
        """Whether a worker may queue for hours before it starts."""
        return self.kind == SLURM

    def place(self, host: str, job: str) -> str:
        """Describe where a worker runs, from the host and Slurm job that it reported."""
        if self.local:
            return "on this machine"
        return f"on {host}, job {job} of Slurm" if self.kind == SLURM else f"on {host}, started by {self.words[0]}"

    def start(self) -> WorkerStart:
        """Prepare one start, under a unique name."""
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
        """End the jobs of an earlier service; raises StateError (E-STATE-20) if one of its workers may still write."""
        if self.kind == SLURM:
            jobs = (line.split(maxsplit=1) for line in _ask("squeue", "--format=%i %j").splitlines())
            if left := [id for id, name in jobs if name.startswith(self._prefix)]:
                log.warning("ending jobs of an earlier service: %s", ", ".join(left))
                _end(*left)
        require_unused(self.home.worker_lock)

    @property
    def _prefix(self) -> str:
        """Prefix of this home's job names. It hashes the path, which is the same on all machines of a cluster."""
        return f"consilium-{sha256(bytes(self.home.path.resolve())).hexdigest()[:12]}-"

    def _filled(self, name: str) -> list[str]:
        """Fill in the template; raises ConfigError (E-CFG-02) on unknown fields, or without a worker."""
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
                    shlex.join(self.words), f"{error} in {word!r}; {{worker}} and {{arguments}} must be separate words"
                ) from None
        if not starts:
            raise _unusable(shlex.join(self.words), "neither {worker} nor {arguments}, so that no worker would start")
        return filled


def _unusable(text: str, problem: str) -> ConfigError:
    return ConfigError(
        "E-CFG-02",
        "expected --launcher local, slurm with options of srun, or command with a template of {worker} (or "
        f"{{arguments}} after your own Python), {{home}} and {{name}}, found {problem}, in {text[:200]!r}",
    )


# ---- Slurm -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    """A Slurm job. Killing srun is not enough: its job stays queued, or runs until it notices."""

    name: str
    _ends: bool = False

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill srun, and cancel its job in the background, because scancel may be slow."""
        kill_group(process)
        if not self._ends:
            self._ends = True
            threading.Thread(target=_end, args=(f"--name={self.name}",), name="scancel").start()


def _end(*jobs: str) -> None:
    """Kill running jobs at once (a worker ignores SIGTERM), and cancel queued ones."""
    for how in (["--signal=KILL"], []):
        _ask("scancel", *how, *jobs)


def _why_pending(name: str) -> str:
    state, _, facts = _ask("squeue", f"--name={name}", "--format=%T %r %V").partition(" ")
    reason, _, since = facts.strip().partition(" ")
    return f"waits in the queue of Slurm, reason {reason}, since {since}" if state == "PENDING" else ""


def _ask(program: str, *words: str) -> str:
    """Run a Slurm command for this user's jobs and return its output; logs a failure to answer and returns ""."""
    more = ["--noheader"] if program == "squeue" else []
    try:
        done = subprocess.run(  # noqa: S603 - from PATH, like srun
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
