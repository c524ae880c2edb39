"""secagg=on, auto and off: what a manifest says of masks, and what is refused with the remedy."""

from __future__ import annotations

import pytest

from coordinator.config.hydra_config import compose_from, compose_simulation, compose_spec, words_of
from coordinator.config.manifest_builder import build_manifest, manifest_from
from coordinator.config.run_spec import RunSpec, SecaggSpec
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.secagg import Secagg
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb

NAMES = ["a", "b", "c", "d"]
SIZES = [DeclaredSize(290, 70), DeclaredSize(1234, 301), DeclaredSize(0, 0), DeclaredSize(410, 55)]
SILO_LEVEL = ("privacy=dp_silo_small", "method=fedproto", "rounds=2")
SMALL = ("data=digits", "model=digits_linear")


def made(*words: str, names: list[str] = NAMES, sizes: list[float] | None = None) -> RunManifest:
    found = [290.0, 1234.0, 0.0, 410.0] if sizes is None else sizes
    return manifest_from(compose_spec([*SMALL, *words]), names, found[: len(names)], examples=SIZES[: len(names)])


@pytest.mark.integration
def test_a_run_has_masks_and_a_simulation_has_none_where_no_word_says_it() -> None:
    assert made().digest() == made("secagg=auto").digest() == made("secagg=on").digest()
    assert compose_simulation([*SMALL]).secagg == SecaggSpec()


def test_a_run_is_plain_where_masks_are_not_wanted() -> None:
    plain = made("secagg=off")
    assert plain.secagg is None
    assert '"secagg"' not in plain.to_json()
    assert all(m.units == 0 for m in plain.members)
    assert (plain.grid.ring, plain.grid.bounds) == ("ring64", {})


def test_a_configuration_without_the_key_is_one_without_masks() -> None:
    """Also a later version reads an older lead's so, and an older coordinator is sent no key that it does not know."""
    spec = compose_spec([*SMALL, "secagg=off"])
    assert "secagg" not in spec.to_json()
    assert RunSpec.from_json(spec.to_json()).secagg.name == "off"
    masked = compose_spec([*SMALL, "secagg=auto", "secagg.collusion=0"])
    assert RunSpec.from_json(masked.to_json()) == masked
    assert masked.secagg == SecaggSpec(name="auto", collusion=0)


def test_members_of_a_masked_run_have_their_declared_sizes_in_two_digits() -> None:
    run = made("secagg=on")
    assert [m.units for m in run.members] == [290, 1300, 0, 410]
    assert [run.masked_units(k) for k in range(4)] == [290, 1300, 1, 410]
    assert run.secagg == Secagg(min_contributors=1, class_sums="complete", collusion=1, census=True)


def test_who_declares_no_size_may_count_as_much_as_the_largest() -> None:
    run = CompiledRun.of(made("secagg=on"))
    assert [s.train for s in run.updates.sizes({}).values()] == [290, 1300, 1300, 410]
    assert {s.test for s in run.updates.sizes({}).values()} == {301}


def test_a_class_of_one_hospital_is_learnt_unless_somebody_asks_for_more() -> None:
    for words in ((), ("secagg.min_contributors=0",)):  # as leads of 0.1.0 write the default
        assert made("secagg=on", *words).secagg == Secagg(min_contributors=1, census=True)
    assert made("secagg=on", "secagg.min_contributors=2").secagg == Secagg(min_contributors=2, census=True)


def test_a_private_run_lets_classes_of_one_hospital_count() -> None:
    private = made("secagg=on", "privacy=dp_record", "rounds=2", sizes=[290.0] * 4)
    assert private.secagg == Secagg(min_contributors=1)
    assert [m.units for m in private.members] == [290] * 4
    infinite = made("secagg=on", "privacy=dp_record", "privacy.epsilon=inf", "rounds=2", sizes=[290.0] * 4)
    assert infinite.secagg == Secagg(min_contributors=1, census=True)
    wide = made("secagg=on", "privacy=dp_record", "method=analytic", sizes=[290.0] * 4)
    assert (wide.grid.ring, wide.secagg) == ("ring64", Secagg(min_contributors=1))


