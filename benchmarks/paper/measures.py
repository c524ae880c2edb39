"""What a cell of a table says of a run; `study.measure` keeps the numbers, the functions here choose among them.

A run is the mapping that the store keeps: by_round (global accuracy after 0, 1, ..., T rounds, None where the method
has no global model), personal (scores of all silos' newest personal models, by round that measured any), ga_of
("personal" where that is the papers' GA), pa_fine_tuned, eigenvalues, numbers. `at` reads an accuracy after so many
rounds of a longer run; 0 reads all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.paper.paper_metrics import rounds_to_target
from benchmarks.run_store import Run
from privacy.accounting.uncertainty import LAST

Reader = Callable[[Run, Run | None, int], float]


@dataclass(frozen=True, slots=True)
class Measure:
    """How a run is read (run, FedAvg's run of the same seed and setting, at) and how its number is written.

    better: 1 where a larger number is better, -1 where a smaller one is, 0 where neither
    """

    label: str
    read: Reader
    percent: bool = True
    digits: int = 2
    better: int = 1

    def text(self, value: float, spread: float = 0.0) -> str:
        if math.isnan(value):
            return "not reached" if self.label.startswith("rounds") else "-"
        scale = 100.0 if self.percent else 1.0
        body = f"{scale * value:.{self.digits}f}"
        return body if not spread else f"{body} ± {scale * spread:.{self.digits}f}"


def curve(run: Run) -> list[float]:
    """Return GA after 0, 1, ... rounds: global accuracy, of a method whose model is personal that of its models.

    FedGELA's protocol for the latter: the mean over silos of their models' accuracy on the union of all test sets.
    FedBABU's are made after the last round alone.
    """
    found, own = _global(run), _personal(run, "ga")
    if run.get("ga_of") != "personal" and found and not math.isnan(found[-1]):
        return found
    return [math.nan] * max(1, len(found) - len(own)) + own


def _global(run: Run) -> list[float]:
    found = run.get("by_round") or []
    assert isinstance(found, list)
    return [math.nan if a is None else float(a) for a in found]


def _personal(run: Run, name: str) -> list[float]:
    scores = run.get("personal") or {}
    assert isinstance(scores, dict)
    return [float(v) for v in scores.get(name, [])]


def _best(values: list[float]) -> float:
    return max((v for v in values if not math.isnan(v)), default=math.nan)


def _until(values: list[float], at: int) -> list[float]:
    return values[: at or None]


def _last(values: list[float]) -> float:
    return values[-1] if values else math.nan


def _mean(values: list[float]) -> float:
    known = [v for v in values[-LAST:] if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _of_curve(choose: Callable[[list[float]], float]) -> Reader:
    return lambda run, _, at: choose(_until(curve(run)[1:], at))


def _gm(run: Run, _: Run | None, at: int) -> float:
    """Read a global model's accuracy alone: none without one, as FedNH prints it."""
    return _last(_until(_global(run)[1:], at))


def _pa(run: Run, _: Run | None, at: int) -> float:
    tuned = run.get("pa_fine_tuned")
    return float(str(tuned)) if tuned is not None else _best(_until(_personal(run, "pa"), at))


def _pa_mean(run: Run, _: Run | None, at: int) -> float:
    return _mean(_until(_personal(run, "pa"), at))


def _score(name: str) -> Reader:
    return lambda run, _, at: _last(_until(_personal(run, name), at))


def _kept(name: str) -> Reader:
    return lambda run, _, at: math.nan if run.get(name) is None else float(str(run[name]))  # noqa: ARG005


def _rounds(run: Run, fedavg: Run | None, at: int) -> float:  # noqa: ARG001
    """FedAvg itself is charged all rounds (FedMR, Table 4)."""
    if fedavg is None:
        return math.nan
    if run["key"] == fedavg["key"]:
        return float(len(curve(run)) - 1)
    return rounds_to_target(curve(run), _best(curve(fedavg)[1:]))


def _rounds_to_last(run: Run, fedavg: Run | None, at: int) -> float:  # noqa: ARG001
    """FedCD, Table 2: rounds until a method has what FedAvg has after all of its."""
    return math.nan if fedavg is None else rounds_to_target(curve(run), _last(curve(fedavg)))


MEASURES: Mapping[str, Measure] = {
    "ga": Measure("global accuracy, best round, %", _of_curve(_best)),
    "ga_last": Measure("global accuracy, last round, %", _of_curve(_last)),
    "ga_mean": Measure(f"global accuracy, mean of the last {LAST} rounds, %", _of_curve(_mean)),
    "gm": Measure("GM, %", _gm),
    "balanced": Measure("balanced accuracy, last round, %", _kept("balanced")),
    "pa": Measure("PA, %", _pa),
    "pa_mean": Measure(f"PA without fine-tuning, mean of the last {LAST} rounds, %", _pa_mean),
    "pa_last": Measure("personal accuracy, last round, %", _score("pa")),
    "pm_v": Measure("PM(V), %", _score("pm_v")),
    "pm_l": Measure("PM(L), %", _score("pm_l")),
    "fairness": Measure("standard deviation of PM(L) over silos, points", _score("pm_l_std"), better=-1),
    "rounds": Measure("rounds to FedAvg's best accuracy", _rounds, percent=False, digits=0, better=-1),
    "rounds_to_last": Measure("rounds to FedAvg's last accuracy", _rounds_to_last, percent=False, digits=0, better=-1),
    "eigenvalues": Measure("variance of the top 50 eigenvalues", _kept("eigenvalues"), False, digits=1, better=-1),
    "seconds": Measure("CPU seconds of a silo's training in a round", _kept("seconds"), False, digits=3, better=-1),
    "held": Measure("numbers that a silo holds, millions", _kept("held"), percent=False, digits=3, better=-1),
    "sent": Measure("numbers that a silo sends in a round, millions", _kept("sent"), False, digits=4, better=-1),
    "spread": Measure("distance of features from their class's mean", _kept("spread"), False, digits=3, better=0),
    "alike": Measure("cosine of alike classes' vectors minus others'", _kept("alike"), False, digits=3, better=0),
    "agreement": Measure("cosine of a class's features at two silos", _kept("agreement"), False, digits=3, better=0),
    "numbers": Measure("numbers per round, millions", _kept("numbers"), percent=False, digits=3, better=0),
}
