"""Simulation in one process: `InProcessSilo` runs the hospital's own code without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fl_core.rounds.engine import Observer, RoundLoop
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRuntime, run_silo_round
from fl_core.training import devices
from fl_core.training.broken_records import readable
from fl_core.training.evaluation import ConcatExamples
from fl_core.training.frozen_features import in_memory
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import DataFactory, RoundData
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Examples, RoundContext, State


class StateStore(Protocol):
    """Storage for each silo's state, and for its next state until the round is closed."""

    def get(self, silo: int) -> State | None:
        """Return the last committed state; None before the first."""
        ...

    def stage(self, silo: int, state: State) -> None:
        """Stage the next state; replaces an earlier staged one."""
        ...

    def settle(self, silo: int, commit: bool) -> None:
        """Commit or discard the staged state, if there is one."""
        ...


class MemoryStateStore:
    """States in memory."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._staged: dict[int, State] = {}

    def get(self, silo: int) -> State | None:
        return self._states.get(silo)

    def stage(self, silo: int, state: State) -> None:
        self._staged[silo] = state

    def settle(self, silo: int, commit: bool) -> None:
        state = self._staged.pop(silo, None)
        if commit and state is not None:
            self._states[silo] = state


class PassedState:
    """One silo's state, set before a round and read back after it. The caller stores it."""

    before: State | None = None
    after: State | None = None

    def get(self, silo: int) -> State | None:  # noqa: ARG002
        return self.before

    def stage(self, silo: int, state: State) -> None:  # noqa: ARG002
        self.after = state

    def settle(self, silo: int, commit: bool) -> None:  # noqa: ARG002
        raise AssertionError("the caller settles rounds")


@dataclass(frozen=True, slots=True)
class SiloShare:
    """The examples of one simulated silo. public: the official test set, if `test` was held out of its own data.

    In a run with frozen features, the examples are features: see `with_features`.
    """

    train: Examples
    test: Examples
    public: Examples | None = None


@dataclass(eq=False)
class InProcessSilo:
    """A silo in this process. All silos of a run share one scratch model to save memory."""

    manifest: RunManifest
    index: int
    share: SiloShare
    runtime: SiloRuntime
    public: Examples | None = None
    data_factory: DataFactory = PlainLocalData
    states: StateStore = field(default_factory=MemoryStateStore)
    device: torch.device | None = None

    @property
    def name(self) -> str:
        return self.manifest.members[self.index].name

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        member = self.manifest.members[self.index]
        units = self.manifest.masked_units(self.index)
        context = context.for_silo(self.index, self.manifest.seed, member.prototypes, units)
        data = self.data_factory(
            RoundData(
                self.share.train,
                self.share.test,
                self.manifest.train,
                context,
                device=self.device,
                public=self.public,
            )
        )
        outcome = run_silo_round(self.runtime, msg, self.state, data, context, kind)
        if kind.trains:
            self.states.stage(self.index, outcome.state)
        return outcome.bundle

    @property
    def state(self) -> State | None:
        """The silo's committed state; None before the first."""
        return self.states.get(self.index)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:  # noqa: ARG002
        """Commit the staged state. If the method's server tracks silo states, discard it unless included."""
        self.states.settle(self.index, included or not self.runtime.method.server_tracks_state)


def on_device(shares: Sequence[SiloShare], device: torch.device, train_as_stored: bool = False) -> list[SiloShare]:
    """Move training sets to a device, then test sets, as far as its memory allows."""
    free, placed_train, placed_test = devices.memory_for_examples(device), list[Examples](), list[Examples]()
    for split, placed in ((0, placed_train), (1, placed_test)):
        for share in shares:
            examples = (share.train, share.test)[split]
            examples, free = devices.move_to_device(examples, device, free, train_as_stored and split == 0)
            placed.append(examples)
    public = [share.public for share in shares]
    return [SiloShare(*splits) for splits in zip(placed_train, placed_test, public, strict=True)]


