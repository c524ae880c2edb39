"""One round's sum, by the run's aggregator: the weighted mean, or the mean of updates with bounded norms.

Decisions depend on the updates of the round and on earlier rounds' medians, never on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import BUFFERS
from fl_core.aggregation.options import MIN_UPDATES_FOR_MEDIAN, NormClipped
from fl_core.aggregation.update_check import UpdateCheck, UpdateNorms
from fl_core.errors import RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Bundle, Part


@dataclass(frozen=True, slots=True)
class NormHistory:
    """Medians of earlier rounds' accepted norms, by block: the first one that is not 0, and the largest.

    initial: norm of the initial weights, which follow from the manifest; 0 or missing if they do not.
    """

    first: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    initial: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rounds: Iterable[Mapping[str, float]], initial: Mapping[str, float] = MappingProxyType({})
    ) -> NormHistory:
        """Read the medians from the records of a run's closed rounds, in order."""
        history = cls(initial=initial)
        for medians in rounds:
            history = history.after(medians)
        return history

    def after(self, medians: Mapping[str, float]) -> NormHistory:
        """Return the history after one more round."""
        positive = {block: m for block, m in medians.items() if m > 0}
        largest = {block: max(m, self.largest.get(block, 0.0)) for block, m in positive.items()}
        return NormHistory({**positive, **self.first}, {**self.largest, **largest}, self.initial)

    def reference(self, block: str, ceiling: float) -> float | None:
        """Return the largest median so far, at most ceiling M_0; None before the first."""
        return min(self.largest[block], ceiling * self.first[block]) if block in self.first else None


NO_HISTORY = NormHistory()


@dataclass(slots=True)
class AggregationDecision:
    """The outcomes of a round's updates, by silo and in words. medians: of the accepted norms, by block.

    cut_rows: number of clipped rows, over all silos   unbounded: whether some part of the updates could not be compared
    with other updates, of this or an earlier round. Then only the initial weights bound it, and rows are not bounded.
    """

    refused: dict[str, str] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)
    cut_rows: int = 0
    unbounded: bool = False


class RoundSum:
    """The weighted mean: every update that passes the check is added on arrival."""

    def __init__(self, sums: Aggregator, check: UpdateCheck) -> None:
        self.sums = sums
        self.check = check

    def measure(self, update: Bundle, name: str) -> UpdateNorms:
        """Check an update; raises ProtocolError as `UpdateCheck.check`, RefusedError (E-RUN-44)."""
        return self.check.check(update, name)

    def add(self, update: Bundle, name: str, silo: int, measured: UpdateNorms) -> None:  # noqa: ARG002
        """Add a measured update; silo: its index in the roster.

        Raises ProtocolError if a file can no longer be read: the round cannot continue.
        """
        self.sums.add(update, silo)

    def finish(self) -> AggregationDecision:
        """Add the parts that waited for other updates, and return the decision; raises as `add`."""
        return AggregationDecision()

    def total(self) -> Bundle:
        """Return the sum in integer units, after `finish`."""
        return self.sums.total()

    @property
    def clipped(self) -> int:
        """Number of values that were clipped to the grid's bounds here."""
        return self.sums.clipped


@dataclass(frozen=True, slots=True)
class _Update:
    update: Bundle
    silo: int
    measured: UpdateNorms


