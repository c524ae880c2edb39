"""What has left this hospital: which runs, what numbers, how many bytes; and whether an image can be among it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fl_core import kinds
from service_core.console import counted
from silo.storage.store import JoinedRun, SiloStore
from silo.storage.tasks import UnprotectedUpdate

WORDS: Mapping[str, str] = {
    "delta": "by how much training changed each number of the model",
    "metrics": "how often the model was right on test images here, by class",
    "clinical": "which class the model took test images of each class for, and how sure it was",
    "personal": "how often this hospital's own model, which stays here, was right on test images here",
    "personal_public": "how often this hospital's own model, which stays here, was right on public test images",
    "personal_ga": "how often this hospital's own model was right on images of other hospitals' classes",
    "by_hospital": "whether what is measured here may be shown under this hospital's name",
    "own": "how often the model that is measured beside was right on the same test images",
    "paired": "by how much the areas under the curves of both models differ here",
    "prototypes": "one average of what the model sees, for each class",
    "class_gradients": "one average direction of change, for each class",
    "census": "how many hospitals took part",
    "control": "a correction as large as the model",
    "buffers": "averages that the model keeps",
    "steps": "how many steps training took",
    "heads": "the last layer of the model, and how many training images here are of each class",
    "labels": "how many training images here are of each class",
    "hyper": "by how much training changed what makes a head from shares of classes",
    "generator": "by how much training changed what makes up features of each class",
    "fine": "how the model's answers divide into finer classes",
}
"""Parts of updates in plain words; those of a kind of run by its `RunKind.parts`, others as they are named."""
MEASURED = ("metrics", "clinical")
"""Parts that every run has, and that are zeros where nothing is measured."""
NO_PRIVACY = "no privacy"
"""Of a run without masks."""
FLOAT_BYTES = 4
_BYTES_PER_TENSOR, _FRAME_BYTES = 512, 4096
"""The most that an update's file takes beside its numbers: what names and places them."""


