"""What a cell of a table says of a run; `study.measure` keeps the numbers, the functions here choose among them.

A run is the mapping that the store keeps: by_round (global accuracy after 0, 1, ..., T rounds, None where the method
has no global model), personal (scores of personal models by round), pa_fine_tuned, eigenvalues, numbers. `at` reads an
accuracy after so many rounds of a longer run; 0 reads all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.paper.paper_metrics import rounds_to_target

Run = Mapping[str, object]
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
    """Return the global accuracy after 0, 1, ... rounds; without a global model, that of the personal ones.

    FedGELA's protocol for the latter: the mean over silos of their models' accuracy on the union of all test sets.
    """
    found = run.get("by_round") or []
    assert isinstance(found, list)
    if found and found[-1] is not None:
        return [math.nan if a is None else float(a) for a in found]
    return [math.nan, *_personal(run, "ga")]


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


def _of_curve(choose: Callable[[list[float]], float]) -> Reader:
    return lambda run, _, at: choose(_until(curve(run)[1:], at))


def _gm(run: Run, _: Run | None, at: int) -> float:
    """Read a global model's accuracy alone: none without one, as FedNH prints it."""
    found = run.get("by_round") or []
    assert isinstance(found, list)
    return math.nan if not found or found[-1] is None else _last(_until(curve(run)[1:], at))


def _pa(run: Run, _: Run | None, at: int) -> float:
    tuned = run.get("pa_fine_tuned")
    return float(str(tuned)) if tuned is not None else _best(_until(_personal(run, "pa"), at))


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


MEASURES: Mapping[str, Measure] = {
    "ga": Measure("global accuracy, best round, %", _of_curve(_best)),
    "ga_last": Measure("global accuracy, last round, %", _of_curve(_last)),
    "gm": Measure("GM, %", _gm),
    "balanced": Measure("balanced accuracy, last round, %", _kept("balanced")),
    "pa": Measure("PA, %", _pa),
    "pa_last": Measure("personal accuracy, last round, %", _score("pa")),
    "pm_v": Measure("PM(V), %", _score("pm_v")),
    "pm_l": Measure("PM(L), %", _score("pm_l")),
    "fairness": Measure("standard deviation of PM(L) over silos, points", _score("pm_l_std"), better=-1),
    "rounds": Measure("rounds to FedAvg's best accuracy", _rounds, percent=False, digits=0, better=-1),
    "eigenvalues": Measure("variance of the top 50 eigenvalues", _kept("eigenvalues"), False, digits=1, better=-1),
    "numbers": Measure("numbers per round, millions", _kept("numbers"), percent=False, digits=3, better=0),
}
