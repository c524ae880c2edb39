"""A file and its card are enough to build the evaluated model again, and another file is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from consilium.model import model_file
from consilium.model.model_file import ModelFileFacts
from consilium.research.engines.in_process import RoundHistory, simulate
from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import FederationError, StateError
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.values import State
from tests.support.federations import METHOD_OPTIONS, manifest, shares

WITH_A_MODEL = [name for name, method in METHODS.items() if method.has_global_model]
MORE = {
    "fedgela_la": ("fedgela", {"etf": False}),
    "fedgela_batch": ("fedgela", {"feature_norm": "batch", "logit_scale": 12.0}),
    "fednh_fixed_scale": ("fednh", {"fix_scaling": 30.0}),
}
FROZEN = ["data=digits", "federation=hospitals6", "train.freeze=features", "train.epochs=1", "rounds=1", "threads=1"]


def trained(folder: Path, method: str, options: dict[str, object]) -> tuple[RunSetup, State, Path]:
    run = RunSetup.of(manifest(method, options, rounds=1))
    state = simulate(run, shares(), RoundHistory())
    return run, state, written(folder, run, state)


def written(folder: Path, run: RunSetup, state: State) -> Path:
    """Write a model with a card that names it."""
    file = folder / "m.safetensors"
    tensors = {name: v.contiguous() for name, v in run.exported(state).items()}
    save_file(tensors, file, ModelFileFacts.of(run.manifest, tensor_maps.digest(state["w"]), "m").metadata())
    named(file)
    return file


def named(file: Path) -> None:
    model_file.card_beside(file).write_text(f"| file | SHA-256 `{sha256(file.read_bytes()).hexdigest()}` |")


def rewritten(file: Path, **facts: object) -> None:
    """Write a file anew with other facts (None: without that one), and a card that names it."""
    with safe_open(file, framework="pt") as opened:
        old = json.loads(opened.metadata()["consilium"])
    new = {name: value for name, value in {**old, **facts}.items() if value is not None or facts.get(name, 1) == 1}
    save_file(load_file(file), file, {"consilium": json.dumps(new)})
    named(file)


@pytest.mark.integration
@pytest.mark.parametrize("name", [*WITH_A_MODEL, *MORE])
def test_a_file_is_the_evaluated_model_again(tmp_path: Path, name: str) -> None:
    same_as_evaluated(*trained(tmp_path, *MORE.get(name, (name, METHOD_OPTIONS.get(name, {})))))


FROZEN_RUNS = ["method=fedavg model.adapter=linear", "method=fednh model.adapter=linear", "method=analytic"]


@pytest.mark.parametrize("words", FROZEN_RUNS)
def test_a_model_on_a_frozen_body_is_whole(tmp_path: Path, words: str) -> None:
    result = runner.run(compose_simulation([*FROZEN, *words.split()]))
    same_as_evaluated(result.run, result.server, written(tmp_path, result.run, result.server))


def same_as_evaluated(run: RunSetup, state: State, file: Path) -> None:
    found = model_file.load(file)
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    evaluated = run.classifier(state).eval()
    assert torch.equal(found.answers(x)[1], evaluated(x))
    assert not found.head.training
    assert found.facts.schema == run.manifest.schema


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return trained(tmp_path, "fedavg", {})[2]


@pytest.mark.parametrize("change", ["another file", "no card", "an empty card", "the digest in capitals", "one more"])
def test_a_file_that_its_card_does_not_name_is_refused(file: Path, change: str) -> None:
    card = model_file.card_beside(file)
    text = card.read_text()
    if change == "another file":
        tensors = load_file(file)
        tensors["head.bias"] += 1
        with safe_open(file, framework="pt") as opened:
            save_file(tensors, file, opened.metadata())
    elif change == "no card":
        card.unlink()
    else:
        digest = text.split("`")[1]
        wrong = {"an empty card": "", "the digest in capitals": text.upper(), "one more": f"{digest}0"}
        card.write_text(wrong[change])
    with pytest.raises(StateError, match="E-STATE-22"):
        model_file.load(file)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"format": 2}, "format 1, found 2"),
        ({"hospital": "north"}, "there is no 'hospital'"),
        ({"classes": ["a", "a", "b", "c"]}, "different names"),
        ({"classes": ["a", "b", "c"]}, "tensors of the model"),
        ({"shape": [1, 9, 9]}, "E-CFG-23"),
        ({"shape": []}, "shape"),
        ({"shape": [1 << 30, 1 << 30, 8]}, "shape"),
        ({"temperature": float("nan")}, "a number"),
        ({"temperature": 0.0}, "temperature"),
        ({"method": "fedavgg"}, "E-CFG-01"),
        ({"model": "os:system"}, "E-CFG-0"),
        ({"model_options": {"width": "x"}}, "E-CFG-0"),
        ({"model": "digits_mlp"}, "tensors of the model"),
        ({"frozen": "yes"}, "true or false"),
    ],
)
def test_a_header_that_is_no_models_is_refused(file: Path, facts: dict[str, object], said: str) -> None:
    rewritten(file, **facts)
    with pytest.raises(FederationError, match=said):
        model_file.load(file)


@pytest.mark.parametrize("lie", ["NaN", "infinity", "1e38", "a tensor more", "a tensor less", "another shape"])
def test_tensors_that_are_no_models_are_refused(file: Path, lie: str) -> None:
    tensors = load_file(file)
    if lie == "a tensor more":
        tensors["more"] = torch.zeros(1)
    elif lie == "a tensor less":
        del tensors["head.bias"]
    elif lie == "another shape":
        tensors["head.bias"] = torch.zeros(9)
    else:
        tensors["head.bias"][0] = float({"infinity": "inf"}.get(lie, lie))
    with safe_open(file, framework="pt") as opened:
        save_file(tensors, file, opened.metadata())
    named(file)
    with pytest.raises(StateError, match="E-STATE-22"):
        model_file.load(file)


def test_a_file_of_before_says_that_it_must_be_exported_again(file: Path) -> None:
    rewritten(file, data=None)
    with pytest.raises(StateError, match=r"data: expected a value, found none.*Export it again"):
        model_file.load(file)


def test_facts_survive_the_header(tmp_path: Path) -> None:
    run, _, file = trained(tmp_path, "fedgela", {"logit_scale": 3.0})
    wanted = ModelFileFacts.of(run.manifest, "d" * 64, "m")
    assert replace(model_file.load(file).facts, model_digest="d" * 64) == wanted
