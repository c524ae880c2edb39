"""Programs that fork from a process which has imported everything: a start takes milliseconds instead of seconds.

Each test process has one such parent, from its first program on. What a program does at its import is not tested so:
tests of that start real interpreters.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

_MESSAGE = 1 << 20


class Warm:
    """A running program, with those parts of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        *,
        env: Mapping[str, str],
        stdin: IO[Any] | None = None,
        cwd: Path | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        """words: of the command line, the program (coordinator or silo) first   limits: RLIMIT_* and their value."""
        with Path(os.devnull).open("r+b") as nothing:
            files = [(f or nothing).fileno() for f in (stdin, stdout, stderr)]
            place, bounds = str(cwd or Path.cwd()), [*(limits or {}).items()]
            about = {"words": [*words], "env": {**env}, "cwd": place, "limits": bounds}
            self.pid: int = _parent().ask(about, files)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = _parent().ask({"poll": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmWorker(Warm):
    """A worker of this process (`silo.worker` or `coordinator.worker`), the leader of its process group.

    before: Python that it runs first, outside of the cage
    """

    def __init__(self, module: str, before: str = "") -> None:
        theirs_in, to_worker = os.pipe()
        from_worker, theirs_out = os.pipe()
        with os.fdopen(theirs_in, "rb") as stdin, os.fdopen(theirs_out, "wb") as stdout:
            words = [module, before, str(os.getpid())]
            super().__init__(words, stdout, sys.__stderr__, env=os.environ, stdin=stdin)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")


class _Parent:
    """The process that programs fork from, at the other end of a socket."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", __name__, str(theirs.fileno())]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=root, env=env)
        self._lock = threading.Lock()
        atexit.register(self.end)

    def ask(self, about: Mapping[str, object], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._line, [json.dumps(about).encode()], files)
            answer = self._line.recv(_MESSAGE)
        assert answer, "the process that programs fork from has ended"
        return json.loads(answer)

    def end(self) -> None:
        self._line.close()
        self._process.wait(30)


@cache
def _parent() -> _Parent:
    return _Parent()


# ---- the other end -------------------------------------------------------------------------------------------------


_WORKERS = 8
"""That one service may start before its next one has to import everything."""
_SERVICES = ("coordinator.api.server", "silo.service.service")
_COMMANDS = (
    "coordinator.cli.consortium",
    "coordinator.cli.runs",
    "silo.cli.service",
    "silo.cli.membership",
    "silo.cli.status",
    "pydantic",
    "rich",
)


def _serve(line: socket.socket) -> None:
    while True:
        message, files, _, _ = socket.recv_fds(line, _MESSAGE, 3)
        if not message:
            return
        asked = json.loads(message)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                line.close()
                _become(asked, files)
        for file in files:
            os.close(file)
        line.send(json.dumps(answer).encode())


def _become(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be the program that was asked for, to its end."""
    import resource

    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for limit, value in asked["limits"]:
            resource.setrlimit(limit, (value, value))
        os.chdir(asked["cwd"])
        ciphers = {name: value for name, value in os.environ.items() if name.startswith("GRPC_SSL_")}  # of the import
        os.environ.clear()
        os.environ.update(asked["env"] | ciphers)
        sys.argv = asked["words"]
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        if sys.argv[0].endswith(".worker"):
            _work(*sys.argv)
        if sys.argv[1] == "serve":
            from tests.support import forked_workers

            side = forked_workers.SILO if sys.argv[0] == "silo" else forked_workers.COORDINATOR
            forked_workers.fork_workers(side, _WORKERS)
        if sys.argv[0] == "silo":
            from silo.cli.main import main
        else:
            from coordinator.cli.main import main
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(code)


def _work(module: str, before: str, service: str) -> None:
    """Be a worker, whose service is no parent of it."""
    os.setsid()
    os.getppid = lambda: int(service)
    exec(before, {"__name__": "before"})
    importlib.import_module(f"{module}.__main__").main()
    raise SystemExit


def _import_all() -> None:
    from service_core.tls.connect import require_tls13

    require_tls13()
    for name in (*_SERVICES, *_COMMANDS, "tests.support.forked_workers"):
        importlib.import_module(name)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a thread would be missing in what forks from here"


if __name__ == "__main__":
    _import_all()
    _serve(socket.socket(fileno=int(sys.argv[1])))
