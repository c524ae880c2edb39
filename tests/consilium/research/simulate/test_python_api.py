"""`consilium.simulate`: the command line's runs from Python, bit for bit, and what only Python can hand over."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import consilium
from consilium import ConfigError, DataError, Progress, simulate
from consilium.extending import ArrayData, FedAvg, HeadOptions, Schema, SplitModel
from consilium.research.commands import simulate as command
from consilium.research.simulate import round_printer, runner
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import choices, compose_simulation
from fl_core.extensions import registry
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.models.small import DigitsLinear
from fl_core.types import tensor_maps

pytestmark = pytest.mark.integration

FEW = {"rounds": 1, "train": {"max_steps": 1}}
X, Y = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
PAIRS = ((X, Y), (X[:12] + 0.5, Y[:12]))


@pytest.fixture(scope="module")
def made() -> consilium.Simulation:
    return simulate("fedmr", "digits", "p5c2", seed=3, personal=True, rounds=2, train__max_steps=2)


def test_five_lines_give_the_command_s_digest_summary_and_manifest(
    made: consilium.Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["method=fedmr", "data=digits", "federation=p5c2", "seed=3", "personal=true", "rounds=2"]
    command([*words, "train.max_steps=2"], as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(made.summary))
    assert (made.digest, made.manifest.digest()) == (said["model_digest"], said["manifest_digest"])


def test_frame_curves_and_tables_say_what_the_summary_says(made: consilium.Simulation) -> None:
    assert made.curves.accuracy.tolist() == made.summary["accuracy_by_round"]
    assert made.curves.pa.dropna().iloc[-1] == pytest.approx(made.summary["pa"])
    assert set(made.frame.measure) >= {"accuracy", "balanced_accuracy", "class_accuracy", "pa", "pm_v"}
    classes = made.tables["classes"]
    assert dict(zip(classes["class"], classes.value, strict=True)) == made.summary["class_accuracy"]
    assert made.tables["silos"].examples.sum() == 1797
    assert made.plot().axes
    assert made.digest[:16] in repr(made)


def test_the_model_is_the_final_one_and_measures_the_accuracy_that_was_reported(made: consilium.Simulation) -> None:
    model = made.model
    assert tensor_maps.digest(tensor_maps.copy_state(model)) == made.digest
    assert not model.training
    _, sets = runner.build_simulation(made.config)
    right = total = 0
    for silo in sets:
        x, y = silo.test.batch(torch.arange(len(silo.test)))
        with torch.no_grad():
            right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    assert right / total == pytest.approx(made.summary["global_accuracy"])
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert tensor_maps.digest(tensor_maps.copy_state(made.model)) == made.digest  # each is a copy


def test_what_is_saved_is_what_out_writes(made: consilium.Simulation, tmp_path: Path) -> None:
    made.save(tmp_path / "a")
    made.save(tmp_path / "a")
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert {"config.yaml", "manifest.json", "history.csv", "summary.json", "model.safetensors", "plot.png"} <= names
    with pytest.raises(ConfigError, match="another folder"):
        simulate("fedavg", "digits", "p5c2", out=tmp_path / "a", **FEW)


# ---- objects in place of words --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    """FedAvg under another name."""

    mu: float = 0.5


@dataclass(frozen=True, slots=True)
class Flat(HeadOptions):
    width: int = 4

    def build(self, schema: Schema) -> SplitModel:
        body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, self.width))
        return self.complete(body, self.width, schema)


class Four(ArrayData):
    shape, classes = (1, 8, 8), ("a", "b", "c", "d")

    def read(self, root: Path | None):
        return PAIRS


@dataclass(frozen=True)
class Alternate:
    silos: int = 2

    def partition(self, train, test, n_classes, seed):
        return [np.arange(k, len(train), self.silos) for k in range(self.silos)]


def test_an_instance_of_ours_is_its_name_and_all_its_options() -> None:
    a = simulate(FedMR(mu1=0.03, mu2=0.1, eps=0.1), "digits", "p5c2", model=DigitsLinear(), **FEW)
    words = ["method=fedmr", "method.mu1=0.03", "method.mu2=0.1", "method.eps=0.1", "model=digits_linear"]
    b = runner.run(compose_simulation([*words, "data=digits", "federation=p5c2", "rounds=1", "train.max_steps=1"]))
    assert a.digest == b.model_digest
    assert a.manifest.digest() == b.manifest.digest()


def test_classes_and_instances_of_ones_own_of_all_four_kinds_go_together() -> None:
    a = simulate(Mine(mu=0.25), Four, Alternate(silos=2), Flat(width=5), **FEW)
    assert a.manifest.method.options == {"mu": 0.25, "weights": "samples"}
    assert {e.name.rpartition(":")[2] for e in a.manifest.extensions} == {"Mine", "Flat"}
    assert len(a.manifest.members) == 2
    assert a.manifest.schema.classes == ("a", "b", "c", "d")
    assert simulate(Mine, Four(), Alternate, Flat(width=5), **FEW).digest == a.digest
    for kind, name in (("method", "Mine"), ("model", "Flat"), ("data", "Four"), ("partition", "Alternate")):
        assert registry.loaded(kind, f"{__name__}:{name}") is None  # nothing stays behind


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))


def network_of(schema: Schema) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(schema.shape)), len(schema.classes)))


def test_a_module_a_class_of_modules_and_a_function_of_the_schema_are_models() -> None:
    few = {"federation": "p5c2", "data": "digits", "rounds": 1, "train__max_steps": 2}
    given = Network()
    made = simulate(model=given, **few)  # type: ignore[arg-type]
    assert made.digest == simulate(model=given, **few).digest  # type: ignore[arg-type]
    assert made.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert given[1].weight.requires_grad
    by_class = [simulate(model=Network, seed=seed, **few).digest for seed in (0, 0, 1)]  # type: ignore[arg-type]
    assert by_class[0] == by_class[1] != by_class[2]
    assert simulate(model=network_of, **few).model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)  # type: ignore[arg-type]
    private = simulate(model=network_of, privacy="dp_record", **few)  # type: ignore[arg-type]
    assert private.result.privacy
    names = {one.manifest.model.name for one in (made, private)}
    assert len(names) == 2
    assert all(name.startswith("memory:") for name in names)


def test_several_folders_are_a_silo_each_and_their_classes_the_run_s(tmp_path: Path) -> None:
    for place, names in (("north", ("a", "b")), ("south", ("b", "c"))):
        for name in names:
            (tmp_path / place / name).mkdir(parents=True)
            for k in range(4):
                Image.new("RGB", (32, 32), (60 * k, 9, 9)).save(tmp_path / place / name / f"{k}.png")
    paths = [str(tmp_path / place) for place in ("north", "south")]
    words = {"data": "folder", "data__image_size": 32, "model": "simple_cnn", "rounds": 1, "train__epochs": 1}
    made = simulate(data__path=paths, **words)  # type: ignore[arg-type]
    assert made.manifest.schema.classes == ("a", "b", "c")
    assert [member.name for member in made.manifest.members] == ["north", "south"]
    assert made.tables["silos"].examples.sum() == 16
    for wrong in ([], [paths[0]] * 2, [paths[0], 7]):
        with pytest.raises(ConfigError, match="E-CFG-23"):
            simulate(data__path=wrong, **words)  # type: ignore[arg-type]


def test_rounds_are_printed_where_somebody_watches_or_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"data": "digits", "federation": "p5c2", "rounds": 2, "train__max_steps": 1}
    simulate(**few)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    simulate(progress=True, **few)  # type: ignore[arg-type]
    said = capsys.readouterr().err.splitlines()
    assert "each trained at one hospital only" in " ".join(said)
    rounds = [line.partition("balanced accuracy")[0].split() for line in said if "balanced accuracy" in line]
    assert rounds == [["before", "round", "1"], ["before", "round", "2"], ["after", "round", "2"]]
    monkeypatch.setattr(round_printer.sys, "stderr", Watched())
    assert round_printer.is_watched()


class Watched(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tensors_are_data_and_shares_are_a_federation() -> None:
    a = simulate("fedavg", PAIRS, "iid-2", "digits_linear", seed=1, **FEW)
    assert a.manifest.schema == Schema((1, 8, 8), ("0", "1", "2", "3"))
    arrays = tuple((x.numpy(), y.numpy()) for x, y in PAIRS)
    assert simulate("fedavg", arrays, "iid-2", "digits_linear", seed=1, **FEW).digest == a.digest
    own = [np.arange(k, 40, 2) for k in range(2)]
    b = simulate("fedavg", PAIRS, own, "digits_linear", **FEW)
    c = simulate("fedavg", PAIRS, lambda train, test: [np.arange(k, len(train), 2) for k in range(2)], **FEW)
    d = simulate("fedavg", PAIRS, Alternate, **FEW)
    assert simulate("fedavg", PAIRS, own, **FEW).digest == c.digest == d.digest
    assert b.tables["silos"].query("split == 'train'").examples.sum() == 40


def test_a_function_sees_the_labels_of_named_data_and_pairs_name_the_test_examples_too() -> None:
    seen = []

    def low_and_high(train, test):
        seen.append((len(train), len(test)))
        return [(np.flatnonzero(f(train)), np.flatnonzero(f(test))) for f in (lambda y: y < 5, lambda y: y >= 5)]

    found = simulate("fedavg", "digits", low_and_high, **FEW).tables["silos"]
    assert seen == [(1438, 359)]
    held = found[found.examples > 0].groupby(["silo", "split"])["class"].apply(set)
    assert held["hospital0", "test"] == held["hospital0", "train"] == set("01234")


def test_progress_is_told_each_round_and_may_end_the_simulation() -> None:
    told: list[Progress] = []
    result = simulate("fedavg", PAIRS, "iid-2", rounds=3, train__epochs=1, progress=told.append)
    assert [(p.done, p.rounds) for p in told] == [(1, 3), (2, 3), (3, 3)]
    assert [p.accuracy for p in told] == result.summary["accuracy_by_round"][:3]  # type: ignore[index]

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", PAIRS, "iid-2", **FEW, progress=stop)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ({"method": "fedmrr"}, "E-CFG-01", "did you mean"),
        ({"round": 3}, "E-CFG-01", "rounds"),
        ({"train__lrr": 3}, "E-CFG-01", "lrr"),
        ({"train": {"lr": "x"}}, "E-CFG-02", "train.lr"),
        ({"rounds": float("nan")}, "E-CFG-02", "rounds"),
        ({"seed": print}, "E-CFG-02", "seed"),
        ({"seed": object()}, "E-CFG-02", "seed"),
        ({"train_": 3}, "E-CFG-01", "train"),
        ({"weights_file": "x"}, "E-CFG-01", "model__weights"),
        ({"data__image_sise": 3}, "E-CFG-01", "image_size"),
        ({"privacy": 3}, "E-CFG-02", "privacy"),
        ({"method": dict}, "E-CFG-02", "a method"),
        ({"method": 3}, "E-CFG-02", "a method"),
        ({"model": dict}, "E-CFG-02", "a model"),
        ({"data": 3}, "E-CFG-02", "data"),
        ({"data": (X, Y)}, "E-CFG-02", "data"),
        ({"data": ((X, Y), ("a", "b"))}, "E-CFG-02", "arrays"),
        ({"data": ((X, Y[:3]), PAIRS[1])}, "E-DATA-07", "expected x"),
        ({"data": ((X, Y - 1), PAIRS[1])}, "E-DATA-05", "from 0 to"),
        ({"data": ((X, Y + 0.5), PAIRS[1])}, "E-DATA-05", "fractions"),
        ({"data": ((X * float("nan"), Y), PAIRS[1])}, "E-DATA-07", "NaN"),
        ({"federation": []}, "E-CFG-02", "at least one silo"),
        ({"federation": 3}, "E-CFG-02", "federation"),
        ({"federation": [[0, 1], [1, 40]]}, "E-CFG-08", "silo 1"),
        ({"federation": [[0, 0]]}, "E-CFG-08", "different positions"),
        ({"federation": [[-1]]}, "E-CFG-08", "different positions"),
        ({"federation": [[0.5]]}, "E-CFG-08", "different positions"),
        ({"federation": [([0], [0]), [1]]}, "E-CFG-08", "found both"),
        ({"federation": lambda train, test: None}, "E-CFG-02", "shares"),
        ({"data_root": "/nowhere", "data": "cifar10"}, "E-DATA-02", "cifar"),
    ],
)
def test_a_wrong_argument_is_refused_as_the_command_line_refuses_it(
    arguments: dict[str, object], code: str, says: str
) -> None:
    given = {"method": "fedavg", "data": PAIRS, "federation": "iid-2", **FEW, **arguments}
    with pytest.raises((ConfigError, DataError), match=says) as caught:
        simulate(**given)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert len(str(caught.value)) < 1500


def test_text_reaches_the_configuration_as_it_is() -> None:
    for text in ("it's\\", "\\'", "a: [b], {c}=d # e", "", "7", "${oc.env:HOME}"):
        assert simulate("fedavg", PAIRS, "iid-2", **FEW, name=text or None).config.name == (text or None)


def test_a_method_that_no_other_process_can_import_is_refused_workers_and_gets_none_by_itself() -> None:
    class Local(FedAvg):
        pass

    with pytest.raises(ConfigError, match="a method or model defined only in this process"):
        simulate(Local, PAIRS, "iid-2", engine=SimulationEngine(workers=2), **FEW)
    assert simulate(Local, PAIRS, "iid-2", **FEW).digest == simulate("fedavg", PAIRS, "iid-2", **FEW).digest


def test_choices_do_not_show_what_was_given_in_hand() -> None:
    simulate(Mine, PAIRS, "iid-2", **FEW)
    assert not [name for group in ("method", "data", "model", "federation") for name in choices(group) if ":" in name]
    assert "there is no method=fedmrr: did you mean method=fedmr?" in refused("fedmrr")


def refused(method: str) -> str:
    with pytest.raises(ConfigError) as caught:
        simulate(method)
    return str(caught.value)
