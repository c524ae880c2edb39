"""A file that the hospital's service writes every few seconds, to show that it is alive and connected."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fl_core.errors import UnavailableError
from silo.events import SiloEvent
from silo.storage.home import Home
from silo.worker.cage import Walls

FILE = "health.json"
BEAT_S = 5.0
_SILENCE_S = 30.0


def since_boot() -> float:
    """Seconds since this machine booted, including sleep; setting the system clock does not change it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Liveness:
    """Writes the file. `note` may be called on any thread, `beat` on one thread only."""

    home: Home
    clock: Callable[[], float] = since_boot
    _connected: bool = False
    _changed: float = field(default_factory=time.time)
    _why: str = ""
    _walls: Walls | None = None
    _where: str = ""
    _queue: str = ""
    _last: float = -BEAT_S

    def note(self, event: SiloEvent) -> None:
        """Record events about the session, the worker and its queue, and error codes while there is no session."""
        if event.event in ("connected", "disconnected"):
            self._connected, self._changed, self._last = event.event == "connected", time.time(), -BEAT_S
        if event.event == "worker":
            self._walls = Walls(*(str(event.facts[name]) for name in Walls._fields))
            self._where = str(event.facts["where"])
        if event.event == "queue":
            self._queue, self._last = str(event.facts["waits"]), -BEAT_S
        if not self._connected and (code := event.facts.get("code")):
            self._why = str(code)

    def beat(self) -> None:
        """Write the file if it is due, every `BEAT_S` seconds. A failed write is ignored; the file's age shows it."""
        now = self.clock()
        if 0 <= now - self._last < BEAT_S:
            return
        self._last = now
        facts: dict[str, object] = {"beat": now, "connected": self._connected, "since": self._changed, "why": self._why}
        facts |= {"walls": self._walls, "where": self._where, "queue": self._queue}
        path = self.home.path / FILE
        aside = path.with_name(f".{FILE}.tmp")
        with suppress(OSError):
            aside.write_text(json.dumps(facts | {"pid": os.getpid()}))
            aside.replace(path)


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a service. since: start or loss of the session (Unix seconds)   why: an error code, or empty.

    walls: isolation of the worker that was started last   where: it runs   queue: why no worker has started.
    """

    alive: bool
    connected: bool = False
    since: float = 0.0
    why: str = ""
    walls: Walls | None = None
    where: str = ""
    queue: str = ""

    @classmethod
    def of(cls, home: Home, clock: Callable[[], float] = since_boot) -> Health:
        """Read a home's state. A service that does not run, or has not written for half a minute, is not alive."""
        if not home.is_locked():
            return cls(alive=False, why="it is not running")
        try:
            raw = json.loads((home.path / FILE).read_text())
            age = clock() - float(raw["beat"])
            walls = Walls(*map(str, raw["walls"])) if raw.get("walls") else None
            texts = str(raw.get("where", "")), str(raw.get("queue", ""))
            health = cls(True, raw["connected"] is True, float(raw["since"]), str(raw["why"])[:20], walls, *texts)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(alive=False, why="it is still starting")
        return health if 0 <= age < _SILENCE_S else cls(alive=False, why="it does not respond")

    def worker(self) -> list[str]:
        """Describe the worker: its place and isolation, or why none has started; empty if none has run."""
        texts = [f"a worker {self.queue}"] if self.queue else [f"runs {self.where}"] if self.where else []
        return texts + (self.walls.sentences() if self.walls is not None and not self.queue else [])

    def require(self, connected: bool) -> None:
        """Raise UnavailableError (E-NET-01) unless the service is alive and, if `connected`, has a session."""
        if not self.alive:
            raise UnavailableError("E-NET-01", f"the service is not available: {self.why}. See its log")
        if connected and not self.connected:
            raise UnavailableError(
                "E-NET-01",
                f"there is no session with the coordinator ({self.why or 'not yet'}): run silo doctor",
            )
