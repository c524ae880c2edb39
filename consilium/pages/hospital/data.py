"""Run `silo data check` on the served data in the background, and keep its result in the home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service_core.storage import private_files
from silo.storage.home import Home, ServeOptions

FILE = "data-check.json"
_MAX_BYTES = 4 << 20
_PROBLEMS, _FILES, _CLASSES = 20, 5, 200
"""Maximum numbers of problems, files per problem and classes to show."""


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Examples of one class."""

    name: str
    train: int
    test: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with the data. first: the first affected files   names: number of files that the check listed."""

    what: str
    count: int
    first: tuple[str, ...]
    remedy: str
    names: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check. error: why the check failed   fingerprint: of the data   at: Unix seconds."""

    at: float
    origin: str = ""
    classes: tuple[ClassCount, ...] = ()
    problems: tuple[Problem, ...] = ()
    fingerprint: str = ""
    error: str = ""

    @property
    def train(self) -> int:
        return sum(c.train for c in self.classes)

    @property
    def test(self) -> int:
        return sum(c.test for c in self.classes)


class DataCheck:
    """Runs the command in another process, at most one at a time, and stores its result in the home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> bool:
        """Start a check of the served data; return whether a check is running."""
        served = self._home.served()
        with self._lock:
            if served is None or self._closed or self._process is not None:
                return self._process is not None
            words = [sys.executable, "-P", "-m", "silo.cli.main", "data", "check", "--json"]
            words += ["--home", str(self._home.path)]
            words += ["--data-root", served.data_root] if served.data_root else []
            path = os.pathsep.join(filter(None, (str(_PROGRAM), os.environ.get("PYTHONPATH"))))
            try:
                self._process = subprocess.Popen(  # noqa: S603  # this program, and words from this home
                    [*words, "--", served.data],
                    cwd=served.cwd or None,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)
            except OSError as error:
                self._keep(served, {"error": f"cannot start the check: {error}"})
                return False
            threading.Thread(target=self._wait, args=(self._process, served), name="data-check", daemon=True).start()
        return True

    def start_if_new(self) -> None:
        """Start a check if the served data have no result yet."""
        if self.report() is None:
            self.start()

    def report(self) -> Report | None:
        """Return the newest result for the served data; None before the first."""
        try:
            with (self._home.path / FILE).open("rb") as file:
                raw = json.loads(file.read(_MAX_BYTES))
            if ServeOptions(**raw["served"]) != self._home.served():
                return None
            return _report(raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def close(self) -> None:
        """Stop a running check."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.terminate()
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], served: ServeOptions) -> None:
        out, err = process.communicate()
        result: dict[str, Any]
        try:
            result = {"report": json.loads(out)}
        except (ValueError, RecursionError):
            result = {"error": err.decode("utf-8", "replace").strip()[:2000] or f"exit status {process.returncode}"}
        with self._lock:
            if not self._closed:
                self._keep(served, result)
            self._process = None

    def _keep(self, served: ServeOptions, found: Mapping[str, Any]) -> None:
        text = json.dumps({"at": time.time(), "served": served._asdict(), **found})
        with suppress(OSError):  # such as a full disk: the next page starts a new check
            private_files.write_private(self._home.path / FILE, text.encode())


_PROGRAM = Path(__file__).resolve().parents[3]


def _report(raw: Mapping[str, Any]) -> Report:
    at = float(raw["at"])
    if "error" in raw:
        return Report(at, error=str(raw["error"]))
    report = raw["report"]
    names, counts = [str(c) for c in report["classes"]], report["counts"]
    train, test = ([int(n) for n in counts.get(split, [0] * len(names))] for split in ("train", "test"))
    problems = tuple(
        Problem(
            str(p["what"]), int(p["count"]), tuple(map(str, p["first"][:_FILES])), str(p["remedy"]), len(p["first"])
        )
        for p in report["problems"][:_PROBLEMS]
    )
    classes = tuple(ClassCount(*row) for row in zip(names, train, test, strict=True))[:_CLASSES]
    return Report(at, str(report["origin"]), classes, problems, str(report["fingerprint"]))
