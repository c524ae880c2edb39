"""The papers' tables: what their files say, how they are run and kept, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.paper import curves, report, run, study, tables
from benchmarks.paper.measures import MEASURES, curve
from benchmarks.run_store import complete, read, seeded
from coordinator.config.hydra_config import choices, compose_simulation
from coordinator.simulate.checkpoints import Checkpoints
from coordinator.simulate.engine import SimulationEngine
from fl_core.errors import ConfigError, DataError
from fl_core.types.enums import TaskKind
from fl_core.types.values import RoundContext

TINY = """
paper: A paper, Table 9
experiment: fedmr_1
measures: [ga, ga_last]
across: {across}
own: FedMR
methods: {{FedAvg: method=fedavg, Best baseline: null, FedMR: method=fedmr}}
settings: {{CIFAR10 P5C2: data=cifar10 federation=p5c2}}
printed: {{CIFAR10 P5C2: 67.68/1 69.64/2 74.19/3}}
small:
  words: rounds=2 train.max_steps=2
  settings:
    digits P5C2: {{words: data=digits federation=p5c2, beside: CIFAR10 P5C2}}
"""


def _tiny(folder: Path, across: str = "methods") -> tables.Table:
    (folder / "tiny.yaml").write_text(TINY.format(across=across))
    return tables.load("tiny", "small", folder)


MAY_LACK = ("gm", "balanced", "rounds")
"""Measures that a method without a global model, or a run of two rounds, has no number for."""
DIGITS = "data=digits federation=p5c2 cohort=0"
"""In place of images that only their owner has."""


def _never(point: study.Point) -> dict[str, object]:
    raise AssertionError(f"{point.key} was computed twice")


@pytest.mark.parametrize("scale", tables.SCALES)
@pytest.mark.parametrize("name", tables.names())
def test_every_table_reads_and_has_its_experiment(name: str, scale: str) -> None:
    table = tables.load(name, scale)
    assert table.experiment == name
    assert name in choices("experiment")
    assert table.own in table.methods
    assert table.across in ("methods", "settings")
    assert set(table.fine_tune) <= set(tables.load(name, "paper").methods)
    for setting in table.settings:
        for method in table.methods:
            assert len(table.printed_cell(method, setting)) == len(table.measures)


def test_every_table_of_the_papers_is_there() -> None:
    asked = [f"fedmr_{n}" for n in range(1, 9)] + [f"fedgela_{n}" for n in (2, 3, 4, 5, 6, 10)]
    assert set(tables.names()) == {*asked, "fednh_1", "fednh_2", "fedcd_1", "fedcd_3", "map_1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.names())
def test_the_small_scale_of_every_experiment_runs_on_the_digits(name: str) -> None:
    spec = compose_simulation([f"experiment={name}", "scale=small"])
    assert (spec.data["name"], spec.model["name"], spec.train.epochs, spec.threads) == ("digits", "digits_cnn", 1, 1)
    assert compose_simulation([f"experiment={name}"]).data["name"] != "digits"


def test_printed_numbers_are_those_of_the_papers() -> None:
    """One number from a corner of each table's middle, as the specification lists it."""

    def cell(table: str, setting: str, method: str) -> tuple[str, ...]:
        return tables.load(table, "paper").printed[setting][method]

    assert cell("fedmr_1", "CIFAR10 P5C2", "FedDyn") == ("69.64",)
    assert cell("fedmr_2", "ISIC2019 Real", "FedMR") == ("76.55",)
    assert cell("fedmr_7", "P10C2", "FedMR (inter+intra)") == ("538",)
    assert cell("fedgela_2", "CIFAR10 partial 0.2", "FedGELA") == ("86.55", "60.52")
    assert cell("fedgela_5", "SVHN P50C2", "Best baseline") == ("96.88", "72.97")
    assert cell("fednh_1", "CIFAR100 Dir(1.0)", "FedNH") == ("43.19", "36.88", "45.46")
    assert cell("fedcd_1", "CIFAR100 β=5", "MOON") == ("68.29",)


