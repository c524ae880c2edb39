"""Simulations of masked runs: the rules of the deployed run, through every engine, and what masks may not change."""

from __future__ import annotations

from functools import cache

import pytest

from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.python_api import simulate
from consilium.research.simulate.results import Result
from consilium.research.simulate.round_printer import RoundPrinter
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import ConfigError
from privacy.secagg_run import secagg_run
from tests.support.data import real_data

WORDS = ("data=digits", "model=digits_mlp", "train.max_steps=3", "rounds=2", "threads=1")
CLASSES = ("method=fednh", "secagg=on", "secagg.min_contributors=2", "aggregator=norm_clipped")


@cache
def result(*words: str, federation: str = "iid-4", **options: object) -> Result:
    return runner.run(
        compose_simulation([*WORDS, f"federation={federation}", *words]), engine=SimulationEngine(**options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_on_the_wide_ring_with_weights_of_one_the_model_is_the_plain_runs_to_the_bit(method: str) -> None:
    words = (f"method={method}", "method.weights=uniform", "metrics=basic")
    plain, masked = result(*words), result(*words, "secagg=on", "secagg.ring=ring64")
    assert masked.model_digest == plain.model_digest
    assert [r.correct for r in masked.records] == [r.correct for r in plain.records]


def test_the_narrow_ring_is_within_rounding_of_it() -> None:
    words = ("method=fedavg", "method.weights=uniform")
    narrow, plain = result(*words, "secagg=on"), result(*words)
    assert narrow.manifest.grid.ring == "ring32"
    assert narrow.model_digest != plain.model_digest
    for name, value in plain.server["w"].items():
        assert float((narrow.server["w"][name] - value).abs().max()) < 1e-6, name


@pytest.mark.integration
def test_workers_and_spilt_states_change_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    one = result(*CLASSES, workers=1)
    several = runner.run(
        compose_simulation([*WORDS, "federation=iid-4", *CLASSES]),
        engine=SimulationEngine(workers=2, spill=tmp_path_factory.mktemp("spill")),
    )
    assert {"hospitals", "norms"} <= set(one.server)
    for group, tensors in one.server.items():
        for name, value in tensors.items():
            assert several.server[group][name].equal(value), (group, name)


@pytest.mark.parametrize(("least", "kept"), [(1, True), (2, True), (4, True)])
def test_rows_of_classes_that_all_silos_have_are_opened(least: int, kept: bool) -> None:
    run = result("method=fedproto", "secagg=on", f"secagg.min_contributors={least}")
    assert bool(run.server["prototypes"]["known"].any()) is kept


def test_by_default_classes_that_one_hospital_alone_has_are_learnt() -> None:
    words = ("data=digits", "model=random_features", "model.width=256", "federation=hospitals6", "method=analytic")
    run = runner.run(compose_simulation([*words, "rounds=1", "threads=1", "secagg=on"]))
    assert run.records[-1].balanced_accuracy > 0.9
    fednh = [result("method=fednh", "rounds=4", more, federation="p5c2") for more in ("secagg=on", "secagg=off")]
    masked, plain = (run.records[-1].balanced_accuracy for run in fednh)
    assert abs(masked - plain) < 0.02


@pytest.mark.integration
def test_a_lesion_that_one_real_centre_has_is_recognised_and_said_to_be_at_one_hospital() -> None:
    if (isic := real_data("isic2019")) is None:
        pytest.skip("no isic2019 in CONSILIUM_TEST_DATA")
    words = ["data=isic2019", "federation.centers=[1,3,5]", "method=analytic", "method.class_weights=balanced"]
    words += ["model=random_features", "model.width=512", "data.image_size=32", "secagg=on"]
    learnt, left_out = (
        runner.run(compose_simulation([*words, *more]), isic.parent) for more in ((), ("secagg.min_contributors=2",))
    )
    assert learnt.coverage.alone == left_out.coverage.left_out == ("AK", "SCC")
    scc = learnt.manifest.schema.classes.index("SCC")
    assert learnt.records[-1].examples[scc] == 23
    assert learnt.records[-1].correct[scc] > left_out.records[-1].correct[scc] == 0


@pytest.mark.parametrize("kind", ["local", "printed"])
def test_a_simulation_says_before_round_1_what_is_left_out(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method=fedproto", "secagg=on", "secagg.min_contributors=2", "federation=p5c2"]
    run = runner.run(compose_simulation([*WORDS, *words]), observer=RoundPrinter if kind == "printed" else None)
    assert len(run.coverage.left_out) == len(run.coverage.untaught) == 10
    assert run.summary()["classes"]["left_out"] == list(run.coverage.left_out)
    said = " ".join(capsys.readouterr().err.split())
    if kind == "printed":
        assert said.index("hospitals have them: the model cannot recognise them") < said.index("before round 1")
    else:
        assert not said


def test_of_disjoint_classes_no_prototype_leaves_where_two_contributors_are_asked_for() -> None:
    words = ("method=fedproto", "secagg=on")
    closed, opened = (result(*words, *more, federation="p5c2") for more in (("secagg.min_contributors=2",), ()))
    assert float(closed.server["hospitals"]["hospitals"].max()) == 1
    assert not closed.server["prototypes"]["known"].any()
    assert opened.server["prototypes"]["known"].all()


@pytest.mark.integration
@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_private_runs_go_under_masks(method: str) -> None:
    record = result(f"method={method}", "secagg=on", "privacy=dp_record", "privacy.rng=test", "privacy.epsilon=50")
    assert record.manifest.grid.ring == "ring32"
    assert all(r.clipped == 0 and not r.missing for r in record.records)
    silo = ("privacy=dp_silo_small", "privacy.rng=test", "privacy.epsilon=1000", "privacy.delta=0.0001")
    both = [result(f"method={method}", "aggregator=mean", *silo, *more) for more in ((), ("secagg=on",))]
    assert both[1].manifest.grid.ring == "ring32"
    assert all(not r.missing for r in both[1].records)


def test_a_cohort_is_drawn_where_each_rounds_sums_per_class_are_opened() -> None:
    drawn = result("method=fedavg", "cohort=3", "secagg=on", "secagg.class_sums=each")
    assert [len(r.included) for r in drawn.records] == [3, 3, 4]
    assert all(sum(r.examples) > 0 for r in drawn.records)


def test_python_takes_the_same_words() -> None:
    found = simulate("fedavg", "digits", "iid-4", "digits_mlp", secagg="on", rounds=1, train__max_steps=1)
    assert found.manifest.secagg is not None
    nested = simulate(
        "fedavg", "digits", "iid-4", "digits_mlp", secagg={"name": "on", "ring": "ring64"}, rounds=1, train__max_steps=1
    )
    assert nested.manifest.grid.ring == "ring64"
    with pytest.raises(ConfigError, match="E-CFG-01"):
        simulate("fedavg", "digits", "iid-4", secagg="maybe", rounds=1)


def test_the_manifests_terms_are_those_of_the_protocol() -> None:
    manifest = result(*CLASSES).manifest
    run = secagg_run("run", manifest)
    assert (run.ring, run.terms, len(run.members)) == (manifest.grid.ring, manifest.secagg, len(manifest.members))
