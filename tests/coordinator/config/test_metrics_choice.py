"""What a run's evaluations measure: clinical metrics where its classes, its silos and its privacy allow it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import build_manifest, manifest_from
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.manifest import EvaluationTerms, RunManifest
from fl_core.types.clinical import BASIC, CLINICAL, MAX_CLASSES
from fl_core.types.records import Schema
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb

NAMES = ["a", "b", "c"]
SMALL = ["method=fedavg", "data=digits", "model=digits_linear", "secagg=off"]


def frozen(*words: str) -> RunManifest:
    return manifest_from(compose_spec([*SMALL, *words]), NAMES, [100.0] * 3)


@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        ((), CLINICAL),
        (("metrics=basic",), BASIC),
        (("privacy=dp_record",), BASIC),
        (("privacy=dp_record", "privacy.test_data=public"), CLINICAL),
        (("privacy=dp_silo_small", "privacy.allow_large=true", "privacy.test_data=public"), CLINICAL),
        (("privacy=dp_record", "privacy.epsilon=inf"), CLINICAL),
        (("method=fedproto",), BASIC),
    ],
)
def test_a_run_measures_all_that_is_exact_unless_it_is_told_otherwise(words: tuple[str, ...], metrics: str) -> None:
    made = frozen(*words)
    assert made.evaluation.metrics == metrics
    assert ("clinical" in made.layout) == (metrics == CLINICAL)
    assert ("metrics" in json.loads(made.to_json())) == (metrics == CLINICAL)
    assert RunManifest.from_json(made.to_json()) == made


@pytest.mark.fault("a coordinator", "requests exact histograms in a private run", "refused before any charge")
@pytest.mark.parametrize("privacy", ["dp_record", "dp_silo_small"])
def test_a_private_run_with_exact_tables_is_refused_by_both_sides(privacy: str) -> None:
    words = (f"privacy={privacy}", *(["privacy.allow_large=true"] if privacy == "dp_silo_small" else []))
    with pytest.raises(RefusedError, match=r"E-PRIV-16.*metrics=auto"):
        frozen(*words, "metrics=clinical")
    with pytest.raises(RefusedError, match="E-PRIV-16"):
        CompiledRun.of(replace(frozen(*words), evaluation=EvaluationTerms(CLINICAL)))


def silo(name: str, metrics: tuple[str, ...] = (CLINICAL,)) -> pb.SiloInfo:
    return pb.SiloInfo(name=name, state="online", data=pb.DataOffer(name="digits", metrics=metrics))


def test_a_silo_of_an_older_version_gets_a_run_that_it_knows() -> None:
    spec, today, older = compose_spec(SMALL).to_json(), silo("a"), silo("b", ())
    assert build_manifest(spec, [today]).evaluation.metrics == CLINICAL
    mixed = build_manifest(spec, [today, older])
    assert (mixed.evaluation.metrics, [m.name for m in mixed.members]) == (BASIC, ["a", "b"])
    assert mixed == replace(frozen("metrics=basic"), members=mixed.members, grid=mixed.grid)


def test_clinical_metrics_of_older_silos_are_refused_by_name() -> None:
    spec = compose_spec([*SMALL, "metrics=clinical"]).to_json()
    with pytest.raises(ConfigError, match=r"E-RUN-05.*found b: upgrade them"):
        build_manifest(spec, [silo("a"), silo("b", ("a later one",))])


def test_words_that_are_no_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*'auto', 'basic', 'clinical'"):
        compose_spec([*SMALL, "metrics=medical"])


def test_a_manifest_of_more_classes_than_tables_are_kept_for_is_refused() -> None:
    many = Schema((1, 8, 8), tuple(map(str, range(MAX_CLASSES + 1))))
    with pytest.raises(ConfigError, match=r"E-CFG-02.*at most 100 classes"):
        replace(frozen(), schema=many).require_possible()
    replace(frozen("metrics=basic"), schema=many).require_possible()
    with pytest.raises(ConfigError, match="E-CFG-02"):
        replace(frozen(), evaluation=EvaluationTerms("")).require_possible()
