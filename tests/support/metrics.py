"""Asking a service's metrics port, as a monitoring system does and as one would not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from service_core.operations.metrics_endpoint import LoopbackAddress


def ask(at: LoopbackAddress, raw: bytes, seconds: float = 10.0) -> tuple[int, str]:
    """Send bytes and read until the end; return status and body, status 0 where nothing came."""
    with socket.create_connection((at.host, at.port), seconds) as line:
        line.sendall(raw)
        found = b""
        while piece := line.recv(1 << 16):
            found += piece
    head, _, body = found.decode().partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def get(at: LoopbackAddress, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    return ask(at, f"{method} {path} HTTP/1.1\r\nHost: {host or at}\r\nAccept: */*\r\n\r\n".encode())


class Scrape(dict[str, float]):
    """The samples of one answer, by name and sorted labels: `name` or `name{label=value,...}`."""

    @classmethod
    def of(cls, at: LoopbackAddress) -> Scrape:
        status, body = get(at, "/metrics")
        assert status == 200, body
        found = cls()
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                key = f"{sample.name}{{{labels}}}" if labels else sample.name
                assert key not in found, f"{key} twice"
                found[key] = sample.value
        return found

    def labels(self, name: str) -> list[str]:
        """List the labels with which a metric is there."""
        return sorted(key.removeprefix(name).strip("{}") for key in self if key.partition("{")[0] == name)


def until_scraped(at: LoopbackAddress, holds: Callable[[Scrape], Any], seconds: float = 20.0) -> Scrape:
    """Scrape until a condition holds: an answer may be a second old."""
    from tests.support import until

    seen: list[Scrape] = []

    def look() -> bool:
        seen.append(Scrape.of(at))
        return bool(holds(seen[-1]))

    until(look, f"in {seen[-1:]}", seconds, every=0.1)
    return seen[-1]
