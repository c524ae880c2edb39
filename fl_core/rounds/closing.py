"""The rule that closes a round: enough updates have arrived, and no silo is awaited. Callers pass the times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

CONNECTED, SOLE_CONNECTED, SOLE_OFFLINE = 2, 20, 10
"""How long to wait for a silo, in multiples of h (see `ClosingRule`): for a connected silo; for a connected and for an
offline silo with a class that no accepted update has."""
MISSED = 2
"""Missed rounds in a row after which an offline silo is not awaited, even for its classes."""


def needed(quorum: int, cohort: int) -> int:
    """Return how many updates close a round: the run's quorum, or two thirds of the cohort (0)."""
    return min(quorum, cohort) if quorum else -(-2 * cohort // 3)


@dataclass(frozen=True, slots=True)
class Attendance:
    """The state of one silo in a round's cohort. Times are seconds.

    Attributes:
        answered: from the round's opening to its accepted update
        refused: it will send no update: it refused, was revoked or excluded, or its update was refused
        offline: since its session ended; None while connected
        missed: rounds in a row that closed without it
        classes: those that it has; None if unknown
    """

    name: str
    answered: float | None = None
    refused: bool = False
    offline: float | None = None
    missed: int = 0
    classes: frozenset[str] | None = None

    @property
    def is_open(self) -> bool:
        return self.answered is None and not self.refused


class ClosingVerdict(Enum):
    """What to do with an open round. PAUSE: the quorum was missed, and the lead decides."""

    CLOSE = "close"
    WAIT = "wait"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class PendingSilo:
    """A silo that the round waits for. until: seconds after the opening   classes: that are missing without it."""

    name: str
    until: float
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict. awaited: the awaited silos   lost: silos that are given up although their classes are missing."""

    verdict: ClosingVerdict
    awaited: tuple[PendingSilo, ...] = ()
    lost: tuple[PendingSilo, ...] = ()


@dataclass(frozen=True, slots=True)
class ClosingRule:
    """The closing rule of a run.

    A round closes when the quorum has arrived and no silo is awaited. Let h be the time until half of the silos that
    can answer had answered, at least half of `patience`. A connected silo is awaited until 2h. A silo with a class that
    no accepted update has is awaited until 20h; if it is offline until 10h, and not at all if it also missed the last
    two rounds. Below the quorum all silos are awaited until the deadline. A silo that was connected less than
    `patience` ago counts as connected, so that a restart is no absence. A silo with unknown classes counts as one whose
    classes are missing.

    needed: updates that close a round   deadline: seconds after the opening   extension: added by the lead for all.
    """

    needed: int
    deadline: float
    patience: float
    extension: float = 0.0

    def decide(self, silos: Sequence[Attendance], now: float) -> Decision:
        """Decide about a cohort. now: seconds since the round was opened."""
        answered = [s for s in silos if s.answered is not None]
        waiting = [s for s in silos if s.is_open]
        brought = frozenset[str]().union(*(s.classes or () for s in answered))
        end = self.deadline + self.extension
        if len(answered) < self.needed:
            if len(answered) + len(waiting) < self.needed or now >= end:
                return Decision(ClosingVerdict.PAUSE)
            return Decision(ClosingVerdict.WAIT, tuple(PendingSilo(s.name, end, _alone(s, brought)) for s in waiting))
        h = max(self._half(silos), self.patience / 2)
        limits = [
            PendingSilo(s.name, min(self._limit(s, brought, h) + self.extension, end), _alone(s, brought))
            for s in waiting
        ]
        awaited = tuple(a for a in limits if now < a.until)
        lost = tuple(a for a in limits if now >= a.until and a.classes)
        return Decision(ClosingVerdict.WAIT if awaited else ClosingVerdict.CLOSE, awaited, lost)

    @staticmethod
    def _half(silos: Sequence[Attendance]) -> float:
        """Return the time when half of the silos that can answer had answered; infinity if they have not yet."""
        times = sorted(max(0.0, s.answered) for s in silos if s.answered is not None)
        half = -(-sum(not s.refused for s in silos) // 2)
        return times[half - 1] if 0 < half <= len(times) else math.inf

    def _limit(self, silo: Attendance, brought: frozenset[str], h: float) -> float:
        connected = silo.offline is None or silo.offline < self.patience
        if silo.classes is None or not silo.classes <= brought:
            if connected:
                return SOLE_CONNECTED * h
            return 0.0 if silo.missed >= MISSED else SOLE_OFFLINE * h
        return CONNECTED * h if connected else 0.0


def _alone(silo: Attendance, brought: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted((silo.classes or frozenset()) - brought))
