"""No number of a manifest can undo a bound: a silo refuses it, whatever the coordinator that sent it checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError
from fl_core.errors.catalogue import EXPLANATIONS
from fl_core.methods import METHODS, build_method
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.records import TrainConfig
from privacy import profiles
from privacy.accounting import ranges
from privacy.accounting.record_config import RecordDpConfig
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.silo import adaptive_clipping
from privacy.mechanisms.silo.config import SiloDpConfig
from silo.admission.controls import AdmissionRequest, HospitalControls
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support.fake_coordinator import manifest
from tests.support.privacy import hospital_level, private

BAD = [math.nan, math.inf, -math.inf, 1e38, 1e-40, -1.0, 10**400, "1", None, True, [1.0]]


def refused(lying: RunManifest) -> None:
    """What comes over the wire is refused with words, when it is read or before anything is built of it."""
    with pytest.raises(FederationError) as caught:
        CompiledRun.of(RunManifest.from_json(lying.to_json()))
    assert caught.value.code in {"E-PRIV-20", "E-CFG-02", "E-WIRE-06"}


def with_terms(made: RunManifest, **terms: object) -> RunManifest:
    return replace(made, privacy=NamedOptions(made.privacy.name, {**made.privacy.options, **terms}))  # type: ignore[arg-type]


NUMBERS = [
    (run, f.name)
    for run, terms in ((private, RecordDpConfig), (hospital_level, SiloDpConfig))
    for f in fields(terms)
    if type(f.default) in (int, float)
]


@pytest.mark.parametrize(("run", "name"), NUMBERS)
def test_every_number_of_the_terms_has_a_range(run: Callable[[], RunManifest], name: str) -> None:
    for value in BAD:
        if not (name == "epsilon" and value == math.inf):  # the plain run, which a policy refuses
            refused(with_terms(run(), **{name: value}))


@pytest.mark.parametrize("name", [f.name for f in fields(TrainConfig)])
def test_every_number_and_word_of_the_schedule_has_a_range(name: str) -> None:
    kind = type(getattr(TrainConfig(), name))
    for value in BAD if kind in (int, float) else [7, None, "yes" if kind is bool else 1.0]:
        refused(replace(private(), train=replace(TrainConfig(batch_size=64), **{name: value})))  # type: ignore[arg-type]
    if kind is int:
        refused(replace(private(), train=replace(TrainConfig(batch_size=64), **{name: 2.0})))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rounds", "cohort", "quorum", "threads", "seed", "image_size"])
def test_every_number_of_the_run_has_a_range(name: str) -> None:
    for value in [2.5, 10**30, -(10**30), "1", math.nan]:
        refused(replace(private(), **{name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("units", [-1, 10**12, 1.5, "64", math.nan, True])
def test_declared_sizes_have_a_range(units: object) -> None:
    made = private()
    refused(replace(made, members=(replace(made.members[0], units=units), *made.members[1:])))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "grid",
    [
        FixedPointFormat("ring64", 10**9),
        FixedPointFormat("ring64", 3, {"delta": math.nan}),
        FixedPointFormat("ring64", 3, {"delta": 1e-300}),
    ],
)
def test_the_grid_has_a_range(grid: FixedPointFormat) -> None:
    refused(replace(private(), grid=grid))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_strength_of_a_method_has_a_range(name: str) -> None:
    for f in fields(METHODS[name]):
        if type(f.default) in (int, float):
            for value in (math.nan, math.inf, 1e38, 1e-40, -1.0, 10**400):
                refused(replace(private(), method=NamedOptions(name, {f.name: value})))


def test_numbers_of_a_model_have_a_range() -> None:
    refused(replace(private(), model=NamedOptions("digits_cnn", {"projection": [10**9]})))
    for value in (math.nan, 1e38, -0.1):
        refused(replace(private(), model=NamedOptions("efficientnet_b0", {"dropout": value})))


@pytest.mark.parametrize(
    "terms",
    [
        {"clip": 1e-4, "coupled_clip_ratio": 0.5},
        {"clip": 1e4, "coupled_clip_ratio": 2.0},
        {"prototype_bound": 1e-4, "count_weight": 1e-3},
    ],
)
def test_bounds_that_are_products_have_the_range_of_a_clip(terms: dict[str, float]) -> None:
    refused(with_terms(private(), **terms))


def test_a_clip_that_decays_to_nothing_is_refused() -> None:
    refused(replace(with_terms(hospital_level(), clip=1.0, clip_decay=0.01), rounds=4))
    CompiledRun.of(replace(with_terms(hospital_level(), clip=1.0, clip_decay=0.99), rounds=4))


def test_steps_that_nobody_could_list_are_refused() -> None:
    made = private()
    huge = tuple(replace(m, units=10**9) for m in made.members)
    refused(replace(made, members=huge, train=TrainConfig(batch_size=1, epochs=100)))


@pytest.mark.parametrize("clip", [math.nan, math.inf, 1e38, 1e-38, 9e-5, 1.1e4, -1.0, 0.0])
def test_a_clip_that_is_broadcast_has_a_range(clip: float) -> None:
    terms = SiloDpConfig(clipping="adaptive", bit_noise=5.0)
    with pytest.raises(RefusedError, match="E-PRIV-15"):
        adaptive_clipping.clip_of(terms, {"clip": torch.tensor(clip)})


@pytest.mark.parametrize(("first", "within", "wanted"), [(1e-4, 0.5, 1e-4), (1e4, -0.5, 1e4)])
def test_a_clip_that_follows_stays_where_silos_accept_it(first: float, within: float, wanted: float) -> None:
    from fl_core.types.values import Part

    terms = SiloDpConfig(clipping="adaptive", bit_noise=5.0, clip=first)
    answered = Part({"within": torch.tensor(within)}, torch.tensor(1.0))
    after = adaptive_clipping.update_clip(terms, adaptive_clipping.initial_clip(terms), answered)
    assert adaptive_clipping.clip_of(terms, after) == pytest.approx(wanted, rel=1e-6)


def test_the_coordinator_refuses_before_anything_is_sent() -> None:
    words = ["method=fedavg", "data=digits", "privacy=dp_record"]
    for bad in ("privacy.clip=1e-7", "train.lr=1e-30", "train.weight_decay=1e11", "method=fedprox method.mu=1e38"):
        with pytest.raises(RefusedError, match="E-PRIV-20"):
            manifest_from(compose_spec([*words, *bad.split()]), ["a"], [100.0])


def test_a_silo_refuses_before_its_data_are_opened_and_the_ledger_has_the_record(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").make()
    store = SiloStore(home.database)
    controls = HospitalControls(home, store)
    with pytest.raises(RefusedError, match=r"E-PRIV-20.*privacy\.clip"):
        controls.admit(AdmissionRequest("run-1", with_terms(private(), clip=1e-30)))
    store.close_database()
    assert "E-PRIV-20" in [detail for _, _, state, detail, _ in controls.ledger.events() if state == "REFUSED"]


def test_plain_runs_may_have_any_number() -> None:
    CompiledRun.of(replace(manifest(), train=TrainConfig(lr=1e9, batch_size=64)))
    CompiledRun.of(replace(manifest(), method=NamedOptions("fedprox", {"mu": 1e30})))
    infinite = with_terms(private(), epsilon=math.inf, clip=1e-9)
    CompiledRun.of(infinite)


def test_the_defaults_are_in_range() -> None:
    CompiledRun.of(private())
    CompiledRun.of(hospital_level())
    for name in METHODS:
        options = {f.name: f.default for f in fields(METHODS[name])}
        choice, _ = profiles.private_form(NamedOptions(name, options), NamedOptions("dp_record", {}))
        ranges.check(replace(private(), method=choice), RecordDpConfig())
        build_method(name, choice.options)


def test_the_explanation_prints_the_table() -> None:
    assert ranges.text() in EXPLANATIONS["E-PRIV-20"].cause


def test_a_manifest_of_endless_digits_is_no_crash() -> None:
    text = private().to_json()
    raw = json.loads(text)
    assert text.count('"rounds":') == 1
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        RunManifest.from_json(text.replace(f'"rounds":{raw["rounds"]}', '"rounds":' + "9" * 5000))
    with pytest.raises(ConfigError, match="E-CFG-02"):
        build_method("fedprox", {"mu": 10**400})
