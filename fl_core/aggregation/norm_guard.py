"""Bounded updates under masks: each silo clips its own update by the norms of earlier rounds.

With its update, each silo sends a histogram of 128 bins per block. It has a single 1, in the bin of the norm of the
block's mean values before clipping. The sum shows the norms of the round without names, each to within 19 %:

bin = floor(4 log2 norm) + 64, within 0 to 127          upper edge of a bin = 2^((bin - 63) / 4)

M_t is the upper edge of the lower median's bin. Each silo applies the rule of `NormClipped` to its own update, with M_0
and later medians: it clips the update to clip_at R_t, and sends none above refuse_above R_t. Before the first sum only
the grid bounds an update. This stops accidents, not attackers: only the ring bounds the update of a dishonest silo.
Range proofs, as in ACORN (Bell et al., USENIX Security 2023) and PINE (Rothblum et al., 2023), are not in this version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fl_core.aggregation.fixed_point import BUFFERS, FixedPointFormat
from fl_core.aggregation.options import MIN_UPDATES_FOR_MEDIAN, NormClipped
from fl_core.aggregation.round_sum import NormHistory
from fl_core.aggregation.update_check import norms
from fl_core.errors import ProtocolError, RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.interfaces import Guard
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.values import Bundle, Layout, Part, PartRule, PartSpec, Tensors

NORMS = "norms"
"""The part of the histograms, and the group of the server's state with the medians."""
BINS = 128
_ZERO_BIN = 64
_FIRST, _LARGEST = "first", "largest"
_ROUNDING = 1e-5
"""Tolerance for float32, in which medians and updates are computed."""
Blocks = Mapping[str, tuple[tuple[str, str], ...]]
"""Block -> (part, tensor) of its contents."""


def blocks_of(layout: Layout, rules: Mapping[str, PartRule]) -> Blocks:
    """Return the blocks of an update as in `UpdateNorms.norms`, without levels, since these are no differences."""
    blocks: dict[str, tuple[tuple[str, str], ...]] = {}
    for part, spec in sorted(layout.items()):
        rule = rules.get(part, PartRule())
        if spec.weight_shape or rule.level or part in METRIC_PARTS or part == NORMS:
            continue
        for key in sorted(spec.shapes):
            if key not in (rule.counts, rule.steps):
                block = f"{part}.buffers" if key.endswith(BUFFERS) else part
                blocks[block] = (*blocks.get(block, ()), (part, key))
    return blocks


def norms_layout(blocks: Iterable[str]) -> Layout:
    return {NORMS: PartSpec(dict.fromkeys(sorted(blocks), (BINS,)), ())}


def bin_of(norm: float) -> int:
    return min(max(math.floor(4 * math.log2(norm)) + _ZERO_BIN, 0), BINS - 1) if norm > 0 else 0


def upper_edge(bin: int) -> float:
    """Return the largest norm of a bin; 0 for the first, whose norms carry no information."""
    return 2.0 ** ((bin + 1 - _ZERO_BIN) / 4) if bin else 0.0


