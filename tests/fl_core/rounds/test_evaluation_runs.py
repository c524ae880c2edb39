"""Runs of no rounds in one process: what is in their updates, what is refused, and what a liar can say in them."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck
from fl_core.errors import ConfigError, ProtocolError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import closing_layout, derive_layout
from fl_core.rounds.manifest import (
    MAX_WEIGHTS_BYTES,
    EvaluationTerms,
    NamedOptions,
    OtherModel,
    RunManifest,
    StartPoint,
)
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import SiloRuntime, round_layout, run_silo_round
from fl_core.training.delong import paired_auc
from fl_core.training.evaluation import evaluate_own, no_own_parts, own_models, shown_result
from fl_core.training.local_data import PlainLocalData
from fl_core.types.clinical import CLINICAL
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import BY_HOSPITAL, METRICS, OWN, PAIRED
from fl_core.types.records import FEATURES, RoundRecord, TrainConfig
from fl_core.types.secagg import Secagg
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import Bundle, Layout, Part, RoundContext
from tests.support.federations import SCHEMA, Given, manifest, shares

CLASSES = len(SCHEMA.classes)
CONTEXT = RoundContext(3, CLASSES, 0, 0, 3).for_silo(0, 0)


def require_start(run: RunManifest) -> None:
    run.kind.check_start(run)


EVERYTHING = {"metrics": CLINICAL, "by_hospital": True, "beside": "run-1"}


def measuring(trains: bool = False, **closing: object) -> Layout:
    method, network = build_method("fedavg", {}), build_model("digits_cnn", {}, SCHEMA, 0)
    asked = closing_layout(CLASSES, EvaluationTerms(**{**EVERYTHING, **closing}), masked=False)  # type: ignore[arg-type]
    return derive_layout(method, network, SCHEMA, metrics=CLINICAL, updates=trains, closing=asked)


def update(layout: Layout, withholds: frozenset[str] = frozenset(), own: bool = True) -> Bundle:
    method, network = build_method("fedavg", {}), build_model("digits_cnn", {}, SCHEMA, 0)
    share, other = shares()[0], build_model("digits_cnn", {}, SCHEMA, 1)
    data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=5, epochs=1), CONTEXT))
    msg = method.broadcast(method.init_server(network, CONTEXT))
    runtime = SiloRuntime(method, network, layout, withholds=withholds, own=other if own else None)
    return run_silo_round(runtime, msg, None, data, CONTEXT, TaskKind.EVALUATE).bundle


def test_an_update_of_an_evaluation_has_no_part_of_the_model() -> None:
    layout = measuring()
    assert set(layout) == {METRICS, "clinical", BY_HOSPITAL, OWN, PAIRED}
    assert set(update(layout)) == set(layout)


def test_what_a_run_asks_of_its_closing_evaluation_is_in_no_round_of_training() -> None:
    layout, method = measuring(trains=True), build_method("fedavg", {})
    assert {BY_HOSPITAL, OWN, PAIRED} <= set(round_layout(method, layout, TaskKind.EVALUATE))
    assert not {BY_HOSPITAL, OWN, PAIRED} & set(round_layout(method, layout, TaskKind.TRAIN))


def test_a_hospital_that_withholds_its_consent_is_not_shown_and_its_sums_are_the_same() -> None:
    layout = measuring()
    open_, closed = update(layout), update(layout, frozenset({BY_HOSPITAL}))
    shown = shown_result(open_)
    assert shown is not None
    assert shown.correct == tuple(open_[METRICS].total["correct"].tolist())
    assert shown_result(closed) is None
    assert torch.equal(open_[METRICS].total["correct"], closed[METRICS].total["correct"])


def test_a_hospital_without_a_model_of_its_own_counts_nowhere() -> None:
    assert own_models(update(measuring(), own=False)) is None
    found = own_models(update(measuring()))
    assert found is not None
    assert sum(found.examples) == len(shares()[0].test)
    assert found.images == len(shares()[0].test)  # scores of both were compared


def test_a_model_is_not_ahead_of_itself() -> None:
    share = shares()[0]
    data = PlainLocalData(RoundData(share.train, share.test, TrainConfig(batch_size=5, epochs=1), CONTEXT))
    model = build_model("digits_cnn", {}, SCHEMA, 0)
    found = own_models(evaluate_own(model, build_model("digits_cnn", {}, SCHEMA, 0), data, CLASSES, paired=True))
    assert found is not None
    assert found.own == found.measured
    assert found.auc_ahead in (None, (0.0, 0.0))


def test_of_several_labels_two_models_are_held_against_each_other_over_who_was_looked_at() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=generator)
    labels = torch.where(torch.rand(90, 3, generator=generator) < 0.3, UNKNOWN, (x > 0).long())
    examples = Given(x, labels)
    data = PlainLocalData(RoundData(examples, examples, TrainConfig(batch_size=5, epochs=1), CONTEXT))
    knows, guesses = nn.Identity(), nn.Linear(3, 3)
    parts = evaluate_own(knows, guesses, data, 3, paired=True)
    assert {name: set(part.total) for name, part in parts.items()} == {
        name: set(part.total) for name, part in no_own_parts(3, paired=True).items()
    }
    found = own_models(parts)
    assert found is not None
    known = labels != UNKNOWN
    assert found.examples == found.measured == tuple(known.sum(0).float().tolist())
    with torch.no_grad():
        right = ((guesses(x) > 0) == (labels == FOUND)) & known
    assert found.own == tuple(right.sum(0).float().tolist())
    assert found.images == int(known.any(1).sum())
    ahead = paired_auc(x, guesses(x).detach(), labels)
    assert ahead is not None
    assert found.auc_ahead == pytest.approx((ahead.difference, math.sqrt(ahead.variance)))
    assert found.auc_ahead[0] > 0


def lies() -> list[tuple[str, Part]]:
    wide = lambda value: torch.full((CLASSES,), value)  # noqa: E731
    return [
        (BY_HOSPITAL, Part({"shown": torch.tensor(7.0)}, torch.tensor(7.0))),
        (BY_HOSPITAL, Part({"shown": torch.tensor(1.0)}, torch.tensor(0.0))),
        (BY_HOSPITAL, Part({"shown": torch.tensor(math.nan)}, torch.tensor(1.0))),
        (OWN, Part({"own": wide(2.0), "measured": wide(0.0)}, wide(1.0))),
        (OWN, Part({"own": wide(0.0), "measured": wide(-1.0)}, wide(1.0))),
        (OWN, Part({"own": wide(0.0), "measured": wide(0.0)}, wide(1e38))),
        (OWN, Part({"own": wide(math.inf), "measured": wide(0.0)}, wide(1.0))),
        (PAIRED, Part({"difference": torch.tensor(9.0), "square": torch.tensor(0.0)}, torch.tensor(4.0))),
        (PAIRED, Part({"difference": torch.tensor(0.0), "square": torch.tensor(1e38)}, torch.tensor(4.0))),
        (PAIRED, Part({"difference": torch.tensor(0.0), "square": torch.tensor(-1.0)}, torch.tensor(4.0))),
        (PAIRED, Part({"difference": torch.tensor(0.0), "square": torch.tensor(0.0)}, torch.tensor(1e9))),
    ]


@pytest.mark.fault("a hospital", "sends impossible results of an evaluation", "its update is refused (E-RUN-43)")
@pytest.mark.parametrize("lie", range(len(lies())))
def test_a_hospital_cannot_send_results_that_no_evaluation_gives(lie: int) -> None:
    name, part = lies()[lie]
    layout = measuring()
    check = UpdateCheck(layout, FixedPointFormat("ring64", 3), sizes={"north": DeclaredSize(100, 50)})
    honest = update(layout)
    check.check(honest, "north")
    with pytest.raises(ProtocolError, match=r"E-RUN-43|E-WIRE-05"):
        check.check({**honest, name: part}, "north")


def evaluation(**changes: object) -> RunManifest:
    names = {f.name for f in fields(EvaluationTerms)}
    terms = EvaluationTerms(**{name: v for name, v in changes.items() if name in names})  # type: ignore[arg-type]
    more = {name: v for name, v in changes.items() if name not in names}
    layout = measuring(beside="", by_hospital=False)
    return replace(manifest(rounds=0), layout=layout, evaluation=terms, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"personal": True},
        {"privacy": NamedOptions("dp_record")},
        {"by_hospital": True, "rounds": 2, "privacy": NamedOptions("dp_record")},
        {"beside": "../../etc"},
        {"beside": "a" * 81},
        {"beside": "local-1", "train": TrainConfig(freeze=FEATURES)},
    ],
)
def test_what_does_not_go_together_is_refused_whoever_made_the_manifest(changes: dict[str, object]) -> None:
    evaluation().require_possible()
    with pytest.raises(ConfigError, match="E-CFG-08"):
        evaluation(**changes).require_possible()


def test_results_of_single_hospitals_are_refused_under_masks() -> None:
    with pytest.raises(ConfigError, match="E-CFG-08: masks allow only sums, so by_hospital=true needs secagg=off"):
        RunSetup.of(evaluation(by_hospital=True, secagg=Secagg(2, "complete", 1, 0)))


def test_a_manifest_that_asks_for_nothing_new_has_the_digest_that_it_had() -> None:
    raw = json.loads(manifest().to_json())
    assert not {"by_hospital", "own"} & set(raw)
    asked = replace(manifest(), evaluation=EvaluationTerms(by_hospital=True, beside="local-1"))
    assert RunManifest.from_json(asked.to_json()) == asked
    assert asked.digest() != manifest().digest()


def test_an_evaluation_needs_a_whole_model() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*found none"):
        require_start(evaluation())
    require_start(evaluation(start=StartPoint("run-1", 3)))
    require_start(manifest())


def test_an_evaluation_is_one_round_and_changes_nothing() -> None:
    run = RunSetup.of(evaluation(metrics=CLINICAL))
    assert run.training_rounds == [[], [], []]


def test_a_record_comes_back_from_json_with_what_hospitals_let_be_shown() -> None:
    found = update(measuring())
    shown, own = shown_result(found), own_models(found)
    assert shown is not None
    record = RoundRecord(0, TaskKind.EVALUATE, (1.0,), (2.0,), ("a",), by_hospital={"a": shown}, own=own)
    assert RoundRecord.of(json.loads(json.dumps(record.to_dict()))) == record
    older = {k: v for k, v in record.to_dict().items() if k not in ("by_hospital", "own")}
    assert RoundRecord.of(json.loads(json.dumps(older))).by_hospital == {}


def second(method: str = "fedgela") -> OtherModel:
    theirs = manifest(method, model="digits_linear", seed=7)
    return OtherModel(theirs.method, theirs.model, theirs.seed, "0" * 64, 100)


def test_a_second_model_answers_as_its_own_run_has_it_whatever_this_run_trains() -> None:
    theirs = RunSetup.of(manifest("fedgela", model="digits_linear", seed=7))
    state = theirs.initial_state()
    state = {**state, "w": {name: v + 0.1 for name, v in state["w"].items()}}
    found = RunSetup.of(manifest("fedavg")).for_comparison(second())
    x = torch.rand(4, *SCHEMA.shape)
    mine, its = found.sent_model(theirs.method.broadcast(state)).eval(), theirs.classifier(state).eval()
    torch.testing.assert_close(mine(x), its(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda w: {name: v for name, v in w.items() if "bias" not in name}, "E-WIRE-06.*other names"),
        (lambda w: {name: v.double() for name, v in w.items()}, "E-WIRE-06.*types"),
        (lambda w: {name: v[:1] for name, v in w.items()}, "E-WIRE-06.*shapes"),
        (lambda w: {name: v * math.nan for name, v in w.items()}, "E-WIRE-05.*NaN"),
        (lambda w: {name: v + math.inf for name, v in w.items()}, "E-WIRE-05.*infinity"),
    ],
)
def test_a_second_model_that_is_another_than_the_manifest_says_is_refused(wrong: object, expected: str) -> None:
    run = RunSetup.of(manifest("fedavg")).for_comparison(second("fedavg"))
    msg = run.method.broadcast(run.initial_state())
    with pytest.raises(ProtocolError, match=expected):
        run.sent_model({**msg, "w": wrong(msg["w"])})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"object": "../../etc/passwd"}, "other.object of 64 hex digits"),
        ({"size": 0}, "size"),
        ({"size": MAX_WEIGHTS_BYTES + 1}, "size"),
    ],
)
def test_a_manifest_names_a_second_model_as_an_object(changes: dict[str, object], expected: str) -> None:
    terms = EvaluationTerms(beside="run-1", other=second())
    made = replace(manifest("fedavg"), evaluation=terms)
    made.require_possible()
    assert RunManifest.from_json(made.to_json()) == made
    with pytest.raises(ConfigError, match=expected):
        replace(made, evaluation=replace(terms, other=replace(second(), **changes))).require_possible()
    with pytest.raises(ConfigError, match="other also needs own=RUN"):
        replace(made, evaluation=replace(terms, beside="")).require_possible()


def test_the_place_that_terms_of_evaluations_have_here_is_no_key_of_a_manifest() -> None:
    """Else one run would have two texts."""
    raw = json.loads(manifest().to_json())
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*'evaluation'"):
        RunManifest.from_json(json.dumps({**raw, "evaluation": {}}))
