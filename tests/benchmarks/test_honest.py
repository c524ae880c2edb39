"""Honest hospitals are not refused for what they send, however uneven they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.honest.__main__ import SETTINGS, Case, measure, table
from coordinator.config.hydra_config import compose_spec
from coordinator.simulate.runner import build_simulation
from fl_core.simulation.in_process import RoundHistory, SiloShare, simulate
from privacy.compiled_run import CompiledRun

SHARE = {"disjoint": 0.35, "dir0.1": 0.15, "dir0.3": 0.05, "sizes1:100": 0.1}
"""Updates that may be cut: with this learning rate training overshoots where classes are disjoint."""


@pytest.mark.fault("a hospital", "is honest and larger than the few others of a round", "its run goes on to the end")
def test_a_run_of_honest_hospitals_of_uneven_size_is_not_ended_by_the_check_of_lengths() -> None:
    """Updates of 5.0 and 6.4 medians were refused in round 8, and three of five were too few."""
    words = "method=fedgela data=digits federation=dirichlet-0.2-20 cohort=5 rounds=8 model=digits_linear seed=0"
    schedule = ["threads=1", "train.epochs=1", "train.lr=0.1", "aggregator=norm_clipped"]
    manifest, sets = build_simulation(compose_spec([*words.split(), *schedule]))
    history = RoundHistory()
    simulate(CompiledRun.of(manifest), [SiloShare(s.train, s.test) for s in sets], history)
    assert [dict(record.missing) for record in history.records] == [{}] * 9


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_honest_update_is_refused_and_few_are_cut(setting: str) -> None:
    cases = [Case(name, setting, 3, 0.1, 0) for name in ("fedavg", "fednova", "fedrep", "fedmr", "fedrod")]
    runs = [measure(case) for case in [*cases, replace(cases[0], cohort=5), replace(cases[0], rate=0.01)]]
    assert [run["ended"] for run in runs] == [""] * len(runs)
    assert [run["refused"] for run in runs] == [[{}] * 20] * len(runs)
    cut = sum(len(names) for run in runs for names in run["cut"])  # type: ignore[attr-defined]
    assert cut <= SHARE[setting] * sum(run["updates"] for run in runs)  # type: ignore[misc]


def test_the_table_counts_refused_and_cut_updates_and_says_what_is_not_done() -> None:
    run = {"method": "fedavg", "rate": 0.01, "setting": "disjoint", "cohort": 3, "updates": 6}
    runs = [{**run, "refused": [{"a": "why"}, {}], "cut": [{}, {"a": "how", "b": "how"}]}]
    lines = {line.split(" | ")[0]: line for line in table(runs)}
    assert lines["| fedavg"] == "| fedavg | 1; 33.3 %, - | 0; -, - | 0; -, - | 0; -, - | 6 |"
    assert lines["| cohort 5"] == "| cohort 5 | 0; -, - | 0; -, - | 0; -, - | 0; -, - | 0 |"
