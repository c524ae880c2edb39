"""A card has the run's numbers as they were released: counts with the interval of luck, noise with its own or none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from consilium.report import documents
from consilium.report.card import Card
from consilium.report.facts import Statement, card_of, share_of, survey_of
from coordinator.lead.accuracy import clinical_message
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.clinical import CALIBRATION_BINS, BinnedRange, ClinicalMetrics, ReliabilityBin, TwoByTwo
from fl_core.types.intervals import share
from fl_core.types.secagg import Secagg
from fl_core.types.survey import Cell, SurveyAnswer
from privacy.accounting.projection import preview
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import CertificateRole, Identity
from tests.support.federations import NAMES, manifest
from tests.support.privacy import private
from tests.support.recorded_runs import SUMS

pytestmark = pytest.mark.integration

LEAD = Identity(CertificateRole.LEAD, "skin", "anna")


def card(run: RunManifest, *rounds: pb.RoundInfo, silos: list[pb.SiloInfo] | None = None, **detail: object) -> Card:
    info = pb.RunInfo(run_id="r1", name="study", state="finished", rounds=run.rounds, manifest_digest=run.digest())
    found = pb.RunDetail(info=info, manifest_json=run.to_json(), rounds=rounds, **detail)
    made = card_of(found, run, silos or [], LEAD, Statement("use", "MIT"), 99)
    made.require_possible()
    return made


def trained(**other: object) -> pb.RoundInfo:
    return pb.RoundInfo(kind=pb.TRAIN, correct=[1, 1, 0, 0], examples=[2, 2, 0, 3], **other)


def evaluated(correct: tuple[float, ...] = (2, 1, 0, 1), examples: tuple[float, ...] = (2, 2, 0, 3)) -> pb.RoundInfo:
    return pb.RoundInfo(kind=pb.EVALUATE, correct=correct, examples=examples, included=NAMES)


def test_counts_become_shares_with_exact_intervals_and_classes_without_examples_none() -> None:
    made = card(manifest(rounds=1), trained(included=NAMES), evaluated())
    assert made.results.test_examples == 7
    assert (made.results.accuracy.point, made.results.accuracy.low) == (4 / 7, share(4, 7)[0])
    assert made.results.balanced.point == pytest.approx((1 + 0.5 + 1 / 3) / 3)
    assert (made.results.classes_tested, made.results.level_of_chance) == (3, 1 / 3)
    assert [c.test_examples for c in made.classes] == [2, 2, 0, 3]
    assert made.classes[2].recognised.text() == "not measured"
    assert made.classes[0].recognised.high == 1.0
    assert made.results.of_exported_model


def test_a_card_of_several_labels_says_what_was_found_and_not_how_often_absent_was_right() -> None:
    run = manifest(rounds=1)
    run = replace(run, schema=replace(run.schema, multi_label=True))
    tables = (TwoByTwo(90, 0, 10, 0), TwoByTwo(80, 10, 2, 8), TwoByTwo(100, 0, 0, 0), TwoByTwo(0, 0, 0, 0))
    found = ClinicalMetrics((), (None,) * 4, (ReliabilityBin(0, 0, 0.0),) * CALIBRATION_BINS, tables)
    last = evaluated((90, 88, 100, 0), (100, 100, 100, 0))
    last.several_labels = True
    last.clinical.CopyFrom(clinical_message(found))
    made = card(run, trained(included=NAMES), last)
    assert [c.test_examples for c in made.classes] == [10, 10, 0, 0]
    assert [c.recognised.point for c in made.classes] == [0, 0.8, None, None]
    assert made.results.balanced.point == pytest.approx((0 + 1 + 0.8 + 80 / 90) / 4)
    assert (made.results.classes_tested, made.results.level_of_chance) == (2, 0.5)
    said = documents.markdown(made)
    assert "decides for each of 4 labels whether it is present" in said
    assert "over 2 of 4 labels. Guessing reaches 50.0 %." in said
    assert re.search(r"Accuracy: 92.7 % .* of all label decisions are right", said)
    assert "from 300 label decisions on test examples" in said
    assert "| a | 90 | 0 | 10 | 0 |" in said
    last.ClearField("clinical")
    accuracies_alone = card(run, trained(included=NAMES), last)
    assert {c.recognised.text() for c in accuracies_alone.classes} == {"not measured"}
    assert accuracies_alone.results.balanced.point is None
    assert accuracies_alone.results.accuracy.point == pytest.approx(278 / 300)


def test_a_run_that_was_aborted_has_the_results_of_the_model_before() -> None:
    made = card(manifest(rounds=2), trained(included=NAMES))
    assert not made.results.of_exported_model
    assert made.run.rounds == 1


def test_a_run_without_a_closed_round_has_no_results() -> None:
    made = card(manifest())
    assert (made.results.accuracy.point, made.results.test_examples) == (None, None)
    assert "ccuracy: " not in documents.markdown(made)
    assert {c.recognised.text() for c in made.classes} == {"not measured"}


@pytest.mark.parametrize("sums", [(70.3, 39.1), (-4.0, 100.0), (642.0, 100.0), (3.0, -55.0), (1e38, 1e-40), (1.0, 1.5)])
@pytest.mark.fault("a hospital", "sends test results that are not counts", "the card withholds them")
def test_sums_that_are_no_counts_are_withheld(sums: tuple[float, float]) -> None:
    made = card(manifest(rounds=1), evaluated((sums[0], 1, 0, 0), (sums[1], 2, 0, 3)))
    assert made.results.accuracy.withheld
    assert made.results.balanced.withheld
    assert {c.test_examples for c in made.classes} == {None}
    assert share_of(*sums).withheld


@pytest.mark.parametrize("case", ["642 %", "nothing passed", "huge"])
def test_noise_that_hides_a_number_hides_it_on_the_card_with_its_counts(case: str) -> None:
    run = private()
    total, of = SUMS[case]
    rest = [0.0] * (len(run.schema.classes) - 1)
    made = card(run, evaluated((total, *rest), (of, *rest)))
    assert made.results.accuracy.withheld
    assert made.results.accuracy.point is None
    assert made.results.test_examples is None
    assert {c.test_examples for c in made.classes} == {None}


def test_enough_signal_has_the_interval_of_the_noise() -> None:
    run = private()
    rest = [0.0] * (len(run.schema.classes) - 1)
    made = card(run, evaluated((7000.0, *rest), (10_000.0, *rest)))
    assert made.results.accuracy.of == "noise of differential privacy"
    assert made.results.accuracy.low < 0.7 < made.results.accuracy.high


def test_what_privacy_promises_is_what_the_accountant_plans() -> None:
    run = private(rng="secure")
    made, planned = card(run).privacy, preview(CompiledRun(run))
    assert (made.epsilon, made.delta, made.planned) == (
        8.0,
        1e-5,
        max(silo["epsilon_tight"] for silo in planned["silos"]),
    )
    assert 0 < made.planned < 8
    assert (made.subject, made.test_data, made.noise_from) == ("each record", "private", "secure")
    assert made.alone is None
    assert card(manifest()).privacy.epsilon is None
    assert (
        card(replace(private(), privacy=NamedOptions("dp_record", {"epsilon": float("inf")}))).privacy.epsilon is None
    )


def test_masks_are_those_of_the_manifest() -> None:
    assert card(manifest()).masks is None
    made = card(replace(manifest(), secagg=Secagg())).masks
    assert made is not None
    assert (made.withstood, made.min_contributors) == (1, 1)


def test_hospitals_are_the_members_with_what_they_declare_and_nobody_else() -> None:
    silos = [
        pb.SiloInfo(name=NAMES[0], fingerprint="f" * 64, data=pb.DataOffer(nominal_size=430, holds=["a", "c"])),
        pb.SiloInfo(name="stranger", data=pb.DataOffer(holds=["b"])),
    ]
    rounds = [
        trained(included=NAMES, round=0),
        trained(included=NAMES[:1], missing={NAMES[1]: "offline"}, round=1),
    ]
    stated = [pb.Declaration(silo=NAMES[0], stated=pb.Attestation(policy_digest="p" * 64))]
    made = card(manifest(rounds=2), *rounds, silos=silos, declarations=stated, software={"": "fl 1", NAMES[0]: "fl 2"})
    first, second = made.hospitals[:2]
    assert (first.rounds, first.size, first.policy, first.software) == (2, 430.0, "p" * 64, "fl 2")
    assert (second.rounds, second.missed, second.size) == (1, ("2: offline",), 0.0)
    assert [h.name for h in made.hospitals] == list(NAMES)
    assert [c.declared_by for c in made.classes] == [(NAMES[0],), (), (NAMES[0],), ()]
    assert made.software["coordinator"] == "fl 1"


def test_clinical_metrics_are_carried_by_class() -> None:
    confusion = ((1, 1, 0, 0), (0, 2, 0, 0), (0, 0, 0, 0), (0, 0, 0, 3))
    bins = tuple(ReliabilityBin(7, 6, 6.5) if k == 14 else ReliabilityBin(0, 0, 0.0) for k in range(CALIBRATION_BINS))
    found = ClinicalMetrics(
        confusion, (BinnedRange(0.8, 0.9), BinnedRange(0.5, 0.5), None, BinnedRange(1.0, 1.0)), bins
    )
    last = evaluated((1, 2, 0, 3))
    last.clinical.CopyFrom(clinical_message(found))
    made = card(manifest(rounds=1, metrics="clinical"), last)
    assert made.results.confusion == confusion
    assert (made.classes[0].auc_low, made.classes[0].auc_high, made.classes[2].auc_low) == (0.8, 0.9, None)
    assert made.classes[1].specificity == pytest.approx(4 / 5)
    assert made.results.why_no_more == ""
    assert "no hospital sent" in card(manifest(rounds=1, metrics="clinical"), evaluated()).results.why_no_more


def test_withdrawals_say_whether_the_model_depends_on_them() -> None:
    gone = pb.Withdrawal(silo="north", run_id="r1", at_unix=1.0, reason="trained by gradients", run_state="finished")
    made = card(manifest(), withdrawals=[gone])
    assert made.withdrawals[0].depends
    assert "cannot be taken out: trained by gradients" in made.withdrawals[0].outcome
    assert "This model still depends on its data." in documents.markdown(made)


# ---- surveys ---------------------------------------------------------------------------------------------------------

CELLS = (Cell("a", 30.0, 20.0, 0.0, 1), Cell("b", None, None, 0.0, 3), Cell("c", 0.0, 0.0, 0.0, 0))
ANSWERS = SurveyAnswers("d" * 64, 3, None, None, (SurveyAnswer("classes", "Class", "", CELLS, {}),), {})


def answered(run: RunManifest, asked: RunManifest, found: SurveyAnswers = ANSWERS) -> Card:
    detail = pb.RunDetail(info=pb.RunInfo(run_id="s1"), rounds=[pb.RoundInfo(included=[*NAMES, "elsewhere"])])
    made = card(run, trained(included=NAMES))
    return replace(made, survey=survey_of(run, asked, detail, found))


def test_a_survey_names_the_members_that_answered_and_no_other() -> None:
    run = manifest(rounds=1)
    made = answered(run, run)
    made.require_possible()
    assert made.survey is not None
    assert made.survey.members == tuple(NAMES)
    said = documents.markdown(made)
    assert (
        "- In the survey s1, 3 hospitals counted their training and test records. "
        f"{len(NAMES)} of them took part in this run. Withheld counts are missing, not zero.\n"
        "- Class (counting patients). a: 20 (withheld by 1 hospital); b: withheld (by 3 hospitals); c: 0.\n"
    ) in said


def test_a_survey_about_other_data_or_with_numbers_of_no_records_is_refused() -> None:
    run = manifest(rounds=1)
    with pytest.raises(ConfigError, match="about the run's data"):
        answered(run, replace(run, data="mnist"))
    with pytest.raises(ConfigError, match="possible counts"):
        answered(run, run, replace(ANSWERS, implausible=("classes, a",)))


@pytest.mark.parametrize("cell", [{"held": -1}, {"held": 4}, {"half_width": -1.0}, {"patients": float("inf")}])
def test_answers_that_no_hospitals_give_are_neither_signed_nor_believed(cell: dict[str, float]) -> None:
    run, wrong = manifest(rounds=1), (SurveyAnswer("classes", "Class", "", (replace(CELLS[0], **cell),), {}),)
    with pytest.raises(ConfigError, match="possible counts"):
        answered(run, run, replace(ANSWERS, answers=wrong))
    made = answered(run, run)
    assert made.survey is not None
    with pytest.raises(ConfigError, match="possible survey answers"):
        replace(made, survey=replace(made.survey, answers=wrong)).require_possible()
