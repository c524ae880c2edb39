"""The researcher's tutorial, in this process and with few rounds; tests/e2e/test_tutorials.py runs all of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from consilium import simulate
from tests.e2e.test_readme import blocks
from tests.e2e.test_tutorials import FILES
from tests.support.processes import ROOT

TEXT = (ROOT / "docs/tutorials/researcher.md").read_text()
CODE = dict(FILES.findall(TEXT))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in CODE.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_method_of_ones_own_takes_less_than_ten_lines() -> None:
    lines = [line for line in CODE["mine.py"].splitlines() if line.strip()]
    assert len(lines) < 10


def test_own_method_data_and_partition_run_as_written(here: Path) -> None:
    exec(compile(CODE["own_data.py"], "own_data.py", "exec"), {})
    frame = pd.read_csv(here / "own_data.csv")
    assert frame["round"].max() == 5
    assert frame[frame.measure == "accuracy"].value.iloc[-1] > 0.8


def test_the_table_of_a_sweep_has_the_columns_that_the_comparison_reads(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"data": "digits", "federation": "p5c2", "rounds": 1, "train": {"max_steps": 1}, "threads": 1}
    (here / "sweep").mkdir()
    rows = [
        {"seed": seed, "method": method, **simulate(method, **words, seed=seed).summary}
        for seed in (0, 1)
        for method in ("fedavg", "mine:Smoothed")
    ]
    pd.DataFrame(rows).to_csv(here / "sweep/sweep.csv", index=False)
    exec(compile(CODE["compare.py"], "compare.py", "exec"), {})
    assert re.search(r"gain [+-]0\.\d{3}, standard error 0\.\d{3}", capsys.readouterr().out)


def test_every_block_is_run_by_the_long_test_or_is_one_of_the_files() -> None:
    assert TEXT.count("```") == 2 * (len(blocks(TEXT)) + len(CODE))
    assert {" ".join(words) for words, _ in blocks(TEXT)} == {"", "images", "interrupted"}
