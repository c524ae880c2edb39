"""The events of a run and the lines of the audit log that name it, by time."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coordinator.lead.as_json import event_json
from coordinator.lead.client import LeadClient, is_live
from coordinator.lead.tables import place
from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.audit_log.lines import ALLOWED, LogLine
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.console import local_time, printable

_LOOK_S = 0.5
_LOOKS = ("Lead/Show", "Lead/Watch")
"""Read-only calls of leads, including this command's; `coordinator log show` has them."""
_ABOUT = re.compile(r"(?:^|\s)run(?:_id)?=(\S+)")


@dataclass(frozen=True, slots=True)
class RunLine:
    """An event or an audit line."""

    at: float
    event: pb.Event | None = None
    audit: LogLine | None = None


@dataclass(slots=True)
class AuditTail:
    """Reads the lines of a home's audit log that name a run, each once. names: the run's id, and its name.

    Successful read-only calls of leads are left out. Invalid lines are skipped: `log verify` reports them.
    """

    home: Path
    names: frozenset[str]
    since: float = 0.0
    _last: int = 0

    def fresh(self) -> Iterator[LogLine]:
        if not (self.home / FOLDER).is_dir():
            return
        with closing(AuditLog(self.home / FOLDER)) as log:
            for line in log.lines(self._last):
                self._last = line.number
                named = self.names.intersection(_ABOUT.findall(line.entry.about))
                looked = line.entry.what in _LOOKS and line.entry.outcome == ALLOWED
                if named and not looked and line.at >= self.since:
                    yield line


def run_lines(client: LeadClient, home: Path, run: str, follow: bool) -> Iterator[RunLine]:
    """Yield a run's history, oldest first; with `follow` also new entries until the run has ended.

    Raises ConfigError (E-RUN-10) on an unknown run, UnavailableError if the service stays away.
    """
    info = client.show(run).info
    tail = AuditTail(home, frozenset((info.run_id, info.name)), int(info.created_unix))
    events = client.events(info.run_id)
    lines = [RunLine(event.at_unix, event=event) for event in events]
    lines += [RunLine(line.at, audit=line) for line in tail.fresh()]
    yield from sorted(lines, key=lambda line: line.at)
    if follow:
        yield from _followed(client, info.run_id, max((event.number for event in events), default=0), tail)


def _followed(client: LeadClient, run_id: str, last: int, tail: AuditTail) -> Iterator[RunLine]:
    arrived: queue.Queue[pb.Event | FederationError | None] = queue.Queue()

    def watch() -> None:
        try:
            for event in client.watch(run_id, last):
                arrived.put(event)
            arrived.put(None)
        except FederationError as error:
            arrived.put(error)

    threading.Thread(target=watch, daemon=True).start()
    over = False
    while not over:
        try:
            news = arrived.get(timeout=_LOOK_S)
        except queue.Empty:
            pass
        else:
            if isinstance(news, FederationError):
                raise news
            over = news is None
            if news is not None and not is_live(news):
                yield RunLine(news.at_unix, event=news)
        yield from (RunLine(line.at, audit=line) for line in tail.fresh())


def line_json(line: RunLine) -> dict[str, object]:
    """Convert an event or a line of the audit log for machines; `source` says which it is."""
    if line.event is not None:
        return {"source": "event", **event_json(line.event)}
    assert line.audit is not None
    entry = line.audit.entry
    named = {name: getattr(entry, name) for name in ("who", "what", "about", "outcome", "code", "address", "bytes")}
    return {"source": "audit", "number": line.audit.number, "at": line.at, **{k: v for k, v in named.items() if v}}


def line_text(line: RunLine, rounds: int) -> str:
    """Convert an event or a line of the audit log for people. rounds: of the run."""
    if line.event is not None:
        event = line.event
        words = [event.kind, place(event, rounds), event.silo, event.text]
    else:
        assert line.audit is not None
        entry = line.audit.entry
        words = ["audit", entry.who, entry.what, entry.about, entry.outcome, entry.code]
    return "  ".join([local_time(line.at), *(printable(word) for word in words if word)])
