"""What a method costs a silo: bytes per round, numbers held, arithmetic and time.

FedMR (TMLR 2023), Table 3 counts the numbers of a model with all its buffers, and what prototypes add; Figure 4
compares memory and time. Here traffic is read off a run's layout, so it is what is really sent.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from fl_core.rounds.layout import BlankExamples
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import Bench
from fl_core.simulation.in_process import SiloShare, bench_of
from fl_core.training.evaluation import MEASURED
from fl_core.training.local_data import PlainData
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Federation, Layout, Outcome, State, TrainConfig, Turn

FLOAT = 4
"""Bytes of a number on the wire; a masked run sends integers of its ring, of 4 or 8 bytes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers that one silo sends (up) and receives (down) in a round of training, measurements not counted."""

    up: int
    down: int

    @property
    def bytes_up(self) -> int:
        """Return the bytes of the numbers sent, in float32."""
        return FLOAT * self.up

    @property
    def bytes_down(self) -> int:
        """Return the bytes of the numbers received, in float32."""
        return FLOAT * self.down


@dataclass(frozen=True, slots=True)
class Cost:
    """One silo's round: copies of the model held, floating-point operations of training, seconds measured here."""

    traffic: Traffic
    copies: float
    flops: int
    seconds: float


def sent(layout: Layout) -> int:
    """Count the numbers of a bundle, weights included."""
    parts = [spec for name, spec in layout.items() if name not in MEASURED]
    return sum(math.prod(shape) for spec in parts for shape in (*spec.shapes.values(), spec.weight_shape))


def received(msg: State) -> int:
    """Count the numbers of a broadcast."""
    return sum(trees.count(values) for values in msg.values())


def traffic(manifest: RunManifest) -> Traffic:
    """Count what a silo sends and receives in a round."""
    bench = bench_of(manifest)
    server = bench.method.init_server(bench.fresh(), _federation(manifest))
    return Traffic(sent(manifest.layout), received(bench.method.broadcast(server)))


def copies(manifest: RunManifest) -> float:
    """Return the numbers that a silo holds after a round (message, model, own state) in units of the model.

    Found by a round on blank examples, so what a silo keeps only after its first round is counted.
    """
    bench, blank = bench_of(manifest), BlankExamples(manifest.schema)
    msg, outcome = _train(bench, manifest, SiloShare(blank, blank), 0, TrainConfig(epochs=1, max_steps=1))
    size = trees.count(bench.initial)
    return (size + received(msg) + received(outcome.state)) / size


def measure(manifest: RunManifest, share: SiloShare, silo: int = 0) -> Cost:
    """Run one silo's training of round 0 twice: once counted by torch, once timed.

    Guarantees: copies, operations and traffic are the same on every machine; seconds are this machine's.
    """
    bench = bench_of(manifest)
    with FlopCounterMode(display=False) as counter:
        _train(bench, manifest, share, silo, manifest.train)
    start = time.perf_counter()
    _train(bench, manifest, share, silo, manifest.train)
    return Cost(traffic(manifest), copies(manifest), int(counter.get_total_flops()), time.perf_counter() - start)


def _train(
    bench: Bench, manifest: RunManifest, share: SiloShare, silo: int, train: TrainConfig
) -> tuple[State, Outcome]:
    method, fed = bench.method, _federation(manifest)
    turn = Turn(fed, silo, manifest.seed, manifest.members[silo].prototypes)
    msg = method.broadcast(method.init_server(bench.fresh(), fed))
    state = method.init_silo(bench.fresh(), fed)
    return msg, method.local(bench.fresh(), msg, state, PlainData(share.train, share.test, train, turn), turn)


def _federation(manifest: RunManifest) -> Federation:
    n = len(manifest.members)
    return Federation(n, len(manifest.schema.classes), manifest.rounds, 0, manifest.cohort or n)
