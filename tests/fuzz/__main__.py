"""Fuzz decoders and calls for a while: python -m tests.fuzz TARGET ... --minutes 10 --seed 1; `all` for every one."""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.fuzz.calls import METHODS, payloads, service  # noqa: E402
from tests.fuzz.limits import HangError, limited  # noqa: E402
from tests.fuzz.mutations import any_bytes  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402

_AT_ONCE = 200


def main(words: list[str]) -> int:
    """Fuzz each target for so many minutes; return 1 where one broke, with the bytes that broke it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=["all", *TARGETS, *METHODS], metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in ("coordinator", "consilium", "protos"):  # they say thousands of refusals
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    chosen = [*TARGETS, *METHODS] if "all" in asked.targets else asked.targets
    broken = 0
    with TemporaryDirectory(prefix="consilium-fuzz-") as folder:
        for name in chosen:
            tried, wrong = (_decoder if name in TARGETS else _call)(name, asked.minutes, asked.seed, Path(folder))
            print(f"{name}: {tried} inputs, {wrong or 'all held'}", flush=True)
            broken += bool(wrong)
    return int(bool(broken))


def _decoder(name: str, minutes: float, number: int, folder: Path) -> tuple[int, str]:
    del folder
    target = TARGETS[name]

    def attempt(data: bytes) -> None:
        with limited(target.memory):
            target.run(data)

    return _repeat(any_bytes(target.samples(), target.is_json), attempt, minutes, number)


def _call(name: str, minutes: float, number: int, folder: Path) -> tuple[int, str]:
    with service(folder / name) as running:
        both = st.tuples(st.sampled_from(("north", "lead")), payloads(name))
        return _repeat(both, lambda given: running.call(name, *given), minutes, number)


def _repeat(
    inputs: st.SearchStrategy[Any], attempt: Callable[[Any], None], minutes: float, number: int
) -> tuple[int, str]:
    """Try inputs until the time is over or one breaks; return how many, and what broke with the smallest input."""
    tried, deadline, last = 0, time.monotonic() + 60 * minutes, b""

    def counted(data: Any) -> None:
        nonlocal tried, last
        tried, last = tried + 1, data
        attempt(data)

    while time.monotonic() < deadline:
        run = settings(max_examples=_AT_ONCE, deadline=None, database=None, suppress_health_check=[*HealthCheck])(
            given(inputs)(counted)
        )
        try:
            seed(number)(run)()
        except (Exception, HangError) as error:
            return tried, f"{type(error).__name__}: {error}\n  with {last!r}"
        number += 1
    return tried, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
