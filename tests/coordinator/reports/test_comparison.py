"""Runs side by side."""

from __future__ import annotations

import json

import pytest

from coordinator.reports.comparison import MOST_RUNS, ComparedRun, Comparison, flatten
from coordinator.reports.comparison import compare as compare_runs
from fl_core.errors import ConfigError, ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.recorded_runs import SPEC, detail, measured


def compare(details: list[pb.RunDetail]) -> Comparison:
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
    assert found.measures == ["accuracy", "balanced_accuracy"]
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


@pytest.mark.parametrize("runs", [[A], [A, A], [], [detail(str(k), []) for k in range(MOST_RUNS + 1)]], ids=len)
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
