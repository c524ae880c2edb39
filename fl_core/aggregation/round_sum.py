"""One round's sum, by the run's aggregator: the weighed mean, or the mean of updates whose norms are bounded.

What is decided depends on the updates of the round and on earlier rounds' medians, never on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.options import NormClipped
from fl_core.aggregation.update_check import BUFFERS, Measured, UpdateCheck
from fl_core.errors import RefusedError
from fl_core.types.values import Bundle, Part

FEWEST = 3
"""Updates without which a median protects nobody."""


@dataclass(frozen=True, slots=True)
class NormHistory:
    """Medians of earlier rounds' accepted norms, by block: the first one that is not 0, and the last."""

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: Iterable[Mapping[str, float]]) -> NormHistory:
        """Read the medians off the records of a run's closed rounds, in order."""
        found = cls()
        for medians in rounds:
            found = found.after(medians)
        return found

    def after(self, medians: Mapping[str, float]) -> NormHistory:
        """Return the history after one more round."""
        first = {block: m for block, m in medians.items() if m > 0}
        return NormHistory({**first, **self.first}, {**self.last, **medians})

    def reference(self, block: str, ceiling: float) -> float | None:
        """Return min(M_{t-1}, ceiling M_0); None before there is one."""
        last, first = self.last.get(block, 0.0), self.first.get(block, 0.0)
        return min(last, ceiling * first) if last > 0 and first > 0 else None

    def refusal_reference(self, block: str, reference: float) -> float:
        """Return max(R_t, M_0): beside the short updates of a model that has converged, an honest one may be long."""
        return max(reference, self.first.get(block, 0.0))


NO_HISTORY = NormHistory()


@dataclass(slots=True)
class Decided:
    """What became of a round's updates, by silo and in words; medians: of the accepted norms, by block.

    cut_rows: how many rows were cut, over all silos   unbounded: no reference and fewer than three updates, so that
    only the manifest's bound held.
    """

    refused: dict[str, str] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)
    cut_rows: int = 0
    unbounded: bool = False


class RoundSum:
    """The weighed mean: every update that passes the check is added on arrival."""

    def __init__(self, sums: Aggregator, check: UpdateCheck) -> None:
        self.sums = sums
        self.check = check

    def measure(self, update: Bundle, name: str) -> Measured:
        """Check an update; raises ProtocolError as `UpdateCheck.check`, RefusedError (E-RUN-44)."""
        return self.check.check(update, name)

    def add(self, update: Bundle, name: str, silo: int, measured: Measured) -> None:  # noqa: ARG002
        """Take an update that was measured; silo: its index in the roster.

        Raises ProtocolError where a file can no longer be read: the round cannot go on.
        """
        self.sums.add(update, silo)

    def finish(self) -> Decided:
        """Add what had to wait for the others; raises as `add`."""
        return Decided()


@dataclass(frozen=True, slots=True)
class _Update:
    update: Bundle
    silo: int
    measured: Measured


