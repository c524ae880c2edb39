"""What a coordinator says of itself in the metadata of its health answers: time, version, and what is wrong.

A silo asks before it joins anything, and without a session: that would take the place of the one of its service.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from service_core.version import PROTOCOL

_TIME, _PROTOCOL, _SOFTWARE, _PROBLEMS = (f"consilium-{word}" for word in ("time", "protocol", "software", "problems"))
_MAX_VERSION = 10_000


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """A coordinator's answer. offset_s: how far its clock is ahead; None, as protocol: it does not tell."""

    serving: bool
    offset_s: float | None = None
    protocol: int | None = None
    software: str = ""
    problems: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, serving: bool, metadata: Iterable[tuple[str, str | bytes]], asked: float, answered: float
    ) -> HealthAnswer:
        """Read an answer; any bytes are one, and nonsense is as good as nothing. asked, answered: Unix seconds."""
        said = {str(k): v for k, v in metadata if isinstance(v, str)}
        try:
            there = float(said.get(_TIME, "nan"))
        except ValueError:
            there = math.nan
        protocol = said.get(_PROTOCOL, "")
        number = int(protocol) if re.fullmatch(r"[0-9]{1,5}", protocol) else _MAX_VERSION
        return cls(
            serving,
            there - (asked + answered) / 2 if math.isfinite(there) else None,
            number if number < _MAX_VERSION else None,
            "".join(c for c in said.get(_SOFTWARE, "") if c.isprintable())[:80],
            tuple(re.findall(r"[a-z]{1,20}", said.get(_PROBLEMS, ""))[:10]),
        )


def about(software: str, problems: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the metadata of an answer. problems: words, without details: silos read them too."""
    facts = {
        _TIME: f"{time.time():.3f}",
        _PROTOCOL: str(PROTOCOL),
        _SOFTWARE: "".join(c for c in software if " " <= c <= "~")[:80],
        _PROBLEMS: ",".join(problems),
    }
    return tuple(facts.items())
