"""Workers that are forked from a process which has imported everything, before that has any other thread.

Each waits for the line by which a worker begins; a start takes milliseconds instead of seconds. What it does then, also
to enter the cage, is what `python -m silo.worker` and `python -m coordinator.worker` do.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType

import coordinator.runs.workers
import coordinator.worker.__main__
import coordinator.worker.process  # imported before the forks
import silo.service.launchers
import silo.worker.__main__
import silo.worker.process

SILO = silo.service.launchers
COORDINATOR = coordinator.runs.workers
_MAIN = {SILO: silo.worker.__main__.main, COORDINATOR: coordinator.worker.__main__.main}


class ForkedWorker:
    """A forked process, with those parts of `subprocess.Popen` that a service uses of its worker."""

    def __init__(self, main: Callable[[], None], earlier: list[ForkedWorker], begin: Callable[[], None]) -> None:
        theirs_in, to_worker = os.pipe()
        from_worker, theirs_out = os.pipe()
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            try:
                for other in earlier:  # its pipe must end with the service alone
                    other.stdin.close()
                    other.stdout.close()
                os.close(to_worker)
                os.close(from_worker)
                os.dup2(theirs_in, 0)
                os.dup2(theirs_out, 1)
                os.setsid()
                begin()
                main()
            except ValueError:
                pass  # nobody wanted it
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), io.BufferedReader(io.FileIO(from_worker))

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code


def fork_workers(side: ModuleType, number: int, first: Callable[[], None] = lambda: None) -> None:
    """Have the service of this process launch workers that are forked now; later ones are real.

    side: SILO or COORDINATOR   first: is called in the first worker
    Call it while the process has one thread, and for one side alone.
    """
    waiting: list[ForkedWorker] = []
    for k in range(number):
        waiting.append(ForkedWorker(_MAIN[side], waiting, (lambda: None) if k else first))
    launch = side.launch_here

    def launch_forked() -> subprocess.Popen[bytes]:
        return waiting.pop(0) if waiting else launch()  # type: ignore[return-value]

    side.launch_here = launch_forked