def test_auto_is_on_from_three_hospitals_and_off_below() -> None:
    assert made("secagg=auto").secagg == made("secagg=on").secagg
    assert made("secagg=auto", names=NAMES[:3]).secagg is not None
    two = made("secagg=auto", names=NAMES[:2])
    assert two.digest() == made(names=NAMES[:2]).digest()
    with pytest.raises(ConfigError, match=r"E-CFG-02.*secagg=on.*found 2.*secagg=off"):
        made("secagg=on", names=NAMES[:2])


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("aggregator=median",), r"norm_clipped or mean.*found median.*secagg=off"),
        (("aggregator=trimmed_mean",), r"found trimmed_mean"),
        (("aggregator=geometric_median",), r"found geometric_median"),
        (("method=fedcd",), r"fedcd cannot be used with secure aggregation: set method.acla=stale.*or set secagg=off"),
        (("method=fedgen",), r"fedgen cannot be used with secure aggregation.*set mode=secagg"),
        (("method=analytic", "method.covariance=means"), r"set method.covariance=moments"),
        (("method=analytic", "secagg.ring=ring32"), r"secagg.ring=ring64"),
        (("method=fedavg", "cohort=3"), r"secagg.class_sums=each"),
        (("secagg.collusion=2",), r"secagg.collusion of at most 1 with 4 hospitals"),
        (("secagg.min_contributors=5",), r"secagg.min_contributors of at most 4"),
        (
            (*SILO_LEVEL, "privacy.clipping=adaptive", "privacy.bit_noise=2"),
            r"has none: .*follows the norms.*secagg.ring=ring64",
        ),
    ],
)
def test_what_does_not_go_with_masks_is_refused_with_the_remedy_and_never_runs_without(
    words: tuple[str, ...], said: str, mode: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(f"secagg={mode}", *words, sizes=[290.0] * 4)


@pytest.mark.parametrize(
    "words",
    [
        ("method=fedcd", "method.acla=stale"),
        ("method=fedgen", "method.mode=secagg"),
        ("method=fedavg", "cohort=3", "secagg.class_sums=each"),
        SILO_LEVEL,
    ],
)
def test_the_remedies_work(words: tuple[str, ...]) -> None:
    run = made("secagg=on", *words, sizes=[290.0] * 4)
    assert run.secagg is not None
    assert run.grid.ring == "ring32"


def test_terms_beside_no_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*secagg=on.*found secagg=off"):
        made("secagg=off", "secagg.ring=ring64")
    with pytest.raises(ConfigError, match=r"E-CFG-01.*secagg=yes.*valid: auto, off, on"):
        made("secagg=yes")
    with pytest.raises(ConfigError, match=r"E-CFG-0[12].*ring"):
        made("secagg=on", "secagg.ring=ring16")
    with pytest.raises(ConfigError, match=r"E-CFG-02.*class_sums"):
        made("secagg=on", "secagg.class_sums=some")


def test_exact_methods_take_the_wide_ring_and_its_grid_is_the_plain_runs() -> None:
    run, plain = made("secagg=on", "method=analytic"), made("secagg=off", "method=analytic")
    assert run.grid.ring == "ring64"
    assert all(run.grid.bound(s) == plain.grid.bound(s) for part in run.layout for s in (part, f"{part}.weight"))
    assert made("secagg=on").grid.ring == "ring32"
    assert made("secagg=on", "secagg.ring=ring64").grid.ring == "ring64"


def test_bounds_follow_from_what_is_declared() -> None:
    grid = made("secagg=on", "aggregator=mean", "method=scaffold").grid
    assert {s: b for s, b in grid.bounds.items() if "hospitals" not in s and "clinical" not in s} == {
        "census": 1300.0,
        "census.weight": 1.0,
        "control": 4 * 1300.0,
        "control.weight": 1300.0,
        "delta": 4 * 1300.0,
        "delta.weight": 1300.0,
        "metrics": 301.0,
        "metrics.weight": 301.0,
    }


def test_nobody_who_declares_a_size_leaves_room_for_a_million() -> None:
    spec = compose_spec([*SMALL, "secagg=on", "method=fedproto"])
    grid = manifest_from(spec, NAMES, [0.0] * 4).grid
    assert grid.bounds["metrics.weight"] == 2**20
    assert grid.bounds["prototypes"] == 64 * 2.0**20
    assert grid.frac_bits("metrics.weight") >= 0  # counts are exact


def test_a_census_is_counted_in_words_of_one() -> None:
    for ring in ("ring32", "ring64"):
        for n in (3, 4):
            run = made("secagg=on", f"secagg.ring={ring}", names=NAMES[:n])
            assert run.grid.frac_bits("hospitals.weight") == 0


def silo(name: str, masks: bool = True, **sizes: float) -> pb.SiloInfo:
    offer = pb.DataOffer(name="digits", metrics=["clinical"], masks=masks, **sizes)  # type: ignore[arg-type]
    return pb.SiloInfo(name=name, state="online", data=offer)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_silos_whose_version_knows_no_masks_are_named(mode: str) -> None:
    silos = [silo("a"), silo("b", masks=False), silo("c")]
    with pytest.raises(ConfigError, match=rf"E-RUN-05.*secagg={mode}, found b: upgrade"):
        build_manifest(compose_spec([*SMALL, f"secagg={mode}"]).to_json(), silos)
    assert build_manifest(compose_spec([*SMALL, "secagg=off"]).to_json(), silos).secagg is None
    two = build_manifest(compose_spec([*SMALL, "secagg=auto"]).to_json(), silos[:2])
    assert two.secagg is None  # of two there are no masks anyway


def test_a_service_takes_counted_examples_and_what_was_typed_without() -> None:
    silos = [
        silo("a", nominal_size=100, train_examples=340, test_examples=80),  # of 100 patients
        silo("b", nominal_size=777),
        silo("c"),
    ]
    run = build_manifest(compose_spec([*SMALL, "secagg=on"]).to_json(), silos)
    assert [m.units for m in run.members] == [340, 780, 0]
    assert run.grid.bounds["metrics.weight"] == 80


def test_a_run_that_goes_on_keeps_its_masks_and_words_say_them() -> None:
    spec = compose_spec([*SMALL, "secagg=on", "secagg.class_sums=each"])
    assert compose_from(spec, ["rounds=3"]).secagg == spec.secagg
    assert compose_from(spec, ["secagg=off"]).secagg == SecaggSpec()
    assert "secagg=on" in words_of(spec)
    assert compose_simulation(["secagg=auto"]).secagg.name == "auto"


def test_a_quorum_below_the_smallest_sum_is_refused_with_it() -> None:
    """It was taken, and meant the smallest sum."""
    with pytest.raises(ConfigError, match=r"E-CFG-02.*quorum of at least 3, found 2.*fewer than 3 of 3 hospitals"):
        made("secagg=on", "quorum=2", names=NAMES[:3])
    with pytest.raises(ConfigError, match=r"E-CFG-02.*quorum of at least 4, found 3"):
        made("secagg=on", "quorum=3", "secagg.min_sum=4", names=NAMES[:4])
    assert made("secagg=on", "quorum=3", names=NAMES[:3]).quorum == 3
    assert made("secagg=on", names=NAMES[:3]).quorum == 0
    assert made("secagg=off", "quorum=2", names=NAMES[:3]).quorum == 2
