"""Which records a ledger speaks of: the version of each split of a data set, and the identity of each unit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from fl_core.datasets import SiloDataset
from fl_core.types import Examples
from privacy.course import HOSPITAL, TEST, TRAIN
from privacy.ledger import Ledger


def splits(dataset: SiloDataset) -> dict[str, Examples]:
    """Name the splits whose records are charged apart."""
    return {TRAIN: dataset.train, TEST: dataset.test}


def version(dataset: SiloDataset, split: str) -> str:
    """Return the fingerprint of one split of a version of the data."""
    return hashlib.sha256(f"{dataset.fingerprint}|{split}".encode()).hexdigest()


def collection(name: str, split: str) -> str:
    """Name the collection of a split: its training and test records have budgets of their own.

    The hospital has one budget, whatever data it serves under whatever names.
    """
    return HOSPITAL if split == HOSPITAL else f"{name}/{split}"


def unit_of(examples: Examples) -> str:
    """Name the unit of privacy: the group where the data names any, else the record."""
    return "record" if examples.groups is None else "group"


def unit_names(examples: Examples) -> list[str]:
    """Identify each unit, whatever the label space or the image size of a run: by its group, or by its content."""
    if examples.groups is not None:
        return sorted({f"group {g}" for g in examples.groups})
    return [f"record {digest}" for digest in _contents(examples)]


def register(ledger: Ledger, dataset: SiloDataset, name: str) -> dict[str, bool]:
    """Register both splits under a name, and the hospital itself; tell which collections got a new version.

    Raises RefusedError (E-BUDGET-03) when a unit stands in another collection: also when one patient has records in
    both splits, which would spend two budgets for one privacy.
    """
    found = {
        collection(name, split): ledger.register(
            collection(name, split),
            unit_of(examples),
            version(dataset, split),
            len(examples),
            unit_names(examples),
        )
        for split, examples in splits(dataset).items()
    }
    everything = len(dataset.train) + len(dataset.test)
    found[HOSPITAL] = ledger.register(HOSPITAL, HOSPITAL, version(dataset, HOSPITAL), everything, [HOSPITAL])
    return found


def _contents(examples: Examples) -> Iterator[str]:
    """Hash what each example is: its file where it is one, else its numbers."""
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    if paths is not None:
        for path in paths:
            with path.open("rb") as file:
                yield hashlib.file_digest(file, "sha256").hexdigest()
        return
    for index in torch.split(torch.arange(len(examples)), 256):
        x, _ = examples.batch(index)
        for row in x:
            yield hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()
