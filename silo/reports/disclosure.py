"""Report of the updates that left this hospital: runs, numbers, bytes, and whether one can contain an image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fl_core import kinds
from service_core.console import pluralize
from silo.storage.store import JoinedRun, SiloStore
from silo.storage.tasks import UnprotectedUpdate

PART_DESCRIPTIONS: Mapping[str, str] = {
    "delta": "changes of the model's parameters",
    "metrics": "correct predictions on this hospital's test images, by class",
    "clinical": "confusion matrix and score histograms on this hospital's test images",
    "personal": "correct predictions of this hospital's own model on its test images (the model stays here)",
    "personal_public": "correct predictions of this hospital's own model on public test images (the model stays here)",
    "personal_ga": "correct predictions of this hospital's own model on classes of other hospitals",
    "by_hospital": "whether this hospital's results may be shown under its name",
    "own": "correct predictions of the comparison model on the same test images",
    "paired": "differences between the areas under the ROC curves of both models",
    "prototypes": "mean features of each class (prototypes)",
    "class_gradients": "mean gradient of each class",
    "census": "number of hospitals that took part",
    "control": "control variates, as many as the model's parameters",
    "buffers": "running statistics of the model (buffers)",
    "steps": "number of training steps",
    "heads": "parameters of the last layer, and training images of each class",
    "labels": "training images of each class",
    "hyper": "changes of the parameters of the network that makes heads from class shares",
    "generator": "changes of the parameters of the feature generator",
    "fine": "statistics of the subclusters of each class",
}
"""Descriptions of an update's parts; a kind of run describes its own in `RunKind.parts`."""
MEASURED = ("metrics", "clinical")
"""Parts that every run has; they are zeros if nothing is measured."""
NO_PRIVACY = "no privacy"
"""First words of the guarantee of a run without differential privacy."""
FLOAT_BYTES = 4
_BYTES_PER_TENSOR, _FRAME_BYTES = 512, 4096
"""Upper bounds on the bytes of an update's file besides its numbers: names and positions."""


@dataclass(frozen=True, slots=True)
class UpdateContents:
    """The contents of a run's update according to its manifest: numbers in each part, and the number of tensors.

    word: largest size of a number in bytes (4 in entries of earlier versions)
    extra_bytes: additional bytes in each masked update, for opening the sum; 0 without masks.
    """

    parts: Mapping[str, int]
    tensors: int
    word: int = FLOAT_BYTES
    extra_bytes: int = 0

    def to_json(self) -> str:
        masked = {"masked": (self.word, self.extra_bytes)} if self.extra_bytes else {}
        return json.dumps(
            {"parts": dict(self.parts), "tensors": self.tensors, "word": self.word, **masked}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> UpdateContents | None:
        """Read a run's stored contents; None if an earlier version stored none."""
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
        return self.word * self.numbers + self.extra_bytes + _BYTES_PER_TENSOR * self.tensors + _FRAME_BYTES

    def descriptions(self) -> list[str]:
        described = {**PART_DESCRIPTIONS, **{part: text for kind in kinds.kinds() for part, text in kind.parts.items()}}
        masked = (
            []
            if not self.extra_bytes
            else [
                "all of it is masked: the coordinator reads only sums over several hospitals",
                "for a class that only this hospital has, the sum is its own contribution, without its name",
            ]
        )
        return masked + [
            f"{count:,} {'number' if count == 1 else 'numbers'}: {described.get(name, f'the part {name}')}"
            for name, count in sorted(self.parts.items(), key=lambda item: -item[1])
            if count and (self.measures or name not in MEASURED)
        ]

    @property
    def measures(self) -> bool:
        """Whether a model is measured on test images here; the run's kind names the parts."""
        return not any(self.parts.keys() & kind.parts.keys() for kind in kinds.kinds() if not kind.measures)


class Unprotected(NamedTuple):
    """Updates that left without differential privacy, masked or not, and the number of their runs.

    unregistered: with data that are not in the ledger   unknown: from versions that did not record privacy; these are
    not counted in `updates`.
    """

    updates: int = 0
    runs: int = 0
    unregistered: int = 0
    unknown: int = 0

    @classmethod
    def of_home(cls, updates: Sequence[UnprotectedUpdate]) -> Unprotected:
        """Count the unprotected updates of a home, whichever records they used."""
        runs = [update.run_id for update in updates if update.splits is not None]
        return cls(len(runs), len(set(runs)), unknown=len(updates) - len(runs))

    def sentence(self, whose: str = "") -> str:
        """Describe it for the data protection officer; empty if there are none. whose: " of these records"."""
        text = ""
        if self.updates:
            text = (
                f"{pluralize(self.updates, 'update')}{whose} left without noise, in {pluralize(self.runs, 'run')}: "
                f"no privacy bound holds for {'it' if self.updates == 1 else 'them'}."
            )
        if self.unregistered:
            which = "It used" if self.updates == 1 else f"{self.unregistered} of them used"
            text += f" {which} data that is not registered in the ledger and may contain the same records."
        if self.unknown:
            text += f" Whether {pluralize(self.unknown, 'earlier update')} had privacy was not recorded."
        return text.strip()


NO_UPDATES = Unprotected()


@dataclass(frozen=True, slots=True)
class RunDisclosure:
    """The updates that left for one run.

    bytes, largest: of all updates, and of the largest one   last: when the newest was ready (Unix seconds)
    waiting: updates that are ready and not sent   privacy: the run's guarantee, empty if not recorded
    classes: a note on the classes, once a census was proved.
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
    contents: UpdateContents | None
    privacy: str = ""
    classes: tuple[str, ...] = ()

    @property
    def protected(self) -> bool:
        return not self.privacy.startswith(NO_PRIVACY)

    @property
    def fits(self) -> bool | None:
        """Tell whether no update is larger than the numbers in its run's manifest; None if these were not recorded."""
        if not self.updates:
            return True
        return None if self.contents is None else self.largest <= self.contents.most_bytes


@dataclass(frozen=True, slots=True)
class DisclosureSummary:
    """The updates that left for all runs, the newest run first. unprotected: those without differential privacy."""

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
        """Summarise the report in one sentence: the headline of the page, and a line of `silo status`.

        Guarantees: it says that no image left only if `proved`: every update that was sent is known to be no larger
        than the numbers in its run's manifest. These are sums over records.
        """
        if not self.updates:
            return "Nothing has left this hospital"
        fits = {run.fits for run in self.runs}
        if False in fits:
            return "An update that left this hospital was larger than its declared numbers"
        if None in fits:
            return "Updates have left this hospital; of some, only the size is known"
        return "No image has left this hospital"


def disclosures_of(store: SiloStore) -> DisclosureSummary:
    """Add up the updates in the silo's database. An update that the coordinator refused has left as well."""
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
        contents=UpdateContents.from_json(run.leaves),
        privacy=run.privacy,
        classes=classes,
    )