class NormClippedSum(RoundSum):
    """The mean of updates whose norms are bounded.

    What is within the bound of earlier rounds is added on arrival. What is above it, everything in the first round, and
    what is judged by this round's median (rows, levels) waits for the others, in its file or in memory.

    Guarantees: where nothing is refused or cut, the bytes are those of `RoundSum`.
    """

    def __init__(
        self,
        sums: Aggregator,
        check: UpdateCheck,
        options: NormClipped,
        history: NormHistory,
        bias: Tensor | None = None,
    ) -> None:
        """Prepare a round; bias: of the head that it sends, where there is one."""
        super().__init__(sums, check)
        self._options = options
        self._history = history
        self._bias = bias
        self._waiting: dict[str, _Update] = {}
        self._late: dict[str, _Update] = {}
        self._norms: dict[str, Mapping[str, float]] = {}

    def measure(self, update: Bundle, name: str) -> Measured:
        measured = super().measure(update, name)
        if self._options.signs and measured.direction(self._bias) < 0:
            raise RefusedError(
                "E-RUN-44", f"{name}: update lowers the score of its own classes: refused; check the label order"
            )
        return measured

    def add(self, update: Bundle, name: str, silo: int, measured: Measured) -> None:
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

    def finish(self) -> Decided:
        decided, references = Decided(), self._references()
        moved = self._moved(references)
        for name, held in sorted(self._waiting.items()):
            over = {block: self._excess(block, norm, references) for block, norm in self._differences(name).items()}
            block, worst = max(over.items(), key=lambda item: (item[1] if item[0] not in moved else 0.0, item[0]))
            if worst > self._options.refuse_above and block not in moved:
                decided.refused[name] = self._refusal(name, worst)
                continue
            self._add_cut(held, name, references, decided)
        self._add_late(decided)
        decided.medians = self._medians(decided.refused)
        return decided

    # ---- norms of differences --------------------------------------------------------------------------------------

    def _is_level(self, part: str) -> bool:
        return self.check.rule(part, False).level

    def _is_within(self, block: str, norm: float) -> bool:
        known = self._history.reference(block, self._options.ceiling)
        return known is not None and norm <= self._options.clip_at * known

    def _differences(self, name: str) -> dict[str, float]:
        return {block: norm for block, norm in self._norms[name].items() if not self._is_level(block)}

    def _references(self) -> dict[str, float]:
        """Return R_t by block: of earlier rounds, or this round's median where it has enough updates."""
        found: dict[str, float] = {}
        for block, norms in self._by_block().items():
            known = self._history.reference(block, self._options.ceiling)
            if known is not None:
                found[block] = known
            elif len(norms) >= FEWEST:
                found[block] = lower_median(norms)
        return found

    def _moved(self, references: Mapping[str, float]) -> frozenset[str]:
        """Name the blocks of which at least half of the updates are above the limit: the round changed, and no silo.

        All of them are cut then and none is refused: the bound holds, and the run goes on.
        """
        found = set[str]()
        for block, norms in self._by_block().items():
            above = [n for n in norms if self._excess(block, n, references) > self._options.refuse_above]
            if 2 * len(above) >= len(norms):
                found.add(block)
        return frozenset(found)

    def _excess(self, block: str, norm: float, references: Mapping[str, float]) -> float:
        """Return how many times as long as what a refusal is measured by a norm is."""
        reference = references.get(block)
        return _ratio(norm, None if reference is None else self._history.refusal_reference(block, reference))

    def _by_block(self, without: Mapping[str, str] | None = None) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name in sorted(self._norms):
            if name not in (without or {}):
                for block, norm in self._differences(name).items():
                    found.setdefault(block, []).append(norm)
        return found

    def _medians(self, refused: Mapping[str, str]) -> dict[str, float]:
        accepted = self._by_block(refused)
        return {block: lower_median(norms) for block, norms in accepted.items() if len(norms) >= FEWEST}

    def _refusal(self, name: str, ratio: float) -> str:
        times = f"{ratio:.3g}x" if math.isfinite(ratio) else "without bound above"
        error = RefusedError(
            "E-RUN-44",
            f"{name}: update is {times} the usual length, the larger of the last and the first round's median (limit "
            f"{self._options.refuse_above:g}x): refused",
        )
        return str(error)

    def _add_cut(self, held: _Update, name: str, references: Mapping[str, float], decided: Decided) -> None:
        factors: dict[tuple[str, str], float | Tensor] = {}
        for block, norm in self._differences(name).items():
            if block in references and norm > (bound := self._options.clip_at * references[block]):
                part = block.removesuffix(".buffers")
                own = block != part
                factors |= {
                    (part, key): bound / norm for key in held.update[part].total if key.endswith(BUFFERS) is own
                }
        if factors:
            decided.cut[name] = f"update cut to {self._options.clip_at:g}x the median"
        self.sums.add(held.update, held.silo, factors)

    # ---- rows and levels -------------------------------------------------------------------------------------------

    def _add_late(self, decided: Decided) -> None:
        """Add the parts that are judged by this round's medians."""
        left = {name: late for name, late in sorted(self._late.items()) if name not in decided.refused}
        factors: dict[str, dict[tuple[str, str], float | Tensor]] = {name: {} for name in left}
        for part in sorted({part for late in left.values() for part in late.update}):
            rows = {name: late.measured.rows[part] for name, late in left.items() if part in late.measured.rows}
            norms = {name: late.measured.norms.get(part, 0.0) for name, late in left.items()}
            found = self._row_factors(rows) if rows else self._level_factors(norms)
            for name, factor in found.items():
                keys = self._values(part, left[name].update[part])
                factors[name] |= {(part, key): factor for key in keys}
                shortened = int((factor < 1).sum()) if isinstance(factor, Tensor) else 0
                decided.cut_rows += shortened
                what = f"{shortened} rows of {part}" if shortened else part
                times = self._options.rows if isinstance(factor, Tensor) else self._options.clip_at
                before = f"{decided.cut[name]}, " if name in decided.cut else ""
                decided.cut[name] = f"{before}{what} cut to {times:g}x the median"
        for name, late in left.items():
            self.sums.add(late.update, late.silo, factors[name])

    def _values(self, part: str, found: Part) -> list[str]:
        rule = self.check.rule(part, bool(found.weight.dim()))
        return [key for key in found.total if key not in (rule.counts, rule.steps)]

    def _level_factors(self, norms: Mapping[str, float]) -> dict[str, float]:
        if len(norms) < FEWEST:
            return {}
        bound = self._options.clip_at * lower_median(list(norms.values()))
        return {name: bound / norm for name, norm in norms.items() if norm > bound}

    def _row_factors(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut rows at a multiple of the median of their contributors; of fewer than three, of all rows."""
        if len(rows) < FEWEST or self.check.noise:
            return {}
        norms = torch.stack(list(rows.values()))  # (silos, C)
        every = norms[~norms.isnan()].tolist()
        if not every:
            return {}
        overall, bounds = lower_median(every), list[float]()
        for row in norms.T:
            there = row[~row.isnan()].tolist()
            bounds.append(self._options.rows * (lower_median(there) if len(there) >= FEWEST else overall))
        bound = torch.tensor(bounds, dtype=torch.float64)
        found = {}
        for name, row in rows.items():
            factor = torch.where(row > bound, bound / row, 1.0).nan_to_num(1.0)
            if bool((factor < 1).any()):
                found[name] = factor
        return found


def lower_median(values: Sequence[float]) -> float:
    """Return the middle value, of an even number the lower of the two."""
    return sorted(values)[(len(values) - 1) // 2]


def _ratio(norm: float, reference: float | None) -> float:
    """Return norm / reference; 0 where there is no reference, infinite above a reference of 0."""
    if reference is None or norm == 0:
        return 0.0
    return norm / reference if reference > 0 else math.inf
