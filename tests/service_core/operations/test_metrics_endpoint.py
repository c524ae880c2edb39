"""The metrics port: what it answers, whom it refuses, and that nobody can hold it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fl_core.errors import ConfigError, StateError
from service_core.loopback import LoopbackAddress
from service_core.operations import metrics
from service_core.operations.metrics import GaugeSnapshot, MetricFamily
from service_core.operations.metrics_endpoint import MetricsEndpoint
from tests.support import until
from tests.support.pages import Scrape, ask, get

pytestmark = pytest.mark.integration

HERE = LoopbackAddress("127.0.0.1", 0)


class Counted(Collector):
    """A metric that counts how often it was computed."""

    def __init__(self) -> None:
        self.times = 0
        self.free = threading.Event()
        self.free.set()

    def collect(self):
        self.times += 1
        assert self.free.wait(10)
        yield GaugeMetricFamily("times", "how often this was computed", self.times)

    def describe(self):
        return ()


class Port:
    """A port that is open, and what stands behind it."""

    def __init__(self, **times: float) -> None:
        self.counted, self.lives, self.problems = Counted(), True, ()
        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(self.counted)
        self.endpoint = MetricsEndpoint(registry, lambda: self.lives, lambda: self.problems, **times)
        self.at = self.endpoint.open(HERE)

    def connect(self, stack: ExitStack) -> socket.socket:
        return stack.enter_context(socket.create_connection((self.at.host, self.at.port), 5))


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.endpoint.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("9464", "127.0.0.1:9464"),
        ("127.0.0.1:9464", "127.0.0.1:9464"),
        ("127.8.8.8:1", "127.8.8.8:1"),
        ("localhost:9464", "127.0.0.1:9464"),
        ("LOCALHOST:0", "127.0.0.1:0"),
        ("[::1]:9464", "[::1]:9464"),
    ],
)
def test_a_bare_port_means_loopback_and_loopback_addresses_are_taken(text: str, shown: str) -> None:
    assert str(LoopbackAddress.parse(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0:9464",
        "[::]:9464",
        "10.0.0.7:9464",
        "fl.example.org:9464",
        "localhost.example.org:1",
        "127.1:9",
        "[fe80::1]:9",
    ],
)
def test_an_address_that_others_reach_is_refused_and_the_error_says_why(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no certificate.*proxy") as found:
        LoopbackAddress.parse(text)
    assert found.value.code == "E-CFG-02"


@pytest.mark.parametrize("text", ["", ":9464", "65536", "-1", "1/metrics", "127.0.0.1:", "::1:9464", "٩٤", "9464\n"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a port or an address"):
        LoopbackAddress.parse(text)


def test_a_port_that_another_program_has_is_refused(port: Port) -> None:
    other = MetricsEndpoint(CollectorRegistry(), lambda: True, tuple)
    with pytest.raises(StateError, match="E-NET-20"):
        other.open(port.at)
    other.close()


def test_only_three_pages_are_answered_and_only_to_get(port: Port) -> None:
    assert get(port.at, "/metrics")[0] == 200
    assert get(port.at, "/metrics?name[]=times")[0] == 200
    assert get(port.at, "/healthz") == (200, "ok\n")
    assert get(port.at, "/readyz") == (200, "ok\n")
    for path in ("/", "/metrics/", "/../etc/passwd", "/metrics%00", "http://127.0.0.1/metrics", "*"):
        assert get(port.at, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "get"):
        assert get(port.at, "/metrics", method=method)[0] == 405


def test_health_and_readiness_are_told_apart(port: Port) -> None:
    port.problems = ("disk", "stopping")
    assert get(port.at, "/healthz")[0] == 200
    assert get(port.at, "/readyz") == (503, "disk stopping\n")
    port.lives = False
    assert get(port.at, "/healthz")[0] == 503


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:9464", 200),
        ("[::1]:9464", 200),
        ("[::1]", 200),
        ("evil.example.org", 403),
        ("evil.example.org:9464", 403),
        ("127.0.0.1.evil.example.org", 403),
        ("localhost.evil.example.org", 403),
        ("127.0.0.1@evil.example.org", 403),
        ("10.0.0.7", 403),
        ("[::]", 403),
        (" ", 403),
    ],
)
def test_a_name_that_is_not_this_machines_loopback_is_refused(port: Port, host: str, status: int) -> None:
    found, body = get(port.at, "/metrics", host)
    assert found == status
    assert ("times" in body) is (status == 200)


def test_a_request_with_two_hosts_or_none_is_refused(port: Port) -> None:
    for hosts in (b"", b"Host: 127.0.0.1\r\nHost: evil.example.org\r\n"):
        assert ask(port.at, b"GET /metrics HTTP/1.1\r\n%b\r\n" % hosts)[0] == 421


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET /" + b"m" * 20_000])
def test_what_is_no_request_or_too_long_is_refused(port: Port, raw: bytes) -> None:
    assert ask(port.at, raw)[0] == 400
    assert get(port.at, "/metrics")[0] == 200


@pytest.mark.fault("a scraper", "holds 2,000 idle connections", "the next one is answered at once")
def test_idle_connections_keep_nobody_out(port: Port) -> None:
    with ExitStack() as stack:
        first = port.connect(stack)
        first.sendall(b"G")  # a request that does not end
        threads = threading.active_count()
        for _ in range(2000):
            port.connect(stack)
        assert Scrape.of(port.at)["times"] == 1
        assert threading.active_count() <= threads + 1
        first.settimeout(10)
        with suppress(ConnectionError):  # the oldest made room
            assert first.recv(1) == b""


@pytest.mark.fault(
    "a scraper", "requests metrics without pause", "they are computed once per second, and the service continues"
)
def test_a_flood_of_scrapes_is_one_computation() -> None:
    port = Port(every_s=60.0)
    try:
        answers = [Scrape.of(port.at)["times"] for _ in range(50)]
        assert answers == [1.0] * 50
        assert port.counted.times == 1
    finally:
        port.endpoint.close()


def test_metrics_that_take_long_hold_up_no_other_page(port: Port) -> None:
    port.counted.free.clear()
    found: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: found.append(get(port.at, "/metrics")))
    asking.start()
    until(lambda: port.counted.times >= 1)
    assert get(port.at, "/readyz")[0] == 200
    port.counted.free.set()
    asking.join()
    assert found[0][0] == 200


def test_an_answer_that_nobody_reads_ends(port: Port) -> None:
    with socket.create_connection((port.at.host, port.at.port), 5) as line:
        line.sendall(f"GET /metrics HTTP/1.1\r\nHost: {port.at}\r\n\r\n".encode())
        until(lambda: port.counted.times >= 1)
    assert get(port.at, "/metrics")[0] == 200


def test_closing_twice_and_with_a_connection_open_ends_at_once(port: Port) -> None:
    with socket.create_connection((port.at.host, port.at.port), 5):
        port.endpoint.close()
        port.endpoint.close()
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection((port.at.host, port.at.port), 1).close()


def test_a_part_that_cannot_be_looked_up_is_said_and_the_others_are_there() -> None:
    well = MetricFamily("well", "gauge", "a part that can be looked up")
    success = MetricFamily("lookup_success", "gauge", "whether it could be", ("part",))

    def ill():
        raise OSError("the disk is gone")

    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(GaugeSnapshot(success, {"ill": ill, "well": lambda: [well.one(3.0)]}))
    endpoint = MetricsEndpoint(registry, lambda: True, tuple)
    try:
        found = Scrape.of(endpoint.open(HERE))
    finally:
        endpoint.close()
    assert found == {"well": 3.0, "lookup_success{part=ill}": 0.0, "lookup_success{part=well}": 1.0}


def test_values_of_labels_from_elsewhere_cannot_begin_a_line_and_are_bounded() -> None:
    family = MetricFamily("kept", "gauge", "of somebody", ("who",))
    hostile = ['a"} 1\nkept{who="b', "\x1b[2J", "x" * 5000, "\\"]
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(
        GaugeSnapshot(
            MetricFamily("s", "gauge", "", ("part",)), {"p": lambda: [family.samples(((h,), 1.0) for h in hostile)]}
        )
    )
    endpoint = MetricsEndpoint(registry, lambda: True, tuple)
    try:
        found = Scrape.of(endpoint.open(HERE))
    finally:
        endpoint.close()
    assert len(found.labels("kept")) == len(hostile)
    assert all(label.isprintable() and len(label) < 200 for label in found.labels("kept"))
    assert metrics.bounded(list(range(250))) == (list(range(100)), 150)


@pytest.mark.parametrize(("code", "label"), [("E-NET-12", "E-NET-12"), ("E-XYZ-99", "other"), ("", "other")])
def test_a_code_that_the_catalogue_does_not_have_is_one_label(code: str, label: str) -> None:
    assert metrics.code_label(code) == label
