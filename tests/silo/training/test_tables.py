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
from tests.support.data import SCHEMA, rows, write_table
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
        hospital.offer()
        hospital.sent()
    finally:
        hospital.stop()
        hospital.host.stop()


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
        hospital.stop()
        hospital.host.stop()


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
