"""Which runs take torch, and what a machine says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.errors import RefusedError
from fl_core.extensions.registry import Extension
from fl_core.rounds import torch_need
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.torch_need import abilities, require_torch
from tests.support.federations import manifest

FROZEN, NOISE = NamedOptions("frozen"), NamedOptions("dp_silo_small")


def run(method: str, model: str = "frozen", **more: object) -> RunManifest:
    return replace(manifest("fedavg"), method=NamedOptions(method), model=NamedOptions(model), **more)


@pytest.mark.parametrize(
    "free",
    [
        run("analytic"),
        run("analytic", rounds=0),
        run("fedavg", rounds=0),
        run("survey", "resnet18"),
        run("analytic", privacy=NamedOptions("dp_record", {"epsilon": 8.0})),
    ],
)
def test_what_takes_no_gradient_is_free(free: RunManifest) -> None:
    assert torch_need.torch_need(free) == ""


@pytest.mark.parametrize(
    ("taken", "named"),
    [
        (run("fedavg"), "training by method=fedavg"),
        (run("fednh", rounds=0), "method=fednh"),
        (run("analytic", "random_features"), "model=random_features"),
        (run("fedavg", "resnet18", rounds=0), "model=resnet18"),
        (run("analytic", privacy=NOISE), "privacy=dp_silo_small"),
        (run("survey", extensions=(Extension("method", "theirs.methods:New", "theirs", "1", "a" * 64),)), "the code "),
    ],
)
def test_what_takes_torch_is_named(taken: RunManifest, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_torch(taken)  # it is installed
    monkeypatch.setattr(torch_need, "installed", lambda module: module != "torch")
    with pytest.raises(RefusedError, match=f"E-RUN-14.*found {named}.*pip install"):
        require_torch(taken)


def test_a_machine_says_what_it_computes_and_what_brings_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for there in (("torch", "onnxruntime"), ("torch",), ("onnxruntime",), ()):
        monkeypatch.setattr(torch_need, "installed", there.__contains__)
        answers.append(abilities())
    (everything, nothing), (_, no_bodies), (some, training), (least, both) = answers
    assert (everything, nothing) == ("every kind of run", {})
    assert list(no_bodies.values()) == ["pip install 'consilium-fl[body]'"]
    assert "method=analytic" in some
    assert training == {"training": "pip install 'consilium-fl[torch]'"}
    assert least == "without torch: surveys"
    assert len(both) == 2
