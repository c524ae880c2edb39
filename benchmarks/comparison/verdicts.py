"""The one rule by which a claim is judged: gates for both signs, every baseline, and an interval of both samples.

The interval of a difference is that of its mean over seeds by Student's t, with the variance of the test sample added:
of each test image the mean over seeds and the last rounds of (ours right - theirs right) is one number, and the images
are a sample of N. For one seed and one round that is McNemar's. Personal scores are kept per silo and not per image:
there the part is that of two independent binomials, which is wider.

holds                       the interval lies above 0 against the best FedAvg and each baseline that the claim lists
holds against FedAvg alone  it does against the best FedAvg; the most where a claim lists no baseline
does not                    against FedAvg it lies below 0, or below the printed gain; or it lies below 0 against a
                            listed baseline, at 95 % for all of them together (Bonferroni)
not decided                 all else, and whatever does not pass a gate, with the distance to it

Gates: FedAvg has the paper's level; rates were chosen by the claim's measure; the method's diagnostics move from those
of FedAvg with the same network, words and rate, or from those of FedAvg as chosen where FedAvg learns nothing at that
rate (no model, or features that are all equal).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

import numpy as np
from scipy.stats import t as student

from benchmarks.comparison import report, study
from benchmarks.comparison.protocol import BASELINE, Claim, Protocol, network_of
from benchmarks.comparison.search import Searched, of_network
from benchmarks.comparison.settings import CURVES, DIAGNOSTICS
from benchmarks.run_store import Run
from privacy.accounting.uncertainty import LAST

HOLDS, ALONE, NOT, OPEN = "holds", "holds against FedAvg alone", "does not", "not decided"
RULE = "29 November 2026"
"""When this rule was last changed. A protocol's digest covers its file, not the rule: the page says both."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference in points with the ends of its 95 % interval; over_seeds, of_test: its two standard errors."""

    mean: float
    low: float
    high: float
    over_seeds: float
    of_test: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{_end(self.low)}, {_end(self.high)}]"


def _end(value: float) -> str:
    """Write a tenth of a point, or the first digit of what would round to 0: its sign decides a verdict."""
    return f"{value:.1f}" if not value or abs(value) >= 0.05 else f"{value:.1g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word of the rule and why; best: the listed baseline that is ahead of the others on the test images."""

    word: str
    why: str
    against_fedavg: Interval
    fedavg: str
    against_best: Interval
    best: str

    def __str__(self) -> str:
        return self.word + (f" ({self.why})" if self.why else "")


def interval(ours: Mapping[int, Run], theirs: Mapping[int, Run], measure: str, errors: float = 0.05) -> Interval:
    """Compare two rows paired by seed; raises ValueError on other seeds or machines than one's own.

    errors: how often the interval may miss, 1 in 20 unless it is one of several
    """
    if set(ours) != set(theirs):
        raise ValueError(f"expected runs of the same seeds, found {sorted(set(ours) ^ set(theirs))} on one side")
    machines = {str(run.get("machine", "not named")) for side in (ours, theirs) for run in side.values()}
    if len(machines) > 1 or "not named" in machines:
        raise ValueError(f"expected pairs of one machine, found {sorted(machines)}")
    seeds = sorted(ours)
    gaps = [study.mean_of_last(ours[s], measure) - study.mean_of_last(theirs[s], measure) for s in seeds]
    over_seeds = variance(gaps) / len(gaps)
    of_test = _test_part([ours[s] for s in seeds], [theirs[s] for s in seeds], measure)
    half = float(student.ppf(1 - errors / 2, len(gaps) - 1)) * math.sqrt(over_seeds + of_test)
    mean = fmean(gaps)
    numbers = (mean, mean - half, mean + half, math.sqrt(over_seeds), math.sqrt(of_test))
    return Interval(*(100 * number for number in numbers))


def _test_part(ours: Sequence[Run], theirs: Sequence[Run], measure: str) -> float:
    """Return the variance of a mean difference that is the test images'."""
    pairs = [(study.hits_of(a), study.hits_of(b)) for a, b in zip(ours, theirs, strict=True)]
    if measure == "ga" and all(a is not None and b is not None for a, b in pairs):
        per_image = sum(a - b for a, b in pairs) / len(pairs)  # type: ignore[operator]
        return float(np.var(per_image, ddof=1) / per_image.size) if per_image.size > 1 else 0.0
    rates = [fmean(study.mean_of_last(run, measure) for run in side) for side in (ours, theirs)]
    size = max(int(str(run.get("test_images", 0))) for run in (*ours, *theirs))
    return sum(p * (1 - p) for p in rates) / size if size else 0.0  # no run of either ended with a model