@dataclass(frozen=True, slots=True)
class UpdateContents:
    """What an update of a run may hold, by its manifest: numbers of each part, and tensors in all.

    word: bytes of a number, at most: under a mask, or 8 of sums that stay exact; what earlier versions noted has 4
    beside: bytes of what opens sums of masked updates, in each; 0 where updates leave in clear.
    """

    parts: Mapping[str, int]
    tensors: int
    word: int = FLOAT_BYTES
    beside: int = 0

    def to_json(self) -> str:
        masked = {"masked": (self.word, self.beside)} if self.beside else {}
        return json.dumps(
            {"parts": dict(self.parts), "tensors": self.tensors, "word": self.word, **masked}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> UpdateContents | None:
        """Read what was noted of a run; None where an earlier version noted nothing."""
        if not text:
            return None
        raw = json.loads(text)
        word, beside = raw.get("masked") or (raw.get("word", FLOAT_BYTES), 0)
        parts = {str(k): int(v) for k, v in raw["parts"].items()}
        return cls(parts, int(raw["tensors"]), int(word), int(beside))

    @property
    def numbers(self) -> int:
        return sum(self.parts.values())

    @property
    def most_bytes(self) -> int:
        return self.word * self.numbers + self.beside + _BYTES_PER_TENSOR * self.tensors + _FRAME_BYTES

    def words(self) -> list[str]:
        words = {**WORDS, **{part: text for kind in kinds.kinds() for part, text in kind.parts.items()}}
        covered = (
            []
            if not self.beside
            else [
                "all of it under masks: only sums over several hospitals are read",
                "of a class that this hospital alone has, these sums are its own, without its name",
            ]
        )
        return covered + [
            f"{count:,} {'number' if count == 1 else 'numbers'}: {words.get(name, f'the part {name}')}"
            for name, count in sorted(self.parts.items(), key=lambda item: -item[1])
            if count and (self.measures or name not in MEASURED)
        ]

    @property
    def measures(self) -> bool:
        """Whether a model is measured on test images here; the parts are those of the run's kind."""
        return not any(self.parts.keys() & kind.parts.keys() for kind in kinds.kinds() if not kind.measures)


class Unprotected(NamedTuple):
    """How many updates left without noise that bounds what they tell, under masks or not, and of how many runs.

    unregistered: of data that the ledger does not know, which may be any records   unknown: not in `updates`, since an
    earlier version made them.
    """

    updates: int = 0
    runs: int = 0
    unregistered: int = 0
    unknown: int = 0

    @classmethod
    def of_home(cls, updates: Sequence[UnprotectedUpdate]) -> Unprotected:
        """Count what left a home, of whatever records."""
        runs = [update.run_id for update in updates if update.splits is not None]
        return cls(len(runs), len(set(runs)), unknown=len(updates) - len(runs))

    def sentence(self, whose: str = "") -> str:
        """Say it to whoever answers for the records; empty where there are none. whose: " of these records"."""
        text = ""
        if self.updates:
            text = (
                f"{counted(self.updates, 'update')}{whose} left without noise, in {counted(self.runs, 'run')}: no "
                f"bound holds for what {'it tells' if self.updates == 1 else 'they tell'}."
            )
        if self.unregistered:
            of = "It is" if self.updates == 1 else f"Of these, {self.unregistered} are"
            text += f" {of} of data that the ledger does not know, which may be the same records."
        if self.unknown:
            text += f" Of {counted(self.unknown, 'earlier update')} no version noted whether they had privacy."
        return text.strip()


NO_UPDATES = Unprotected()


@dataclass(frozen=True, slots=True)
class RunDisclosure:
    """What left for one run.

    privacy: what it promises, empty where not noted   classes: what was said of them once a census was proved
    last: when the newest was ready to be sent   larger: updates that their numbers exceed.
    """

    run_id: str
    name: str
    state: str
    reason: str
    updates: int
    bytes: int
    largest: int
    last: float | None
    waiting: int
    leaves: UpdateContents | None
    privacy: str = ""
    classes: tuple[str, ...] = ()

    @property
    def protected(self) -> bool:
        return not self.privacy.startswith(NO_PRIVACY)

    @property
    def fits(self) -> bool | None:
        """Tell whether no update is larger than the numbers that its run's manifest lists; None where not noted."""
        if not self.updates:
            return True
        return None if self.leaves is None else self.largest <= self.leaves.most_bytes


@dataclass(frozen=True, slots=True)
class DisclosureSummary:
    """What left for all runs, the newest run first; unprotected: of any records."""

    runs: tuple[RunDisclosure, ...]
    unprotected: Unprotected = NO_UPDATES

    @property
    def updates(self) -> int:
        return sum(run.updates for run in self.runs)

    @property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.runs)

    @property
    def last(self) -> float | None:
        return max((run.last for run in self.runs if run.last is not None), default=None)

    @property
    def proved(self) -> bool:
        """Tell whether every update that was sent is known to be no larger than its run's numbers."""
        return all(run.fits for run in self.runs)

    @property
    def verdict(self) -> str:
        """Say in one sentence what is known: the headline of the page, and a line of `silo status`.

        Guarantees: that no image left is said only where every update that was sent is known to be no larger than the
        numbers that the manifest of its run lists, which are sums over records.
        """
        if not self.updates:
            return "Nothing has left this hospital"
        found = {run.fits for run in self.runs}
        if False in found:
            return "An update that left this hospital was larger than its numbers"
        if None in found:
            return "Updates have left this hospital, and of some only the size is known"
        return "No image has left this hospital"


def leaving(store: SiloStore) -> DisclosureSummary:
    """Add up the updates of the silo's database. One that the coordinator refused has left as well."""
    unprotected = Unprotected.of_home(store.unprotected())
    lines = {run_id: tuple(coverage.lines()) for run_id, coverage in store.secagg.coverages().items()}
    made = (_of_run(run, lines.get(run.run_id, ())) for run in reversed(store.history()))
    return DisclosureSummary(tuple(made), unprotected)


def _of_run(run: JoinedRun, classes: tuple[str, ...]) -> RunDisclosure:
    sent = [t for t in run.tasks if t.receipt or t.refused is not None]
    waiting = [t for t in run.tasks if t.staged is not None and t.included is None and t not in sent]
    return RunDisclosure(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        reason=run.reason,
        updates=len(sent),
        bytes=sum(t.size for t in sent),
        largest=max((t.size for t in sent), default=0),
        last=max((t.staged for t in sent if t.staged is not None), default=None),
        waiting=len(waiting),
        leaves=UpdateContents.from_json(run.leaves),
        privacy=run.privacy,
        classes=classes,
    )
