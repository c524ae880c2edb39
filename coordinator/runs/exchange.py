"""What the service and the worker of a run ask of each other; tensors go by file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from coordinator.runs.tasks import RunInterrupted
from coordinator.storage.records import RunState, StoredRun
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext
from privacy.secagg.coordinator_side import OpenedSeeds
from service_core.workers.calls import Later
from service_core.workers.lines import ErrorLines

Size = tuple[str, float, float]
ERRORS = ErrorLines({RunInterrupted.__name__: RunInterrupted})


class Place(NamedTuple):
    """Where a worker works.

    objects: the folder of objects   written: the beginning of the paths of the files that it writes for the service
    extensions: installed distributions whose methods and models runs may use.
    """

    objects: str
    written: str
    extensions: Sequence[str] = ()


class Setup(NamedTuple):
    """What a worker needs to know of its run.

    manifest: as JSON   sizes: of each member, its training and test examples where it declares them (0: it does not).
    """

    manifest: str
    sizes: Sequence[Size]


class RunReference(NamedTuple):
    """What the opening of a run needs to know of another one; fields as of `StoredRun`."""

    id: str
    manifest: str
    state: str
    closed: int
    state_object: str | None

    @classmethod
    def of(cls, run: StoredRun) -> RunReference:
        return cls(run.id, run.manifest, run.state.value, run.closed, run.state_object)

    def run(self) -> StoredRun:
        run = StoredRun(self.id, "", "", "", self.manifest, "", "", "", 0, (), RunState(self.state))
        return replace(run, closed=self.closed, state_object=self.state_object)


class OpenRequest(NamedTuple):
    """A run that is to be opened.

    manifest: as JSON, with no model to start from   sizes: as in `Setup`   parent: the run that it continues
    beside: the run whose models are measured beside its model.
    """

    manifest: str
    sizes: Sequence[Size]
    parent: RunReference | None
    beside: RunReference | None


class Opened(NamedTuple):
    """A run that can be stored.

    facts: as `DerivedFacts.to_dict`   state: of its first round, if it begins from another run or from weights
    other: the model that is measured beside it.
    """

    manifest: str
    sizes: Sequence[Size]
    facts: Mapping[str, Any]
    state: Written | None
    other: Written | None


class Written(NamedTuple):
    """A file that the worker wrote, with the digest and the number of its bytes."""

    path: str
    digest: str
    size: int


class Update(NamedTuple):
    """An update: whose it is, of what round, and its file."""

    id: str
    silo: str
    round: int
    kind: str
    path: str


class Rounds(NamedTuple):
    """Which rounds are to be run, and from what.

    state: the file of the server's state   quorum: updates that close a round, 0: as the manifest says
    closed: the medians of norms of the rounds before `start`   counted: hospitals of each class, of a census.
    """

    state: str
    start: int
    quorum: int
    closed: Sequence[Mapping[str, float]]
    counted: Sequence[float] | None


class RunService(Protocol):
    """What the arithmetic of a run asks of the service. Every method may raise RunInterrupted."""

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str], needed: int) -> None:
        """Open a round. needed: updates that close it, unless masks need more."""

    def broadcast(self, round: int, written: Written | None) -> None:
        """Store what a round's silos get; None: the state that was stored just before."""

    def ask(self, silo: str, context: RoundContext, kind: TaskKind) -> Later[tuple[str, Path]]:
        """Return the id and the file of a silo's update, once it is here; raises why there is none, now or later."""

    def arrived(self, silo: str, classes: Collection[str] | None) -> None:
        """Count an update that was added. classes: that it trains; None if it does not say."""

    def refused(self, silo: str, why: str) -> None:
        """Record that a silo will send nothing in this round."""

    def unmask(self, round: int, kind: TaskKind, members: Collection[str], blocks: Collection[str]) -> OpenedSeeds:
        """Have the members open the sum of a round; raises as `MaskedRounds.unmask`."""

    def counted(self, hospitals: Sequence[int]) -> None:
        """Keep the proof of a census, whose sum these are."""

    def closed(self, record: RoundRecord, written: Written | None, model: str) -> None:
        """Store a round's result. written: the server's state after training   model: its digest after the last."""


def seeds_as_json(opened: OpenedSeeds) -> list[object]:
    """Write what takes masks off a sum."""
    seeds = [[*slot, seed.hex()] for slot, seed in opened.seeds.items()]
    return [opened.task, opened.context.hex(), opened.inside, seeds]


def seeds_of_json(raw: Sequence[Any]) -> OpenedSeeds:
    """Read what `seeds_as_json` wrote."""
    task, context, inside, seeds = raw
    opened = {(block, dealer, slot): bytes.fromhex(seed) for block, dealer, slot, seed in seeds}
    return OpenedSeeds(task, bytes.fromhex(context), tuple(inside), opened)


def open_request_of_json(raw: Sequence[Any]) -> OpenRequest:
    """Read the fields of an `OpenRequest` that passed as JSON."""
    manifest, sizes, *others = raw
    parent, beside = (None if other is None else RunReference(*other) for other in others)
    return OpenRequest(manifest, sizes, parent, beside)


def opened_of_json(raw: Sequence[Any]) -> Opened:
    """Read the fields of an `Opened` that passed as JSON."""
    manifest, sizes, facts, *files = raw
    state, other = (None if file is None else Written(*file) for file in files)
    return Opened(manifest, sizes, facts, state, other)
