"""A coordinator and three hospitals, each behind a line of its own, and how a fault is done to them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc

from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core import datasets
from fl_core.errors import FederationError
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from service_core.pki.identity import Address
from service_core.storage import unfinished
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from tests.chaos.plan import (
    COORDINATOR,
    DATA,
    FEDERATION,
    LATENCY_S,
    PROCESS_FAULTS,
    SILOS,
    THROTTLED_BYTES_S,
    Fault,
    RunPlan,
)
from tests.chaos.proxy import Proxy
from tests.support import until
from tests.support.coordinator import when_due
from tests.support.processes import BIN, ENV, ROOT, World

RUN_S, WELL_S, BEGUN_S = 1200.0, 600.0, 300.0
"""Within which a run ends, all are online again, and a command has begun to write: on a machine that does more, too."""
RESUMES = 3
_POLICY = '[privacy]\nrng = "test"\n'
_TURN_S = 0.02
Say = Callable[[str], None]


class Federation(World):
    """Homes, processes and lines below one folder; `disturb` runs one plan."""

    def __init__(self, folder: Path, say: Say) -> None:
        super().__init__(folder)
        self.say = say
        self.lines = {name: Proxy(int(self.address.rpartition(":")[2])) for name in SILOS}
        self.done: Counter[str] = Counter()
        self.died: list[str] = []
        self._hours: dict[str, float] = {}
        self._number = 0
        self._ending: list[threading.Timer] = []

    def begin(self) -> None:
        """Found the consortium, give every hospital a budget and its line, and start everything."""
        self.init()
        self.serve()
        for k, name in enumerate(SILOS):
            self.enrol(name)
            home = Home(self.folder / name)
            home.write_addresses((Address.parse(f"127.0.0.1:{self.lines[name].port}"),))
            home.policy.write_text(_POLICY)
            home.policy.chmod(0o600)
            ledger = Ledger(home.ledger, home.ledger_key)
            register(ledger, datasets.load(f"{DATA}/{FEDERATION}/{k}"), DATA)
            for collection in (f"{DATA}/train", f"{DATA}/test", "hospital"):
                ledger.set_budget(collection, 1e4, 1e-5, "dpo", "test")
            self._restart(name)
        self.online(SILOS)

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        hours = self._hours.get(name, 0.0)
        program = [sys.executable, "-m", "tests.chaos.shifted", str(hours)] if hours else []
        command = [*program, *words] if hours else [str(BIN / words[0]), *words[1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=ENV | {"PYTHONPATH": str(ROOT)} | (env or {}),
                cwd=self.folder,
            )
        return self.running[name]

    def _restart(self, name: str) -> None:
        if name == COORDINATOR:
            self.serve()
        else:
            self.silo(name, f"{DATA}/{FEDERATION}/{SILOS.index(name)}")

    def stop(self) -> None:
        for timer in self._ending:
            timer.cancel()
        for process in self.running.values():
            if process.poll() is None:
                _set_room(process.pid, None)
                process.send_signal(signal.SIGCONT)
        super().stop()
        for line in self.lines.values():
            line.stop()

    # ---- one run ----------------------------------------------------------------------------------------------------

    def disturb(self, plan: RunPlan) -> tuple[str, dict[str, Any]]:
        """Submit a plan's run, do its faults to it, and return its id and what the lead is shown at its end.

        Raises AssertionError when it does not finish.
        """
        self._when_all_are_well()  # a run is made of the hospitals that are online
        run = self.submit(*plan.overrides)
        began, resumes, left = time.monotonic(), 0, list(plan.faults)
        while True:
            found = self._found(run)
            closed = int(found["closed"]) if found else 0
            state = found["state"] if found else ""
            if found and state == "finished":
                break
            if found and state not in ("waiting", "running"):
                self.say(f"  the run is {state}: {found['reason']}")
                excused = any(f.kind in ("full disk", "clock") for f in plan.faults)
                assert state in ("failed", "paused"), found["reason"]
                assert excused, f"no fault excuses this: {found['reason']}"
                assert resumes < RESUMES, found["reason"]
                resumes += 1
                self._when_all_are_well()
                self.client.resume(run)
            if left and closed >= left[0].round:
                fault = left.pop(0)
                time.sleep(fault.after)
                self.say(f"  {time.monotonic() - began:5.1f} s, {closed} rounds closed: {fault}")
                self._inflict(fault)
                self.done[fault.kind] += 1
            self._watch_over()
            assert time.monotonic() - began < RUN_S, f"{run} has not ended after {RUN_S:.0f} s: {found}"
            time.sleep(_TURN_S)
        self._when_all_are_well()
        self.say(f"  finished after {time.monotonic() - began:.1f} s; {len(left)} faults came too late, not done")
        return run, self.info(run)

    def _found(self, run: str) -> dict[str, Any] | None:
        with suppress(FederationError, grpc.RpcError):
            return self.info(run)
        return None

    def _watch_over(self) -> None:
        """Start again what ended by itself, which `checks` will count as a fault of the software."""
        for name, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                last = self.log(name).splitlines()[-1:]
                self.died.append(f"{name} ended by itself with status {code}: {''.join(last)}")
                self.say(f"  {self.died[-1]}")
                self._restart(name)

    def _when_all_are_well(self) -> None:
        for timer in self._ending:
            timer.join()
        self._ending.clear()
        for line in self.lines.values():
            line.calm()

        def there() -> bool:
            self._watch_over()
            with suppress(FederationError, grpc.RpcError):
                states = self.states()
                return all(states.get(name) == "online" for name in SILOS)
            return False

        until(there, "all hospitals to be online", WELL_S)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _inflict(self, fault: Fault) -> None:
        name = fault.target
        if fault.kind in PROCESS_FAULTS:
            self._on_process(fault)
        else:
            line = self.lines[name]
            match fault.kind:
                case "cut":
                    line.cut()
                case "truncate":
                    line.truncate(fault.bytes, fault.upward)
                case "flip":
                    line.flip(fault.bytes, fault.upward)
                case "delay":
                    line.delay(LATENCY_S, fault.seconds)
                case "throttle":
                    line.throttle(THROTTLED_BYTES_S, fault.seconds)
                case "black hole":
                    line.black_hole(fault.seconds)

    def _on_process(self, fault: Fault) -> None:
        name = fault.target
        process = self.running[name]
        match fault.kind:
            case "kill":
                self.kill(name)
                time.sleep(fault.seconds)
                self._restart(name)
            case "stop":
                process.send_signal(signal.SIGSTOP)
                time.sleep(fault.seconds)
                process.send_signal(signal.SIGCONT)
            case "clock":
                self.kill(name)
                self._hours[name] = fault.hours
                self._restart(name)
                time.sleep(fault.seconds)
                del self._hours[name]
                if name in self.running and self.running[name].poll() is None:
                    self.kill(name)
                    self._restart(name)
            case "renewal":
                self.kill(name)
                self._make_due(name)
                self._restart(name)
            case "restore" | "half restore":
                self._put_back(name, fault.seconds, half=fault.kind == "half restore")
            case "full disk":
                _set_room(process.pid, fault.bytes)
                timer = threading.Timer(fault.seconds, _set_room, (process.pid, None))
                timer.start()
                self._ending.append(timer)

    def _make_due(self, name: str) -> None:
        """Give a hospital a certificate that its service renews when it starts."""
        identity = SiloIdentity(self.folder / name)
        asked = identity.renewal_request()
        with closing(CoordinatorStore(self.home)) as store:
            made = Membership(self.home, store, when_due).renew(identity.load(), asked.csr_pem, asked.proof)
        identity.install(made.certificate_pem, made.authority_pem)

    def _put_back(self, name: str, seconds: float, half: bool) -> None:
        """Back a home up, and put it back after so many seconds; half: the first restore is killed on its way."""
        side, key = ("coordinator", "--with-authority-key") if name == COORDINATOR else ("silo", "--with-ledger-key")
        home = self.folder / name
        self._number += 1
        backup, old = (self.folder / f"{name}-{what}-{self._number}" for what in ("backup", "old"))
        self.call(side, "backup", str(backup), key, "--home", str(home))
        time.sleep(seconds)
        self.kill(name)
        home.rename(old)
        restore = (side, "restore", str(backup), "--home", str(home))
        if half:
            self._kill_on_its_way(restore, home)
        self.call(*restore)
        self._restart(name)

    def _kill_on_its_way(self, restore: tuple[str, ...], home: Path) -> None:
        """Kill a restore once its home is marked; what serves such a home must refuse it."""
        begun = subprocess.Popen(
            [str(BIN / restore[0]), *restore[1:]], env=ENV, cwd=self.folder, stdout=subprocess.DEVNULL
        )
        marker = home / unfinished.FILE
        until(lambda: marker.exists() or begun.poll() is not None, "a restore to begin", BEGUN_S, every=0.001)
        begun.kill()
        begun.wait()
        assert marker.exists(), "the restore was done before it could be killed"
        data = () if restore[0] == COORDINATOR else ("--data", f"{DATA}/{FEDERATION}/0")
        refused = self.call(restore[0], "serve", *data, "--home", str(home), ok=False)
        assert refused.returncode == 1, refused.stderr
        assert "E-STATE-26" in refused.stdout + refused.stderr, refused.stderr


def _set_room(pid: int, size: int | None) -> None:
    """Let a process write no file beyond a size; None: as it was. It gets EFBIG, as other limits give ENOSPC."""
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def children(folder: Path) -> list[int]:
    """List the processes that name something in a folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