class NormClippedSum(RoundSum):
    """The mean of updates whose norms are bounded.

    Updates within the bound of earlier rounds are added on arrival. Those above it, all updates of the first round, and
    parts that are compared with this round's median (rows, levels) wait for the others, in their files or in memory.

    Guarantees: if nothing is refused or clipped, the bytes are those of `RoundSum`.
    """

    def __init__(
        self,
        sums: Aggregator,
        check: UpdateCheck,
        options: NormClipped,
        history: NormHistory,
        bias: Tensor | None = None,
    ) -> None:
        """Prepare a round; bias: of the broadcast head, if there is one."""
        super().__init__(sums, check)
        self._options = options
        self._history = history
        self._bias = bias
        self._waiting: dict[str, _Update] = {}
        self._late: dict[str, _Update] = {}
        self._norms: dict[str, Mapping[str, float]] = {}

    def measure(self, update: Bundle, name: str) -> UpdateNorms:
        measured = super().measure(update, name)
        if self._options.signs:
            require_direction(measured, name, self._bias)
        return measured

    def add(self, update: Bundle, name: str, silo: int, measured: UpdateNorms) -> None:
        self._norms[name] = measured.norms
        waits = frozenset(part for part in update if part in measured.rows or self._is_level(part))
        late = {part: update[part] for part in sorted(waits)}
        if late:
            self._late[name] = _Update(late, silo, measured)
        now = {part: update[part] for part in update if part not in waits}
        if all(self._is_within(block, norm) for block, norm in measured.norms.items() if block not in waits):
            self.sums.add(now, silo)
        else:
            self._waiting[name] = _Update(now, silo, measured)

    def finish(self) -> AggregationDecision:
        decided, references = AggregationDecision(), self._references()
        moved = self._moved(references)
        for name, waiting in sorted(self._waiting.items()):
            over = [
                _ratio(norm, references.get(block))
                for block, norm in self._differences(name).items()
                if block not in moved and self._is_absurd(block, norm, references)
            ]
            if over:
                decided.refused[name] = self._refusal(name, max(over))
                continue
            self._add_cut(waiting, name, references, decided)
        self._add_late(decided)
        decided.medians = self._medians(decided.refused)
        decided.unbounded = self._has_no_comparison()
        return decided

    # ---- norms of differences --------------------------------------------------------------------------------------

    def _is_level(self, part: str) -> bool:
        return self.check.rule(part, False).level

    def _is_within(self, block: str, norm: float) -> bool:
        reference = self._history.reference(block, self._options.ceiling)
        return reference is not None and norm <= self._options.clip_at * reference

    def _differences(self, name: str) -> dict[str, float]:
        return {block: norm for block, norm in self._norms[name].items() if not self._is_level(block)}

    def _references(self) -> dict[str, float]:
        """Return R_t by block: from earlier rounds, else this round's median of at least three, else the manifest's."""
        references: dict[str, float] = {}
        for block, norms in self._by_block().items():
            reference, initial = self._history.reference(block, self._options.ceiling), self._history.initial.get(block)
            if reference is not None:
                references[block] = reference
            elif len(norms) >= MIN_UPDATES_FOR_MEDIAN:
                references[block] = lower_median(norms) or initial or 0.0
            elif initial:
                references[block] = initial
        return references

    def _has_no_comparison(self) -> bool:
        """Tell whether some part of this round's updates has no median to be compared with."""
        new = [norms for block, norms in self._by_block().items() if block not in self._history.first]
        late = 0 < len(self._late) < MIN_UPDATES_FOR_MEDIAN and not self.check.noise
        return late or any(len(norms) < MIN_UPDATES_FOR_MEDIAN for norms in new)

    def _moved(self, references: Mapping[str, float]) -> frozenset[str]:
        """Return the blocks in which at least half of the updates exceed the limit.

        Such an increase is a change of the whole round, not of a silo. So these updates are clipped, not refused: the
        bound holds, and the run continues.
        """
        return frozenset(
            block
            for block, norms in self._by_block().items()
            if 2 * sum(self._is_absurd(block, n, references) for n in norms) >= len(norms)
        )

    def _is_absurd(self, block: str, norm: float, references: Mapping[str, float]) -> bool:
        """Tell whether neither the other updates nor the manifest explain a norm."""
        explained = self._options.clip_at * self._history.initial.get(block, 0.0)
        return norm > explained and _ratio(norm, references.get(block)) > self._options.refuse_above

    def _by_block(self, without: Mapping[str, str] | None = None) -> dict[str, list[float]]:
        by_block: dict[str, list[float]] = {}
        for name in sorted(self._norms):
            if name not in (without or {}):
                for block, norm in self._differences(name).items():
                    by_block.setdefault(block, []).append(norm)
        return by_block

    def _medians(self, refused: Mapping[str, str]) -> dict[str, float]:
        accepted = self._by_block(refused)
        return {block: lower_median(norms) for block, norms in accepted.items() if len(norms) >= MIN_UPDATES_FOR_MEDIAN}

    def _refusal(self, name: str, ratio: float) -> str:
        times = f"{ratio:.3g} times" if math.isfinite(ratio) else "without bound above"
        error = RefusedError(
            "E-RUN-44",
            f"{name}: update refused: its norm is {times} the usual norm (limit {self._options.refuse_above:g}). "
            "Check whether the images have another scale, or training diverged",
        )
        return str(error)

    def _add_cut(self, late: _Update, name: str, references: Mapping[str, float], decided: AggregationDecision) -> None:
        factors: dict[tuple[str, str], float | Tensor] = {}
        for block, norm in self._differences(name).items():
            if block in references and norm > (bound := self._options.clip_at * references[block]):
                part = block.removesuffix(".buffers")
                is_own_block = block != part
                factors |= {
                    (part, key): bound / norm
                    for key in late.update[part].total
                    if key.endswith(BUFFERS) is is_own_block
                }
        if factors:
            decided.cut[name] = f"update clipped to {self._options.clip_at:g} times the usual norm"
        self.sums.add(late.update, late.silo, factors)

    # ---- rows and levels -------------------------------------------------------------------------------------------

    def _add_late(self, decided: AggregationDecision) -> None:
        """Add the parts that are compared with this round's medians."""
        remaining = {name: late for name, late in sorted(self._late.items()) if name not in decided.refused}
        factors: dict[str, dict[tuple[str, str], float | Tensor]] = {name: {} for name in remaining}
        for part in sorted({part for late in remaining.values() for part in late.update}):
            rows = {name: late.measured.rows[part] for name, late in remaining.items() if part in late.measured.rows}
            norms = {name: late.measured.norms.get(part, 0.0) for name, late in remaining.items()}
            of_part = self._row_factors(rows) if rows else self._level_factors(norms)
            for name, factor in of_part.items():
                keys = self._values(part, remaining[name].update[part])
                factors[name] |= {(part, key): factor for key in keys}
                shortened = int((factor < 1).sum()) if isinstance(factor, Tensor) else 0
                decided.cut_rows += shortened
                what = f"{shortened} rows of {part}" if shortened else part
                times = self._options.rows if isinstance(factor, Tensor) else self._options.clip_at
                before = f"{decided.cut[name]}, " if name in decided.cut else ""
                decided.cut[name] = f"{before}{what} clipped to {times:g} times the median"
        for name, late in remaining.items():
            self.sums.add(late.update, late.silo, factors[name])

    def _values(self, name: str, part: Part) -> list[str]:
        rule = self.check.rule(name, bool(part.weight.dim()))
        return [key for key in part.total if key not in (rule.counts, rule.steps)]

    def _level_factors(self, norms: Mapping[str, float]) -> dict[str, float]:
        if len(norms) < MIN_UPDATES_FOR_MEDIAN:
            return {}
        bound = self._options.clip_at * lower_median(list(norms.values()))
        return {name: bound / norm for name, norm in norms.items() if norm > bound}

    def _row_factors(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip rows at a multiple of the median of their contributors; with fewer than three, of all rows."""
        if len(rows) < MIN_UPDATES_FOR_MEDIAN or self.check.noise:
            return {}
        norms = torch.stack(list(rows.values()))  # (silos, C)
        every = norms[~norms.isnan()].tolist()
        if not every:
            return {}
        overall, bounds = lower_median(every), list[float]()
        for row in norms.T:
            sent = row[~row.isnan()].tolist()
            bounds.append(self._options.rows * (lower_median(sent) if len(sent) >= MIN_UPDATES_FOR_MEDIAN else overall))
        bound = torch.tensor(bounds, dtype=torch.float64)
        factors = {name: torch.where(row > bound, bound / row, 1.0).nan_to_num(1.0) for name, row in rows.items()}
        return {name: factor for name, factor in factors.items() if bool((factor < 1).any())}


def require_direction(measured: UpdateNorms, name: str, bias: Tensor | None) -> None:
    """Raise RefusedError (E-RUN-44) if an update lowers the score of its own classes; as `UpdateNorms.direction`."""
    if measured.direction(bias) < 0:
        raise RefusedError(
            "E-RUN-44",
            f"{name}: update refused: it lowers the scores of the hospital's own classes. Check the label order",
        )


def lower_median(values: Sequence[float]) -> float:
    """Return the middle value, or the lower one of two."""
    return sorted(values)[(len(values) - 1) // 2]


def _ratio(norm: float, reference: float | None) -> float:
    """Return norm / reference; 0 without a reference, infinite above a reference of 0."""
    if reference is None or norm == 0:
        return 0.0
    return norm / reference if reference > 0 else math.inf
