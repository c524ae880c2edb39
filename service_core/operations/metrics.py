"""Prometheus metrics of a service: names, meanings, samples.

Names follow Prometheus' conventions: base units, `_total` on counters, times as Unix seconds. Labels hold a bounded
number of names of silos, runs, calls and codes; another metric counts those left out.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fl_core.errors.catalogue import EXPLANATIONS
from service_core.console import printable
from service_core.pki.identity import identity_of, parse_certificate
from service_core.storage import disk
from service_core.storage.private_files import Credentials
from service_core.version import PROTOCOL

log = logging.getLogger(__name__)
MAX_VALUES = 100
"""Maximum number of values per label, for instance silos."""
_LABEL_CHARS = 100
_DURATIONS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)
T = TypeVar("T")
Samples = Iterable[tuple[Sequence[str], float]]
"""Label values and the value of the metric."""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric: its name without `_total`, its meaning, its labels."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def durations(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.help, self.labels, registry=registry, buckets=_DURATIONS_S)

    def samples(self, values: Samples) -> Metric:
        made = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in values:
            made.add_metric([printable(label)[:_LABEL_CHARS] for label in labels], value)
        return made

    def one(self, value: float) -> Metric:
        return self.samples([((), value)])


Look = Callable[[], Iterable[Metric]]


@dataclass(eq=False)
class GaugeSnapshot(Collector):
    """Gauges computed at each scrape, in parts: one failing part does not affect the others.

    success: the metric that tells for each part whether it succeeded
    """

    success: MetricFamily
    parts: Mapping[str, Look] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        successes = []
        for name, look in self.parts.items():
            try:
                metrics = list(look())
            except Exception as error:  # a full disk, a locked database: metrics must work just then
                log.warning("metrics: %s failed: %s", name, error)
                successes.append(((name,), 0.0))
            else:
                successes.append(((name,), 1.0))
                yield from metrics
        yield self.success.samples(successes)

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not compute the gauges


def new_registry() -> CollectorRegistry:
    """Make the registry of one service, with the metrics of its process (`process_*`)."""
    # `_created` series would double the number of counters.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(support_collectors_without_names=True)
    ProcessCollector(registry=registry)
    return registry


def code_label(code: str) -> str:
    """Return an error code of the catalogue as a label, any other as `other`."""
    return code if code in EXPLANATIONS else "other"


def bounded(values: Sequence[T]) -> tuple[Sequence[T], int]:
    """Return the first `MAX_VALUES` values, and how many were left out."""
    return values[:MAX_VALUES], max(0, len(values) - MAX_VALUES)


def build(family: MetricFamily, version: str) -> Metric:
    return family.samples([((version, str(PROTOCOL), platform.python_version()), 1.0)])


def disk_room(family: MetricFamily, folder: Path) -> Metric:
    return family.one(disk.available(folder))


def expiries(family: MetricFamily, credentials: Credentials) -> Metric:
    """Return when the certificate in use and the authority's certificate expire."""
    authority = parse_certificate(credentials.ca_pem).not_valid_after_utc
    ends = {"own": identity_of(credentials.cert_pem).not_after, "authority": authority}
    return family.samples(((name,), when.timestamp()) for name, when in ends.items())


def common_families(prefix: str) -> dict[str, MetricFamily]:
    """Return the metrics of both services, by their names without the prefix."""
    families = (
        MetricFamily(
            f"{prefix}_build_info", "gauge", "Always 1; the labels have the versions", ("version", "protocol", "python")
        ),
        MetricFamily(f"{prefix}_ready", "gauge", "Whether the service can do its work: 1 or 0"),
        MetricFamily(
            f"{prefix}_disk_available_bytes",
            "gauge",
            "Bytes that may still be written in the home: free space minus the reserve; may be negative",
        ),
        MetricFamily(
            f"{prefix}_certificate_expiry_timestamp_seconds",
            "gauge",
            "Unix time at which a certificate expires: the service's own, or the authority's",
            ("certificate",),
        ),
        MetricFamily(
            f"{prefix}_lookup_success",
            "gauge",
            "Whether this part of the metrics could be computed: 1 or 0; if 0, its metrics are missing",
            ("part",),
        ),
    )
    return {family.name.removeprefix(f"{prefix}_"): family for family in families}


def table(families: Iterable[MetricFamily]) -> str:
    """Return the metrics as a Markdown table."""
    rows = [
        f"| `{f.shown_name}` | {f.kind} | {', '.join(f'`{label}`' for label in f.labels)} | {f.help} |"
        for f in families
    ]
    return "\n".join(["| metric | type | labels | |", "|---|---|---|---|", *rows]) + "\n"
