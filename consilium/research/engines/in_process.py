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
    """A place for each silo's state, and for the next one until its round is closed."""

    def get(self, silo: int) -> State | None:
        """Return the state that was last committed; None before the first."""
        ...

    def stage(self, silo: int, state: State) -> None:
        """Keep the next state aside, in place of one that was staged before."""
        ...

    def settle(self, silo: int, commit: bool) -> None:
        """Commit what is staged, or forget it; nothing happens where nothing is."""
        ...


class MemoryStateStore:
    """States as they are."""

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
    """One silo's state, passed in before a round and read back after it: the caller keeps it."""

    before: State | None = None
    after: State | None = None

    def get(self, silo: int) -> State | None:  # noqa: ARG002
        return self.before

    def stage(self, silo: int, state: State) -> None:  # noqa: ARG002
        self.after = state

    def settle(self, silo: int, commit: bool) -> None:  # noqa: ARG002
        raise AssertionError("rounds are settled by the caller")


@dataclass(frozen=True, slots=True)
class SiloShare:
    """The examples of one simulated silo; public: the official test set, where `test` was held out of its own data.

    Of a run with frozen features they are these: see `with_features`.
    """

    train: Examples
    test: Examples
    public: Examples | None = None


@dataclass(eq=False)
class InProcessSilo:
    """A silo in this process. All ports of a run share one scratch model: 100 silos do not hold 100 models."""

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
        """Return the silo's committed state; None before the first."""
        return self.states.get(self.index)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:  # noqa: ARG002
        """Commit what was staged; of a method whose server tracks silo states, only when this silo was included."""
        self.states.settle(self.index, included or not self.runtime.method.server_tracks_state)


def on_device(shares: Sequence[SiloShare], device: torch.device, train_as_stored: bool = False) -> list[SiloShare]:
    """Put training sets on a device while its memory allows, then test sets."""
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
    """Make what a run is trained on of what silos have: with a frozen body its features, else what can be read.

    Raises as `RunSetup.features` and `broken_records.require_few`. A set that several silos share is read once.
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
    """Make one port per member, all sharing one scratch model; the official test set is public here.

    data_factories: one per member; None gives each `PlainLocalData`   states: where silos' states are kept between
    rounds   device: where models are trained; examples are put there as well, as far as they fit.
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
    """Tell whether silos hold out their own test examples, so that the official test set is nobody's."""
    return any(s.public is not None for s in shares)


def public_test(shares: Sequence[SiloShare]) -> Examples:
    """Return the official test set where the data has one apart from the silos', else the union of theirs."""
    official = [s.public for s in shares if s.public is not None]
    return official[0] if official else ConcatExamples([s.test for s in shares])


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a simulation goes on.

    Silos' states are in the store that the simulation is given.

    Attributes:
        round: the next one, 0-based
        server: the state that it begins with
        medians: `RoundRecord.medians` of all rounds before
        threads: of a silo's round until here, 0 as the run says
    """

    round: int
    server: State
    medians: Sequence[Mapping[str, float]]
    threads: int = 0


@contextmanager
def thread_count(wanted: int) -> Iterator[None]:
    """Compute with so many CPU threads inside, with torch's own number where `wanted` is 0."""
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
    """Do a run in this process and return the final server state; the arguments are those of `local_ports`.

    resume: where it goes on; None begins with the first round   threads: where the run leaves them open
    Guarantees: equals the same manifest over real silo processes bit for bit, on one kind of machine; a run that goes
    on ends in the bits of one that was not interrupted.
    """
    with thread_count(run.manifest.threads or threads):
        ports = local_ports(run, shares, data_factories, states, device)
        return run_rounds(run.round_loop(ports, parallel=1), run, observer, resume)


def run_rounds(loop: RoundLoop, run: RunSetup, observer: Observer, resume: ResumePoint | None) -> State:
    """Run a loop from where it goes on to the end."""
    if resume is None:
        return loop.run(run.initial_state(), observer)
    return loop.run(resume.server, observer, resume.round, resume.medians)


class RoundHistory(Observer):
    """An observer that keeps the record of every round."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        self.records.append(record)

    @property
    def accuracies(self) -> list[float]:
        """Return the global accuracy of the model after 0, 1, ..., T rounds."""
        return [r.accuracy for r in self.records]
