"""The newest facts of a running service: fetched while a page is open, and kept with their date if it is away."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from consilium.pages.lead.run_record import WatchedRun
from coordinator.lead.client import LeadClient
from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)
REFRESH_S = 2.0
"""Age after which facts are fetched again, while a page is open."""
_PATIENCE_S = 3.0
"""Longest wait of a page for newer facts before it shows the old ones."""
_LOOKED_S = 30.0
"""How long a run is followed after its page was last loaded."""
_MAX_RUNS, _MAX_EVENTS = 12, 2000
_COUNTDOWN_S = 10.0
"""Interval at which pages with a countdown are refreshed."""


@dataclass(frozen=True, slots=True)
class ServiceUnreachable:
    """Since when the service has not answered, and why."""

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """A run whose page is open. events: the newest ones   last: the number of the last event."""

    record: WatchedRun
    events: Sequence[pb.Event] = ()
    last: int = 0


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """The service's last answers. at: when, None if there was none   away: set while the service does not answer."""

    at: float | None = None
    silos: Sequence[pb.SiloInfo] = ()
    invitations: Sequence[pb.InvitationInfo] = ()
    runs: Sequence[pb.RunInfo] = ()
    away: ServiceUnreachable | None = None

    def run(self, run_id: str) -> pb.RunInfo | None:
        return next((run for run in self.runs if run.run_id == run_id), None)


class ServiceWatch:
    """Queries the service in its own thread, and only while a page is open. connect: creates a client, or raises.

    Guarantees: no method raises because the service is away, and none waits for it longer than three seconds.
    """

    def __init__(self, connect: Callable[[], LeadClient], clock: Callable[[], float] = time.time) -> None:
        self._connect = connect
        self._clock = clock
        self._client: LeadClient | None = None
        self._lock = threading.Condition()
        self._snapshot = ServiceSnapshot()
        self._tried: float | None = None
        self._wanted = False
        self._stopped = False
        self._begun = self._done = 0
        self._looked: dict[str, float] = {}
        self._followed: dict[str, FollowedRun] = {}
        self._thread = threading.Thread(target=self._work, name="service watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        self._thread.join(_PATIENCE_S)  # a pending call ends by its own deadline

    def current(self, fresh: bool = False) -> ServiceSnapshot:
        """Return the newest facts; fetches them again if older than two seconds. fresh: fetch at any age."""
        with self._lock:
            if fresh or self._stale():
                enough = self._begun + 1 if fresh else self._done + 1
                self._want()
                self._lock.wait_for(lambda: self._done >= enough or self._stopped, _PATIENCE_S)
            return self._snapshot

    def follow(self, run_id: str) -> tuple[ServiceSnapshot, FollowedRun | None]:
        """Return the newest facts, and a run's rounds and events or None if they were never fetched."""
        with self._lock:
            new = run_id not in self._followed
            self._looked[run_id] = time.monotonic()
        snapshot = self.current(fresh=new)
        with self._lock:
            return snapshot, self._followed.get(run_id)

    def version(self) -> str:
        """Return a text that changes with the facts, and every ten seconds during a countdown. Never waits."""
        with self._lock:
            if self._stale():
                self._want()
            snapshot, followed = self._snapshot, dict(self._followed)
        digest = hashlib.sha256(repr(snapshot.away is not None).encode())
        for silo in snapshot.silos:
            shown = pb.SiloInfo()
            shown.CopyFrom(silo)
            shown.ClearField("last_seen_unix")
            digest.update(shown.SerializeToString(deterministic=True))
        for run in snapshot.runs:
            digest.update(settled(run).SerializeToString(deterministic=True))
            digest.update(repr((run.waiting.round, run.waiting.there, [s.name for s in run.waiting.silos])).encode())
        digest.update(repr(sorted((name, each.last) for name, each in followed.items())).encode())
        if any(run.waiting.silos for run in snapshot.runs):
            digest.update(str(self._clock() // _COUNTDOWN_S).encode())
        return digest.hexdigest()

    def forget(self, run_id: str) -> None:
        """Fetch a run's facts again, after an order changed it."""
        with self._lock:
            self._followed.pop(run_id, None)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _stale(self) -> bool:
        return self._tried is None or time.monotonic() - self._tried >= REFRESH_S

    def _want(self) -> None:
        self._wanted = True
        self._lock.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._wanted or self._stopped)
                if self._stopped:
                    break
                self._wanted = False
                self._begun += 1
            snapshot = self._next_snapshot()
            with self._lock:
                self._snapshot, self._tried = snapshot, time.monotonic()
                self._done = self._begun
                self._lock.notify_all()
        self._disconnect()

    def _next_snapshot(self) -> ServiceSnapshot:
        before = self._snapshot
        try:
            if self._client is None:
                self._client = self._connect()
            silos, runs = self._client.silos(), self._client.runs()
            snapshot = ServiceSnapshot(self._clock(), silos.silos, silos.invitations, runs)
            self._fetch(self._client, snapshot)
        except FederationError as error:
            why = str(error)
        except Exception as error:  # an invalid answer must not end the page
            log.exception("could not query the service")
            why = f"this page could not read its answer: {error!r}"
        else:
            return snapshot
        self._disconnect()
        since = before.away.since if before.away else self._clock()
        return replace(before, away=ServiceUnreachable(since, why))

    def _fetch(self, client: LeadClient, found: ServiceSnapshot) -> None:
        """Fetch the followed runs that have changed."""
        now = time.monotonic()
        with self._lock:
            self._looked = {name: at for name, at in self._looked.items() if now - at < _LOOKED_S}
            wanted = sorted(self._looked, key=self._looked.__getitem__)[-_MAX_RUNS:]
            kept = {name: self._followed[name] for name in wanted if name in self._followed}
        for name in wanted:
            info, cached = found.run(name), kept.get(name)
            if info is None:
                kept.pop(name, None)
                continue
            same = cached is not None and settled(cached.record.detail.info) == settled(info)
            record = cached.record if cached and same else WatchedRun(client.show(name))
            if same and info.state not in ("waiting", "running"):
                continue
            fresh = client.events(name, cached.last if cached else 0)
            events = [*(cached.events if cached else ()), *fresh][-_MAX_EVENTS:]
            kept[name] = FollowedRun(record, events, events[-1].number if events else 0)
        with self._lock:
            self._followed = kept

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def settled(run: pb.RunInfo) -> pb.RunInfo:
    """Return a run's info without the fields that change while a round is open."""
    info = pb.RunInfo()
    info.CopyFrom(run)
    info.ClearField("waiting")
    info.ClearField("bytes_up")
    info.ClearField("bytes_down")
    return info
