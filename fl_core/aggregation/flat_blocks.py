"""A round's update as two flat blocks of ring words, of one length whatever a silo holds: what a mask can cover.

`classes` has the parts that tell of single classes: those with a weight per row or with class counts, and what an
evaluation measures. `model` has everything else. Within a block parts come by name, within a part tensors by name, then
the weight; row by row. Each block begins with `CHECK_WORDS` words of value 1, whose sums say how many updates were
added: masks that did not cancel make random numbers of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.training.evaluation import CLINICAL_PART, METRICS
from fl_core.types.values import Bundle, Layout, Part, PartRule, PartSpec

MODEL, CLASSES = "model", "classes"
BLOCKS = (MODEL, CLASSES)
CHECK_WORDS = 4
WORDS = "words"
"""The one tensor of a block, where an update is a bundle of two blocks."""


class Segment(NamedTuple):
    """A tensor of an update, or a part's weight (key: None), and where it lies in its block, in words."""

    part: str
    key: str | None
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """How the updates of one kind of round lie in their two blocks; both sides make it of the manifest.

    layout: of that kind of round, guards' parts included   rules: as `Method.part_rules`.
    """

    layout: Layout
    grid: FixedPointFormat
    rules: Mapping[str, PartRule]
    n_classes: int

    def block_of(self, part: str) -> str:
        spec, counts = self.layout[part], self.rules.get(part, PartRule()).counts
        per_class = bool(spec.weight_shape) or spec.shapes.get(counts) == (self.n_classes,)
        return CLASSES if per_class or part in (METRICS, CLINICAL_PART) else MODEL

    @cached_property
    def segments(self) -> Mapping[str, tuple[Segment, ...]]:
        return {block: tuple(self._segments(block)) for block in BLOCKS}

    def _segments(self, block: str) -> Iterator[Segment]:
        start = CHECK_WORDS
        for part, spec in sorted(self.layout.items()):
            if self.block_of(part) != block:
                continue
            for key, shape in (*sorted(spec.shapes.items()), (None, spec.weight_shape)):
                segment = Segment(part, key, tuple(shape), start)
                yield segment
                start = segment.stop

    def words(self, block: str) -> int:
        """Count the words of a block, check words included."""
        last = self.segments[block]
        return last[-1].stop if last else CHECK_WORDS

    @property
    def blocks(self) -> Layout:
        """The layout of an update as two blocks."""
        return {block: PartSpec({WORDS: (self.words(block),)}, ()) for block in BLOCKS}

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32 if self.grid.ring == "ring32" else torch.int64

    def flatten(self, units: Bundle) -> Bundle:
        """Lay out an update that is on the grid, in integer units; each number is within its ring."""
        blocks = {}
        for block, segments in self.segments.items():
            words = torch.empty(self.words(block), dtype=self.dtype)
            words[:CHECK_WORDS] = 1
            for s in segments:
                words[s.start : s.stop] = _tensor(units[s.part], s.key).reshape(-1)
            blocks[block] = Part({WORDS: words}, torch.zeros((), dtype=self.dtype))
        return blocks

    def unflatten(self, sums: Mapping[str, Tensor]) -> Bundle:
        """Read sums of blocks (words,) back as parts in integer units; a block that is not there is all zeros."""
        total = {part: dict[str, Tensor]() for part in self.layout}
        weights = dict[str, Tensor]()
        for block, segments in self.segments.items():
            for s in segments:
                flat = sums[block][s.start : s.stop].long() if block in sums else torch.zeros(math.prod(s.shape)).long()
                value = flat.reshape(s.shape)
                if s.key is None:
                    weights[s.part] = value
                else:
                    total[s.part][s.key] = value
        return {part: Part(total[part], weights[part]) for part in self.layout}


def _tensor(part: Part, key: str | None) -> Tensor:
    return part.weight if key is None else part.total[key]