def test_a_study_is_kept_run_by_run_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    table, store, said = _tiny(tmp_path), tmp_path / "runs.jsonl", list[str]()
    grid = study.grid(table, [0, 1], None)
    asked = study.points(grid)
    assert [p.seed for p in asked] == [0, 0, 1, 1]
    assert len({p.key for p in asked}) == 4
    first = complete(asked[:1], store, study.measure, -1, said.append)
    store.write_text(store.read_text() + '{"key": "torn')
    with pytest.raises(AssertionError, match="computed twice"):
        complete(asked, store, _never, -1, said.append)
    every = complete(asked, store, study.measure, -1, said.append)
    assert said[-4] == "4 runs, 1 of them done before"
    assert complete(asked, store, _never, -1, said.append) == every
    assert every[asked[0].key] == first[asked[0].key]
    assert len(curve(every[asked[0].key])) == 3  # before round 1, and after both
    assert every[asked[0].key] != every[asked[2].key]


def test_a_changed_setting_is_another_run(tmp_path: Path) -> None:
    table = _tiny(tmp_path)

    def keys(*words: str) -> set[str]:
        found = study.point_of(table, "FedAvg", words, [0, 1], None, study.SimulationEngine(), table.settings[0])
        return {point.key for point in found.values()}

    assert len(keys("method=fedavg") | keys("method=fedavg", "train.lr=0.02")) == 4


def test_runs_whose_numbers_changed_their_meaning_are_run_again_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _tiny(tmp_path)

    def key(*words: str) -> str:
        how = study.SimulationEngine()
        return study.point_of(table, "FedAvg", words, [0], None, how, table.settings[0])[0].key

    runs = {
        False: [("method=fedavg",), ("method=fedavg", "cohort=2")],
        True: [
            ("method=fedrep",),
            ("method=fedavg", "personal=true"),
            ("method=fedavg", "federation=map", "federation.silos=4", "cohort=0"),
        ],
    }
    before = {words: key(*words) for both in runs.values() for words in both}
    monkeypatch.setattr(study, "MEASURED", study.MEASURED + 1)
    for changed, both in runs.items():
        assert [key(*words) != before[words] for words in both] == [changed] * len(both)


def _made(table: tables.Table, accuracies: dict[str, float]) -> report.Results:
    grid = study.grid(table, [0, 1], None)
    runs = {}
    for (method, _), cell in grid.items():
        for seed, (point,) in cell.items():
            a = accuracies[method] + seed / 100
            runs[point.key] = {"key": point.key, "by_round": [0.1, a, a - 0.05], "manifest": "m", "aggregator": "mean"}
    return report.Results(table, grid, runs)


def test_the_layout_is_the_papers_with_the_printed_number_beside_ours(tmp_path: Path) -> None:
    results = _made(_tiny(tmp_path), {"FedAvg": 0.5, "FedMR": 0.75})
    lines = report.markdown(results).splitlines()
    assert "|  | FedAvg | Best baseline | FedMR |" in lines
    assert (
        "| digits P5C2 (CIFAR10 P5C2) | 50.50 ± 0.71 (67.68) / 45.50 ± 0.71 (1) | not run (69.64) / not run (2) | "
        "75.50 ± 0.71 (74.19) / 70.50 ± 0.71 (3) |"
    ) in lines
    assert "| digits P5C2, global accuracy | +25.0 (0.0) |" in lines
    assert any(line.startswith("Updates became one by aggregator=mean.") for line in lines)
    down = report.markdown(_made(_tiny(tmp_path, "settings"), {"FedAvg": 0.5, "FedMR": 0.75}))
    assert "| FedAvg | 50.50 ± 0.71 (67.68) / 45.50 ± 0.71 (1) |" in down.splitlines()


