"""Slurm under a test: programs that behave as its own do, with jobs in a folder, or the real one on this machine.

The file is also each of these programs: srun, squeue, scancel, and the daemon that a node starts for a job.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER = "FAKE_SLURM"
HOLD = "hold"
"""While this file is there no job begins."""


class FakeSlurm:
    """A queue in a folder, and the programs on PATH that know it."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder, programs = folder, folder / "bin"
        programs.mkdir(parents=True)
        for name in ("srun", "squeue", "scancel"):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} {name} "$@"\n')
            program.chmod(0o755)
        monkeypatch.setenv(FOLDER, str(folder))
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def hold(self) -> None:
        (self.folder / HOLD).touch()

    def go_on(self) -> None:
        (self.folder / HOLD).unlink()

    def jobs(self) -> list[dict[str, Any]]:
        return _jobs(self.folder)

    def preempt(self) -> None:
        """End every job, as a scheduler does that needs its nodes."""
        for job in self.jobs():
            _end(self.folder, job)


@contextmanager
def real_slurm(folder: Path, monkeypatch: Any) -> Iterator[None]:
    """Run a cluster of this machine inside the block: munged, slurmctld and slurmd, with files and ports of its own."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700, parents=True)
    key, host = folder / "munge" / "key", os.uname().nodename.partition(".")[0]
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = _free_ports(2)
    settings = f"""
    ClusterName=tests
    SlurmctldHost={host}(127.0.0.1)
    SlurmUser=root
    AuthType=auth/munge
    AuthInfo=socket={folder}/munge/socket
    CredType=cred/munge
    SlurmctldPort={ports[0]}
    SlurmdPort={ports[1]}
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd.pid
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/none
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core
    ReturnToService=2
    SwitchType=switch/none
    NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
    PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
    """
    file = folder / "slurm.conf"
    file.write_text("".join(line.strip() + "\n" for line in settings.splitlines()))
    monkeypatch.setenv("SLURM_CONF", str(file))
    places = [f"--{what}={folder}/munge/{name}" for what, name in (("socket", "socket"), ("pid-file", "pid"))]
    places += [f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"]
    programs = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *places],
        ["slurmctld", "-D", "-L", f"{folder}/slurmctld.log"],
        ["slurmd", "-D", "-L", f"{folder}/slurmd.log"],
    ]
    started = []
    try:
        for words in programs:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(words, **quiet))  # type: ignore[call-overload]
            end = time.monotonic() + 30
            while words[0] == "munged" and not (folder / "munge" / "socket").exists() and time.monotonic() < end:
                time.sleep(0.05)
        _idle()
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def missing_programs() -> str:
    """Say what of a real Slurm is not installed here; "" if all is."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "squeue") if shutil.which(name) is None]
    return "" if not missing and os.getuid() == 0 else f"no {', '.join(missing) or 'root'}: apt-get install slurm-wlm"


def real_jobs() -> str:
    return subprocess.run(["squeue", "--noheader", "--format=%j %T"], capture_output=True, text=True).stdout.strip()


def _idle() -> None:
    end = time.monotonic() + 60
    while subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout.strip() != "idle":
        assert time.monotonic() < end, "no node became idle"
        time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    import socket

    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second)][:number]


# ---- the programs ----------------------------------------------------------------------------------------------------


def _jobs(folder: Path) -> list[dict[str, Any]]:
    jobs = []
    for file in sorted(folder.glob("job-*.json")):
        with suppress(OSError, ValueError):
            jobs.append(json.loads(file.read_text()))
    return jobs


def _keep(folder: Path, job: dict[str, Any]) -> None:
    aside = folder / f".{job['id']}-{os.getpid()}"
    aside.write_text(json.dumps(job))
    aside.replace(folder / f"job-{job['id']}.json")


def _forget(folder: Path, job: dict[str, Any]) -> None:
    (folder / f"job-{job['id']}.json").unlink(missing_ok=True)


def _end(folder: Path, job: dict[str, Any]) -> None:
    """Kill what a job started; its daemon then forgets it. One that waits is forgotten at once."""
    if not job.get("group"):
        return _forget(folder, job)
    with suppress(ProcessLookupError):
        os.killpg(job["group"], signal.SIGKILL)
    return None


def _srun(folder: Path, words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    command = words[len(options) :]
    name = next(word.partition("=")[2] for word in options if word.startswith("--job-name="))
    job = {"id": os.getpid(), "name": name, "state": "PENDING", "since": time.strftime("%Y-%m-%dT%H:%M:%S")}
    job["options"] = options
    _keep(folder, job)
    while (folder / HOLD).exists():
        if not (folder / f"job-{job['id']}.json").exists():
            print("srun: error: Unable to allocate resources: Job/step already completing", file=sys.stderr)
            return 1
        time.sleep(0.02)
    words = [sys.executable, "-S", __file__, "stepd", json.dumps(job), *command]
    step = subprocess.Popen(words, stdin=-1, stdout=-1, start_new_session=True)
    assert step.stdin is not None
    assert step.stdout is not None
    into, out = step.stdin.fileno(), step.stdout.fileno()

    def pass_on() -> None:
        with suppress(OSError):
            while data := os.read(0, 1 << 16):
                view = memoryview(data)
                while view:
                    view = view[os.write(into, view) :]
        os.close(into)

    threading.Thread(target=pass_on, daemon=True).start()
    while data := os.read(out, 1 << 16):
        os.write(1, data)
    os._exit(step.wait() and 137)


def _stepd(folder: Path, words: list[str]) -> int:
    """Be the parent of a job's processes on its node: it outlives srun."""
    job, command = json.loads(words[0]), words[1:]
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "SLURM_JOB_ID": str(job["id"])})
    _keep(folder, job | {"state": "RUNNING", "group": process.pid})
    os.close(0)
    os.close(1)
    status = process.wait()
    _forget(folder, job)
    return 1 if status else 0


def _chosen(folder: Path, words: list[str]) -> list[dict[str, Any]]:
    name = next((word.partition("=")[2] for word in words if word.startswith("--name=")), None)
    ids = [word for word in words if not word.startswith("--")]
    return [j for j in _jobs(folder) if name in (None, j["name"]) and (not ids or str(j["id"]) in ids)]


def _squeue(folder: Path, words: list[str]) -> int:
    form = next(word.partition("=")[2] for word in words if word.startswith("--format="))
    for job in _chosen(folder, words):
        reason = "Resources" if job["state"] == "PENDING" else "None"
        facts = {"%i": str(job["id"]), "%j": job["name"], "%T": job["state"], "%r": reason, "%V": job["since"]}
        line = form
        for sign, fact in facts.items():
            line = line.replace(sign, fact)
        print(line)
    return 0


def _scancel(folder: Path, words: list[str]) -> int:
    signalled = any(word.startswith("--signal=") for word in words)
    for job in _chosen(folder, words):
        if job["state"] == "RUNNING" or not signalled:
            _end(folder, job)
    return 0


if __name__ == "__main__":
    program = {"srun": _srun, "squeue": _squeue, "scancel": _scancel, "stepd": _stepd}[sys.argv[1]]
    sys.exit(program(Path(os.environ[FOLDER]), sys.argv[2:]))
