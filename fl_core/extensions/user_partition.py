"""Partitions of users: frozen dataclasses with `silos` and `partition`, in another package or a notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from fl_core import rng
from fl_core.converter import ConversionError, read_options
from fl_core.datasets.partition.by_class import Indices, Labels
from fl_core.errors import ConfigError
from fl_core.extensions import registry

Shares = Sequence[tuple[ArrayLike, ArrayLike] | ArrayLike]
"""One entry per silo: positions in the train and in the test labels, or only in the train labels. In the second case
the test examples of each class are divided in proportion to its training examples."""
_TEXT = re.compile(r"([\w.]+:\w+)(?:\(([^()/#@]*)\))?", re.ASCII)


class OwnPartition(Protocol):
    """How the examples of a data set are divided among silos; its fields are its options.

    silos: number of silos.
    """

    silos: int

    def partition(self, train: Labels, test: Labels, n_classes: int, seed: int) -> Shares:
        """Divide the examples. The result must depend only on these arguments. seed: `federation.partition_seed`."""
        ...


def require(name: str, value: object) -> None:
    """Raise ConfigError (E-CFG-02) if a value is no partition."""
    made = value() if isinstance(value, type) else value
    if not callable(getattr(made, "partition", None)) or not _is_count(getattr(made, "silos", None)):
        raise ConfigError(
            "E-CFG-02", f"{name}: expected a partition, with silos >= 1 and partition(train, test, n_classes, seed)"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1_000_000


def parse_partition(body: str) -> tuple[OwnPartition, str] | None:
    """Read a loaded partition from "package:Name(silos=5,alpha=0.3)"; None if the text has another form.

    Returns the partition and its canonical text: options that differ from their defaults, in the order of the fields.
    """
    match = _TEXT.fullmatch(body)
    if match is None:
        return None
    partition = registry.loaded("partition", match[1])
    if partition is None:
        raise registry.unknown("partition", match[1], ())
    if not isinstance(partition, type):  # objects of this process have no options
        return partition, match[1]  # type: ignore[return-value]
    options = {}
    for entry in filter(None, (match[2] or "").split(",")):
        key, _, value = entry.partition("=")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value.strip()
    return make_partition(match[1], options)


def make_partition(name: str, options: dict[str, object]) -> tuple[OwnPartition, str]:
    """Make a loaded partition from its options; raises ConfigError (E-CFG-01, E-CFG-02, E-CFG-08)."""
    partition = registry.loaded("partition", name)
    if not isinstance(partition, type):
        return partition, name  # type: ignore[return-value]
    try:
        one: OwnPartition = read_options(partition, name, options)
    except ConversionError as error:
        raise ConfigError("E-CFG-02", str(error)) from error
    if not _is_count(one.silos):
        raise ConfigError("E-CFG-08", f"{name}: expected at least one silo, found {one.silos!r}: raise the number")
    assert is_dataclass(one)
    values = {f.name: getattr(one, f.name) for f in fields(one)}
    options_text = ",".join(
        f"{f.name}={_plain(name, f.name, values[f.name])}" for f in fields(one) if values[f.name] != f.default
    )
    return one, f"{name}({options_text})" if options_text else name


def _plain(name: str, option: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not re.fullmatch(r"[\w.+-]+", text, re.ASCII):
        raise ConfigError("E-CFG-02", f"{name}.{option}: expected a number or a word, found {value!r}: change it")
    return text


def checked(
    text: str, shares: Shares, silos: int, labels: tuple[Labels, Labels], n_classes: int, seed: int
) -> list[tuple[Indices, Indices]]:
    """Check a partition's result, and return pairs of positions.

    Raises ConfigError (E-CFG-08) if the number of silos is wrong, or if positions are no whole numbers, outside the
    data or twice in one silo.
    """
    entries = list(shares)
    if len(entries) != silos:
        raise ConfigError(
            "E-CFG-08", f"{text}: expected shares of {silos} silos, found {len(entries)}: correct `silos`"
        )
    paired = [entry for entry in entries if isinstance(entry, tuple) and len(entry) == 2]
    if paired and len(paired) != len(entries):
        raise ConfigError("E-CFG-08", f"{text}: expected (train, test) of every silo or of none, found both")
    if paired:
        both = [[_positions(text, k, entry[half], labels[half]) for k, entry in enumerate(paired)] for half in (0, 1)]
        return list(zip(*both, strict=True))
    train = [_positions(text, k, np.asarray(entry), labels[0]) for k, entry in enumerate(entries)]
    return list(zip(train, divided_alike(train, labels, n_classes, seed), strict=True))


def _positions(text: str, silo: int, raw: ArrayLike, labels: Labels) -> Indices:
    index = np.asarray(raw)
    if index.size == 0:
        return np.empty(0, np.int64)
    sound = index.ndim == 1 and np.issubdtype(index.dtype, np.integer)
    if not sound or index.min() < 0 or index.max() >= len(labels) or len(np.unique(index)) < len(index):
        raise ConfigError(
            "E-CFG-08",
            f"{text}, silo {silo}: expected different positions from 0 to {len(labels) - 1}, found {raw!r:.80}: "
            "correct the partition",
        )
    return index.astype(np.int64)


def divided_alike(train: Sequence[Indices], labels: tuple[Labels, Labels], n_classes: int, seed: int) -> list[Indices]:
    """Divide the test examples of each class in proportion to its training examples; omit classes of no silo.

    Guarantees: the parts are disjoint, and a silo without training examples of a class gets no test example of it.
    """
    parts: list[list[Indices]] = [[] for _ in train]
    for c in range(n_classes):
        index = rng.numpy_stream(seed, "partition", "own", "test", c).permutation(np.flatnonzero(labels[1] == c))
        counts = np.array([(labels[0][part] == c).sum() for part in train], dtype=np.int64)
        if counts.sum():
            ends = (np.cumsum(counts) * len(index)) // counts.sum()
            for part, share in zip(parts, np.split(index, ends[:-1]), strict=True):
                part.append(share)
    return [np.sort(np.concatenate([*part, np.empty(0, np.int64)])).astype(np.int64) for part in parts]