def test_all_three_files_are_written(tmp_path: Path) -> None:
    table = _tiny(tmp_path)
    run.compute(table, [0], tmp_path / "out", -1, None)
    run.write(table, tmp_path / "out")
    rows = (tmp_path / "out" / "tiny_small.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2
    assert rows[1].startswith("tiny,small,digits P5C2,FedAvg,0,ga,")
    assert (tmp_path / "out" / "tiny_small.png").read_bytes()[1:4] == b"PNG"
    assert "74.19" in (tmp_path / "out" / "tiny_small.md").read_text()


def test_a_method_has_one_colour_in_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "settings: {digits P5C2: data=digits federation=p5c2, digits P10C3: data=digits federation=p10c3}"
    text = TINY.format(across="methods").split("  settings:")[0] + f"  {both}\n"
    (tmp_path / "two.yaml").write_text(text)
    made = _made(tables.load("two", "small", tmp_path), {"FedAvg": 0.5, "FedMR": 0.75})
    partial = replace(made, grid={cell: runs for cell, runs in made.grid.items() if cell != ("FedAvg", "digits P5C2")})
    drawn: list[Figure] = []
    monkeypatch.setattr(curves.plt, "close", drawn.append)
    assert curves.draw(partial, tmp_path / "two.png")
    alone, beside = ({line.get_label(): line.get_color() for line in axis.lines} for axis in drawn[0].axes)
    assert set(alone) == {"FedMR"}
    assert alone["FedMR"] == beside["FedMR"] != beside["FedAvg"]
    assert [entry.get_text() for entry in drawn[0].legends[0].get_texts()] == ["FedAvg", "FedMR"]


def test_a_table_is_all_that_its_store_has_whatever_was_computed_last(tmp_path: Path) -> None:
    table, out = _tiny(tmp_path), tmp_path / "out"
    run.compute(tables.chosen(table, ["FedAvg"], []), [0, 1], out, -1, None)
    run.compute(tables.chosen(table, ["FedMR"], []), [1], out, -1, None)
    text = run.write(table, out)
    rows = (out / "tiny_small.csv").read_text().splitlines()
    assert sorted((row.split(",")[3], row.split(",")[4]) for row in rows[1:]) == [
        *(("FedAvg", seed) for seed in "0011"),
        *(("FedMR", "1"),) * 2,
    ]
    assert "over seeds 0, 1;" in text
    assert text.count("(1 seeds)") == 2


def test_an_empty_table_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "tiny_small.md").write_text("full")
    for lines in ("", '{"key": "another", "seed": 0}\n'):
        (tmp_path / "runs_small.jsonl").write_text(lines)
        with pytest.raises(DataError, match="found none: leave out run=false"):
            run.write(_tiny(tmp_path), tmp_path)
    assert (tmp_path / "tiny_small.md").read_text() == "full"
    assert not (tmp_path / "tiny_small.csv").exists()


