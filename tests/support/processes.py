"""A federation of real processes on loopback: what the end-to-end tests drive, as its users would."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coordinator.cli.main import main
from coordinator.config.hydra_config import compose_spec
from coordinator.lead.as_json import round_json, run_json
from coordinator.lead.client import LeadClient
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from silo.service import enrolment as enrol
from silo.storage.home import Home
from tests.support import until
from tests.support.warm import Warm

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def here(*words: str) -> subprocess.CompletedProcess[str]:
    """Do what the process `coordinator WORDS` does in this one: what it costs to import torch is paid already."""
    out, err, argv, code = io.StringIO(), io.StringIO(), sys.argv, 0
    try:
        sys.argv = ["coordinator", *words]
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = argv
        gc.unfreeze()  # this process does not end with the command
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


class World:
    """Homes, processes and logs below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "coordinator"
        self.address = f"127.0.0.1:{free_port()}"
        self.running: dict[str, subprocess.Popen[bytes] | Warm] = {}
        self._client: LeadClient | None = None

    def call(self, *words: str, ok: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            code = Warm(words, out, err, env=ENV, cwd=self.folder).wait(timeout)
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(words, code, out.read(), err.read())
        if ok:
            assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.call(*words, "--json").stdout.strip().splitlines()[-1])

    def lead(self, *words: str) -> Any:
        return self.json("coordinator", *words, "--home", str(self.home))

    @property
    def client(self) -> LeadClient:
        """Talk to the service as the lead, without starting a process for each question."""
        if self._client is None:
            self._client = LeadClient.open(self.home)
        return self._client

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes] | Warm:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = Warm(words, log, log, env=ENV | (env or {}), cwd=self.folder)
        self.running[name] = process
        return process

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(30)

    # ---- the federation ----

    def init(self) -> None:
        self.call("coordinator", "init", "test", "--address", self.address, "--home", str(self.home))

    def serve(self) -> None:
        (self.home / "service.json").unlink(missing_ok=True)
        process = self.start("coordinator", "coordinator", "serve", "--home", str(self.home), "--bind", self.address)
        until(lambda: self._up(process), "the coordinator")

    def _up(self, process: subprocess.Popen[bytes] | Warm) -> bool:
        assert process.poll() is None, self.log("coordinator")
        return (self.home / "service.json").exists()

    def invite(self, name: str) -> str:
        return str(self.lead("invite", name)["token"])

    def join(self, name: str) -> None:
        self.call("silo", "join", self.invite(name), "--home", str(self.folder / name))

    def enrol(self, name: str) -> None:
        """Do what `join` does without starting two processes: what the commands call, over the same wire."""
        with closing(CoordinatorStore(self.home)) as store:
            token = Membership(self.home, store).invite(name).token
        enrol.join(token, Home(self.folder / name))

    def silo(self, name: str, data: str, *more: str) -> None:
        self.start(name, "silo", "serve", "--data", data, "--home", str(self.folder / name), *more)

    def online(self, names: Sequence[str], seconds: float = 240) -> None:
        def there() -> bool:
            for name in names:
                if name in self.running:
                    assert self.running[name].poll() is None, self.log(name)
            return all(self.states().get(name) == "online" for name in names)

        until(there, f"{names} to be online", seconds)

    def federation(self, data: Sequence[str], *more: str) -> list[str]:
        """Start a coordinator and one silo per data reference, named hospital0, hospital1, ..."""
        names = [f"hospital{k}" for k in range(len(data))]
        self.init()
        self.serve()
        for name, reference in zip(names, data, strict=True):
            (self.join if name == names[0] else self.enrol)(name)
            self.silo(name, reference, *more)
        self.online(names)
        return names

    def states(self) -> dict[str, str]:
        return {s.name: s.state for s in self.client.silos().silos}

    def submit(self, *overrides: str) -> str:
        return self.client.submit(compose_spec(overrides).to_json(), uuid.uuid4().hex).run_id

    def info(self, run: str) -> dict[str, Any]:
        detail = self.client.show(run)
        return {**run_json(detail.info), "round": [dict(round_json(r)) for r in detail.rounds]}

    def wait(self, run: str, state: str = "finished", seconds: float = 120) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            for name, process in self.running.items():
                assert process.poll() is None, self.log(name)
            found = self.info(run)
            assert found["state"] in ("waiting", "running", state), found["reason"]
            return found if found["state"] == state else None

        found: dict[str, Any] = until(there, f"{run} to be {state}", seconds)
        return found

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


@contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    try:
        yield made
    finally:
        made.stop()