def with_features(
    run: RunSetup, shares: Sequence[SiloShare], device: torch.device | None = None, threads: int = 0
) -> list[SiloShare]:
    """Return the examples to train on: with a frozen body its features, otherwise the readable examples.

    Raises as `RunSetup.features` and `broken_records.require_few`. Examples shared by several silos are read once.
    """
    made: dict[tuple[int, int], Examples] = {}

    def of(examples: Examples, train: bool = False) -> Examples:
        key = id(examples), run.views(train) if run.frozen else 1
        if key not in made:
            batches = run.features(examples, device or torch.device("cpu"), train) if run.frozen else None
            made[key] = readable(examples) if batches is None else in_memory(examples, batches)
        return made[key]

    with thread_count(run.manifest.threads or threads):
        return [
            SiloShare(of(s.train, train=True), of(s.test), None if s.public is None else of(s.public)) for s in shares
        ]


def local_ports(
    run: RunSetup,
    shares: Sequence[SiloShare],
    data_factories: Sequence[DataFactory] | None = None,
    states: StateStore | None = None,
    device: torch.device | None = None,
) -> list[InProcessSilo]:
    """Create one port per member. All share one scratch model, and can evaluate on the official test set.

    data_factories: one per member, by default `PlainLocalData`   states: store of the silos' states between rounds
    device: models are trained here; examples are moved there as well, as far as they fit.
    """
    manifest, runtime, device = run.manifest, run.silo_runtime(), device or torch.device("cpu")
    states = states or MemoryStateStore()
    runtime.model.to(device)
    shares = on_device(shares, device, manifest.train.augment_on_device)
    public = public_test(shares) if manifest.personal else None
    factories = data_factories or [PlainLocalData] * len(shares)
    return [
        InProcessSilo(manifest, k, share, runtime, public, factory, states, device)
        for k, (share, factory) in enumerate(zip(shares, factories, strict=True))
    ]


def has_official_test(shares: Sequence[SiloShare]) -> bool:
    """Return whether silos hold out their own test examples, so that the official test set belongs to none of them."""
    return any(s.public is not None for s in shares)


def public_test(shares: Sequence[SiloShare]) -> Examples:
    """Return the official test set if it is separate from the silos', otherwise the union of theirs."""
    official = [s.public for s in shares if s.public is not None]
    return official[0] if official else ConcatExamples([s.test for s in shares])


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point where a simulation continues. Silos' states are in the simulation's `StateStore`.

    Attributes:
        round: the next round, 0-based
        server: the server's state at its start
        medians: `RoundRecord.medians` of all earlier rounds
        threads: CPU threads of a silo's round so far; 0: as the run configures
    """

    round: int
    server: State
    medians: Sequence[Mapping[str, float]]
    threads: int = 0


@contextmanager
def thread_count(wanted: int) -> Iterator[None]:
    """Set torch's number of CPU threads inside the block; 0 leaves it unchanged."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def simulate(
    run: RunSetup,
    shares: Sequence[SiloShare],
    observer: Observer,
    data_factories: Sequence[DataFactory] | None = None,
    states: StateStore | None = None,
    device: torch.device | None = None,
    resume: ResumePoint | None = None,
    threads: int = 0,
) -> State:
    """Run a federation in this process and return the final server state; arguments as for `local_ports`.

    resume: where to continue; None starts with the first round   threads: used if the run sets none
    Guarantees: on one kind of machine, equals the same manifest over real silo processes bit for bit; a resumed run
    ends with the same bits as an uninterrupted one.
    """
    with thread_count(run.manifest.threads or threads):
        ports = local_ports(run, shares, data_factories, states, device)
        return run_rounds(run.round_loop(ports, parallel=1), run, observer, resume)


def run_rounds(loop: RoundLoop, run: RunSetup, observer: Observer, resume: ResumePoint | None) -> State:
    """Run a loop to its end, from the beginning or from a resume point."""
    if resume is None:
        return loop.run(run.initial_state(), observer)
    return loop.run(resume.server, observer, resume.round, resume.medians)


class RoundHistory(Observer):
    """Keeps the record of every round."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        self.records.append(record)

    @property
    def accuracies(self) -> list[float]:
        """Global accuracy of the model after 0, 1, ..., T rounds."""
        return [r.accuracy for r in self.records]
