"""The rules for alerts name metrics, labels and values that there are; the page of metrics is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from coordinator.operations import metrics as coordinator_metrics
from coordinator.operations.health import PROBLEMS
from coordinator.storage.records import RunState
from silo.operations import metrics as silo_metrics

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {f.shown_name: f for f in (*coordinator_metrics.FAMILIES, *silo_metrics.FAMILIES)}
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_names_metrics_and_labels_that_there_are(rule: dict[str, object]) -> None:
    expression, said = str(rule["expr"]), str(rule["annotations"])
    found = [FAMILIES[name.removesuffix("_count")] for name in re.findall(r"consilium_\w+", expression)]
    assert found
    labels = {label for family in found for label in family.labels}
    assert {*re.findall(r"\{(\w+)=", expression), *re.findall(r"\$labels\.(\w+)", said)} <= labels
    assert set(re.findall(r'state="(\w+)"', expression)) <= {state.value for state in RunState}


def test_a_name_ends_with_its_unit_and_a_counter_with_total() -> None:
    for family in FAMILIES.values():
        assert re.fullmatch(r"consilium_(coordinator|silo)_[a-z_]+", family.name)
        assert (family.kind == "counter") is family.shown_name.endswith("_total"), family
        assert not re.search(r"total|millis|_ms\b|minutes|hours|kib|mib|percent", family.name), family
        assert family.kind != "histogram" or family.name.endswith("_seconds"), family


def test_problems_that_are_shown_are_those_that_can_be_found() -> None:
    source = (ROOT / "coordinator/operations/health.py").read_text()
    assert {word for word in PROBLEMS if f'"{word}"' in source.partition("class Readiness")[2]} == set(PROBLEMS)
