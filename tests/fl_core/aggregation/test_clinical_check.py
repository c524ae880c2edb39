"""A hospital that lies in its clinical metrics is refused by name: counts must be counts, and tables must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.research.engines.in_process import local_ports
from fl_core.aggregation.update_check import clinical_fault
from fl_core.errors import ProtocolError
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.clinical import answers, label_counts
from fl_core.training.evaluation import withheld
from fl_core.types.enums import TaskKind
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.values import Part, RoundContext
from tests.fl_core.aggregation.test_update_check import SIZES
from tests.support.federations import manifest, shares

FIRST = RoundContext(3, 4, 2, 0, 3)
RUN = RunSetup.of(manifest("fedavg", metrics="clinical"))
CHECK = RUN.update_check(SIZES)
PORTS = local_ports(RUN, shares())
MSG = RUN.method.broadcast(RUN.initial_state())
EVERY = [dict(port.round(MSG, FIRST, TaskKind.TRAIN)) for port in PORTS]
HONEST = next(k for k, sent in enumerate(EVERY) if sent[METRICS].total["correct"].any())
SENT = EVERY[HONEST]
"""Of a silo for which the first model is right now and then."""


def changed(name: str, change: Change) -> dict[str, Part]:
    """Change one tensor of the clinical part, or its weight."""
    found = SENT[CLINICAL_PART]
    total, weight = {k: v.clone() for k, v in found.total.items()}, found.weight.clone()
    change(weight if name == "weight" else total[name])
    return {**SENT, CLINICAL_PART: Part(total, weight)}


def moved(v: Tensor) -> None:
    """Move a count to another cell, so that sums over rows or bins are no longer those of the examples."""
    full = int(v.reshape(-1).argmax())
    v.view(-1)[full] -= 1
    v.view(-1)[full - v.shape[-1] if full >= v.shape[-1] and v.dim() > 1 else (full + v.shape[-1]) % v.numel()] += 1


Change = Callable[[Tensor], object]
COUNT_LIES: list[tuple[Change, str]] = [
    (lambda v: v.view(-1)[0].add_(1), "expected"),
    (lambda v: v.view(-1)[0].add_(0.5), "not a count"),
    (lambda v: v.view(-1)[0].sub_(1e6), "not a count"),
    (lambda v: v.fill_(1e38), "expected"),
    (lambda v: v.view(-1)[0].add_(1e-40), "not a count"),
]
LIES: list[tuple[str, Change, str]] = [
    *(
        (name, change, said)
        for name in ("confusion", "positive", "negative", "examples", "correct")
        for change, said in COUNT_LIES
    ),
    *((name, moved, "expected") for name in ("confusion", "positive", "negative")),
    ("confusion", lambda v: v.copy_(v.roll(1, 1)), "diagonal of 'confusion'"),
    ("correct", lambda v: v.copy_(v.flip(0)), "more correct answers than examples in a bin"),
    ("confidence", lambda v: v.view(-1)[0].add_(1.0), "outside its bin"),
    ("confidence", lambda v: v.zero_(), "outside its bin"),
    ("confidence", lambda v: v.fill_(-1e38), "outside its bin"),
    ("weight", lambda v: v.add_(1), "weight"),
    ("weight", lambda v: v.fill_(-1), "weight"),
    ("weight", lambda v: v.zero_(), "values of weight 0"),
    ("weight", lambda v: v.fill_(1e-40), "weight"),
]


@pytest.mark.fault(
    "a hospital", "sends clinical metrics that no evaluation can produce", "refused and reported by name (E-RUN-43)"
)
@pytest.mark.parametrize(("name", "change", "said"), LIES)
def test_tables_that_do_not_agree_are_refused_by_name(name: str, change: Change, said: str) -> None:
    with pytest.raises(ProtocolError, match=f"E-RUN-43: north: clinical metrics: .*{said}"):
        CHECK.check(changed(name, change), "north")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["confusion", "confidence", "weight"])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        CHECK.check(changed(name, lambda v: v.fill_(value)), "north")


def test_a_table_of_another_size_is_refused_before_it_is_read() -> None:
    found = SENT[CLINICAL_PART]
    larger = {**SENT, CLINICAL_PART: Part({**found.total, "positive": torch.zeros(4, 10**6)}, found.weight)}
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        CHECK.check(larger, "north")


def test_metrics_that_do_not_fit_the_tables_are_refused() -> None:
    found = SENT[METRICS]
    better = {**SENT, METRICS: Part({"correct": found.weight.clone()}, found.weight)}
    with pytest.raises(ProtocolError, match=r"E-RUN-43: north: clinical metrics: diagonal"):
        CHECK.check(better, "north")


def test_what_honest_silos_send_passes_in_rounds_and_in_the_closing_evaluation() -> None:
    for port, trained in zip(PORTS, EVERY, strict=True):
        CHECK.check(trained, port.name)
        sent = port.round(MSG, replace(FIRST, round=2), TaskKind.EVALUATE)
        CHECK.of({name: CHECK.layout[name] for name in (METRICS, CLINICAL_PART)}).check(sent, port.name)


@pytest.mark.parametrize("kept", [{CLINICAL_PART}, {CLINICAL_PART, METRICS}])
def test_a_silo_may_withhold_what_it_measured_and_trains_all_the_same(kept: set[str]) -> None:
    port = replace(PORTS[HONEST], runtime=replace(PORTS[HONEST].runtime, withholds=frozenset(kept)))
    sent = port.round(MSG, FIRST, TaskKind.TRAIN)
    CHECK.check(sent, "north")
    assert all(not v.any() for name in kept for v in (*sent[name].total.values(), sent[name].weight))
    assert torch.equal(sent["delta"].total["head.bias"], SENT["delta"].total["head.bias"])
    assert all(torch.equal(v, torch.zeros_like(v)) for v in withheld(SENT[METRICS]).total.values())


# ---- several labels at once ------------------------------------------------------------------------------------------

ASKED = torch.tensor([[1, 0, -1], [0, 1, 1], [1, 0, 0], [-1, 1, 0]])
SAID = torch.tensor([[2.0, -1, 3], [1, 1, -1], [1, -2, -1], [4, -1, -2]])
LABEL_LIES: list[tuple[str, Change, str]] = [
    *(
        (name, change, said)
        for name in ("confusion", "positive", "negative", "examples", "correct")
        for change, said in COUNT_LIES
    ),
    *((name, moved, "expected") for name in ("positive", "negative")),
    ("confusion", lambda v: v.copy_(v.flip(2)), "diagonal of 'confusion'"),
    ("confusion", lambda v: v[1].copy_(torch.tensor([[2.0, 1], [0, 1]])), "rows of 'positive'"),
    ("confidence", lambda v: v.zero_(), "outside its bin"),
    ("weight", lambda v: v.add_(1), "weight"),
    ("weight", lambda v: v.zero_(), "values of weight 0"),
]


def label_totals() -> dict[str, Tensor]:
    return label_counts(SAID, ASKED, 3)


def fault_of(total: dict[str, Tensor], weight: Tensor) -> str:
    """Hold a clinical part of labels against honest "metrics"."""
    return clinical_fault(total, weight, *answers(label_totals()["confusion"]))


def test_honest_tables_of_labels_agree() -> None:
    assert fault_of(label_totals(), torch.tensor(10.0, dtype=torch.float64)) == ""


@pytest.mark.parametrize(("name", "change", "said"), LABEL_LIES)
def test_tables_of_labels_that_do_not_agree_are_refused(name: str, change: Change, said: str) -> None:
    total, weight = label_totals(), torch.tensor(10.0, dtype=torch.float64)
    change(weight if name == "weight" else total[name])
    assert said in fault_of(total, weight)
