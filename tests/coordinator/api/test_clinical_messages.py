"""Clinical metrics on their way to a lead: as they were measured, or refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from coordinator.api.messages import round_info
from coordinator.lead import accuracy
from coordinator.lead.as_json import round_json
from coordinator.lead.tables import clinical_tables
from coordinator.lead.watcher import Watcher
from coordinator.storage.records import RoundRow
from fl_core.errors import ProtocolError
from fl_core.training.clinical import clinical_counts, clinical_metrics, label_counts
from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Part
from privacy.accounting.measures import ACCURACY, BALANCED
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb

CLASSES = ("nevus", "melanoma", "absent")


def measured() -> ClinicalMetrics:
    logits = torch.tensor([[2.0, 1, 0], [0, 2, 1], [1, 0, -3], [0, 1, 0]])
    counts = clinical_counts(logits, torch.tensor([0, 0, 1, 1]), 3)
    found = clinical_metrics(Part(counts, counts["confusion"].sum()))
    assert found is not None
    return found


def sent(found: ClinicalMetrics | None = None, several_labels: bool = False) -> pb.RoundInfo:
    record = RoundRecord(0, TaskKind.EVALUATE, (1, 1, 0), (2, 2, 0), (), clinical=found, several_labels=several_labels)
    row = RoundRow("r", record, is_open=False, cohort=())
    return pb.RoundInfo.FromString(round_info(row).SerializeToString())


def test_a_lead_reads_what_was_measured() -> None:
    found = measured()
    assert accuracy.clinical_of(sent(found)) == found
    assert accuracy.clinical_of(sent()) is None


def of_labels() -> ClinicalMetrics:
    logits = torch.tensor([[2.0, 1, 0], [0, 2, 1], [1, 0, -3], [-1, 1, 0]])
    counts = label_counts(logits, torch.tensor([[1, 0, -1], [0, 1, -1], [1, 1, -1], [0, -1, -1]]), 3)
    found = clinical_metrics(Part(counts, counts["confusion"].sum()))
    assert found is not None
    return found


def test_a_lead_reads_what_was_measured_of_labels_and_its_balanced_accuracy_is_theirs() -> None:
    found, info = of_labels(), sent(of_labels(), several_labels=True)
    assert accuracy.clinical_of(info) == found
    assert BALANCED.estimate(accuracy.result_of(info)).point == found.balanced_accuracy
    shown = json.loads(json.dumps(round_json(info), allow_nan=False))
    assert shown["balanced_accuracy"] == shown["clinical"]["balanced_accuracy"] == found.balanced_accuracy
    assert shown["clinical"]["confusion"] is None
    assert shown["clinical"]["labels"][0] == {"tn": 2, "fp": 0, "fn": 0, "tp": 2}
    out = Console(width=120, force_terminal=False)
    with out.capture() as captured:
        for table in clinical_tables(info, CLASSES):
            out.print(table, soft_wrap=True)
    assert "2 of 4" in captured.get()
    assert "over 2 of 3 labels that were found in some test examples and not in others" in captured.get()


def test_right_answers_about_labels_alone_are_no_balanced_accuracy() -> None:
    """Most are right where nothing is: without clinical metrics an accuracy stands alone."""
    info = sent(several_labels=True)
    assert BALANCED.estimate(accuracy.result_of(info)) == NOTHING
    assert ACCURACY.estimate(accuracy.result_of(info)).point == 0.5
    run = pb.RunInfo()
    accuracy.set_balanced(run, accuracy.result_of(info).balanced_sums, several_labels=True)
    assert (accuracy.newest_balanced(run), accuracy.chance(run)) == (NOTHING, None)
    tables = sent(of_labels(), several_labels=True)
    accuracy.set_balanced(run, accuracy.result_of(tables).balanced_sums, several_labels=True)
    assert accuracy.chance(run) == 0.5


@pytest.mark.parametrize("several_labels", [True, False])
def test_tables_of_the_other_kind_are_refused(several_labels: bool) -> None:
    info = sent(measured() if several_labels else of_labels(), several_labels)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        accuracy.clinical_of(info)


@pytest.mark.parametrize("change", [lambda c: c.labels.append(1), lambda c: c.confusion.extend([0] * 9)])
def test_tables_of_labels_that_no_evaluation_gives_are_refused(change: Callable[[pb.ClinicalMetrics], None]) -> None:
    info = sent(of_labels(), several_labels=True)
    change(info.clinical)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        accuracy.clinical_of(info)


def test_json_has_no_nan_and_says_null() -> None:
    shown = json.loads(json.dumps(round_json(sent(measured())), allow_nan=False))
    assert shown["balanced_accuracy"] == 0.5
    assert shown["clinical"]["sensitivity"] == [0.5, 0.5, None]
    assert shown["clinical"]["auc"][2] is shown["clinical"]["auc_range"][2] is None
    assert shown["clinical"]["classes_present"] == 2
    assert sum(b["examples"] for b in shown["clinical"]["reliability"]) == 4
    assert round_json(sent())["clinical"] is None


def test_a_person_reads_a_row_per_class_and_over_how_many_classes_means_are() -> None:
    info = sent(measured())
    info.examples[0] = 5  # of which one hospital sends accuracies alone
    out = Console(width=120, force_terminal=False)
    with out.capture() as captured:
        for shown in clinical_tables(info, CLASSES):
            out.print(shown, soft_wrap=True)
    text = captured.get()
    assert "sensitivity" in text
    assert "melanoma" in text
    assert "over 2 of 3 classes that have test examples: macro AUC" in text
    assert "balanced accuracy" not in text  # the one of all test images stands elsewhere
    assert "without 3 test examples whose hospitals send only accuracies" in text


def test_a_run_whose_hospitals_send_correct_answers_alone_says_why_it_has_no_auc() -> None:
    for metrics, expected in (("clinical", ["policy.toml"]), ("basic", []), ("", [])):
        found = clinical_tables(sent(), CLASSES, metrics)
        assert [word for text in found for word in expected if word in str(text)] == expected
        assert len(found) == len(expected)


def test_watch_shows_the_newest_metrics() -> None:
    out = Console(width=200, force_terminal=False)
    with out.capture() as captured, Watcher(out) as watcher:
        watcher.show(pb.Event(kind="closed", closed=sent(measured()), info=pb.RunInfo(run_id="r", accuracy=0.5)))
        info = sent(measured())
        info.correct[1], info.examples[1] = 4, 5  # of which one hospital sends accuracies alone
        watcher.show(pb.Event(kind="closed", closed=info, info=pb.RunInfo(run_id="r", accuracy=0.5)))
    first, second = captured.get().splitlines()
    assert re.search(r"balanced accuracy 50.00 % over 2 of 3 classes  accuracy 50.00 %  macro AUC 0\.", first)
    assert "test images" not in first
    assert "balanced accuracy 65.00 % over 2 of 3 classes  accuracy " in second
    assert "on 4 of 7 test images" in second


@pytest.mark.parametrize(
    "lie",
    [
        lambda m: m.confusion.append(1),
        lambda m: m.auc_low.pop(),
        lambda m: m.auc_high.__setitem__(0, 2.0),
        lambda m: m.auc_high.__setitem__(0, math.nan),
        lambda m: m.auc_low.__setitem__(0, math.inf),
        lambda m: m.bin_examples.append(3),
        lambda m: m.bin_correct.__setitem__(0, 2**63),
        lambda m: m.bin_confidence.__setitem__(0, math.nan),
        lambda m: m.bin_confidence.__setitem__(0, 1e300),
    ],
)
def test_numbers_that_no_evaluation_gives_are_refused(lie: Callable[[pb.ClinicalMetrics], object]) -> None:
    info = sent(measured())
    lie(info.clinical)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        accuracy.clinical_of(info)
