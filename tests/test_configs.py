"""Choices compose to what their dataclasses and files say, and misspelt words are refused with the nearest one.

Hydra takes a tenth of a second for each. `make check` composes all of them, `make test` a share of each kind.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from coordinator.config.hydra_config import choices, compose_simulation, compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from fl_core.aggregation.options import NormClipped
from fl_core.converter import read_options
from fl_core.errors import ConfigError
from fl_core.methods import METHODS, programs
from fl_core.models import MODELS
from fl_core.training import memory
from fl_core.types.values import RoundContext
from privacy.compiled_run import CompiledRun
from privacy.profiles import PROFILES
from tests.support import some
from tests.support.federations import measured

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[1] / "configs"


def _yaml(path: str) -> dict[str, object]:
    raw = OmegaConf.to_container(OmegaConf.load(ROOT / path))
    assert isinstance(raw, dict)
    return {str(k): v for k, v in raw.items()}


REGISTRIES = {"method": programs(), "model": MODELS}


@pytest.mark.parametrize(
    ("group", "name"), some([(group, name) for group, registry in REGISTRIES.items() for name in registry])
)
def test_a_registered_name_is_a_choice_with_the_defaults_of_its_dataclass(group: str, name: str) -> None:
    kind = REGISTRIES[group][name]
    options = dict(getattr(compose_spec([f"{group}={name}", "data=spiral"]), group))
    assert options.pop("name") == name
    assert read_options(kind, name, options) == kind()


def test_choices_are_the_registered_names_and_the_files() -> None:
    for group, registry in REGISTRIES.items():
        presets = {path.stem for path in (ROOT / group).glob("*.yaml")}
        assert choices(group) == sorted({*registry, *presets})
    assert choices("privacy") == sorted(PROFILES)


@pytest.mark.parametrize("path", sorted(ROOT.glob("method/*.yaml")), ids=lambda path: path.stem)
def test_a_preset_is_its_method_with_the_papers_values_and_others_than_the_defaults(path: Path) -> None:
    spec, said = compose_spec([f"method={path.stem}"]), _yaml(f"method/{path.name}")
    assert spec.method["name"] == path.stem.split("_")[0]
    default, own = compose_spec([f"method={spec.method['name']}"]).method, said["method"]
    assert isinstance(own, dict)
    assert spec.method == {**default, **own} != default
    changed = compose_spec(
        [f"method={path.stem}", "data=spiral", f"method.{next(iter(own))}={default[next(iter(own))]}"]
    )
    assert changed.method[next(iter(own))] == default[next(iter(own))]


@pytest.mark.parametrize("data", some(choices("data"), 6))
def test_scaffold_has_no_momentum_whatever_the_data(data: str) -> None:
    assert compose_spec(["method=scaffold", f"data={data}"]).train.momentum == 0


def _composes(method: str, data: str) -> None:
    spec = compose_spec([f"method={method}", f"data={data}"])
    assert (spec.method["name"], spec.data["name"]) == (method, data)
    assert RunSpec.from_json(spec.to_json()) == spec


METHOD_NAMES, DATA_NAMES = sorted(METHODS), choices("data")
EACH_ONCE = [
    (METHOD_NAMES[i % len(METHOD_NAMES)], DATA_NAMES[i % len(DATA_NAMES)])
    for i in range(max(len(METHOD_NAMES), len(DATA_NAMES)))
]


@pytest.mark.parametrize(("method", "data"), some(EACH_ONCE))
def test_each_method_and_each_data_set_composes_with_another(method: str, data: str) -> None:
    _composes(method, data)


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA_NAMES)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_composes_with_every_data_set(method: str, data: str) -> None:
    _composes(method, data)


def test_scaffold_brings_a_schedule_without_momentum_and_the_command_line_wins() -> None:
    assert compose_spec(["method=fedavg"]).train.momentum == 0.9
    assert compose_spec(["method=scaffold", "train.momentum=0.5", "method.server_lr=0.5"]).train.momentum == 0.5


def test_another_draw_of_a_partition_changes_nothing_else() -> None:
    words = ["method=fedmr", "data=digits"]
    drawn, first = compose_spec([*words, "federation=p5c2@3"]), compose_spec([*words, "federation=p5c2"])
    assert drawn.federation == {**first.federation, "name": "p5c2@3"}
    assert (drawn.model, drawn.train, drawn.method) == (first.model, first.train, first.method)


@pytest.mark.parametrize("name", some(choices("experiment"), 4))
def test_every_experiment_composes(name: str) -> None:
    assert compose_spec([f"experiment={name}"]).rounds >= 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["metod=fedmr"], "E-CFG-01", "did you mean 'method'"),
        (["method=fedmrr"], "E-CFG-01", "did you mean method=fedmr? valid: "),
        (["method=fedmr", "method.mu11=1"], "E-CFG-01", "mu11"),
        (["train.lrr=0.1"], "E-CFG-01", "train.lrr"),
        (["rounds=ten"], "E-CFG-02", "rounds: expected a whole number"),
        (["rounds=-1"], "E-CFG-02", "rounds: expected a finite number >= 0"),
        (["train.lr=-1"], "E-CFG-02", "train.lr: expected a finite number > 0"),
        (["+extra=1"], "E-CFG-01", "there is no key 'extra'"),
        (["rounds"], "E-CFG-01", "KEY=VALUE"),
        (["federation=p5x2"], "E-CFG-01", "p5c2"),
    ],
)
def test_a_wrong_word_is_refused_with_what_would_be_right(words: list[str], code: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_spec(words)
    assert caught.value.code == code
    assert says in str(caught.value)


def test_a_partition_without_a_file_of_its_own_can_be_named() -> None:
    assert compose_spec(["federation=p7c3"]).federation["name"] == "p7c3"


def test_a_simulation_averages_and_a_run_bounds_updates_where_no_word_says_how(tmp_path: Path) -> None:
    assert compose_spec([]).aggregator == {"name": "norm_clipped", **asdict(NormClipped())}
    assert compose_simulation([]).aggregator == {"name": "mean"}
    experiment = tmp_path / "experiment/mine.yaml"
    experiment.parent.mkdir()
    experiment.write_text("# @package _global_\ndefaults:\n  - override /aggregator: median\n")
    for compose in (compose_spec, compose_simulation):
        assert compose(["aggregator=trimmed_mean"]).aggregator["name"] == "trimmed_mean"
        assert compose(["experiment=mine"], tmp_path).aggregator == {"name": "median"}
    apart = {
        f.name for f in fields(RunSpec) if getattr(compose_spec([]), f.name) != getattr(compose_simulation([]), f.name)
    }
    assert apart == {"aggregator", "secagg"}


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        (["data=folder"], "imagenet"),
        (["data=manifest", "model=resnet50"], "imagenet"),
        (["data=isic2019", "model=resnet18"], "imagenet"),
        (["data=folder", "data.image_size=63"], "cifar"),
        (["data=folder", "model.stem=cifar"], "cifar"),
        (["data=cifar10"], "cifar"),
        (["data=cifar10", "model.stem=imagenet"], "imagenet"),
        (["data=tinyimagenet"], "cifar"),  # as in its paper
    ],
)
def test_a_resnet_has_imagenets_stem_from_64_pixels_on_unless_it_is_named(words: list[str], stem: str) -> None:
    assert compose_spec(words).model["stem"] == stem


def test_small_images_keep_the_manifest_that_they_had_before_there_were_stems_and_micro_batches() -> None:
    found = manifest_from(compose_spec(["data=cifar10"]), ["a", "b"]).to_json()
    assert "stem" not in found
    assert "micro_batch" not in found


@pytest.mark.slow
@pytest.mark.parametrize("data", ["folder", "manifest", "isic2019"])
def test_the_default_run_on_images_fits_a_machine_of_16_gb(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: None)  # whatever this machine has
    classes = [] if data == "isic2019" else ["data.classes=[a,b,c]"]
    spec = compose_spec([f"data={data}", *classes])
    run = CompiledRun.of(manifest_from(spec, ["a", "b"]))
    context = RoundContext(2, len(run.manifest.schema.classes), run.manifest.rounds, 0, 2).for_silo(0, 0)
    rows = run.profile.made_up_step(0, context, torch.device("cpu"))
    assert measured(run).need(rows.training, rows.evaluating) < 6 << 30
    before = compose_spec([f"data={data}", *classes, "model=resnet18", "model.stem=cifar"])
    then = CompiledRun.of(manifest_from(before, ["a", "b"]))
    assert measured(then).need(128, 512) > 16 << 30  # what the defaults were


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=digits", "model=resnet18"], "batch norm"),
        (["method=fedmr"], "method fedmr has a loss that mixes examples"),
        (["privacy=dp_record"], "micro_batch"),
    ],
)
def test_micro_batches_are_refused_where_their_steps_would_be_others(words: list[str], said: str) -> None:
    sizes = [500.0, 500.0]
    with pytest.raises(ConfigError, match=rf"E-CFG-08.*{said}"):
        manifest_from(compose_spec([*words, "train.micro_batch=8"]), ["a", "b"], sizes)