def judge(claim: Claim, protocol: Protocol, rows: Mapping[str, Searched]) -> Verdict:
    """Judge a claim by the rule above."""
    table = rows[claim.method].table
    against = interval(table, rows[BASELINE].table, claim.measure)
    listed = {name: interval(table, rows[name].table, claim.measure) for name in claim.baselines}
    ahead = [
        name
        for name in claim.baselines
        if interval(table, rows[name].table, claim.measure, 0.05 / len(claim.baselines)).high < 0
    ]
    word, *why = _word(claim, against, list(listed.values()), ahead)
    gates = (level_gate(claim, protocol, rows), measure_gate(claim, protocol), *moves_gate(claim, protocol, rows))
    if closed := [text for text in gates if text]:
        word, why = OPEN, closed
    else:
        why += _other_networks(claim, rows, against)
    compared = {name: rows[name] for name in (claim.method, BASELINE, *claim.baselines)}
    why += [f"{name}'s rate is an end of all that were tried" for name, row in compared.items() if row.at_an_end]
    fedavg = network_of(rows[BASELINE].chosen[0])
    fedavg = f"{BASELINE}{fedavg and ', ' + fedavg}"
    best = min(listed, key=lambda name: listed[name].mean, default="")
    against_best = (listed[best], best) if best else (against, fedavg)
    return Verdict(word, "; ".join(filter(None, why)), against, fedavg, *against_best)


def _word(claim: Claim, against: Interval, listed: Sequence[Interval], ahead: Sequence[str]) -> tuple[str, str]:
    if math.isnan(against.mean):
        return OPEN, "a run has no number"
    behind = f"behind {', '.join(ahead)}" if ahead else ""
    if against.low > 0:
        return (HOLDS, "") if listed and all(gap.low > 0 for gap in listed) else (ALONE, behind)
    if against.high < 0:
        return NOT, "behind"
    if claim.printed is not None and against.high < claim.printed:
        return NOT, f"the printed {claim.printed:+g} is above the interval"
    if behind:
        return NOT, behind
    return OPEN, "the interval holds 0" + (" and the printed gain" if claim.printed is not None else "")


def level_gate(claim: Claim, protocol: Protocol, rows: Mapping[str, Searched]) -> str:
    """Say how far the best FedAvg is from where it may be; empty where it is there."""
    ours = 100 * study.score(list(rows[BASELINE].table.values()), claim.measure)
    gates = protocol.gates
    if claim.level is None:
        short = gates.lost - ours
        return "" if short < 0 else f"FedAvg has {ours:.1f} %, {short:.1f} below the {gates.lost:g} it needs"
    far = abs(ours - claim.level) - gates.level
    return "" if far <= 0 else f"FedAvg has {ours:.1f} %, the paper's {claim.level:g}: {far:.1f} beyond the gate"


def measure_gate(claim: Claim, protocol: Protocol) -> str:
    """Say by what other measure rates and weights were chosen; empty where it was the claim's."""
    chose = protocol.measures[0]
    return "" if claim.measure == chose else f"rates and weights were chosen by the {CURVES[chose].split(',')[0]}"


def moves_gate(claim: Claim, protocol: Protocol, rows: Mapping[str, Searched]) -> list[str]:
    """Say by how much too little the method's diagnostics move from FedAvg's."""
    row, base = rows[claim.method], rows[BASELINE]
    said = [] if claim.moves else ["the protocol names no diagnostic that shows its part"]
    for diagnostic, way in claim.moves.items():
        moved = [
            (1 if way == "up" else -1) * _change(*(_number(run, diagnostic) for run in runs))
            for runs in zip(row.trials[row.chosen], row.twin, base.trials[base.chosen], strict=True)
        ]
        if not all(change >= protocol.gates.moves for change in moved):  # also where one is NaN
            unknown = any(map(math.isnan, moved))
            said.append(
                f"its {diagnostic} must move {way} by {100 * protocol.gates.moves:.0f} % from FedAvg's, "
                + ("and one of the two ends without any" if unknown else f"and moves {way} by {100 * min(moved):.0f} %")
            )
    return said


def _change(ours: float, twin: float, chosen: float) -> float:
    """Return the relative change from FedAvg's at the same rate, or as chosen where that one learnt nothing."""
    theirs = twin if twin > 0 else chosen
    return ours / theirs - 1 if theirs > 0 else math.nan


def _number(run: Run, name: str) -> float:
    return float(str(run.get(name, math.nan)))


def _other_networks(claim: Claim, rows: Mapping[str, Searched], against: Interval) -> list[str]:
    """Name each network whose own FedAvg a method is on the other side of."""
    of_networks = {name: row for name, row in rows.items() if name.startswith(of_network(""))}
    others = {name: interval(rows[claim.method].table, row.table, claim.measure) for name, row in of_networks.items()}
    return [
        f"against {name}: {other}"
        for name, other in others.items()
        if (other.low > 0) != (against.low > 0) or (other.high < 0) != (against.high < 0)
    ]


# ---- the page ----------------------------------------------------------------------------------------------------


