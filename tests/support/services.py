"""The hospital's service as tests start it: over a channel of theirs, and quick.

Equal runs are measured once in a process, and what is installed is looked up once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import grpc

from fl_core.extensions import registry
from fl_core.rounds.silo_round import run_silo_round
from service_core.tls.causes import Diagnosis
from silo.connection.transfer import RetryPolicy
from silo.events import SiloEvent
from silo.service.service import Service
from silo.settings import SiloSettings
from silo.training.trainer import PreparedRun, RunRound


def service(
    settings: SiloSettings,
    notices: list[SiloEvent],
    retry_policy: RetryPolicy,
    channel: Callable[[], grpc.Channel],
    run_round: RunRound | None = run_silo_round,
    clock: Callable[[], float] = time.monotonic,
) -> Service:
    """Make a service that talks over a channel, and tells of itself in a list.

    run_round: the arithmetic of a round, in a thread of the service; None: as it is, in a worker's process.
    """
    well, plain = Diagnosis(None, "works", "all is well"), registry.entry_points
    registry.entry_points = lambda kinds=registry.KINDS: _installed(tuple(kinds), tuple(sys.path))
    try:
        return Service(settings, notices.append, retry_policy, lambda _: channel(), lambda _: well, run_round, clock)
    finally:
        registry.entry_points = plain


@cache
def _installed(kinds: Sequence[str], path: Sequence[str], look: Any = registry.entry_points) -> list[Any]:
    del path  # where it was looked
    return look(kinds)


def _measured_once(measure: Callable[[PreparedRun], Any]) -> cached_property[Any]:
    known: dict[object, Any] = {}

    def measured(prepared: PreparedRun) -> Any:
        key = prepared.run.manifest.digest(), prepared.index, prepared.device
        if key not in known:
            known[key] = measure(prepared)
        return known[key]

    made = cached_property(measured)
    made.__set_name__(PreparedRun, "step_memory")
    return made


PreparedRun.step_memory = _measured_once(PreparedRun.step_memory.func)  # type: ignore[method-assign, attr-defined]
