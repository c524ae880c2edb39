"""A method takes the form that a private run needs, and whoever runs it is told; a silo takes no other form."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from typer.testing import CliRunner

from consilium.research.simulate import runner
from coordinator.cli.main import program
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.lead.tables import private_form
from fl_core.errors import ConfigError
from fl_core.methods import METHODS, build_method
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import Capability
from privacy import profiles
from privacy.compiled_run import CompiledRun
from tests.support.privacy import private

pytestmark = pytest.mark.integration

NAMES = ["a", "b", "c"]
TYPED = ["method=fedmr", "data=digits", "federation=hospitals6", "privacy=dp_record", "secagg=off"]
QUICK = ["rounds=1", "train.epochs=1", "train.max_steps=2", "train.batch_size=16", "privacy.rng=test"]


def frozen(*words: str) -> RunManifest:
    return manifest_from(compose_spec([*TYPED, *words]), NAMES, [100.0] * 3)


def test_fedmr_runs_privately_as_typed() -> None:
    result = runner.run(compose_spec([*TYPED, *QUICK]))
    assert result.manifest.method.options["inter_weighting"] == "example"
    assert result.manifest.private_form == {"inter_weighting": "batch"}
    assert result.summary()["private_form"] == {"inter_weighting": "batch"}


@pytest.mark.parametrize(
    ("words", "was", "now"),
    [
        ((), {"inter_weighting": "batch"}, {"inter_weighting": "example"}),
        (("method.lite=8",), {"inter_weighting": "batch", "lite": 8}, {"inter_weighting": "example", "lite": 0}),
        (("method.lite=8", "method.lite_scope=both", "method.prototypes=false"), {"lite": 8}, {"lite": 0}),
        (("method.inter_weighting=example",), {}, {}),
        (("method=fedrod", "method.variant=hyper"), {"variant": "hyper"}, {"variant": "linear"}),
        (("method=fedgela", "method.feature_norm=batch"), {"feature_norm": "batch"}, {"feature_norm": "l2"}),
        (("method=fedgen",), {"draws": "example"}, {"draws": "class"}),
        (("method=fedgen", "method.beta=0"), {}, {}),
        (("method=fedavg",), {}, {}),
    ],
)
def test_the_manifest_has_the_form_and_says_what_it_replaced(
    words: tuple[str, ...], was: dict[str, object], now: dict[str, object]
) -> None:
    made = frozen(*words)
    assert dict(made.private_form) == was
    assert {k: made.method.options[k] for k in now} == now
    assert RunManifest.from_json(made.to_json()) == made
    notes = private_form(made.to_json())
    assert all(f"method.{k}={now[k]} (was {was[k]})" in notes for k in now)
    assert bool(notes) == bool(was)


@pytest.mark.parametrize("words", [("privacy=none",), ("privacy.epsilon=inf",)])
def test_a_run_without_privacy_keeps_what_was_asked_for_and_its_digest(words: tuple[str, ...]) -> None:
    made = frozen(*words)
    assert made.method.options["inter_weighting"] == "batch"
    assert not made.private_form
    assert "private_form" not in json.loads(made.to_json())


def variants(name: str) -> list[dict[str, object]]:
    """The defaults, and each option that is a word or a number at another value that the method takes."""
    words = (
        "batch",
        "example",
        "class",
        "hyper",
        "linear",
        "l2",
        "paired_sample",
        "own_sample",
        "both",
        "mmd",
        "secagg",
    )
    found: list[dict[str, object]] = [{}]
    for f in fields(METHODS[name]):
        for value in words if type(f.default) is str else (5,) if type(f.default) is int else ():
            try:
                build_method(name, {f.name: value})
            except ConfigError:
                continue
            found.append({f.name: value})
    return found


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedcd"])
def test_every_form_leaves_nothing_lacking(name: str) -> None:
    for options in variants(name):
        choice, was = profiles.private_form(NamedOptions(name, options), NamedOptions("dp_record", {"epsilon": 1.0}))  # type: ignore[arg-type]
        method = build_method(name, choice.options)
        assert Capability.DIFFERENTIAL_PRIVACY not in method.unsupported
        assert not method.private_form
        before = build_method(name, options)
        assert bool(was) == (Capability.DIFFERENTIAL_PRIVACY in before.unsupported)


def test_a_method_without_a_private_form_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-08.*use fednh, fedproc or fedmr"):
        frozen("method=fedcd")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedmr", {"inter_weighting": "batch"}),
        ("fedmr", {"inter_weighting": "example", "lite": 4}),
        ("fedmr", {"prototypes": False, "lite": 4, "lite_scope": "both"}),
        ("fedrod", {"variant": "hyper"}),
        ("fedgen", {"draws": "example"}),
        ("fedgela", {"feature_norm": "batch"}),
        ("fedcd", {}),
    ],
)
def test_a_silo_refuses_a_manifest_that_only_says_that_the_form_was_taken(
    method: str, options: dict[str, object]
) -> None:
    lying = replace(private(), method=NamedOptions(method, options), private_form=dict.fromkeys(options, "batch"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="E-CFG-08"):
        CompiledRun.of(lying)
    with pytest.raises(ConfigError, match="E-CFG-08"):
        capabilities.check_supported(build_method(method, options), {Capability.DIFFERENTIAL_PRIVACY})


def test_preview_says_which_form_is_taken() -> None:
    words = ["privacy", "preview", *TYPED, "rounds=2", "--sizes", "300"]
    shown = CliRunner().invoke(program().build(["privacy"]), words)
    assert "fedmr uses the options of its private form: method.inter_weighting=example (was batch)" in shown.output
    found = json.loads(CliRunner().invoke(program().build(["privacy"]), [*words, "--json"]).stdout)
    assert found["private_form"] == {"inter_weighting": "batch"}
