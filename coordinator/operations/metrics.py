"""Metrics of the coordinator for an operator's monitoring; docs/operations/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from coordinator.operations.health import PROBLEMS, Readiness
from coordinator.storage.records import RoundRow, RunState
from fl_core.types.enums import TaskKind
from service_core.operations import metrics
from service_core.operations.metrics import GaugeSnapshot, MetricFamily
from service_core.pki.identity import CertificateRole
from service_core.storage.private_files import Credentials

if TYPE_CHECKING:
    from coordinator.runs.dispatcher import Dispatcher
    from coordinator.storage.store import CoordinatorStore

_P = "consilium_coordinator"
_COMMON = metrics.common_families(_P)
PROBLEM = MetricFamily(
    f"{_P}_problem", "gauge", "Whether this problem keeps the service from working: 1 or 0", ("problem",)
)
MEMBERS = MetricFamily(f"{_P}_members", "gauge", "Number of hospitals that are enrolled and not revoked")
CONNECTED = MetricFamily(f"{_P}_silos_connected", "gauge", "Number of hospitals that have a session now")
SILO_CONNECTED = MetricFamily(
    f"{_P}_silo_connected", "gauge", "Whether a hospital has a session now: 1 or 0", ("silo",)
)
SILO_EXPIRY = MetricFamily(
    f"{_P}_silo_certificate_expiry_timestamp_seconds",
    "gauge",
    "Unix time at which a hospital's newest certificate expires",
    ("silo",),
)
LIVE = (RunState.WAITING, RunState.RUNNING, RunState.PAUSED)
RUNS = MetricFamily(f"{_P}_runs", "gauge", "Number of runs by state", ("state",))
RUN_CLOSED = MetricFamily(
    f"{_P}_run_rounds_closed",
    "gauge",
    "Closed rounds of a waiting, running or paused run",
    ("run",),
)
RUN_PLANNED = MetricFamily(
    f"{_P}_run_rounds_planned", "gauge", "Planned rounds of a waiting, running or paused run", ("run",)
)
LEFT_OUT = MetricFamily(
    f"{_P}_label_values_left_out",
    "gauge",
    f"Number of silos or runs left out because only {metrics.MAX_VALUES} are shown",
    ("label",),
)
ROUND_SECONDS = MetricFamily(
    f"{_P}_round_duration_seconds",
    "histogram",
    "Seconds from the opening of a round to its close, for rounds that closed since the service started",
    ("kind",),
)
CALLS = MetricFamily(f"{_P}_calls", "counter", "Received calls, including refused ones", ("call",))
UNDER_WAY = MetricFamily(f"{_P}_calls_under_way", "gauge", "Calls in progress, including open streams", ("call",))
REFUSALS = MetricFamily(f"{_P}_refusals", "counter", "Calls that ended with an error, by error code", ("code",))
RECEIVED = MetricFamily(f"{_P}_received_bytes", "counter", "Bytes of updates that hospitals sent")
SENT = MetricFamily(f"{_P}_sent_bytes", "counter", "Bytes of models and manifests sent, by receiver", ("role",))
FAMILIES = (
    *(_COMMON[name] for name in ("build_info", "ready")),
    PROBLEM,
    MEMBERS,
    CONNECTED,
    SILO_CONNECTED,
    RUNS,
    RUN_CLOSED,
    RUN_PLANNED,
    ROUND_SECONDS,
    CALLS,
    UNDER_WAY,
    REFUSALS,
    RECEIVED,
    SENT,
    *(_COMMON[name] for name in ("disk_available_bytes", "certificate_expiry_timestamp_seconds")),
    SILO_EXPIRY,
    LEFT_OUT,
    _COMMON["lookup_success"],
)


class CoordinatorMetrics:
    """Counts events from the start; after `watch`, other values are read when scraped. Thread-safe."""

    def __init__(self) -> None:
        self.registry = metrics.new_registry()
        self._calls = CALLS.counter(self.registry)
        self._under_way = UNDER_WAY.gauge(self.registry)
        self._refusals = REFUSALS.counter(self.registry)
        self._received = RECEIVED.counter(self.registry)
        self._sent = SENT.counter(self.registry)
        self._rounds = ROUND_SECONDS.durations(self.registry)
        for kind in (CertificateRole.SILO, CertificateRole.LEAD):
            self._sent.labels(kind.value)
        for task in TaskKind:
            self._rounds.labels(task.value)

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Count a call inside the block. method: one that the service has."""
        name = method.removeprefix("/consilium.v1.").removeprefix("/")
        self._calls.labels(name).inc()
        with self._under_way.labels(name).track_inprogress():
            yield

    def refused(self, code: str) -> None:
        self._refusals.labels(metrics.code_label(code)).inc()

    def received(self, size: int) -> None:
        self._received.inc(size)

    def sent_to(self, role: CertificateRole) -> Callable[[int], None]:
        return self._sent.labels(role.value).inc

    def round_closed(self, row: RoundRow) -> None:
        """Count a round, which may have been opened before a restart."""
        self._rounds.labels(row.record.kind.value).observe(max(0.0, row.closed - row.opened))

    def watch(
        self,
        home: Path,
        store: CoordinatorStore,
        dispatcher: Dispatcher,
        readiness: Readiness,
        certificate: Callable[[], Credentials],
        software: str,
    ) -> None:
        """Report this service's state from now on."""
        looks = _Looks(store, dispatcher, readiness)
        build, room, ends = (
            _COMMON[name] for name in ("build_info", "disk_available_bytes", "certificate_expiry_timestamp_seconds")
        )
        parts: dict[str, Callable[[], Iterable[Metric]]] = {
            "build": lambda: [metrics.build(build, software)],
            "readiness": looks.readiness,
            "silos": looks.silos,
            "runs": looks.runs,
            "disk": lambda: [metrics.disk_room(room, home)],
            "certificates": lambda: [metrics.expiries(ends, certificate())],
        }
        self.registry.register(GaugeSnapshot(_COMMON["lookup_success"], parts))


