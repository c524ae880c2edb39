"""A manifest that leaves an option out means what it meant when it was written, whatever the default is today."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from fl_core.aggregation import options as aggregators
from fl_core.methods import METHODS, build_method, build_written, programs
from fl_core.models import MODELS, model_options
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.records import TrainConfig
from privacy.profiles import PROFILES

WRITTEN = json.loads((Path(__file__).parents[2] / "data/written_defaults.json").read_text())
"""What every option means where a manifest leaves it out. A new option gets a line here: the value that does what the
software did without it. A line is never changed: a default that changes goes to a list as of aggregators."""

READ: dict[str, Callable[[str], object]] = {
    "method": lambda name: build_written(name, {}),
    "model": lambda name: model_options(name, {}),
    "aggregator": lambda name: aggregators.read_written(name, {}),
    "privacy": lambda name: (kind := PROFILES[name].config) and kind.of({}),
}


def plain(options: object) -> object:
    return json.loads(json.dumps(asdict(options) if options else {}))  # type: ignore[call-overload]


def test_every_entry_of_every_registry_has_its_frozen_defaults() -> None:
    registries = {
        "method": programs(),
        "model": MODELS,
        "aggregator": aggregators.AGGREGATORS,
        "privacy": PROFILES,
    }
    assert {group: sorted(names) for group, names in WRITTEN.items()} == {g: sorted(r) for g, r in registries.items()}


@pytest.mark.parametrize(("group", "name"), [(g, n) for g, names in WRITTEN.items() for n in names])
def test_what_a_manifest_leaves_out_has_its_frozen_meaning(group: str, name: str) -> None:
    assert plain(READ[group](name)) == WRITTEN[group][name]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_new_manifest_names_all_options_of_its_method(name: str) -> None:
    """Also of a configuration that names none, as one that no command line composed."""
    spec = RunSpec(
        method={"name": name},
        model={"name": "digits_linear"},
        data={"name": "digits"},
        federation={"name": "hospitals6"},
        privacy={"name": "none"},
        train=TrainConfig(epochs=2),
    )
    made = manifest_from(spec, [f"hospital{k}" for k in range(6)])
    assert sorted(made.method.options) == sorted(WRITTEN["method"][name])
    assert RunSetup.of(made).method == build_method(name, {})
