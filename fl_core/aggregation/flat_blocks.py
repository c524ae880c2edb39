"""A round's update as two flat blocks of ring words, equally long for every silo: the form that masks cover.

`classes` has the parts that reveal single classes: those with a weight per row or with class counts, and evaluation
results. `model` has everything else. A block has its parts in the order of their names; a part has its tensors in the
order of their names, row by row, then its weight. Each block begins with `CHECK_WORDS` words of value 1. Their sums are
the number of added updates, or random numbers if masks did not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.tensors import Tensor, torch
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.secagg import BLOCKS, CLASSES, MODEL
from fl_core.types.values import Bundle, Layout, Part, PartRule, PartSpec

CHECK_WORDS = 4
WORDS = "words"
"""The only tensor of a block, if an update is a bundle of two blocks."""


class Segment(NamedTuple):
    """A tensor of an update, or a part's weight (key: None), and its position in its block, in words."""

    part: str
    key: str | None
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The positions of an update's tensors in its two blocks, by kind of round, derived from the manifest.

    layout: of that kind of round, including guards' parts   rules: as `Method.part_rules`.
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
        """Count the words of a block, including check words."""
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
        """Convert an update in integer units to its two blocks; each number must be within its ring."""
        blocks = {}
        for block, segments in self.segments.items():
            words = torch.empty(self.words(block), dtype=self.dtype)
            words[:CHECK_WORDS] = 1
            for s in segments:
                words[s.start : s.stop] = _tensor(units[s.part], s.key).reshape(-1)
            blocks[block] = Part({WORDS: words}, torch.zeros((), dtype=self.dtype))
        return blocks

    def unflatten(self, sums: Mapping[str, Tensor]) -> Bundle:
        """Convert sums of blocks (words,) back to parts in integer units; a missing block is all zeros."""
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
