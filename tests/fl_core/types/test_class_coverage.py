"""What is said of the classes of a run, and what follows for a run that goes on from another."""

from __future__ import annotations

import json

import pytest

from fl_core.types.class_coverage import ClassCoverage, counted_holders

CLASSES = ("MEL", "NV", "SCC", "VASC")


def coverage(*hospitals: int, least: int = 1, masked: bool = True, partial: bool = False) -> ClassCoverage:
    return ClassCoverage(CLASSES, hospitals, partial, least, masked)


def test_a_class_at_one_hospital_is_named_and_the_hospital_is_not() -> None:
    assert coverage(3, 3, 1, 2).sentences() == [
        "SCC: trained at one hospital only; the coordinator reads this hospital's sums, but not its name"
    ]
    assert coverage(3, 3, 1, 2, masked=False).sentences() == [
        "SCC: trained at one hospital only; the coordinator can read this hospital's update"
    ]
    assert (
        coverage(1, 3, 1, 2)
        .sentences()[0]
        .startswith("MEL, SCC: each trained at one hospital only; the coordinator reads")
    )
    assert coverage(3, 3, 2, 2).sentences() == []


def test_a_class_that_is_left_out_is_one_that_the_model_will_not_know() -> None:
    found = coverage(3, 3, 1, 0, least=2)
    assert found.sentences() == [
        "SCC: left out because fewer than 2 hospitals have it: the model cannot recognise it",
        "VASC: at no hospital: the model cannot recognise it",
    ]
    assert (found.left_out, found.untaught, found.alone) == (("SCC",), ("SCC", "VASC"), ())


def test_what_is_not_known_is_not_claimed() -> None:
    assert coverage(3, 3, 1, 0, partial=True).untaught == ()
    assert coverage(3, 3, 1, 0, partial=True).hospitals_of("VASC") is None
    silent = ClassCoverage(CLASSES, why="private run")
    assert silent.sentences() == ["the number of hospitals per class is unknown: private run"]
    assert (silent.untaught, silent.headline(), silent.hospitals_of("MEL")) == ((), "", None)


def test_the_headline_says_how_many_classes_were_tested_and_trained() -> None:
    tested = coverage(2, 3, 1, 0).with_tested((4.0, 2.0, 0.0, 0.0))
    assert tested.headline() == "2 of 4 classes tested, 3 of 4 trained at 1 to 3 hospitals each"
    assert tested.over() == " over 2 of 4 classes"
    assert coverage(1, 1, 1, 1).headline() == "4 of 4 classes trained at 1 hospital each"
    assert coverage(2, 2, 2, 2).with_tested((1.0,) * 4).over() == ""


def test_what_the_first_run_taught_is_still_there_in_the_one_that_goes_on_from_it() -> None:
    before, now = coverage(0, 3, 1, 0), coverage(2, 0, 0, 0)
    assert now.after(before, trains=True).hospitals == (2, 3, 1, 0)
    left_out = coverage(0, 3, 1, 0, least=2)
    assert now.after(left_out, trains=True).hospitals == (2, 3, 0, 0)
    assert coverage().after(before, trains=False).hospitals == before.hospitals


@pytest.mark.parametrize("parent", [None, ClassCoverage(CLASSES), ClassCoverage(("a",), (1,))])
def test_after_a_run_of_which_nothing_is_known_no_class_is_called_untaught(parent: ClassCoverage | None) -> None:
    assert coverage(2, 0, 0, 0).after(parent, trains=True).untaught == ()
    assert coverage().after(parent, trains=False).hospitals == ()


def test_it_is_stored_and_read_as_json() -> None:
    found = coverage(2, 0, 1, 0, least=2).with_tested((1.0, 2.0, 0.0, 3.0))
    assert ClassCoverage.of(json.loads(json.dumps(found.facts()))) == found


def test_declared_classes_are_counted_once_for_each_hospital() -> None:
    assert counted_holders(CLASSES, [["MEL", "MEL", "NV"], ["NV", "other"]]) == (1, 2, 0, 0)


def test_of_many_classes_the_first_are_named() -> None:
    many = ClassCoverage(tuple(f"c{k}" for k in range(300)), (1,) * 300, masked=True)
    (said,) = many.sentences()
    assert "c19 and 280 more: each trained at one hospital only" in said
