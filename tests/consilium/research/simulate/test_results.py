"""The folder and the tables of `coordinator simulate --out`: complete, typed, and never over another run's."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from consilium.research.commands import simulate
from consilium.research.simulate import results, runner
from consilium.research.simulate.answer import _say_where
from consilium.research.simulate.results import Result, ResultFolder
from consilium.research.simulate.runner import SimulationJob
from consilium.research.simulate.sweep import SweepTable, folder_name, swept
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.run_spec import RunSpec
from fl_core.errors import ConfigError, StateError
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from fl_core.types.clinical import BinnedRange, ClinicalMetrics
from privacy.accounting import uncertainty
from privacy.accounting.measures import MACRO_AUC

SHORT = ["data=digits", "federation=p5c2", "rounds=2", "train.max_steps=2", "threads=1", "personal=true", "cohort=3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, runner.run(compose_simulation(SHORT), out=folder, words=SHORT)


@pytest.mark.integration
def test_the_folder_holds_configuration_manifest_tables_summary_model_and_picture(
    made: tuple[Path, Result],
) -> None:
    folder, result = made
    assert RunSpec.from_mapping(yaml.safe_load((folder / "config.yaml").read_text())) == compose_simulation(SHORT)
    assert (folder / "config.yaml").read_text().startswith("# coordinator simulate data=digits ")
    assert RunManifest.from_json((folder / "manifest.json").read_text()).digest() == result.manifest.digest()
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(result.summary()))
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(folder / "model.safetensors")
    assert tensor_maps.digest(weights) == result.model_digest
    build_model(result.manifest.model.name, result.manifest.model.options, result.manifest.schema, 0).load_state_dict(
        weights
    )


def test_one_row_per_round_and_measure_equal_to_the_summary_and_to_pandas_own_mean(
    made: tuple[Path, Result],
) -> None:
    folder, result = made
    frame = pd.read_parquet(folder / "history.parquet")
    pd.testing.assert_frame_equal(
        frame, pd.read_csv(folder / "history.csv", dtype={"class": str}).fillna({"class": ""})
    )
    assert not frame.duplicated(["round", "measure", "class"]).any()
    summary = result.summary()
    accuracy = frame[frame.measure == "accuracy"]
    assert accuracy["round"].tolist() == [0, 1, 2]
    assert accuracy.value.tolist() == summary["accuracy_by_round"]
    by_class = frame[frame.measure == "class_accuracy"].groupby("round").value.mean()
    balanced = frame[frame.measure == "balanced_accuracy"].set_index("round").value
    assert balanced.to_numpy() == pytest.approx(by_class.to_numpy())
    pa = frame[frame.measure == "pa"].set_index("round").value
    assert pa.index.tolist() == [1, 2]  # of the models that the rounds trained
    assert pa[2] == pytest.approx(summary["pa"])
    assert frame[frame.measure == "cohort_accuracy"].value.tolist() == summary["cohort_accuracy_by_round"]


def test_the_table_of_silos_counts_every_example_once(made: tuple[Path, Result]) -> None:
    folder, _ = made
    frame = pd.read_csv(folder / "silos.csv")
    assert frame.groupby("split").examples.sum().to_dict() == {"test": 359, "train": 1438}
    assert (frame[frame.split == "train"].query("examples > 0").groupby("silo").size() == 2).all()  # p5c2


def test_a_folder_from_before_models_had_adapters_is_one_of_the_same_configuration(tmp_path: Path) -> None:
    folder, spec = ResultFolder(tmp_path), compose_simulation(SHORT)
    written = results.plain(spec)
    del written["model"]["adapter"]  # type: ignore[attr-defined]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert folder.differences(spec) == []
    assert folder.differences(compose_simulation([*SHORT, "model.adapter=linear"])) == [
        "model.adapter: 'none' stored, 'linear' now"
    ]


@pytest.mark.parametrize(("std", "shown"), [(2.0, True), (1e6, False)])
def test_what_noise_hides_has_its_interval_or_no_number(std: float, shown: bool, made: tuple[Path, Result]) -> None:
    noise = uncertainty.RunNoise(uncertainty.EvaluationNoise(std), frozenset({"pa"}))
    result = replace(made[1], noise=noise, measured=())
    rows = results.history(result)
    for row in (r for r in rows if r.measure == "accuracy"):
        assert (row.value is not None) is shown
        assert not shown or row.low <= row.value < row.high  # type: ignore[operator]
    assert {"pa", "pa_std"}.isdisjoint(row.measure for row in rows)
    assert bool(results.draw(result).axes[0].lines) is shown


def test_results_of_another_configuration_are_refused_before_training_and_left_alone(
    made: tuple[Path, Result],
) -> None:
    folder, _ = made
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(ConfigError, match=r"seed: 0 stored, 7 now.*another folder") as caught:
        runner.run(compose_simulation([*SHORT, "seed=7"]), observer=pytest.fail, out=folder)
    assert caught.value.code == "E-CFG-08"
    with pytest.raises(ConfigError, match=r"federation\.name"):  # which the manifest does not know
        ResultFolder(folder).claim(compose_simulation([*SHORT, "federation=p10c3"]), made[1].manifest)
    assert {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    "text", ["", "a: [1", "- 1", "a: &x [1]\nb: [*x, *x]", "\x00", "é".encode("latin-1").decode("latin-1") * 3]
)
def test_a_damaged_configuration_is_refused_with_words(text: str, tmp_path: Path, made: tuple[Path, Result]) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(StateError, match=r"config\.yaml: move it away") as caught:
        ResultFolder(tmp_path).claim(compose_simulation(SHORT), made[1].manifest)
    assert caught.value.code == "E-STATE-22"


def test_a_file_in_place_of_the_folder_and_a_planted_link_are_not_written_through(
    tmp_path: Path, made: tuple[Path, Result]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="found the file"):
        ResultFolder(file).claim(compose_simulation(SHORT), made[1].manifest)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").symlink_to(file)
    ResultFolder(tmp_path / "out").claim(compose_simulation(SHORT), made[1].manifest)
    assert file.read_text() == "mine"


def test_words_cannot_begin_a_line_of_the_configuration(tmp_path: Path, made: tuple[Path, Result]) -> None:
    ResultFolder(tmp_path).claim(compose_simulation(SHORT), made[1].manifest, ["name=a\nrounds: 9\u2028x"])
    assert ResultFolder(tmp_path).differences(compose_simulation(SHORT)) == []


@pytest.mark.integration
def test_a_sweep_gives_one_table_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [word for word in SHORT if not word.startswith(("personal", "cohort"))]
    words = ["seed=0,1", *short]
    job, table = SimulationJob(out=tmp_path), SweepTable(tmp_path, words)

    def ran(seed: int) -> dict[str, object]:
        chosen = [f"seed={seed}", *short]
        return {"overrides": chosen, **job.run_of_sweep(swept(words), chosen)}

    for seed in (1, 0):
        table.add(ran(seed))
    table.close()
    frame = pd.read_parquet(tmp_path / "sweep.parquet")
    assert frame.seed.astype(int).tolist() == [0, 1]
    rounds = pd.read_csv(tmp_path / "history.csv")
    assert rounds[rounds.measure == "accuracy"].groupby("seed").value.last().tolist() == frame.global_accuracy.tolist()
    assert rounds["round"].dtype.kind == "i"

    def never(*_: object, **__: object) -> Result:
        raise AssertionError("it was finished")

    monkeypatch.setattr(runner, "run", never)
    assert ran(0)["model_digest"] == frame.model_digest[0]
    monkeypatch.setattr("consilium.research.simulate.runner.version", lambda: "another version")
    with pytest.raises(AssertionError):
        ran(0)


@pytest.mark.parametrize("value", ["../../etc", "a/b", "é", "x" * 300, "a b", "", ".."])
def test_the_folder_of_a_run_is_one_short_element_and_different_runs_get_different_ones(value: str) -> None:
    found = folder_name([f"name={value}", "seed=1"], ["name"])
    assert Path(found).parts == (found,)
    assert len(found) <= 100
    assert not found.startswith(".")
    assert found != folder_name([f"name={value}_", "seed=1"], ["name"])


def test_own_configurations_are_composed_from_a_folder_under_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nrounds: 3\ntrain:\n  lr: 0.5\n")
    spec = compose_simulation(["experiment=mine", "federation=p5c2", "train.lr=0.25"], tmp_path)
    assert (spec.rounds, spec.train.lr) == (3, 0.25)
    with pytest.raises(ConfigError, match="there is no experiment=mine"):
        compose_simulation(["experiment=mine"])
    with pytest.raises(ConfigError, match="did you mean experiment=mine"):
        compose_simulation(["experiment=mien"], tmp_path)
    with pytest.raises(ConfigError, match="--config-dir"):
        compose_simulation([], tmp_path / "none")
    odd = tmp_path / "it's [a] folder, ${odd}"
    (tmp_path / "experiment").rename(tmp_path / "kept")
    (odd / "experiment").mkdir(parents=True)
    (tmp_path / "kept/mine.yaml").rename(odd / "experiment/mine.yaml")
    assert compose_simulation(["experiment=mine"], odd).rounds == 3
    (odd / "experiment/fedmr.yaml").write_text("rounds: 3\n")
    with pytest.raises(ConfigError, match="name of a built-in file: rename"):
        compose_simulation(["experiment=mine"], odd)


def test_a_plus_adds_what_own_files_lack_and_nothing_that_no_run_has(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method/bare.yaml").write_text("# @package method\nname: fedprox\n")
    assert compose_simulation(["method=bare", "+method.mu=0.5"], tmp_path).method == {"name": "fedprox", "mu": 0.5}
    assert compose_simulation(["+rounds=3", "++seed=4"]) == compose_simulation(["rounds=3", "seed=4"])
    with pytest.raises(ConfigError, match="nonsense"):
        compose_simulation(["+nonsense=1"])
    with pytest.raises(ConfigError, match="nonsense"):
        compose_simulation(["+train.nonsense=1"])
    with pytest.raises(ConfigError, match="not removed"):
        compose_simulation(["~rounds=3"])


def test_the_command_says_where_the_results_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(["rounds=1", "train.max_steps=1", "federation=p5c2"], out=tmp_path / "x")
    assert f"results in {tmp_path / 'x'}" in capsys.readouterr().err
    with (tmp_path / "x/history.csv").open() as file:
        assert {row["measure"] for row in csv.DictReader(file)} == {
            *("accuracy", "balanced_accuracy", "class_accuracy"),
            *("macro_auc", "auc", "specificity", "calibration_error"),
        }
    assert torch.isfinite(load_file(tmp_path / "x/model.safetensors")["head.weight"]).all()


def test_the_macro_auc_has_one_name_everywhere() -> None:
    found = ClinicalMetrics(((1, 0), (0, 1)), (BinnedRange(0.5, 1.0), BinnedRange(0.5, 1.0)), ())
    assert found.facts()["macro_auc"] == found.macro_auc.middle == 0.75
    assert found.facts()["macro_auc_range"] == [0.5, 1.0]
    assert MACRO_AUC.name == "macro_auc"


def test_what_an_installation_cannot_write_is_left_out_with_a_word_and_the_rest_is_there(
    made: tuple[Path, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    place = ResultFolder(tmp_path)
    place.claim(compose_simulation(SHORT), made[1].manifest)
    assert set(place.write(made[1])) == {file.name for file in tmp_path.iterdir()}
    assert not [file for file in tmp_path.iterdir() if file.suffix in (".parquet", ".png")]
    _say_where(tmp_path)
    assert "without *.parquet (install consilium-fl[research]); without plot.png" in capsys.readouterr().err


def test_a_plot_shows_itself_in_a_notebook_and_leaves_the_backend_alone(made: tuple[Path, Result]) -> None:
    before = matplotlib.get_backend()
    assert results.draw(made[1])._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert matplotlib.get_backend() == before
