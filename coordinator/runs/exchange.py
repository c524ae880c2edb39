"""Messages between the service and the worker of a run; tensors are passed as files."""

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
    """The paths and extensions of a worker.

    objects: the folder of objects   written: prefix of the paths of all files that it writes for the service
    extensions: installed distributions whose methods and models runs may use.
    """

    objects: str
    written: str
    extensions: Sequence[str] = ()


class Setup(NamedTuple):
    """The run that a worker computes for.

    manifest: as JSON   sizes: each member's training and test examples, as declared (0: not declared).
    """

    manifest: str
    sizes: Sequence[Size]


class RunReference(NamedTuple):
    """Another run that the opening of a run reads; fields as in `StoredRun`."""

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
    """A request to open a run.

    manifest: as JSON, with no model to start from   sizes: as in `Setup`   parent: the run that it continues
    beside: the run whose models are evaluated together with its model.
    """

    manifest: str
    sizes: Sequence[Size]
    parent: RunReference | None
    beside: RunReference | None


class Opened(NamedTuple):
    """An opened run, ready to be stored.

    facts: as `DerivedFacts.to_dict`   state: of its first round, if it begins from another run or from weights
    other: the model that is evaluated together with its model.
    """

    manifest: str
    sizes: Sequence[Size]
    facts: Mapping[str, Any]
    state: Written | None
    other: Written | None


class Written(NamedTuple):
    """A file that the worker wrote. digest: of its bytes   size: in bytes."""

    path: str
    digest: str
    size: int


class Update(NamedTuple):
    """A silo's update in a file."""

    id: str
    silo: str
    round: int
    kind: str
    path: str


class Rounds(NamedTuple):
    """The rounds to run, from `start` to the end of the run.

    state: the file of the server's state   quorum: updates that close a round; 0: the manifest's
    closed: the median norms of the rounds before `start`   counted: hospitals per class, from a census.
    """

    state: str
    start: int
    quorum: int
    closed: Sequence[Mapping[str, float]]
    counted: Sequence[float] | None


class RunService(Protocol):
    """Calls of a run's arithmetic to the service. Every method may raise RunInterrupted."""

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str], needed: int) -> None:
        """Open a round. needed: updates that close it; a masked round may need more."""

    def broadcast(self, round: int, written: Written | None) -> None:
        """Store the message to a round's silos; None: it is the state that was stored last."""

    def ask(self, silo: str, context: RoundContext, kind: TaskKind) -> Later[tuple[str, Path]]:
        """Ask a silo for its update; return the update's id and file once it has arrived.

        If there is no update, this call or the result raises the reason.
        """

    def arrived(self, silo: str, classes: Collection[str] | None) -> None:
        """Count an update that was added. classes: those that it trains; None if unknown."""

    def refused(self, silo: str, why: str) -> None:
        """Record that a silo will send nothing in this round."""

    def unmask(self, round: int, kind: TaskKind, members: Collection[str], blocks: Collection[str]) -> OpenedSeeds:
        """Have the members open the sum of a round; raises as `MaskedRounds.unmask`."""

    def counted(self, hospitals: Sequence[int]) -> None:
        """Store the proof of a census. hospitals: the opened sum, hospitals per class."""

    def closed(self, record: RoundRecord, written: Written | None, model: str) -> None:
        """Store a round's result. written: the state after training   model: its digest, after the last round."""


def seeds_as_json(opened: OpenedSeeds) -> list[object]:
    """Convert the seeds that remove the masks from a sum."""
    seeds = [[*slot, seed.hex()] for slot, seed in opened.seeds.items()]
    return [opened.task, opened.context.hex(), opened.inside, seeds]


def seeds_of_json(raw: Sequence[Any]) -> OpenedSeeds:
    """Read the result of `seeds_as_json`."""
    task, context, inside, seeds = raw
    opened = {(block, dealer, slot): bytes.fromhex(seed) for block, dealer, slot, seed in seeds}
    return OpenedSeeds(task, bytes.fromhex(context), tuple(inside), opened)


def open_request_of_json(raw: Sequence[Any]) -> OpenRequest:
    """Read an `OpenRequest` from JSON."""
    manifest, sizes, *others = raw
    parent, beside = (None if other is None else RunReference(*other) for other in others)
    return OpenRequest(manifest, sizes, parent, beside)


def opened_of_json(raw: Sequence[Any]) -> Opened:
    """Read an `Opened` from JSON."""
    manifest, sizes, facts, *files = raw
    state, other = (None if file is None else Written(*file) for file in files)
    return Opened(manifest, sizes, facts, state, other)
