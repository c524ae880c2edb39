"""Metrics of a hospital's service for its monitoring; docs/operations/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from fl_core.types.enums import TaskKind
from service_core.operations import metrics
from service_core.operations.metrics import GaugeSnapshot, MetricFamily
from service_core.storage.private_files import Credentials
from service_core.version import software
from silo.events import EmitEvent, SiloEvent

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger

_P = "consilium_silo"
_COMMON = metrics.common_families(_P)
CONNECTED = MetricFamily(f"{_P}_connected", "gauge", "Whether there is a session with the coordinator: 1 or 0")
ROUND_SECONDS = MetricFamily(
    f"{_P}_round_training_seconds",
    "histogram",
    "Seconds of computation per round, for rounds without an error",
    ("kind",),
)
UPDATES = MetricFamily(f"{_P}_updates_sent", "counter", "Updates for which the coordinator sent a receipt")
REFUSALS = MetricFamily(f"{_P}_refusals", "counter", "Tasks that this hospital refused, by error code", ("code",))
ERRORS = MetricFamily(f"{_P}_errors", "counter", "Failed calls and lost sessions, by error code", ("code",))
SENT = MetricFamily(f"{_P}_sent_bytes", "counter", "Bytes of updates sent")
RECEIVED = MetricFamily(f"{_P}_received_bytes", "counter", "Bytes of models and manifests received")
SPENT = MetricFamily(
    f"{_P}_privacy_spent_epsilon",
    "gauge",
    "Epsilon that a collection has spent, at the delta of its budget (only with --metrics-budgets)",
    ("collection",),
)
BUDGET = MetricFamily(
    f"{_P}_privacy_budget_epsilon",
    "gauge",
    "Epsilon of a collection's budget (only with --metrics-budgets)",
    ("collection",),
)
USED = MetricFamily(
    f"{_P}_privacy_budget_used_ratio",
    "gauge",
    "Used share of a collection's budget (only with --metrics-budgets)",
    ("collection",),
)
LEFT_OUT = MetricFamily(
    f"{_P}_label_values_left_out",
    "gauge",
    f"Number of collections left out because only {metrics.MAX_VALUES} are shown (only with --metrics-budgets)",
    ("label",),
)
FAMILIES = (
    *(_COMMON[name] for name in ("build_info", "ready")),
    CONNECTED,
    ROUND_SECONDS,
    UPDATES,
    REFUSALS,
    ERRORS,
    SENT,
    RECEIVED,
    *(_COMMON[name] for name in ("disk_available_bytes", "certificate_expiry_timestamp_seconds")),
    SPENT,
    BUDGET,
    USED,
    LEFT_OUT,
    _COMMON["lookup_success"],
)


class SiloMetrics:
    """Counts events from the start; after `watch`, other values are read when scraped. Thread-safe."""

    def __init__(self) -> None:
        self.registry = metrics.new_registry()
        self._rounds = ROUND_SECONDS.durations(self.registry)
        self._updates = UPDATES.counter(self.registry)
        self._refusals = REFUSALS.counter(self.registry)
        self._errors = ERRORS.counter(self.registry)
        self._sent = SENT.counter(self.registry)
        self._received = RECEIVED.counter(self.registry)
        for task in TaskKind:
            self._rounds.labels(task.value)

    @property
    def traffic(self) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Return callbacks for the bytes sent and the bytes received."""
        return self._sent.inc, self._received.inc

    def counting(self, emit: EmitEvent) -> EmitEvent:
        """Return a function that counts an event and passes it on."""

        def both(event: SiloEvent) -> None:
            self._count(event)
            emit(event)

        return both

    def computed(self, kind: TaskKind, seconds: float) -> None:
        """Record the seconds of computation for a round."""
        self._rounds.labels(kind.value).observe(seconds)

    def watch(
        self,
        home: Path,
        problems: Callable[[], Iterable[str]],
        credentials: Callable[[], Credentials],
        ledger: Callable[[], Ledger | None] | None,
    ) -> None:
        """Report this service's state from now on. ledger: returns the ledger; None omits the spending."""
        build, room, ends = (
            _COMMON[name] for name in ("build_info", "disk_available_bytes", "certificate_expiry_timestamp_seconds")
        )

        def state() -> Iterable[Metric]:
            current = tuple(problems())
            return [_COMMON["ready"].one(float(not current)), CONNECTED.one(float("disconnected" not in current))]

        parts: dict[str, Callable[[], Iterable[Metric]]] = {
            "build": lambda: [metrics.build(build, software())],
            "state": state,
            "disk": lambda: [metrics.disk_room(room, home)],
            "certificates": lambda: [metrics.expiries(ends, credentials())],
        }
        if ledger is not None:
            parts["ledger"] = lambda: _spending(ledger())
        self.registry.register(GaugeSnapshot(_COMMON["lookup_success"], parts))

    def _count(self, event: SiloEvent) -> None:
        code = metrics.code_label(str(event.facts.get("code") or ""))
        if event.event == "sent":
            self._updates.inc()
        elif event.event == "refused":
            self._refusals.labels(code).inc()
        elif event.event in ("trouble", "disconnected"):
            self._errors.labels(code).inc()


def _spending(ledger: Ledger | None) -> Iterable[Metric]:
    names, left_out = metrics.bounded([] if ledger is None else ledger.collections())
    statuses = [ledger.status(name, prv=False) for name in names] if ledger is not None else []
    yield SPENT.samples(((s.collection,), s.spent_rdp) for s in statuses)
    yield BUDGET.samples(((s.collection,), s.epsilon) for s in statuses if s.epsilon is not None)
    yield USED.samples(((s.collection,), s.used) for s in statuses if s.used is not None)
    yield LEFT_OUT.samples([(("collection",), left_out)])
