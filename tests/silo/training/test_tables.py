"""A hospital with a table: its schema against the run's, and what it says where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.records import Schema
from privacy.ledger import registration
from privacy.ledger.ledger import Ledger
from tests.support.data import SCHEMA, rows, write_csv, write_table
from tests.support.fake_coordinator import Hospital, manifest


def of_table(schema: Schema) -> dict[str, object]:
    layout = derive_layout(build_method("fedavg", {}), build_model("table_mlp", {}, schema, 3), schema)
    return {"data": "table", "schema": schema, "layout": layout, "model": NamedOptions("table_mlp", {})}


def serving(home: Path, run_schema: Schema, table: Path) -> Hospital:
    hospital = Hospital(home, manifest(**of_table(run_schema)), data=f"table:{table}")
    hospital.start()
    return hospital


def test_a_hospital_whose_schema_is_the_runs_trains(tmp_path: Path) -> None:
    table = write_table(tmp_path / "data", rows(60))
    hospital = serving(tmp_path / "home", datasets.load(f"table:{table}").schema, table)
    try:
        assert (hospital.control.last.hello.data.name, list(hospital.control.last.hello.data.classes)) == ("table", [])
        hospital.train()
    finally:
        hospital.end()


def test_a_hospital_with_another_schema_says_what_differs_and_no_number_of_its_records(tmp_path: Path) -> None:
    table = write_table(tmp_path / "data", rows(60))
    wider = SCHEMA.replace("max = 120", "max = 150").replace('"f", "m"', '"f", "m", "x"')
    other = datasets.load(f"table:{write_table(tmp_path / 'other', rows(60), schema=wider)}").schema
    hospital = serving(tmp_path / "home", other, table)
    try:
        hospital.offer()
        refused = hospital.refused()
        assert refused.code == "E-DATA-05"
        assert "'age' has max 150.0 in the run and 120.0 here" in refused.reason
        assert "'sex' has categories ['f', 'm', 'x'] in the run and ['f', 'm'] here" in refused.reason
        for own in (str(tmp_path), "patients", "60", "48"):
            assert own not in refused.reason
    finally:
        hospital.end()


@pytest.mark.parametrize("changed", [False, True])
def test_the_ledger_knows_rows_under_another_name_order_spelling_and_range(tmp_path: Path, changed: bool) -> None:
    body = rows(40)
    ledger = Ledger(tmp_path / "ledger.db")
    registration.register(ledger, datasets.load(f"table:{write_table(tmp_path / 'a', body)}"), "one")
    for row in body:
        row[2], row[5] = f"{row[2]}.0", "1"
        if changed:
            row[2] = 120 - float(str(row[2]))
    wider = SCHEMA.replace("max = 120", "max = 200")
    again = datasets.load(f"table:{write_table(tmp_path / 'b', body[::-1], schema=wider)}")
    if changed:
        assert registration.register(ledger, again, "two")["two/train"]
        return
    with pytest.raises(Exception, match="E-BUDGET-04"):
        registration.register(ledger, again, "two")


LABELS = ("edema", "effusion", "nodule")


def of_labels(folder: Path, labels: tuple[str, ...]) -> Path:
    """Write a table in which each of these labels was looked for in two rows of three."""
    inputs = '[columns.age]\ntype = "integer"\nmin = 0\nmax = 120\n'
    body = [(20 + k, *(("1", "0", "")[(k + j) % 3] for j in range(len(labels)))) for k in range(60)]
    table = write_csv(folder / "patients.csv", ("age", *labels), body)
    table.with_suffix(".toml").write_text(f"labels = {list(labels)}\n{inputs}")
    return table


def test_a_hospital_that_looks_for_fewer_labels_trains_on_those(tmp_path: Path) -> None:
    run = datasets.load(f"table:{of_labels(tmp_path / 'run', LABELS)}").schema
    hospital = serving(tmp_path / "home", run, of_labels(tmp_path / "data", LABELS[:2]))
    try:
        hospital.train()
        (task,) = hospital.service.store.history()[0].tasks
        assert [bool(n) for n in task.evaluation.examples] == [True, True, False]
    finally:
        hospital.end()


def test_a_table_of_classes_is_no_table_of_labels_and_the_lead_hears_so(tmp_path: Path) -> None:
    run = datasets.load(f"table:{of_labels(tmp_path / 'run', LABELS)}").schema
    table = of_labels(tmp_path / "data", LABELS)
    one_class = table.with_suffix(".toml").read_text().replace("labels =", "label = 'kind'\nclasses =")
    write_csv(table, ("age", "kind"), [(20 + k, LABELS[k % 3]) for k in range(60)])
    table.with_suffix(".toml").write_text(one_class)
    hospital = serving(tmp_path / "home", run, table)
    try:
        hospital.offer()
        refused = hospital.refused()
        assert refused.code == "E-DATA-05"
        assert "expected any number of labels for each record" in refused.reason
    finally:
        hospital.end()