def page(protocol: Protocol, rows: Mapping[str, Searched]) -> str:
    """Write the verdicts, the table and what every trial scored."""
    runs = [run for row in rows.values() for run in row.table.values()]
    seconds = sum({str(run["key"]): float(str(run["cpu_seconds"])) for run in _every(rows)}.values())
    judged = [(claim, judge(claim, protocol, rows)) for claim in protocol.claims]
    claims = [
        [
            c.paper,
            c.claim,
            _points(c.printed),
            f"{v.against_fedavg} ({v.fedavg})",
            f"{v.against_best} ({v.best})",
            str(v),
        ]
        for c, v in judged
    ]
    lines = [f"# {protocol.title}", "", protocol.question, ""]
    lines += report.table(["paper", "claim", "printed", "minus FedAvg", "minus the best listed", "verdict"], claims)
    for measure in protocol.measures:
        lines += [
            "",
            f"**{CURVES[measure].capitalize()}, %**, mean of the last {LAST} rounds",
            "",
            *_table(rows, measure),
        ]
    if protocol.diagnostics:
        lines += ["", "**Features of all test images within the final global model**", "", *_features(protocol, rows)]
    chosen = [
        [name, str(len(row.own)), f"`{' '.join(words)}`", f"{lr:g}{'*' * row.at_an_end}", _percent(_scores(row, m))]
        for m in protocol.measures[:1]
        for name, row in rows.items()
        for words, lr in [row.chosen]
    ]
    lines += ["", "**Chosen on the validation images**", ""]
    lines += report.table(["method", "trials", "variant", "lr", "validation, %"], chosen)
    ends = any(row.at_an_end for row in rows.values())
    lines += ["", "*: an end of the rates that were tried; the grid grows twice at most."] if ends else []
    failed = {name: sum("failed" in run for run in row.table.values()) for name, row in rows.items()}
    lines += ["", f"Runs without a model, which count as 0 %: {', '.join(f'{m} {n}' for m, n in failed.items() if n)}."]
    lines = lines if any(failed.values()) else lines[:-2]
    lines += [
        "",
        f"Protocol `{protocol.name}`, digest {protocol.digest}, committed before its first run. The rule of verdicts "
        f"is of {RULE}. Intervals are of 95 %: "
        f"paired over the {len(protocol.seeds)} seeds, with the part of the test images ({_most(runs)}). Rates and "
        f"weights are chosen on validation images, a fifth of the training images, and seeds "
        f"{', '.join(map(str, protocol.tuning_seeds))}. {len({str(r['key']) for r in _every(rows)})} runs, "
        f"{seconds / 3600:.1f} CPU hours, on {_machines(rows)}.",
        "",
        f"`python -m benchmarks.comparison {protocol.name}`",
        "",
    ]
    return "\n".join(lines)


def _table(rows: Mapping[str, Searched], measure: str) -> list[str]:
    base = rows[BASELINE].table
    body = []
    for name, row in rows.items():
        gap = interval(row.table, base, measure)
        parts = f"{gap.over_seeds:.1f}, {gap.of_test:.1f}"
        score = _percent([study.mean_of_last(run, measure) for run in row.table.values()])
        targets = {seed: max(study.curve(run, measure), default=0.0) for seed, run in base.items()}
        rounds = [study.rounds_to(run, measure, targets[seed]) for seed, run in row.table.items()]
        middle, reached = median(rounds), sum(map(math.isfinite, rounds))
        best = (
            f"{middle:g} ({reached} of {len(rounds)})"
            if math.isfinite(middle)
            else f"not reached ({reached} of {len(rounds)})"
        )
        body.append([name, score, *(["", ""] if row.table is base else [str(gap), parts]), best])
    head = ["method", "test images", "minus FedAvg", "standard errors: seeds, test images", "rounds to FedAvg's best"]
    return report.table(head, body)


def _features(protocol: Protocol, rows: Mapping[str, Searched]) -> list[str]:
    """Write mean and standard deviation over seeds of what runs say of features; "-" where fewer than two have any."""
    body = []
    for name, row in rows.items():
        seen = [[_number(run, what) for run in row.table.values() if what in run] for what in protocol.diagnostics]
        body.append([name, *(f"{fmean(v):.3g} ± {variance(v) ** 0.5:.2g}" if len(v) > 1 else "-" for v in seen)])
    return report.table(["method", *(DIAGNOSTICS[what] for what in protocol.diagnostics)], body)


def _scores(row: Searched, measure: str) -> list[float]:
    return [study.mean_of_last(run, measure) for run in row.trials[row.chosen]]


def _percent(values: Sequence[float]) -> str:
    return report.spread([100 * value for value in values])


def _points(printed: float | None) -> str:
    return "-" if printed is None else f"{printed:+g}"


def _most(runs: Sequence[Run]) -> int:
    return max(int(str(run.get("test_images", 0))) for run in runs)


def _machines(rows: Mapping[str, Searched]) -> str:
    """Name the machine of the table, and that of the trials where it is another."""
    (table,) = {str(run["machine"]) for row in rows.values() for run in row.table.values()}
    trials = {str(run["machine"]) for row in rows.values() for runs in row.trials.values() for run in runs}
    return table if trials == {table} else f"{table} (the table) and {', '.join(sorted(trials))} (what was chosen)"


def _every(rows: Mapping[str, Searched]) -> list[Run]:
    trials = [run for row in rows.values() for runs in row.trials.values() for run in runs]
    return [*trials, *(run for row in rows.values() for run in (*row.table.values(), *row.twin))]
