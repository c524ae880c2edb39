"""Metadata of a coordinator's health answers: its time, version and problems.

`silo doctor` reads them without a session, which would replace the session of its service.
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
    """A coordinator's answer. offset_s: how far its clock is ahead. offset_s, protocol: None if not reported."""

    serving: bool
    offset_s: float | None = None
    protocol: int | None = None
    software: str = ""
    problems: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, serving: bool, metadata: Iterable[tuple[str, str | bytes]], sent: float, answered: float
    ) -> HealthAnswer:
        """Parse an answer; invalid values count as missing. sent, answered: Unix seconds."""
        facts = {str(k): v for k, v in metadata if isinstance(v, str)}
        try:
            their_time = float(facts.get(_TIME, "nan"))
        except ValueError:
            their_time = math.nan
        protocol = facts.get(_PROTOCOL, "")
        number = int(protocol) if re.fullmatch(r"[0-9]{1,5}", protocol) else _MAX_VERSION
        return cls(
            serving,
            their_time - (sent + answered) / 2 if math.isfinite(their_time) else None,
            number if number < _MAX_VERSION else None,
            "".join(c for c in facts.get(_SOFTWARE, "") if c.isprintable())[:80],
            tuple(re.findall(r"[a-z]{1,20}", facts.get(_PROBLEMS, ""))[:10]),
        )


def health_metadata(software: str, problems: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the metadata of an answer. problems: single words without details, since silos read them."""
    facts = {
        _TIME: f"{time.time():.3f}",
        _PROTOCOL: str(PROTOCOL),
        _SOFTWARE: "".join(c for c in software if " " <= c <= "~")[:80],
        _PROBLEMS: ",".join(problems),
    }
    return tuple(facts.items())
