"""The papers' figures at a small scale: their list, their runs and what a probe sees of them, their drawings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from benchmarks.paper import drawings, drawn, figures, probes, run, study, tables
from benchmarks.paper.drawn import DRAWN
from benchmarks.paper.figures import Cell, Figure, Found
from benchmarks.paper.variants import OneHotFedMR, UnevenClasses, known, reweighed
from benchmarks.run_store import read
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from consilium.testing import check_partition
from coordinator.config.hydra_config import compose_simulation
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.shared.class_vectors import adaptation
from fl_core.types import tensor_maps
from fl_core.types.values import State
from tests.support import some

pytestmark = pytest.mark.integration

FIGURES, ITEMS = figures.load()
STORE = run.RESULTS / "figures"
COMPARISONS = run.RESULTS.parents[1] / "comparison/results"
SHOWN = {"FedMR": (8, 4), "FedGELA": (11, 10), "FedNH": (3, 8), "MAP": (0, 7), "FedCD": (4, 6)}
"""How many numbered tables and figures each paper has; MAP's tables are not numbered in the text at hand."""
TINY = "data=digits federation=p5c2 model=digits_linear rounds=2 threads=1 train.max_steps=2"


def test_the_list_has_each_table_and_figure_of_the_papers_once_and_says_what_is_not_made() -> None:
    for paper, counts in SHOWN.items():
        for kind, count in zip(("Table", "Figure"), counts, strict=True):
            groups = [re.match(rf"{kind}s? ([0-9, and]+)", item.item) for item in ITEMS if item.paper == paper]
            numbers = [int(number) for group in groups if group for number in re.findall(r"\d+", group[1])]
            assert sorted(numbers) == list(range(1, count + 1)), (paper, kind)
    for item in ITEMS:
        assert set(item.tables) <= set(tables.names()), item
        stored = [run.RESULTS / f"{name}_small.md" for name in item.tables]
        stored += [COMPARISONS / f"{name}.md" for name in item.comparisons]
        assert all(file.exists() for file in stored), item
        assert item.state == "stored" or item.why, item
    assert {name for item in ITEMS for name in item.figures} == {*FIGURES, *DRAWN}


def test_the_page_has_the_list() -> None:
    assert figures.listed(ITEMS) in figures.PAGE.read_text()


