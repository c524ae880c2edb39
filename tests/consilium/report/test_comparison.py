"""Runs side by side."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest

from consilium.pages.lead.site import comparison_facts
from consilium.report.comparison import BEHIND, COMPARED, MAX_RUNS, ComparedRun, RunComparison, flatten, score_rows
from consilium.report.comparison import compare as compare_runs
from coordinator.lead import accuracy
from fl_core.errors import ConfigError, ProtocolError
from privacy.accounting.measures import BALANCED
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.recorded_runs import SPEC, detail, measured


def compare(details: list[pb.RunDetail]) -> RunComparison:
    return compare_runs([ComparedRun.of(each) for each in details])


A = detail("a", measured([0.1, 0.2, 0.3]))
B = detail("b", measured([0.1, 0.4, 0.5]), {**SPEC, "method": {"name": "fedmr", "mu1": 0.01}, "train": {"lr": 0.2}})


def test_the_keys_that_differ_are_named_as_on_the_command_line_and_no_others() -> None:
    found = compare([A, B])
    assert found.differences == {
        "method": ("fedavg", "fedmr"),
        "method.mu1": (None, "0.01"),
        "train.lr": ("0.1", "0.2"),
    }


def test_scores_stand_side_by_side_with_what_makes_them_incomparable() -> None:
    found = compare([A, B])
    assert found.measures == ["balanced_accuracy", "accuracy"]
    assert found.classes == ["a", "b", "c", "d"]
    assert [run.curves["accuracy"].scores.final.point for run in found.runs] == pytest.approx([0.3, 0.5])
    assert not any("different" in note for note in found.notes)
    other = pb.RunDetail()
    other.CopyFrom(B)
    other.manifest_json = json.dumps({"schema": {"classes": list("abcd")}, "members": [{"name": "west"}]})
    other.info.state = "paused"
    notes = " ".join(compare([A, other]).notes)
    assert "different hospitals" in notes
    assert "b (paused)" in notes


@pytest.mark.parametrize("runs", [[A], [A, A], [], [detail(str(k), []) for k in range(MAX_RUNS + 1)]], ids=len)
def test_fewer_than_two_runs_or_the_same_twice_or_too_many_are_refused(runs: list[pb.RunDetail]) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02"):
        compare(runs)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"a": 1, "a": 2}', "\x00"])
@pytest.mark.parametrize("field", ["spec_json", "manifest_json"])
def test_a_configuration_that_is_none_is_an_error_of_the_wire(field: str, text: str) -> None:
    spoilt = pb.RunDetail()
    spoilt.CopyFrom(B)
    setattr(spoilt, field, text)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        compare([A, spoilt])


@pytest.mark.parametrize("schema", [None, 3, {"classes": 7}, {"classes": [1, None]}])
@pytest.mark.parametrize("members", [None, 3, [1], [{"name": None}]])
def test_a_manifest_of_another_shape_is_compared_all_the_same(schema: object, members: object) -> None:
    strange = pb.RunDetail()
    strange.CopyFrom(B)
    strange.manifest_json = json.dumps({"schema": schema, "members": members, "start": [], "software": {}})
    assert compare([A, strange]).notes


def test_a_deep_configuration_is_written_not_followed() -> None:
    deep: dict[str, object] = {}
    for _ in range(500):
        deep = {"x": deep}
    assert len(flatten({"data": deep})) == 1
    assert flatten({"silos": ["a", "b"], "name": None}) == {"silos": '["a", "b"]', "name": "null"}


def rounds(
    accuracies: Sequence[float], scale: int = 1, hospitals: Sequence[str] = ("north", "east"), **more: object
) -> list[pb.RoundInfo]:
    """Make evaluations of as many test images of each class as there are accuracies right of them."""
    last = len(accuracies) - 1
    return [
        pb.RoundInfo(
            round=k,
            kind=pb.EVALUATE if k == last else pb.TRAIN,
            correct=[round(100 * scale * a)] * 4,
            examples=[100 * scale] * 4,
            included=hospitals,
            **more,
        )
        for k, a in enumerate(accuracies)
    ]


NAMES_OF = {"a": "A", "b": "B", "c": "C"}


def test_headline_and_table_say_the_number_of_the_last_model_which_show_says_too() -> None:
    low_at_the_end = detail("a", rounds([0.1, *[0.9] * 5, 0.5], scale=10))
    high_at_the_end = detail("b", rounds([0.1, *[0.4] * 5, 0.6], scale=10))
    found = compare([low_at_the_end, high_at_the_end])
    finals = [run.curves[COMPARED].scores.final.point for run in found.runs]
    assert finals == pytest.approx([0.5, 0.6])
    last = [accuracy.result_of(each.rounds[-1]) for each in (low_at_the_end, high_at_the_end)]
    assert [BALANCED.estimate(result).point for result in last] == finals
    assert found.standing.headline(NAMES_OF).startswith("B ends ahead of A in balanced accuracy: +10.0 points (95 %: ")
    rows = dict(score_rows(found))
    assert rows[COMPARED] == ("50.00 %", "60.00 %")
    assert rows[BEHIND][1] == "best"
    assert rows[BEHIND][0].startswith("-10.0 points (95 %: ")
    page = comparison_facts(found)
    assert page.headline == found.standing.headline(NAMES_OF)
    assert [texts for _, texts in page.scores] == [texts for _, texts in score_rows(found)]


def test_the_model_of_a_closed_form_that_is_not_solved_yet_is_in_no_number_of_its_run() -> None:
    evaluated = rounds([0.0, 0.1, 0.1, 0.9])
    for each in evaluated[:3]:  # it takes three exchanges
        each.untrained = True
    found = compare([detail("a", evaluated), detail("b", rounds([0.1, 0.5]))])
    scores = found.runs[0].curves[COMPARED].scores
    assert [scores.final.point, scores.best.point, scores.last.point] == pytest.approx([0.9] * 3)
    assert dict(score_rows(found))[COMPARED][0] == "90.00 %"
    unfinished = ComparedRun.of(detail("a", evaluated[:3]))
    assert unfinished.evaluated == ()
    assert unfinished.curves[COMPARED].scores.final.point is None


def test_runs_whose_difference_may_be_luck_of_the_test_images_are_not_told_apart() -> None:
    few, many = (
        [detail(name, rounds([0.1, *[share] * 5], scale)) for name, share in (("a", 0.80), ("b", 0.83))]
        for scale in (1, 100)
    )
    found = compare(few)
    assert found.standing.headline(NAMES_OF).startswith(
        "B and A do not differ significantly in balanced accuracy: +3.0 points"
    )
    assert dict(score_rows(found))[BEHIND][0].endswith(", not significant")
    assert compare(many).standing.headline(NAMES_OF).startswith("B ends ahead of A")
    alike = compare([detail("a", rounds([0.1, 1.0])), detail("b", rounds([0.1, 1.0]))])
    assert not alike.standing.ahead["b"].significant


def test_a_run_that_was_measured_at_other_hospitals_is_named_and_not_compared() -> None:
    """The members are the same: one of them was revoked in between."""
    whole = detail("a", rounds([0.1, 0.5, 0.6]))
    revoked = detail("b", rounds([0.1, 0.9, 0.9], hospitals=("north",)))
    found = compare([whole, revoked])
    assert found.standing.headline({"a": "A", "b": "B"}) == "2 runs side by side"
    assert dict(score_rows(found))[BEHIND] == ("-", "not compared")
    assert (
        "b is not compared with the others: it was measured at other hospitals (east only in one of the two)"
        in found.notes
    )
    third = compare([whole, revoked, detail("c", rounds([0.1, 0.5, 0.7]))])
    assert set(third.standing.ahead) == {"a"}
    assert set(third.standing.excluded) == {"b"}


def test_a_run_that_was_measured_on_other_test_images_is_named_and_not_compared() -> None:
    found = compare([detail("a", rounds([0.1, 0.5])), detail("b", rounds([0.1, 0.9], scale=2))])
    assert found.standing.ahead == {}
    assert any(
        "b is not compared with the others: it was measured on other test images (800 and 400" in n for n in found.notes
    )
    swapped = detail("b", rounds([0.1, 0.9]))
    swapped.rounds[-1].examples[:] = [50, 150, 100, 100]  # as many in all
    assert (
        compare([detail("a", rounds([0.1, 0.5])), swapped]).standing.excluded["b"].startswith("was measured on other")
    )


def test_only_the_newest_evaluation_counts() -> None:
    changed = [*rounds([0.1, 0.2, 0.2], hospitals=("north",)), *rounds([0.1, 0.1, 0.1, 0.8, 0.9])[3:]]
    found = compare([detail("a", changed), detail("b", rounds([0.1, 0.3, 0.3, 0.4, 0.5]))])
    assert (found.standing.rounds, found.standing.best) == (1, "a")
    assert found.standing.ahead["b"].point == pytest.approx(0.4)


def test_intervals_of_noisy_evaluations_hold_their_noise_too() -> None:
    exact = compare([detail("a", rounds([0.1, 0.6], 10)), detail("b", rounds([0.1, 0.9], 10))]).standing.ahead["a"]
    noise = pb.Noise(std=3.0, draws=2)
    runs = [detail(name, rounds([0.1, share], 10, noise=noise)) for name, share in (("a", 0.6), ("b", 0.9))]
    found = compare(runs)
    noisy = found.standing.ahead["a"]
    assert noisy.low < exact.low < exact.point < exact.high < noisy.high
    assert any("counts of test images are noisy" in note for note in found.notes)
    drowned = [detail(name, rounds([0.1, 0.5], noise=pb.Noise(std=1e6, draws=2))) for name in "ab"]
    assert compare(drowned).standing.headline({"a": "A", "b": "B"}) == "2 runs side by side"


@pytest.mark.parametrize("agreement", ["most", "none", "least"])
@pytest.mark.parametrize(("better", "worse", "images"), [(0.9, 0.8, 40), (0.6, 0.6, 15), (0.99, 0.97, 200)])
def test_the_interval_of_a_difference_holds_the_true_one_whatever_images_the_models_agree_on(
    agreement: str, better: float, worse: float, images: int
) -> None:
    """Of 400 made up test sets it misses at most so many as 5 % are likely to give: 32 in all but 0.2 % of cases."""
    draws, missed = random.Random(7), 0
    for _ in range(400):
        right = [[0.0] * 4, [0.0] * 4]
        for c in range(4):
            for _ in range(images):
                u, v = draws.random(), draws.random()
                second = {"most": u, "none": v, "least": 1 - u}[agreement]
                right[0][c] += u < better
                right[1][c] += second < worse
        made = [
            detail(name, [pb.RoundInfo(round=1, kind=pb.EVALUATE, correct=counts, examples=[images] * 4)])
            for name, counts in zip("ab", right, strict=True)
        ]
        standing = compare(made).standing
        ((_, found),) = standing.ahead.items()
        true = (better - worse) * (1 if standing.best == "a" else -1)
        missed += not found.low <= true <= found.high
    assert missed <= 32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1.0, 1e38, 0.0])
@pytest.mark.parametrize("field", ["correct", "examples"])
def test_numbers_that_no_evaluation_gives_are_compared_without_an_error(field: str, value: float) -> None:
    spoilt = [rounds([0.1, 0.5, 0.6]), rounds([0.1, 0.5, 0.7])]
    for each in spoilt:
        getattr(each[-1], field)[:] = [value] * 4
    found = compare([detail("a", spoilt[0]), detail("b", spoilt[1])])
    assert found.standing.headline(NAMES_OF)
    assert len(score_rows(found)) >= 1
    shorter = rounds([0.1, 0.5])
    del shorter[-1].correct[2:]
    assert compare([detail("a", shorter), detail("b", rounds([0.1, 0.5]))]).standing.headline(NAMES_OF)
