"""Events of a silo as lines of its log."""

from __future__ import annotations

import logging

from protos.operations.logs import FIELDS
from silo.events import Event

log = logging.getLogger("silo")
_WARNINGS = frozenset({"trouble", "refused", "disconnected", "held", "stopped", "charged"})
_MEASURED = {"staged": "the update is finished and waits to be sent"}
"""Events whose text tells what was measured on the hospital's images: the log has another."""


def log_event(event: Event, silo: str) -> None:
    """Write an event to the log, without what was measured here."""
    facts = {name: event.facts[name] for name in FIELDS if event.facts.get(name) is not None}
    extra = {"silo": silo} | facts | {"event": event.event}
    level = logging.WARNING if event.event in _WARNINGS else logging.INFO
    log.log(level, "%s", _MEASURED.get(event.event, event.text), extra=extra)
