"""The study of FedMR on digits: what it prints is what was measured, and every table's runs are kept."""

from __future__ import annotations

import json

import pytest

from benchmarks.fedmr_digits.run import HERE, SETTINGS, difference, gains, key, of, table


def run(arm: str, lr: float, seed: int, best: float) -> dict[str, object]:
    return {"arm": arm, "lr": lr, "seed": seed, "best": best}


RUNS = [
    *(run("fedavg", 0.1, s, v) for s, v in enumerate((0.80, 0.82, 0.84))),
    *(run("fedavg", 0.2, s, v) for s, v in enumerate((0.70, 0.70, 0.70))),
    *(run("fedmr", 0.1, s, v) for s, v in enumerate((0.81, 0.84, 0.84))),
    *(run("fedmr", 0.2, s, v) for s, v in enumerate((0.90, 0.88, 0.92))),
]


def test_a_difference_is_paired_by_seed() -> None:
    # gaps 1, 2 and 0 points: mean 1, standard deviation 1, over the root of 3
    assert difference([0.81, 0.84, 0.84], [0.80, 0.82, 0.84]) == "+1.0 (0.6), 0.0 to 2.0"


def test_gains_are_at_each_rate_and_last_each_method_at_its_own_best() -> None:
    row = gains(RUNS, ["fedavg", "fedmr"], [0.1, 0.2], "best").splitlines()[-1].split(" | ")
    assert row[0] == "| fedmr"
    assert [cell.split()[0] for cell in row[1:]] == ["+1.0", "+20.0", "+8.0"]
    assert row[3].endswith("(lr 0.2 - lr 0.1) |")


def test_a_table_holds_mean_and_standard_deviation() -> None:
    assert table(RUNS, ["fedavg"], [0.1, 0.2], "best").splitlines()[-1] == "| fedavg | 82.0 ± 2.0 | 70.0 ± 0.0 |"


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_runs_of_every_table_are_kept(setting: str) -> None:
    kept = json.loads((HERE / "results.json").read_text())["runs"]
    chosen = SETTINGS[setting]
    arm, lr, seed = next(iter(chosen.arms)), chosen.lrs[-1], chosen.seeds[-1]
    found = kept[key((setting, arm, lr, seed))]
    assert (found["lr"], found["seed"]) == (lr, seed)
    assert of([found | {"arm": arm}], arm, lr, "best")[0] > 0.1
