"""A service whose clock is wrong: python -m tests.chaos.shifted HOURS coordinator|silo WORDS.

Shifts what our Python code and its libraries read. TLS goes on reading the machine's own clock, and so does gRPC, which
counts its deadlines by it.
"""

from __future__ import annotations

import datetime
import sys
import time
from types import ModuleType
from typing import Any

from service_core.tls.connect import require_tls13, silence_grpc_logs


def shift(seconds: float) -> None:
    """Let everything but gRPC read a clock that is wrong by so many seconds."""
    require_tls13()  # before anything imports gRPC
    silence_grpc_logs()
    import grpc.aio  # noqa: F401 - so that it is there when modules are looked at

    right = ModuleType("time")
    right.__dict__.update(time.__dict__)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = right  # type: ignore[attr-defined]
    actual = datetime.datetime

    class AnyDatetime(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, actual)

    class Shifted(actual, metaclass=AnyDatetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return actual.now(tz) + datetime.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return actual.utcnow() + datetime.timedelta(seconds=seconds)

    time.time = lambda: right.time() + seconds
    time.time_ns = lambda: right.time_ns() + int(seconds * 1e9)
    time.gmtime = lambda at=None: right.gmtime(time.time() if at is None else at)  # type: ignore[assignment]
    time.localtime = lambda at=None: right.localtime(time.time() if at is None else at)  # type: ignore[assignment]
    datetime.datetime = Shifted  # type: ignore[misc]


def main() -> None:
    shift(3600 * float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "coordinator":
        from coordinator.cli.main import main as run
    else:
        from silo.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
