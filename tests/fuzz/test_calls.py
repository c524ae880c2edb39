"""A short pass of every call; `python -m tests.fuzz Transfer.Put` is a long one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.fuzz.calls import METHODS, Service, payloads, samples, service

EXAMPLES = 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("fuzz") / "home") as made:
        yield made


@pytest.mark.fault(
    "a hospital or a lead",
    "sends arbitrary bytes or numbers in any call",
    "an answer, an error with a code, or gRPC's own error for malformed messages",
)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("peer", ["north", "lead"])
def test_any_message_gets_an_answer_or_an_error_of_ours(running: Service, name: str, peer: str) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=[*HealthCheck])
    @given(payloads(name))
    def attempt(sent: list[bytes]) -> None:
        running.call(name, peer, sent)

    for data in ([m.SerializeToString() for m in samples(name)], [b"\xff" * 9]):
        attempt = example(data)(attempt)
    attempt()
