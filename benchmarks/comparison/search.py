"""The runs of a protocol: trials on validation images and tuning seeds, then each method's best on the test images.

Every variant at every rate, then the best variant with each of `then` at every rate; where the best rate is an end of
the grid, one step beyond it, at most `widen` times. Of equal scores the first variant and the smallest rate wins. Of
FedAvg the best of each network is in the table, too. All trials are of one machine, and so is the table. The two may
differ: pairs, which need one machine, are within the trials (a method and its twin) or within the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.comparison import study
from benchmarks.comparison.protocol import BASELINE, Protocol, network_of
from benchmarks.comparison.settings import Words
from benchmarks.comparison.study import Complete, Trial
from benchmarks.run_store import Run

Cell = tuple[Words, float]
"""A variant at a rate."""


@dataclass(slots=True)
class Searched:
    """What the trials of a method came to.

    trials: runs on the tuning seeds of each cell, in the order of `tuning_seeds`   table: runs by seed
    twin: FedAvg's on the tuning seeds with the network, the words and the rate that were chosen
    network: the network that a row of FedAvg's is of, whose cells alone are its own
    """

    trials: dict[Cell, list[Run]] = field(default_factory=dict)
    chosen: Cell = ((), 0.0)
    table: Mapping[int, Run] = field(default_factory=dict)
    twin: Sequence[Run] = ()
    network: str | None = None

    @property
    def own(self) -> list[Cell]:
        return [cell for cell in self.trials if self.network in (None, network_of(cell[0]))]

    @property
    def at_an_end(self) -> bool:
        """Whether no smaller or no larger rate was tried with what was chosen."""
        words, lr = self.chosen
        rates = self.rates(words)
        return lr in (rates[0], rates[-1])

    def rates(self, words: Words) -> list[float]:
        return sorted(lr for other, lr in self.trials if other == words)

    def best(self, measure: str) -> Cell:
        return max(sorted(self.own, key=self._order), key=lambda cell: study.rank(self.trials[cell], measure))

    def _order(self, cell: Cell) -> tuple[int, float]:
        variants = list(dict.fromkeys(words for words, _ in self.trials))
        return variants.index(cell[0]), cell[1]


def tuned(protocol: Protocol, complete: Complete, machine: str, data_root: Path | None = None) -> dict[str, Searched]:
    """Make the trials of a protocol, or find them, and choose; a row per method, and one per network of FedAvg."""
    measure = protocol.measures[0]
    found = {method: Searched() for method in protocol.methods}

    def tune(cells: Mapping[str, Sequence[Cell]]) -> None:
        asked = {
            (method, cell): trials_of(protocol, method, cell, machine, data_root, table=False)
            for method, of in cells.items()
            for cell in of
        }
        runs = complete([trial for trials in asked.values() for trial in trials])
        for (method, cell), trials in asked.items():
            found[method].trials[cell] = [runs[trial.key] for trial in trials]

    tune({m: [(words, lr) for words in variants for lr in protocol.lrs] for m, variants in protocol.methods.items()})
    best = {method: row.best(measure)[0] for method, row in found.items()}
    tune({m: [((*words, *more), lr) for more in protocol.then for lr in protocol.lrs] for m, words in best.items()})
    for _ in range(protocol.widen):
        tune({m: [cell] for m, row in found.items() if (cell := wider(row, measure, protocol.lrs))})
    networks = [n for n in dict.fromkeys(network_of(words) for words in protocol.methods[BASELINE]) if n]
    rows = dict(found)
    for name, network in [(name, None) for name in found] + [(of_network(n), n) for n in networks]:
        row = rows.setdefault(name, Searched(found[BASELINE].trials, network=network))
        row.chosen = row.best(measure)
    twins = {
        claim.method: trials_of(protocol, BASELINE, twin_of(rows[claim.method].chosen), machine, data_root, table=False)
        for claim in protocol.claims
    }
    runs = complete([trial for trials in twins.values() for trial in trials])
    for name, trials in twins.items():
        rows[name].twin = [runs[trial.key] for trial in trials]
    return rows


def tabled(
    protocol: Protocol, rows: Mapping[str, Searched], complete: Complete, machine: str, data_root: Path | None = None
) -> dict[str, Searched]:
    """Make each row's runs on the test images with what was chosen, or find them; return the rows with them."""
    asked = {name: trials_of(protocol, name, row.chosen, machine, data_root, table=True) for name, row in rows.items()}
    runs = complete([trial for trials in asked.values() for trial in trials])
    return {
        name: replace(row, table={trial.seed: runs[trial.key] for trial in asked[name]}) for name, row in rows.items()
    }


def of_network(network: str) -> str:
    """Name the row of the best FedAvg of one network."""
    return f"{BASELINE}, {network}"


def twin_of(cell: Cell) -> Cell:
    """Return the cell of FedAvg that a method's own differs from in the method alone."""
    words, lr = cell
    network = [w for w in words if w.startswith("network=")]
    return (*network, "method=fedavg", *(w for w in words if not w.startswith(("network=", "method")))), lr


def wider(row: Searched, measure: str, lrs: Sequence[float]) -> Cell | None:
    """Return the cell one step beyond the grid where the best rate is its end, None where it is not."""
    words, lr = row.best(measure)
    rates = row.rates(words)
    step = lrs[-1] / lrs[-2]
    if lr == rates[-1]:
        return words, float(f"{lr * step:.2g}")
    return (words, float(f"{lr / step:.2g}")) if lr == rates[0] else None


def trials_of(
    protocol: Protocol, method: str, cell: Cell, machine: str, data_root: Path | None, *, table: bool
) -> list[Trial]:
    """Compose the runs of a cell on the tuning seeds, or on the table's."""
    words, lr = cell
    images = protocol.images["table" if table else "tuning"]
    return study.trials(
        method,
        (f"images={images}", *protocol.words, *protocol.spelled(words)),
        [lr],
        protocol.seeds if table else protocol.tuning_seeds,
        data_root,
        protocol.diagnostics,
        also={"protocol": protocol.digest, "machine": machine, "hits": table},
    )
