"""Registration of data in a ledger: the version of each split, and the identity of each unit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fl_core.datasets import SiloDataset
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content
from fl_core.datasets.image_loader import cores
from fl_core.datasets.sources.table import TableExamples, id_texts
from fl_core.errors import DataError, RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Examples
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN
from privacy.ledger.ledger import Ledger

SHOWN = 5


def splits(dataset: SiloDataset) -> dict[str, Examples]:
    return {TRAIN: dataset.train, TEST: dataset.test}


def version(dataset: SiloDataset, split: str) -> str:
    return hashlib.sha256(f"{dataset.fingerprint}|{split}".encode()).hexdigest()


def collection(name: str, split: str) -> str:
    """Return the collection of a split. The hospital as a whole has one collection, independent of `name`."""
    return HOSPITAL if split == HOSPITAL else f"{name}/{split}"


def unit_of(examples: Examples) -> str:
    return "record" if examples.groups is None else "group"


def unit_names(examples: Examples) -> list[str]:
    """Return each unit's identity, its group or its content, independent of a run's label space or image size."""
    if examples.groups is not None:
        return sorted({f"group {id_texts(g)[0]}" for g in examples.groups})
    return list(content_names(examples))


def content_names(examples: Examples) -> Iterator[str]:
    """Identify each example by its content: the pixels of its file (`pixels.content`), its cells, or its numbers.

    File names, encodings, groups, labels and a run's image size do not matter. Raises DataError (E-DATA-04) if a file
    cannot be decoded.
    """
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    if paths is not None:
        with ThreadPoolExecutor(cores()) as pool:  # keep only digests in memory
            yield from pool.map(_image, paths)
        return
    if isinstance(examples, TableExamples):
        yield from examples.content_names
        return
    for x in _rows(examples):
        numbers = (x.float() + 0.0).contiguous().numpy()  # -0.0 becomes 0.0
        yield _named("tensor", tuple(x.shape), numbers.tobytes())


def _other_names(examples: Examples) -> Iterator[str]:
    """Yield the names that earlier versions of the software gave to these units and records."""
    for group in set(examples.groups or ()):
        yield from (f"group {text}" for text in id_texts(group)[1:])
    if isinstance(examples, TableExamples):
        yield from examples.other_names


def as_registered(ledger: Ledger | None, dataset: SiloDataset) -> SiloDataset:
    """Return data with the fingerprint of the ledger: that of version 0.1.0 if only that one is registered."""
    if ledger is None or dataset.earlier is None or ledger.collection_of(version(dataset, TRAIN)) is not None:
        return dataset
    earlier = dataset.earlier()
    return dataset if ledger.collection_of(version(earlier, TRAIN)) is None else earlier


def register(ledger: Ledger, dataset: SiloDataset, name: str, labels: str = "") -> dict[str, bool]:
    """Register both splits under a name, and the hospital itself; return which collections got a new version.

    labels: digest of the table or query with the labels; the events name it.

    Units are identified by their groups and by the contents of their records. So records that are grouped, named or
    stored differently share their spending. An image that is re-encoded with loss, cropped or resized is a new record.
    Data that 0.1.0 registered keep its identification. Raises RefusedError (E-BUDGET-04) if a unit or a record is in
    another collection, or in the other split.
    """
    dataset = as_registered(ledger, dataset)
    try:
        return _register(ledger, dataset, name, labels)
    except RefusedError:
        if dataset.earlier is None:
            raise
        return _register(ledger, dataset.earlier(), name, labels)


def _register(ledger: Ledger, dataset: SiloDataset, name: str, labels: str) -> dict[str, bool]:
    new = {}
    for split, examples in splits(dataset).items():
        to, contents = collection(name, split), list(content_names(examples))
        units = unit_names(examples) if examples.groups is not None else contents
        former = list(_former_names(examples)) if ledger.chain.unkeyed and examples.groups is None else []
        try:
            every = (*contents, *_other_names(examples), *former)
            new[to] = ledger.register(
                to, unit_of(examples), version(dataset, split), len(examples), units, every, labels
            )
        except RefusedError as error:
            raise _naming_files(error, ledger, to, examples, contents, former or contents) from error
    everything = len(dataset.train) + len(dataset.test)
    new[HOSPITAL] = ledger.register(HOSPITAL, HOSPITAL, version(dataset, HOSPITAL), everything, [HOSPITAL])
    return new


def _naming_files(
    error: RefusedError, ledger: Ledger, to: str, examples: Examples, contents: Sequence[str], former: Sequence[str]
) -> RefusedError:
    paths = [path.name for path in getattr(examples, "paths", ())]
    registered = set(ledger.elsewhere(to, {*contents, *former}))
    files = [path for path, *names in zip(paths, contents, former, strict=bool(paths)) if registered & set(names)]
    shown = f" ({len(files)} files: {', '.join(files[:SHOWN])})" if files else ""
    return RefusedError(error.code, f"{error.message}{shown}")


def _image(path: Path) -> str:
    try:
        return f"content {content(path).key}"
    except UnreadableError as error:
        raise DataError(
            "E-DATA-04", f"expected a readable image at {path}, found: {error}. Restore the file"
        ) from error


def _named(kind: str, shape: tuple[int, ...], numbers: bytes) -> str:
    return f"content {hashlib.sha256(f'{kind} {shape} '.encode() + numbers).hexdigest()}"


def _former_names(examples: Examples) -> Iterator[str]:
    """Yield each record's identity in ledgers of version 1: the bytes of its file, or its numbers only."""
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    for path in paths or ():
        with path.open("rb") as file:
            yield f"record {hashlib.file_digest(file, 'sha256').hexdigest()}"
    for x in () if paths is not None else _rows(examples):
        yield f"record {hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()}"


def _rows(examples: Examples) -> Iterator[Tensor]:
    for index in torch.split(torch.arange(len(examples)), 256):
        x, _ = examples.batch(index)
        yield from x
