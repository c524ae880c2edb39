"""Hospitals are ranked where their test images can tell, and not by how many benign cases they have."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coordinator.lead import accuracy, hospital_results
from coordinator.lead.hospital_results import standing
from fl_core.errors import ProtocolError
from fl_core.types.clinical import CALIBRATION_BINS, BinnedRange, ClinicalMetrics, ReliabilityBin, TwoByTwo
from fl_core.types.records import HospitalResult
from protos.consilium.v1 import federation_pb2 as pb


def result(correct: list[float], examples: list[float]) -> HospitalResult:
    return HospitalResult(tuple(correct), tuple(examples))


def test_the_lowest_hospital_and_the_gap_are_those_of_the_classes_that_all_have() -> None:
    found = standing(
        {
            "a": result([190, 0, 95], [200, 0, 100]),
            "b": result([100, 40, 50], [200, 40, 100]),  # 100 % on a class that nobody else has
        }
    )
    assert found.classes == (0, 2)
    assert found.lowest == "b"
    assert found.gap == pytest.approx((0.95 + 0.95) / 2 - (0.5 + 0.5) / 2)
    assert found.interval is not None
    assert 0 < found.interval.low < found.gap < found.interval.high
    assert found.cannot_rank == ""
    assert found.sentence().startswith(
        "b is lowest with 50.0 % balanced accuracy over 2 classes that all have, gap 45.0"
    )


def test_a_share_of_benign_cases_ranks_nobody() -> None:
    """The same model, 95 % right on benign and 60 % on malignant cases: accuracies 92 and 69 %, and no rank."""
    found = standing({"many": result([171, 12], [180, 20]), "few": result([47, 90], [50, 150])})
    assert found.cannot_rank == "the sampling of test images can explain the difference"
    assert found.sentence().startswith("cannot rank: ")


def of_labels(*tables: tuple[int, int, int, int]) -> HospitalResult:
    labels = tuple(TwoByTwo(*table) for table in tables)
    clinical = ClinicalMetrics((), (None,) * len(labels), (ReliabilityBin(0, 0, 0.0),) * CALIBRATION_BINS, labels)
    return HospitalResult(tuple(float(t.tn + t.tp) for t in labels), tuple(float(sum(t)) for t in labels), clinical)


def test_of_labels_what_is_compared_is_found_and_cleared_and_not_the_many_that_are_absent() -> None:
    """One hospital's model never finds a label that is rare there: right in 95 %, and lowest all the same."""
    blind, sees = of_labels((190, 0, 10, 0), (100, 0, 0, 0)), of_labels((85, 15, 2, 98), (90, 10, 5, 95))
    found = standing(
        {"blind": blind, "sees": sees, "sends accuracies alone": result([1, 1], [100, 100])}, several_labels=True
    )
    assert found.classes == (0,)  # the second one was found nowhere at `blind`
    assert found.compared == {"blind": 0.5, "sees": pytest.approx((85 / 100 + 98 / 100) / 2)}
    assert (found.lowest, found.cannot_rank) == ("blind", "")
    rows = {row[0]: row for row in hospital_results.rows({"blind": blind, "sees": sees}, several_labels=True)}
    assert rows["blind"][3].startswith("50.0 %")
    assert rows["blind"][4] == "50.0 %"
    facts = hospital_results.facts({"blind": blind}, several_labels=True)
    assert facts["hospitals"]["blind"]["balanced_accuracy"] == 0.5  # type: ignore[index]
    (alone,) = hospital_results.rows({"alone": result([95, 90], [100, 100])}, several_labels=True)
    assert (alone[3], alone[4], alone[5][:6]) == ("-", "50.0 %", "92.5 %")


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ({}, "0 hospitals with at least"),
        ({"a": result([9], [10])}, "1 hospital with at least"),
        ({"a": result([9], [10]), "b": result([1], [9])}, "(1 with fewer)"),
        ({"a": result([9, 0], [10, 0]), "b": result([0, 9], [0, 10])}, "different diseases"),
    ],
)
def test_what_cannot_be_ranked_says_why(results: dict[str, HospitalResult], why: str) -> None:
    found = standing(results)
    assert why in found.cannot_rank
    assert found.gap is None
    assert json.dumps(found.facts())


def test_equal_hospitals_are_ranked_in_at_most_one_of_twenty_evaluations() -> None:
    rng, ranked = np.random.default_rng(3), 0
    sizes = [(12, 30, 8), (40, 60, 20), (200, 100, 50), (15, 15, 15), (90, 5, 30), (30, 30, 30)]
    for _ in range(1000):
        drawn = {
            str(k): result([float(v) for v in rng.binomial(n, (0.9, 0.7, 0.8))], list(n)) for k, n in enumerate(sizes)
        }
        ranked += not standing(drawn).cannot_rank
    assert ranked / 1000 <= 0.05


def test_a_hospital_that_is_much_worse_is_found() -> None:
    rng, found = np.random.default_rng(4), 0
    for _ in range(100):
        drawn = {
            name: result([float(v) for v in rng.binomial((80, 80), p)], [80, 80])
            for name, p in (("a", (0.9, 0.9)), ("b", (0.9, 0.85)), ("c", (0.5, 0.5)))
        }
        one = standing(drawn)
        found += not one.cannot_rank and one.lowest == "c"
    assert found >= 95


def test_rows_say_the_level_of_chance_and_mark_few_images() -> None:
    clinical = ClinicalMetrics(((3, 1), (0, 4)), (BinnedRange(0.9, 0.9), BinnedRange(0.9, 0.9)), ())
    rows = list(hospital_results.rows({"b": result([3, 4], [4, 4]), "a": HospitalResult((20, 0), (30, 0), clinical)}))
    assert [row[0] for row in rows] == ["a", "b"]
    assert rows[1][1] == "8 (few)"
    assert rows[0][4] == "100.0 %"
    assert rows[1][4] == "50.0 %"
    assert rows[1][3].startswith("87.5 % (")


def test_results_come_back_from_a_message_as_they_were() -> None:
    clinical = ClinicalMetrics(
        ((3, 1), (0, 4)),
        (BinnedRange(0.875, 0.9), None),
        (ReliabilityBin(8, 7, 6.5),) + (ReliabilityBin(0, 0, 0.0),) * 14,
    )
    own = {"a": HospitalResult((3.0, 4.0), (4.0, 4.0), clinical), "b": HospitalResult((1.0, 0.0), (2.0, 0.0))}
    info = pb.RoundInfo(correct=[4, 4], examples=[6, 4], by_hospital=accuracy.result_messages(own))
    assert accuracy.results_of(pb.RoundInfo.FromString(info.SerializeToString())) == own


@pytest.mark.parametrize(
    "lie",
    [
        {"correct": [1.0], "examples": [2.0]},
        {"correct": [3.0, 0.0], "examples": [2.0, 0.0]},
        {"correct": [float("nan"), 0.0], "examples": [2.0, 0.0]},
        {"correct": [1.0, 0.0], "examples": [float("inf"), 0.0]},
        {"correct": [-1.0, 0.0], "examples": [2.0, 0.0]},
    ],
)
def test_what_no_evaluation_gives_is_refused(lie: dict[str, list[float]]) -> None:
    info = pb.RoundInfo(correct=[1, 1], examples=[2, 2], by_hospital=[pb.HospitalResult(silo="a", **lie)])
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        accuracy.results_of(info)