class _Looks:
    """The values that are read when the metrics are scraped."""

    def __init__(self, store: CoordinatorStore, dispatcher: Dispatcher, readiness: Readiness) -> None:
        self._store, self._dispatcher, self._readiness = store, dispatcher, readiness

    def readiness(self) -> Iterable[Metric]:
        problems = self._readiness.problems()
        yield _COMMON["ready"].one(float(not problems))
        yield PROBLEM.samples(((word,), float(word in problems)) for word in PROBLEMS)

    def silos(self) -> Iterable[Metric]:
        members = [silo for silo in self._store.members.silos() if not silo.revoked]
        here = self._dispatcher.connected()
        shown, left_out = metrics.bounded(members)
        yield MEMBERS.one(len(members))
        yield CONNECTED.one(len(here))
        yield SILO_CONNECTED.samples(((silo.name,), float(silo.name in here)) for silo in shown)
        yield SILO_EXPIRY.samples(((silo.name,), silo.certificate.until) for silo in shown)
        yield LEFT_OUT.samples([(("silo",), left_out), (("run",), self._runs_left_out())])

    def _runs_left_out(self) -> int:
        counts = self._store.runs.counts()
        return max(0, sum(counts[state] for state in LIVE) - metrics.MAX_VALUES)

    def runs(self) -> Iterable[Metric]:
        yield RUNS.samples(((state.value,), count) for state, count in self._store.runs.counts().items())
        progress = self._store.runs.progress(LIVE, metrics.MAX_VALUES)
        yield RUN_CLOSED.samples(((run_id,), closed) for run_id, closed, _ in progress)
        yield RUN_PLANNED.samples(((run_id,), planned) for run_id, _, planned in progress)
