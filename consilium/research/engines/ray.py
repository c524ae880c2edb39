"""Simulation on several processes, GPUs and machines: the silos' rounds run in Ray actors.

Ray is an extra (`consilium-fl[ray]`) and is imported only here, if a simulation uses it. Each actor is a `SiloWorker`,
as with `--workers`. A silo's rounds always run in the same actor, so only that actor has its examples. Its private
state stays with the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import Any, TypeAlias, cast

import torch

from consilium.research.engines.in_process import (
    MemoryStateStore,
    ResumePoint,
    SiloShare,
    StateStore,
    public_test,
    run_rounds,
)
from consilium.research.engines.worker import SiloWorker
from fl_core.errors.extras import require
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, RoundContext, State

Handle: TypeAlias = Any
"""A Ray actor; Ray's types are not available here."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster and its actors.

    address: of a running cluster; None starts one on this machine   actors: their number   cpus, gpus: per actor; may
    be fractions: two actors with gpus=0.5 share one GPU
    """

    address: str | None = None
    actors: int = 2
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(eq=False, slots=True)
class RayPort:
    """A silo whose rounds run in a Ray actor."""

    name: str
    index: int
    actor: Handle
    messages: _MessageCache
    states: StateStore
    server_tracks_state: bool

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        state = self.states.get(self.index)
        reply = self.actor.round.remote(self.messages.reference(msg), (self.index, context, kind, state))
        bundle, after = self.messages.ray.get(reply)
        if after is not None:
            self.states.stage(self.index, after)
        return cast(Bundle, bundle)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:  # noqa: ARG002
        self.states.settle(self.index, included or not self.server_tracks_state)


class _MessageCache:
    """Uploads a round's message to the cluster once for all silos."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray = ray
        self._lock = Lock()
        self._last: tuple[State, object] | None = None

    def reference(self, msg: State) -> object:
        with self._lock:
            if self._last is None or self._last[0] is not msg:
                self._last = (msg, self.ray.put(msg))
            return self._last[1]


def import_ray() -> ModuleType:
    """Import Ray; raises ConfigError (E-CFG-08) with the install command if it is missing."""
    return require("ray", "ray", "--engine ray")


def simulate_ray(
    run: RunSetup,
    shares: Sequence[SiloShare],
    observer: Observer,
    cluster: Cluster | None = None,
    states: StateStore | None = None,
    resume: ResumePoint | None = None,
) -> State:
    """Run a federation on a Ray cluster, from the resume point if given, and return the final server state.

    Guarantees: on one kind of machine, equals `simulate` with the same number of threads bit for bit. Shuts Ray down
    afterwards if it was started here. Raises ConfigError (E-CFG-08) without Ray.
    """
    ray, cluster, states, manifest = import_ray(), cluster or Cluster(), states or MemoryStateStore(), run.manifest
    threads = manifest.threads or torch.get_num_threads()
    started = not ray.is_initialized()
    if started:
        ray.init(address=cluster.address, log_to_driver=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    actors: list[Handle] = []
    try:
        kind = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus)(SiloWorker)
        public = ray.put(public_test(shares)) if manifest.personal else None
        weights = None if run.weights is None else ray.put(dict(run.weights))
        number, device = min(cluster.actors, len(shares)), "cuda" if cluster.gpus > 0 else "cpu"
        for j in range(number):
            worker_shares = {k: shares[k] for k in range(j, len(shares), number)}
            actors.append(kind.remote(manifest.to_json(), weights, worker_shares, public, threads, device))
        messages = _MessageCache(ray)
        ports = [
            RayPort(m.name, k, actors[k % number], messages, states, run.method.server_tracks_state)
            for k, m in enumerate(manifest.members)
        ]
        return run_rounds(run.round_loop(ports, parallel=number), run, observer, resume)
    finally:
        torch.set_num_threads(before)
        for actor in actors:
            ray.kill(actor)
        if started:
            ray.shutdown()
