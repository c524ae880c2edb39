"""Simulation in one process: `LocalPort` runs the hospital's own code without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl_core.evaluation import Joined
from fl_core.fixed_point import FixedPoint
from fl_core.local import PlainData
from fl_core.manifest import RunManifest
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.protocols import SiloPort
from fl_core.rounds import Engine, Observer, RoundRecord, Schedule
from fl_core.types import Bundle, Examples, Federation, State, TaskKind, TrainConfig, Turn
from fl_core.worker import Bench, work


@dataclass(frozen=True, slots=True)
class SiloShare:
    """The examples of one simulated silo."""

    train: Examples
    test: Examples


class LocalPort:
    """A silo in this process. All ports of a run share one scratch model: 100 silos do not hold 100 models."""

    def __init__(
        self,
        name: str,
        index: int,
        share: SiloShare,
        bench: Bench,
        train: TrainConfig,
        seed: int,
        prototypes: bool,
        public: Examples | None = None,
    ) -> None:
        self.name = name
        self._index = index
        self._share = share
        self._bench = bench
        self._train = train
        self._seed = seed
        self._prototypes = prototypes
        self._public = public
        self._state: State | None = None
        self._staged: State | None = None

    def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
        """Run `worker.work` and stage the silo's next state."""
        turn = Turn(fed, self._index, self._seed, self._prototypes)
        data = PlainData(self._share.train, self._share.test, self._train, turn, public=self._public)
        outcome = work(self._bench, msg, self._state, data, turn, kind)
        if kind is TaskKind.TRAIN:
            self._staged = outcome.state
        return outcome.bundle

    def settle(self, fed: Federation, kind: TaskKind, included: bool) -> None:  # noqa: ARG002
        """Commit what was staged; of a method whose server mirrors silo states, only when this silo was included."""
        if self._staged is not None and (included or not self._bench.method.mirrored):
            self._state = self._staged
        self._staged = None


def bench_of(manifest: RunManifest) -> Bench:
    """Build what a silo works with from the manifest alone."""
    method = build_method(manifest.method.name, manifest.method.options)
    model = build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)
    return Bench(method, model, manifest.layout)


def engine_of(manifest: RunManifest, ports: Sequence[SiloPort], parallel: int) -> Engine:
    """Build the round loop of a manifest over given ports."""
    schedule = Schedule(manifest.rounds, manifest.seed, len(manifest.schema.classes), manifest.cohort, manifest.quorum)
    method = build_method(manifest.method.name, manifest.method.options)
    grid = FixedPoint(manifest.grid)
    return Engine(method, schedule, manifest.layout, manifest.grid, (grid,), ports, parallel)


def initial_state(manifest: RunManifest) -> State:
    """Make the server state of round 0; equal manifests give equal bytes."""
    model = build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)
    method = build_method(manifest.method.name, manifest.method.options)
    return method.init_server(model, Federation(len(manifest.members), len(manifest.schema.classes), manifest.rounds))


def local_ports(manifest: RunManifest, shares: Sequence[SiloShare]) -> list[LocalPort]:
    """Make one port per member, all sharing one scratch model; the union of the test sets is public here."""
    bench = bench_of(manifest)
    public = Joined([s.test for s in shares]) if manifest.personal else None
    return [
        LocalPort(m.name, k, share, bench, manifest.train, manifest.seed, m.prototypes, public)
        for k, (m, share) in enumerate(zip(manifest.members, shares, strict=True))
    ]


def simulate(manifest: RunManifest, shares: Sequence[SiloShare], observer: Observer) -> State:
    """Run a manifest in this process and return the final server state.

    Guarantees: equals the same manifest over real silo processes bit for bit, on one kind of machine.
    """
    before = torch.get_num_threads()
    if manifest.threads:
        torch.set_num_threads(manifest.threads)
    try:
        return engine_of(manifest, local_ports(manifest, shares), parallel=1).run(initial_state(manifest), observer)
    finally:
        torch.set_num_threads(before)


class History:
    """An observer that keeps the record of every round."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def opened(self, fed: Federation, kind: TaskKind, names: Sequence[str]) -> None:
        """Note nothing."""

    def arrived(self, name: str) -> None:
        """Note nothing."""

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        """Keep the record."""
        self.records.append(record)

    @property
    def accuracies(self) -> list[float]:
        """Return the global accuracy of the model after 0, 1, ..., T rounds."""
        return [r.accuracy for r in self.records]
