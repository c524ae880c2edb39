"""Smallest and largest number of each large tensor of a file that arrives piece by piece.

Whoever sums updates asks of each tensor whether its numbers are finite and inside their bound. Pieces that have just
arrived are in the processor's cache, where the answer takes a tenth of what reading the file again does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from fl_core.aggregation.aggregator import SMALL
from protos.wire.codec import LENGTH, Entry, entries_of

MOST_INDEX = 1 << 20
"""Bytes of an index at most, some ten thousand tensors; a larger one is not followed here: to read one takes many times
its length in memory, and nothing else of this process runs meanwhile."""
_FOLLOWED: Mapping[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


class _Span(NamedTuple):
    """Where the bytes of a tensor lie that is followed."""

    begin: int
    end: int
    kind: type[np.floating]
    entry: Entry


class Extremes:
    """What is known of a file of tensors, of which `update` is given all bytes in order.

    Tensors of up to SMALL numbers are left to whoever sums them, who reads those at once.

    Guarantees: `found` holds tensors that have arrived whole and no others, each with what NumPy's min and max say of
    all of it (NaN where one number is); of a file that is none of ours, or that comes in pieces which cut numbers, it
    says nothing, and nothing is raised: whoever reads the file says what is wrong with it.
    """

    def __init__(self) -> None:
        self.found: dict[Entry, tuple[float, float]] = {}
        self._index = bytearray()
        self._size = 0
        """Bytes of the index with its length in front of it; 0 before that is known."""
        self._left: list[_Span] | None = None
        """What has not arrived, the next one last; None before the index has."""
        self._at = 0
        self._low, self._high = np.inf, -np.inf

    def update(self, data: bytes | memoryview) -> None:
        """Look at the next bytes."""
        piece = memoryview(data)
        try:
            rest = self._read_index(piece) if self._left is None else piece
            while self._left and rest:
                rest = rest[self._look(self._left, rest) :]
            self._at += len(rest)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            self._left = []
            self._index.clear()
            self.found.clear()

    def _read_index(self, piece: memoryview) -> memoryview:
        """Collect the index, read it once all of it is here, and give the bytes that follow it."""
        taken = 0
        if not self._size:
            taken = min(len(piece), LENGTH - len(self._index))
            self._index += piece[:taken]
            if len(self._index) == LENGTH:
                self._size = LENGTH + int.from_bytes(self._index, "little")
                if self._size > MOST_INDEX:
                    raise ValueError("an index that is too large")
        if self._size:
            rest = piece[taken : taken + self._size - len(self._index)]
            self._index += rest
            taken += len(rest)
        self._at += taken
        if self._size and len(self._index) == self._size:
            index = json.loads(self._index[LENGTH:])
            index.pop("__metadata__", None)
            self._left = _followed(entries_of(index, self._at).values(), self._at)
            self._index.clear()
        return piece[taken:]

    def _look(self, left: list[_Span], piece: memoryview) -> int:
        """Look at what a piece holds of the next tensor, or of what lies before it; return how many bytes that is."""
        begin, end, kind, entry = left[-1]
        if self._at < begin:
            size = min(begin - self._at, len(piece))
            self._at += size
            return size
        size = min(end - self._at, len(piece))
        block = np.frombuffer(piece[:size], kind)  # ValueError where a number is cut
        self._low = np.minimum(self._low, np.minimum.reduce(block))
        self._high = np.maximum(self._high, np.maximum.reduce(block))
        self._at += size
        if self._at == end:
            self.found[entry] = float(self._low), float(self._high)
            left.pop()
            self._low, self._high = np.inf, -np.inf
        return size


def _followed(entries: Iterable[Entry], start: int) -> list[_Span]:
    """Choose what is looked at, the first one last.

    Raises ValueError on tensors that share bytes: to look at each would take longer than to receive them.
    """
    spans = list[_Span]()
    for entry in entries:
        numbers, kind = entry.numbers, _FOLLOWED.get(entry.dtype)
        if numbers > SMALL and kind is not None:
            spans.append(_Span(entry.begin, entry.begin + numbers * entry.dtype.itemsize, kind, entry))
    spans.sort(key=lambda span: span.begin, reverse=True)
    for span in reversed(spans):
        if span.begin < start:
            raise ValueError("tensors that share bytes")
        start = span.end
    return spans
