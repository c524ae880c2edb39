"""The benchmark on patch filters: runs on made-up images, what its store keeps, and what its table says is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_store
from benchmarks.frozen import patches
from tests.support.data import write_mnist

pytestmark = pytest.mark.integration

STRIPES, COSINES = "stripes", "stripes, cosines"
SMALL = {
    STRIPES: ("images=fmnist-6-4", "model.width=72"),
    COSINES: ("images=fmnist-6-4", "model.kind=cosine", "model.width=72"),
}


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Stripes of ten directions at places of their own, two seeds, and the command that reads them."""
    drawn, y = np.random.default_rng(3), np.tile(np.arange(10), 8).astype(np.uint8)
    rows, columns = np.mgrid[:28, :28]
    waves = [
        np.sin((rows * np.sin(np.pi * c / 10) + columns * np.cos(np.pi * c / 10)) * 0.9 + p)
        for c, p in zip(y, drawn.uniform(0, 7, len(y)), strict=True)
    ]
    x = (127 + 100 * np.stack(waves) + drawn.normal(0, 8, (len(y), 28, 28))).clip(0, 255).astype(np.uint8)
    write_mnist(tmp_path / "given", "FashionMNIST", x, y, 60)
    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(patches, "ROWS", SMALL)
    monkeypatch.setattr(patches, "SEEDS", range(2))

    def command(*words: str) -> str:
        given = ["--data-root", str(tmp_path / "given"), "--out", str(tmp_path / "out"), "--jobs", "-1"]
        monkeypatch.setattr(sys, "argv", ["patches", *given, *words])
        patches.main()
        return (tmp_path / "out" / patches.TABLE).read_text()

    return command


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_both_kinds_of_features_are_measured_on_the_same_division_and_runs_are_kept(benchmark, tmp_path: Path) -> None:
    store = tmp_path / "out" / patches.STORE
    first = benchmark(f"{STRIPES},")
    assert cells(first, STRIPES)[2:5] == ["-", "-", "0"]  # begins with other words
    assert cells(first, COSINES)[4] == "2"
    both = benchmark()
    runs = run_store.read(store)
    assert len(runs) == 4
    for row, (_, *words) in SMALL.items():
        own = [
            run
            for run in runs.values()
            if set(words) <= set(run["words"]) and ("kind" in str(run["words"])) == (row == COSINES)
        ]
        assert sorted(run["seed"] for run in own) == [0, 1]
        found = [100 * run["ga"][-1] for run in own]
        features, mean, spread, seeds = cells(both, row)[1:5]
        assert (features, seeds) == ("72", "2")
        assert (mean, spread) == (f"{np.mean(found):.1f}", f"{np.std(found, ddof=1):.1f}")
    assert (
        float(cells(both, STRIPES)[2]) > 60
    )  # of ten classes, from six images of each: where a stripe lies says nothing
    assert benchmark() == both
    assert run_store.read(store) == runs


def test_a_run_is_a_function_of_images_and_seed(benchmark, tmp_path: Path) -> None:
    benchmark()
    kept = run_store.read(tmp_path / "out" / patches.STORE)
    (tmp_path / "out" / patches.STORE).unlink()
    benchmark()
    again = run_store.read(tmp_path / "out" / patches.STORE)
    assert {key: run["model"] for key, run in kept.items()} == {key: run["model"] for key, run in again.items()}
    assert len({run["model"] for run in kept.values()}) == 4


def test_the_stored_table_is_made_of_the_stored_runs() -> None:
    stored = run_store.read(patches.FOLDER / patches.STORE)
    assert (patches.FOLDER / patches.TABLE).read_text() == patches.table(stored)
    wanted = {trial.key for trials in patches.trials(None).values() for trial in trials}
    assert set(stored) <= wanted
    assert all(
        len(trials) == 10 and {t.seed for t in trials} == set(range(10)) for trials in patches.trials(None).values()
    )


def test_no_time_left_begins_no_run_and_says_so(benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    text = benchmark("--minutes", "0")
    assert [cells(text, row)[4] for row in SMALL] == ["0", "0"]
    assert "time" in capsys.readouterr().out