@pytest.mark.parametrize("file", sorted(run.RESULTS.glob("*_small.md")), ids=lambda file: file.stem)
def test_every_table_of_the_small_scale_is_what_its_store_makes(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs_small.jsonl").write_bytes((run.RESULTS / "runs_small.jsonl").read_bytes())
    text = run.write(tables.load(file.stem.removesuffix("_small"), "small"), tmp_path)
    assert text.splitlines()[:-1] == file.read_text().splitlines()[:-1]  # the last line names the machine
    assert (tmp_path / f"{file.stem}.csv").read_text() == file.with_suffix(".csv").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["table=fedmr_11"], "did you mean 'fedmr_1'"),
        (["table=fedmr_1", "scale=smal"], "did you mean 'small'"),
        (["table=fedmr_1", "methods=FedMRR"], "did you mean 'FedMR'"),
        (["table=fedmr_1", "settings=digits P5C3"], "did you mean 'digits P5C2'"),
        (["tabel=fedmr_1"], "did you mean 'table'"),
        (["table=fedmr_1", "seeds=one"], "whole numbers for seeds"),
        (["scale=small"], "expected table=NAME"),
        (["table=fedmr_1", "run=no"], "run=false"),
    ],
)
def test_a_wrong_word_is_refused_with_the_nearest(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_printed_cells_that_do_not_fit_the_methods_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(TINY.format(across="methods").replace("69.64/2 ", ""))
    with pytest.raises(ConfigError, match="expected 3 cells of 2 numbers"):
        tables.load("bad", "small", tmp_path)


def test_measures_read_what_a_run_kept() -> None:
    fedavg = {"key": "a", "by_round": [0.1, 0.4, 0.6, 0.5]}
    ours = {"key": "b", "by_round": [0.1, 0.6, 0.5, 0.7], "personal": {"pa": [0.8, 0.9, 0.7]}, "pa_fine_tuned": None}
    alone = {"key": "c", "by_round": [None] * 4, "personal": {"ga": [0.2, 0.3, 0.1]}, "pa_fine_tuned": 0.5}
    fedrep = {**ours, "personal": {"pa": [0.5, 0.6, 0.4], "ga": [0.2, 0.3, 0.1]}, "ga_of": "personal"}
    fedbabu = {**fedrep, "personal": {"pa": [0.9], "ga": [0.35]}}

    def read(name: str, one: dict[str, object], at: int = 0) -> float:
        return MEASURES[name].read(one, fedavg, at)

    assert (read("ga", ours), read("ga_last", ours), read("ga", ours, 2)) == (0.7, 0.7, 0.6)
    assert (read("pa", ours), read("pa_last", ours), read("pa", alone)) == (0.9, 0.7, 0.5)
    assert (read("ga", alone), read("ga_last", alone)) == (0.3, 0.1)
    assert math.isnan(read("gm", alone))
    assert (read("ga", fedrep), read("ga_last", fedrep), read("gm", fedrep)) == (0.3, 0.1, 0.7)
    assert (read("ga", fedbabu), read("ga_last", fedbabu), read("ga_mean", fedbabu)) == (0.35, 0.35, 0.35)
    assert math.isnan(read("ga", fedbabu, 2))  # its personal models are made at the end
    assert (read("ga_mean", ours), read("pa_mean", fedrep)) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (read("rounds", fedavg), read("rounds", ours)) == (3, 1)
    assert math.isnan(MEASURES["rounds"].read(fedavg, ours, 0))


def test_measures_added_at_the_small_scale_have_nothing_printed(tmp_path: Path) -> None:
    text = TINY.format(across="methods") + "  also: [balanced]\n"
    (tmp_path / "tiny.yaml").write_text(text)
    assert tables.load("tiny", "paper", tmp_path).measures == ("ga", "ga_last")
    table = tables.load("tiny", "small", tmp_path)
    assert table.measures == ("ga", "ga_last", "balanced")
    assert table.printed_cell("FedMR", table.settings[0]) == ("74.19", "3", "-")
    (tmp_path / "tiny.yaml").write_text(text.replace("balanced", "balance"))
    with pytest.raises(ConfigError, match="did you mean 'balanced'"):
        tables.load("tiny", "small", tmp_path)


def test_under_partial_participation_every_round_is_measured_on_all_test_sets(tmp_path: Path) -> None:
    """The round's own record covers its cohort; the closing one covers all silos, and equals the last one here."""
    words = ("data=digits", "federation=p10c3", "cohort=3", "rounds=2", "train.max_steps=2", "method=fedavg")
    point = study.point_of(
        _tiny(tmp_path), "FedAvg", words, [0], None, study.SimulationEngine(), _tiny(tmp_path).settings[0]
    )[0]
    found = study.measure(point)["by_round"]
    assert isinstance(found, list)
    result = study.runner.run(seeded(compose_simulation(point.words), 0))
    assert found == [round(a, 5) for a in result.accuracies]
    assert sum(result.records[2].examples) > sum(result.records[1].examples)
    assert 360 * found[1] == pytest.approx(round(360 * found[1]), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.names())
def test_every_table_runs_through_at_the_small_scale(name: str, tmp_path: Path) -> None:
    """All methods of its first setting, cut to two rounds of one step: every cell has a number, and is written."""
    table = tables.load(name, "small")
    first = table.settings[0]
    given = DIGITS.split() if any(word.startswith("images=") for word in first.runs[0]) else first.runs[0]
    words = (*given, "rounds=2", "train.max_steps=1")
    short = replace(table, settings=[replace(first, runs=(words,), at=min(first.at, 1))])
    run.compute(short, [0], tmp_path, -1, None)
    text = run.write(short, tmp_path)
    results = report.Results(short, study.grid(short, [0], None), read(tmp_path / "runs_small.jsonl"))
    for method, own in table.methods.items():
        if own is not None:
            found = [results.values(method, short.settings[0], m)[0] for m in table.measures if m not in MAY_LACK]
            assert not any(map(math.isnan, found)), (method, found)
    assert (f"{table.own} minus another method" in text) == (name != "fedmr_3")  # which counts, and ranks nothing


def test_a_table_that_was_killed_goes_on_within_its_run_and_then_forgets_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    class Watch(study.NewestState):
        def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
            opened.append(context.round)
            if opened == [0, 1]:
                raise KeyboardInterrupt

    monkeypatch.setattr(study, "NewestState", Watch)
    table = tables.chosen(_tiny(tmp_path), ["FedAvg"], [])
    how = SimulationEngine(checkpoints=Checkpoints(tmp_path / "out/checkpoints", 1))
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            run.compute(table, [0], tmp_path / "out", -1, None, how)
    assert opened == [0, 1, 1, 2]
    assert list((tmp_path / "out/checkpoints").iterdir()) == []