@pytest.mark.parametrize("name", some(sorted(FIGURES)))
def test_every_figure_is_drawn_and_its_part_of_the_page_is_what_the_store_makes(name: str, tmp_path: Path) -> None:
    found = figures.stored(FIGURES[name], STORE)
    assert figures.section(found) in figures.PAGE.read_text()
    assert (STORE / f"{name}.png").is_file()
    drawings.save(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_what_needs_no_run_is_drawn_and_on_the_page(name: str, tmp_path: Path) -> None:
    made = DRAWN[name]()
    assert made.section(name) in figures.PAGE.read_text()
    made.save(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (STORE / f"{name}.png").is_file()


def test_the_papers_weights_shift_by_45_degrees_and_centres_take_most_of_what_training_shifts() -> None:
    assert drawn.shift(*drawn.IN_PAPER.values()) == pytest.approx(45.0, abs=1e-6)
    x, y = drawn.discs()
    assert float(((x - drawn.CENTRES[y]) ** 2).sum(1).max()) <= drawn.RADIUS**2
    whole = drawn.weights(x, y, 100.0)
    alone, aided = (drawn.shift(whole, drawn.averaged(x, y, 100.0, centres=c)) for c in (False, True))
    assert aided < 2 < 8 < alone
    assert drawn.weights(x[y < 2], y[y < 2])[2].tolist() == [0.0, 0.0]


def test_adaptation_gives_directions_of_a_missing_class_to_those_that_are_there() -> None:
    """Three unit vectors 120 degrees apart: a missing class keeps the 60 degrees where both others are negative."""
    plain, adapted = (np.bincount(drawn.regions((100, 100, 0), adapt), minlength=3) / 36_000 for adapt in (False, True))
    assert plain.tolist() == pytest.approx([1 / 3] * 3, abs=1e-3)
    assert adapted.tolist() == pytest.approx([5 / 12, 5 / 12, 1 / 6], abs=1e-3)


def test_uneven_classes_are_a_partition_of_one_silo() -> None:
    check_partition(UnevenClasses)
    y = np.repeat(np.arange(3), 40)
    ((train, test),) = UnevenClasses().partition(y, y, 3, 5)
    assert np.bincount(y[train]).tolist() == [40, 20, 10]
    assert test.tolist() == list(range(120))


@pytest.mark.parametrize(
    ("power", "phi"),
    [(1.0, [2.25, 0.75, 0.0]), (2.0, [2.7, 0.3, 0.0]), (0.0, [3 * 8.487736 / 9.604736, 3 * 1.117 / 9.604736, 0.0])],
)
def test_other_forms_of_phi_are_their_closed_forms(power: float, phi: list[float]) -> None:
    """Of 30 and 10 images of three classes: q = 3/4, 1/4, 0; exp(9/4) - 1 = 8.4877, exp(3/4) - 1 = 1.1170."""

    found = adaptation(reweighed(torch.tensor([30.0, 10.0, 0.0]), power))
    assert found.tolist() == pytest.approx(phi, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fednh_rho", "fedgela_scale", "map_proxies"])
def test_stored_runs_are_what_todays_code_computes(name: str) -> None:
    """The first run of each, within rounding that grew on another machine."""
    point = next(iter(FIGURES[name].points().values()))[0]
    here, stored = study.measure(point), read(STORE / figures.STORE)[point.key]
    for series in ("by_round", "norm_missing"):
        pairs = zip(here.get(series) or [], stored.get(series) or [], strict=True)  # type: ignore[call-overload]
        assert max((abs(ours - theirs) for ours, theirs in pairs if ours is not None), default=0.0) < 0.06


def _figure(draw: str = "sweep", **changed: object) -> Figure:
    plain: dict[str, object] = {
        "name": "tiny",
        "paper": "A paper",
        "shows": "Figure 9",
        "scale": "digits",
        "words": TINY,
        "draw": draw,
        "runs": {"FedNH": "method=fednh"},
        "level": {"FedAvg": "method=fedavg"},
        "varied": {"method.rho": [0.5, 1]},
        "measures": ("ga_last",),
        "seeds": (0, 1),
    }
    return Figure(**{**plain, **changed})  # type: ignore[arg-type]


def test_a_figure_is_computed_once_and_drawn_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "load", lambda: ({"tiny": _figure(seeds=(0,), varied={"method.rho": [0.5]})}, []))
    run.main(["figure=tiny", f"out={tmp_path}", "jobs=-1"])
    first, drawn = capsys.readouterr().out, (tmp_path / "figures/tiny.png").read_bytes()
    assert "2 runs, 0 of them done before" in first
    assert "| FedNH, method.rho=0.5 |" in first
    (tmp_path / "figures/tiny.png").unlink()
    run.main(["figure=tiny", f"out={tmp_path}", "run=false"])
    assert (tmp_path / "figures/tiny.png").read_bytes() == drawn
    with pytest.raises(SystemExit):
        run.main(["figure=tiny", f"out={tmp_path / 'other'}", "run=false"])
    assert "leave out run=false to compute them" in capsys.readouterr().err


def _found(**changed: object) -> Found:
    figure = _figure(**changed)
    cells = [cell for cell, _ in figure.cells()]
    runs = {
        cell: {s: {"key": f"{cell}{s}", "by_round": [0.1, (n + 1) / 10 + s / 100]} for s in (0, 1)}
        for n, cell in enumerate(cells)
    }
    return Found(figure, runs)


def test_a_sweep_shows_the_means_that_the_page_has_in_numbers() -> None:
    found = _found()
    assert figures.numbers(found)[2:] == [
        "| FedNH, method.rho=0.5 | 10.50 ± 0.71 |",
        "| FedNH, method.rho=1 | 20.50 ± 0.71 |",
        "| FedAvg | 30.50 ± 0.71 |",
    ]
    _, axis = plt.subplots()
    (draw,) = drawings.KINDS["sweep"](found).values()
    draw(axis)
    means, level = axis.lines[1], axis.lines[2]
    assert list(means.get_ydata()) == pytest.approx([10.5, 20.5])
    assert level.get_ydata()[0] == pytest.approx(30.5)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0.5", "1"]
    plt.close("all")


def test_a_run_that_ended_without_a_model_is_counted_and_not_drawn() -> None:
    found = _found()
    cell: Cell = ("FedNH", "method.rho", "1")
    runs = {**found.runs, cell: {0: found.runs[cell][0], 1: {"key": "x", "failed": "E-RUN-03"}}}
    assert "| FedNH, method.rho=1 | 20.00 (1 of 2 seeds) |" in figures.numbers(Found(found.figure, runs))


def test_a_name_that_is_unknown_gets_the_nearest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["figure=fednh_roh"])
    assert "fednh_rho" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["figure=fednh_rho", "table=fednh_1"])
    assert "found both" in capsys.readouterr().err
    text = figures.FILE.read_text()
    for old, new, nearest in (("probe: burden", "probe: burdn", "burden"), ("draw: bars", "draw: barz", "bars")):
        (tmp_path / "f.yaml").write_text(text.replace(old, new, 1))
        with pytest.raises(figures.ConfigError, match=nearest):
            figures.load(tmp_path / "f.yaml")


class _Apart(probes.Probe):
    silos = 1
    worst = 0.0

    def look(self, server: State, *, last: bool) -> None:
        local = tensor_maps.copy_state(self.local_model(0))
        made = tensor_maps.copy_state(self.global_model(server))
        self.worst = max(self.worst, *(float((local[name] - made[name]).abs().max()) for name in made))


def test_a_probe_sees_the_model_that_the_silo_trained() -> None:
    """Of one silo alone the global model is its model, but for the grid of the exact sum."""
    spec = compose_simulation([*TINY.split(), "federation=iid-1", "rounds=3", "method=fedavg"])
    probe = _Apart(spec, None)
    runner.run(spec, None, probe, SimulationEngine(workers=1))
    assert probe.worst < 1e-5
    assert float(torch.cat([v.flatten() for v in probe.runtime.initial.values()]).abs().max()) > 1e-2


def test_unit_vectors_in_place_of_prototypes_are_neither_measured_nor_sent() -> None:
    with known():
        one_hot, plain = (
            runner.run(
                compose_simulation([*TINY.split(), f"method={method}", "method.mu1=0", "method.mu2=0.5"]),
                engine=SimulationEngine(workers=1),
            )
            for method in ("memory:OneHotFedMR", "fedmr")
        )
    assert OneHotFedMR(mu2=0.5).sends == FedMR(mu2=0).sends
    assert set(one_hot.server) == {"w"}
    assert one_hot.model_digest != plain.model_digest
