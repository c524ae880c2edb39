"""Kills a command that fills a folder before each of its writes, and looks at what is left.

The commands are `coordinator init`, `backup` and `restore`, and `silo join`, `backup` and `restore`. After each kill
the folder is whole, or every other command refuses it and names the one that goes on; and that one, said again, makes
it whole. The writes are counted by the library of `tests.writes`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coordinator.api.server import CoordinatorServer
from coordinator.cli.main import program
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import FederationError
from service_core.storage.backup import BackupContents
from silo.cli.main import program as silo_program
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.coordinator import FAST
from tests.support.processes import free_port

HALF, AGAIN, HUNG = "a half was used", "the command refused its own half", "did not end"
_SECONDS = 120.0
_TURN_S = 0.002


@dataclass(frozen=True)
class Command:
    """A command that fills a folder. other: what somebody may say next   whole: tells whether the folder is."""

    name: str
    words: Callable[[Path], list[str]]
    other: Callable[[Path], list[list[str]]]
    whole: Callable[[Path], object]

    def call(self, words: list[str], log: Path, watched: Path | None = None, at: int = 0) -> int:
        """Do it in a process of its own; return its status. at: the write before which it is killed."""
        child = os.fork()
        if not child:
            code = 1
            try:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(out, 1)
                os.dup2(out, 2)
                if watched is not None:
                    watch = ctypes.CDLL(None).watch_writes
                    watch.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_char, ctypes.c_int, ctypes.c_int]
                    note = os.open(f"{log}.writes", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    watch(str(watched).encode(), at, b"k", 0, note)
                code = self._run(words)
                sys.stdout.flush()
            except BaseException:  # the child must not return into the parent's work
                traceback.print_exc()
            finally:
                os._exit(code)
        deadline = time.monotonic() + _SECONDS
        while True:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return -1
            time.sleep(_TURN_S)

    def _run(self, words: list[str]) -> int:
        return (silo_program if self.name.startswith("silo") else program)().run(words)

    def is_whole(self, folder: Path) -> bool:
        """Tell whether what the command makes is there and can be used."""
        try:
            return bool(self.whole(folder))
        except FederationError:
            return False


def commands(homes: Path, scratch: Path, address: str) -> list[Command]:
    """List the commands. homes: with a `coordinator` and a `north` that have done a run   address: of a service."""
    backups = {side: scratch / f"backup-{side}" for side in ("coordinator", "north")}
    with closing(CoordinatorStore(homes / "coordinator")) as store:
        runs = [run.id for run in store.runs.all()]
    history = [run.run_id for run in _closed(homes / "north")]

    def joined(home: Path) -> bool:
        return bool(SiloIdentity(home).joined and Home(home).addresses())

    @cache
    def token(home: Path) -> str:
        with closing(CoordinatorStore(homes / "serving")) as store:
            return Membership(homes / "serving", store).invite(f"at-{home.name}").token

    def listed(home: Path) -> object:
        Authority.open(home)
        with closing(CoordinatorStore(home)) as store:
            return [run.id for run in store.runs.all()] == runs

    def elsewhere(folder: Path) -> Path:
        return folder.with_name(f"{folder.name}-other")

    return [
        Command(
            "coordinator init",
            lambda f: ["init", "test", "--address", address, "--home", str(f)],
            lambda f: [["invite", "probe", "--home", str(f)], ["leads", "list", "--home", str(f)]],
            lambda f: Authority.open(f).lead_credentials("lead"),
        ),
        Command(
            "coordinator backup",
            lambda f: ["backup", str(f), "--home", str(homes / "coordinator")],
            lambda f: [["restore", str(f), "--home", str(elsewhere(f))]],
            BackupContents.read,
        ),
        Command(
            "coordinator restore",
            lambda f: ["restore", str(backups["coordinator"]), "--home", str(f)],
            lambda f: [
                ["invite", "probe", "--home", str(f)],
                ["backup", str(elsewhere(f)), "--home", str(f)],
                ["restore", "--accept-loss", "--home", str(f)],
            ],
            listed,
        ),
        Command(
            "silo backup",
            lambda f: ["backup", str(f), "--home", str(homes / "north")],
            lambda f: [["restore", str(f), "--home", str(elsewhere(f))]],
            BackupContents.read,
        ),
        Command(
            "silo restore",
            lambda f: ["restore", str(backups["north"]), "--home", str(f)],
            lambda f: [
                ["ledger", "show", "--home", str(f)],
                ["backup", str(elsewhere(f)), "--home", str(f)],
                ["restore", "--accept-loss", "--home", str(f)],
            ],
            lambda f: SiloIdentity(f).load() and [run.run_id for run in _closed(f)] == history,
        ),
        Command(
            "silo join",
            lambda f: ["join", token(f), "--home", str(f)],
            lambda f: [["fingerprint", "--home", str(f)]],
            joined,
        ),
    ]


def _closed(home: Path) -> list[object]:
    store = SiloStore(home / "silo.db")
    try:
        return store.history()
    finally:
        store.close_database()


def serving(home: Path, port: int) -> int:
    """Start a service in a process of its own; return its id."""
    child = os.fork()
    if child:
        until(lambda: (home / "service.json").exists(), "the service", _SECONDS)
        return child
    try:
        server = CoordinatorServer(home, f"127.0.0.1:{port}", lambda *_: None, FAST)  # type: ignore[arg-type, return-value]
        server.start()
        while True:
            signal.pause()
    finally:
        os._exit(1)


def enumerate_commands(homes: Path, folder: Path, every: int = 1) -> int:
    """Kill each command before each `every`-th of its writes; print the table, and return how many things are wrong."""
    scratch = folder / "commands"
    scratch.mkdir()
    port = free_port()
    address = f"127.0.0.1:{port}"
    Authority.create(homes / "serving", "test", [address]).issue_lead("lead")
    service = serving(homes / "serving", port)
    try:
        found = list(_all(commands(homes, scratch, address), scratch, every))
    finally:
        os.kill(service, signal.SIGKILL)
        os.waitpid(service, 0)
    print("\n| command | writes | killed before | whole | half, refused | wrong |\n|---|---|---|---|---|---|")
    for name, writes, tried, counted, wrong in found:
        print(f"| {name} | {writes} | {tried} | {counted['whole']} | {counted['half']} | {wrong} |")
    number = sum(wrong for *_, wrong in found)
    print(f"\n{sum(tried for _, _, tried, _, _ in found)} commands killed: halves used or refused for good {number}")
    return number


def _all(every_command: list[Command], scratch: Path, every: int) -> Iterator[tuple[str, int, int, Counter[str], int]]:
    log = scratch / "log"
    for command in every_command:
        whole = scratch / "whole"
        status = command.call(command.words(whole), log, whole)
        assert status == 0, log.read_text()
        assert command.is_whole(whole), f"{command.name} has not made {whole}"
        writes = len(Path(f"{log}.writes").read_text().splitlines())
        side = "coordinator" if command.name.startswith("coordinator") else "north"
        if command.name.endswith("backup"):
            shutil.copytree(whole, scratch / f"backup-{side}")
        shutil.rmtree(whole)
        counted, wrong, tried = Counter[str](), 0, range(1, writes + 1, every)
        for at in tried:
            said = list(_killed(command, scratch / f"{at}", log, at, counted))
            wrong += bool(said)
            for text in said:
                print(f"{command.name}, killed before write {at} of {writes}: {text}", flush=True)
        yield command.name, writes, len(tried), counted, wrong


def _killed(command: Command, folder: Path, log: Path, at: int, counted: Counter[str]) -> Iterator[str]:
    """Say what is wrong after one kill."""
    status = command.call(command.words(folder), log, folder, at)
    noted = Path(f"{log}.writes").read_text().splitlines()
    hit = noted[-1].split("\t", 1)[1] if noted else ""
    if status != -signal.SIGKILL:
        yield f"{HUNG} with a kill but with status {status}: {log.read_text()[-500:]}"
        return
    whole = command.is_whole(folder)
    begun = folder.exists() and any(child.name[0] != "." for child in folder.iterdir())
    for words in command.other(folder) if begun and not whole else []:
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy)
        asked = [word.replace(str(folder), str(copy)) for word in words]
        status, said = command.call(asked, log), log.read_text()
        if status == 0:
            yield f"{HALF} at [{hit}] by {' '.join(words[:2])}: {said[-200:].strip()}"
        elif command.name.partition(" ")[2] not in said:
            yield f"{' '.join(words[:2])} does not name {command.name} at [{hit}]: {said[-300:].strip()}"
        shutil.rmtree(copy, ignore_errors=True)
    status, said = command.call(command.words(folder), log), log.read_text()
    if not whole and (status != 0 or not command.is_whole(folder)):
        yield f"{AGAIN} at [{hit}]: {said[-300:].strip()}"
    counted["whole" if whole else "half"] += 1
    for left in folder.parent.glob(f"{folder.name}*"):
        shutil.rmtree(left, ignore_errors=True)