@dataclass(frozen=True)
class NormGuard(Guard):
    """Clips a silo's own update, or refuses to send it, according to the broadcast medians.

    numbers: of each block   history: of earlier rounds, empty in the first

    Guarantees: the silo's norms leave only in the sum of histograms; a refusal does not contain them.
    """

    options: NormClipped
    blocks: Blocks
    numbers: Mapping[str, int]
    grid: FixedPointFormat
    history: NormHistory = field(default_factory=NormHistory)
    group: ClassVar[str] = NORMS

    def initial_setting(self) -> Tensors:
        return {name: torch.zeros(len(self.blocks)) for name in (_FIRST, _LARGEST)}

    def with_setting(self, setting: Tensors | None) -> NormGuard:
        """Apply the medians of earlier rounds; raises ProtocolError (E-WIRE-06) on invalid ones."""
        medians = {} if setting is None else dict(setting)
        if set(medians) != {_FIRST, _LARGEST} or not all(_are_norms(v, len(self.blocks)) for v in medians.values()):
            raise ProtocolError(
                "E-WIRE-06", f"expected the median norms of {len(self.blocks)} blocks with the model, found other ones"
            )
        return replace(
            self, history=NormHistory(*(self._measured_blocks(medians[name]) for name in (_FIRST, _LARGEST)))
        )

    def _measured_blocks(self, values: Tensor) -> dict[str, float]:
        return {block: v for block, v in zip(self.blocks, values.tolist(), strict=True) if v > 0}

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        """Add the histograms, and clip long blocks.

        Raises RefusedError (E-RUN-44) above refuse_above medians. A norm that is not finite is checked elsewhere.
        """
        if not any(part in bundle for keys in self.blocks.values() for part, _ in keys):
            return bundle
        parts, histograms = {name: dict(part.total) for name, part in bundle.items()}, dict[str, Tensor]()
        for block, keys in self.blocks.items():
            norm = self._norm(bundle, block)
            histograms[block] = torch.zeros(BINS)
            if norm is None or not math.isfinite(norm):
                continue
            histograms[block][bin_of(norm)] = 1.0
            reference = self.history.reference(block, self.options.ceiling)
            if reference is None or norm <= self.options.clip_at * reference:
                continue
            if norm > self.options.refuse_above * reference:
                raise RefusedError(
                    "E-RUN-44",
                    f"update withheld: its norm is more than {self.options.refuse_above:g} times the usual norm in "
                    "this run. Check whether the images have another scale, or training diverged",
                )
            for part, key in keys:
                parts[part][key] = bundle[part].total[key].double() * (self.options.clip_at * reference / norm)
        cut = {name: Part(total, bundle[name].weight) for name, total in parts.items()}
        return {**cut, NORMS: Part(histograms, torch.tensor(1.0))}

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        """Check that honest silos can have produced a sum; raises RefusedError (E-RUN-48), which names no silo."""
        if NORMS not in total:
            return total
        if any(bool((v < 0).any()) or float(v.sum()) > cohort for v in total[NORMS].total.values()):
            raise _impossible("counts of norms that no silos have")
        for block in self.blocks:
            norm, reference = self._norm(total, block), self.history.reference(block, self.options.ceiling)
            if norm is not None and reference is not None:
                most = self.options.clip_at * reference * (1 + _ROUNDING) + self._rounding(total, block, cohort)
                if norm > most:
                    raise _impossible(f"a mean of {block!r} that is longer than any update may be")
        return total

    def next_setting(self, setting: Tensors, answered: Part) -> Tensors:
        """Add the round's medians, for blocks with at least three norms; a median of 0 is not added."""
        medians = {block: _lower_median(answered.total[block]) for block in self.blocks}
        after = self.with_setting(setting).history.after(medians)
        return {
            name: torch.tensor([norms.get(block, 0.0) for block in self.blocks])
            for name, norms in ((_FIRST, after.first), (_LARGEST, after.largest))
        }

    def _norm(self, bundle: Bundle, block: str) -> float | None:
        """Return the norm of a block's mean values; None of weight 0."""
        part = self.blocks[block][0][0]
        weight = float(bundle[part].weight)
        if not weight > 0:
            return None
        return norms(part, {key: bundle[part].total[key] for _, key in self.blocks[block]})[block] / weight

    def _rounding(self, total: Bundle, block: str, silos: int) -> float:
        """Bound the effect of grid rounding on the norm of a mean."""
        part, key = self.blocks[block][0]
        step = silos * 2.0 ** -(self.grid.frac_bits(self.grid.segment(part, key)) + 1)
        return math.sqrt(self.numbers[block]) * step / float(total[part].weight)


def _are_norms(values: Tensor, number: int) -> bool:
    return values.shape == (number,) and bool(torch.isfinite(values).all()) and bool((values >= 0).all())


def _lower_median(histogram: Tensor) -> float:
    counts = histogram.round().long().cumsum(0)
    n = int(counts[-1])
    if n < MIN_UPDATES_FOR_MEDIAN:
        return 0.0
    return upper_edge(int((counts <= (n - 1) // 2).sum()))


def _impossible(found: str) -> RefusedError:
    return RefusedError(
        "E-RUN-48",
        f"expected a sum of updates that each hospital bounded, found {found}: nothing is merged, and the sum does "
        "not show which hospital is responsible",
    )
