"""Tables: what a row becomes, every fault of schema and rows, and what a row is known by."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import minmax_scale

from fl_core.datasets import check, federation, load, load_all
from fl_core.datasets.sources import table
from fl_core.datasets.sources.table import cell_parser
from fl_core.datasets.table_schema import read_schema
from fl_core.errors import ConfigError, DataError
from fl_core.types.columns import Column, difference
from tests.support.data import HEADER, SCHEMA, refuse, rows, write_csv, write_table


def test_a_row_becomes_its_places_in_the_declared_ranges(tmp_path: Path) -> None:
    """Against scikit-learn's scaling, with the declared ends as two more rows."""
    body = rows(60)
    silo = load(f"table:{write_table(tmp_path, body)}")
    train = [row for row in body if row[7] == "train"]
    assert silo.schema.shape == (6,)
    assert silo.schema.classes == ("benign", "malignant")
    ages = minmax_scale(np.array([*(float(str(r[2])) for r in train), 0, 120]), (-1, 1))[:-2]
    present = [r[3] != "" for r in train]
    markers = minmax_scale(np.array([*(float(str(r[3] or 1)) for r in train), -1, 3]), (-1, 1))[:-2]
    x, y = silo.train.batch(torch.arange(len(train)))
    assert np.abs(x[:, 0].numpy() - ages).max() < 1e-6
    assert np.abs(x[:, 1].numpy() - np.where(present, markers, 0)).max() < 1e-6
    assert x[:, 2].tolist() == [float(not p) for p in present]
    assert x[:, 3:5].tolist() == [[float(r[4] == "f"), float(r[4] == "m")] for r in train]
    assert x[:, 5].tolist() == [1.0] * len(train)
    assert y.tolist() == [int(r[6] == "malignant") for r in train]


def test_scaling_never_looks_at_the_records(tmp_path: Path) -> None:
    """A row means the same numbers, whatever rows stand beside it."""
    body = rows(40)
    alone = load(f"table:{write_table(tmp_path / 'a', [*body[:1], *body[8:12]])}")
    among = load(f"table:{write_table(tmp_path / 'b', body)}")
    index = torch.arange(len(alone.train))
    shared = [k for k, r in enumerate(r for r in body if r[7] == "train") if r in body[8:12]]
    assert torch.equal(
        torch.sort(alone.train.batch(index)[0], 0)[0], torch.sort(among.train.batch(torch.tensor(shared))[0], 0)[0]
    )


@pytest.mark.parametrize(
    ("column", "cell", "match"),
    [
        ("age", "130", "age: outside 0 to 120"),
        ("age", "40.5", "age: no whole number"),
        ("age", "", "age: no value"),
        ("age", "nan", "age: no number"),
        ("age", "1e999", "age: no number"),
        ("age", "1_0", "age: no number"),
        ("age", "٤٠", "age: no number"),
        ("marker", "1,5", "marker: a decimal comma"),
        ("marker", "1e38", "marker: outside -1 to 3"),
        ("sex", "F", "sex: none of the declared"),
        ("smoker", "perhaps", "smoker: neither true nor false"),
        ("diagnosis", "", "diagnosis: no label"),
        ("split", "valid", "split: neither train nor test"),
    ],
)
def test_a_cell_that_the_schema_does_not_allow_names_its_line_and_not_its_value(
    tmp_path: Path, column: str, cell: str, match: str
) -> None:
    body = rows(30)
    body[4][HEADER.index(column)] = cell
    report = check(f"table:{write_table(tmp_path, body)}")
    (found,) = report.problems
    assert (found.code, found.count) == ("E-DATA-07", 1)
    assert found.first[0].startswith(f"line 6: {match}")
    assert not cell or cell not in found.first[0].partition(": ")[2].replace(match, "")


def test_all_bad_rows_are_counted_and_the_first_fifty_listed(tmp_path: Path) -> None:
    body = rows(100)
    for row in body[:70]:
        row[2] = 999
    (found,) = check(f"table:{write_table(tmp_path, body)}").problems
    assert (found.count, len(found.first)) == (70, 50)


def test_values_outside_are_clipped_where_the_schema_says_so(tmp_path: Path) -> None:
    body = rows(30)
    body[2][2] = 400
    text = SCHEMA.replace("max = 120", 'max = 120\noutside = "clip"')
    silo = load(f"table:{write_table(tmp_path, body, schema=text)}")
    assert silo.train.batch(torch.arange(len(silo.train)))[0][:, 0].max() == 1


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('type = "integer"', 'type = "whole"', "one of"),
        ("max = 120", "max = 0", "min below max"),
        ("max = 120", "max = inf", "finite"),
        ("max = 120", "maximum = 120", "there is no 'maximum'"),
        ("max = 120", "", "min and max"),
        ('categories = ["f", "m"]', 'categories = ["f", "f"]', "each once"),
        ('categories = ["f", "m"]', "", "categories for a category"),
        ('label = "diagnosis"', 'label = "age"', "cannot be inputs"),
        ('label = "diagnosis"', "", "the schema has neither"),
        ('classes = ["benign", "malignant"]', 'classes = ["benign"]', "two classes"),
        ("[columns.age]", '[columns."a\\u202eb"]', "visible name"),
        ("[columns.age]", "[columns.age", "TOML"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, match: str) -> None:
    refuse(match, "E-DATA-07", f"table:{write_table(tmp_path, rows(30), schema=SCHEMA.replace(old, new, 1))}")


def test_a_table_without_schema_or_columns_is_refused(tmp_path: Path) -> None:
    file = write_table(tmp_path, rows(30))
    write_csv(file, HEADER[:-1], [row[:-1] for row in rows(30)])
    refuse("without split", "E-DATA-07", f"table:{file}")
    write_csv(file, (*HEADER, "age"), [[*row, 1] for row in rows(30)])
    refuse("with age twice", "E-DATA-07", f"table:{file}")
    file.with_suffix(".toml").unlink()
    refuse("expected the schema of a table", "E-DATA-02", f"table:{file}")
    refuse("expected the schema of a table", "E-DATA-02", f"table:{tmp_path / 'gone.csv'}")


def test_groups_in_both_splits_are_refused_and_kept_together_without_a_split(tmp_path: Path) -> None:
    body = rows(200)
    file = write_table(tmp_path, body, roles='group = "patient"')
    silo = load(f"table:{file}")
    assert not set(silo.train.groups or ()) & set(silo.test.groups or ())
    assert 0.1 < len(silo.test) / 200 < 0.3
    assert any("held out" in note for note in check(f"table:{file}").notes)
    moved = load(f"table:{write_table(tmp_path / 'b', body[::-1], roles=chr(10).join(['group = ' + repr('patient')]))}")
    assert set(moved.test.groups or ()) == set(silo.test.groups or ())
    for k, row in enumerate(body):
        row[7] = ("train", "test")[k % 2]
    both = write_table(tmp_path / "c", body, roles='group = "patient"\nsplit = "split"')
    refuse("groups in both train and test: 100", "E-DATA-07", f"table:{both}")


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    file = write_table(tmp_path, rows(60))
    frame = pd.read_csv(file)
    frame["smoker"] = frame["smoker"] == "yes"
    frame.sample(frac=1.0, axis=1, random_state=0).to_parquet(tmp_path / "patients.parquet")
    one, other = load(f"table:{file}"), load(f"table:{tmp_path / 'patients.parquet'}")
    index = torch.arange(len(one.train))
    assert torch.equal(one.train.batch(index)[0], other.train.batch(index)[0])
    assert one.train.content_names == other.train.content_names
    raw = (tmp_path / "patients.parquet").read_bytes()
    for n in (0, 40, len(raw) // 2):
        (tmp_path / "patients.parquet").write_bytes(raw[:n])
        refuse("Parquet", "E-DATA-07", f"table:{tmp_path / 'patients.parquet'}")


def test_a_row_is_known_by_its_cells_or_by_its_record(tmp_path: Path) -> None:
    """Spelling, order, scaling, label and group make no new record; another value does."""
    body = rows(40)
    one = load(f"table:{write_table(tmp_path / 'a', body)}")
    for row in body:
        row[2], row[5], row[1] = f"{float(str(row[2])):.1f}", "TRUE", "other"
        row[6] = "malignant" if row[6] == "benign" else "benign"
    wider = SCHEMA.replace("max = 120", "max = 150")
    other = load(f"table:{write_table(tmp_path / 'b', body, schema=wider)}")
    assert set(one.train.content_names) == set(other.train.content_names)
    body[2][2] = 77
    assert set(load(f"table:{write_table(tmp_path / 'c', body)}").train.content_names) != set(one.train.content_names)
    roles = 'split = "split"\nrecord = "visit"'
    named = load(f"table:{write_table(tmp_path / 'd', body, roles=roles)}").train.content_names
    body[2][2] = 11
    edited = load(f"table:{write_table(tmp_path / 'e', body, roles=roles)}")
    assert set(edited.train.content_names) == set(named)
    body[3][0] = body[2][0]
    refuse(
        r"that occur in several rows: 1 \(lines 4 = 5\)",
        "E-DATA-07",
        f"table:{write_table(tmp_path / 'f', body, roles=roles)}",
    )


def test_equal_rows_in_both_splits_are_refused(tmp_path: Path) -> None:
    body = rows(40)
    body[0][2:6] = body[2][2:6]
    refuse(r"equal rows in both train and test: 1 \(lines 2 = 4\)", "E-DATA-07", f"table:{write_table(tmp_path, body)}")


def test_a_table_is_dealt_to_simulated_hospitals_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = f"table:{write_table(tmp_path, rows(80))}"
    reads: list[Path] = []
    whole = table.scan
    monkeypatch.setattr(table, "scan", lambda file, classes: reads.append(file) or whole(file, classes))
    silos = load_all(federation(reference, "iid-4"))
    assert len(reads) == 1
    assert sum(len(s.train) for s in silos) == 64
    names = [name for s in silos for name in s.train.content_names]
    assert len(set(names)) == len(names)


def test_differences_of_schemas_are_told_by_name() -> None:
    run = [Column("age", "integer", 0, 120), Column("sex", "category", categories=("f", "m"))]
    assert difference(run, run) == ""
    own = [Column("age", "integer", 0, 100), Column("bmi", "number", 10, 60)]
    assert difference(run, own) == (
        "'sex' is not here; 'bmi' differs from the run's; 'age' has max 120 in the run and 100 here"
    )
    assert difference(run, run[::-1]) == "the columns are in another order"


@given(
    low=st.floats(allow_nan=False, allow_infinity=False),
    high=st.floats(allow_nan=False, allow_infinity=False),
    value=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_declared_range_gives_finite_numbers_from_minus_one_to_one(low: float, high: float, value: float) -> None:
    try:
        column = Column("a", "number", low, high, outside="clip")
    except ConfigError:
        return
    (found,), _ = cell_parser(column, frozenset([""]))(repr(value))
    assert -1 <= found <= 1


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[columns]\nage = 3", b"columns = 3", b"a" * 100])
def test_a_schema_of_any_bytes_is_refused_with_a_code(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_schema(tmp_path / "a.toml")
    assert caught.value.code == "E-DATA-07"


CRP = 'label = "dx"\nclasses = ["a", "b"]\n[columns.crp]\ntype = "number"\nmin = 0\nmax = 500\n'
SHORT = [round(0.1 + 0.3 * k, 1) for k in range(120)]
LONG = [500 * (k * 0.6180339887498949 % 1) for k in range(120)]


def crp_table(folder: Path, cells: Sequence[object], store: str = "csv") -> Path:
    """Write a table of one number and a class: as text, or in a column of this width."""
    file = folder / (f"{store}.csv" if store == "csv" else f"{store}.parquet")
    folder.mkdir(exist_ok=True)
    file.with_suffix(".toml").write_text(CRP)
    if store == "csv":
        return write_csv(file, ("crp", "dx"), [(cell, "ab"[k % 2]) for k, cell in enumerate(cells)])
    numbers = np.array(cells, dtype=object if store == "decimal" else store)
    pd.DataFrame({"crp": numbers, "dx": list("ab" * (len(cells) // 2))}).to_parquet(file)
    return file


@pytest.mark.parametrize(
    ("values", "store", "spelt"),
    [
        (SHORT, "float32", float),
        (SHORT, "float64", float),
        (SHORT, "decimal", lambda v: Decimal(repr(v))),
        (SHORT, "csv", "{:.3e}".format),
        (SHORT, "csv", "+{:.6f}00".format),
        (LONG, "float32", float),
        (LONG, "csv", lambda v: f"{np.float32(v):.9g}"),
        (LONG, "csv", "{:.15g}".format),
        ([float(k) for k in range(120)], "int16", int),
        ([float(k) for k in range(120)], "csv", lambda v: v or "-0.0"),
        ([float(k) for k in range(120)], "csv", "{:.0f}e0".format),
    ],
    ids=["float32", "float64", "decimal", "e", "sign", "long float32", "nine digits", "15 digits", "int16", "-0", "e0"],
)
def test_a_row_has_one_name_hold_out_and_fingerprint_whatever_width_or_spelling_its_numbers_have(
    tmp_path: Path, values: list[float], store: str, spelt: Callable[[float], object]
) -> None:
    one = load(f"table:{crp_table(tmp_path / 'a', values)}")
    other = load(f"table:{crp_table(tmp_path / 'b', [spelt(v) for v in values], store)}")
    assert one.fingerprint == other.fingerprint
    for a, b in ((one.train, other.train), (one.test, other.test)):
        assert a.content_names == b.content_names
        assert torch.equal(a.batch(torch.arange(len(a)))[0], b.batch(torch.arange(len(b)))[0])


def test_numbers_that_differ_in_the_sixth_digit_are_two_records(tmp_path: Path) -> None:
    one = load(f"table:{crp_table(tmp_path / 'a', [100 + k / 1000 for k in range(120)])}")
    assert len({*one.train.content_names, *one.test.content_names}) == 120


@pytest.mark.parametrize(
    ("values", "store", "fingerprint"),
    [
        (SHORT, "float32", "a85f9790959257e4"),
        (LONG, "csv", "ccefc98532d1e10a"),
        (LONG, "float32", "7cd7bbd0f9aaa417"),
    ],
)
def test_a_table_can_be_read_as_0_1_0_did(tmp_path: Path, values: list[float], store: str, fingerprint: str) -> None:
    """The fingerprints are those that 0.1.0 computed of these tables."""
    silo = load(f"table:{crp_table(tmp_path, values, store)}")
    assert silo.earlier is not None
    assert silo.earlier().fingerprint[:16] == fingerprint
    assert silo.earlier().earlier is None
    assert load(f"table:{crp_table(tmp_path, SHORT)}").fingerprint[:16] == "2fe2e97c63a8ebf0"  # nothing has changed


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_a_table_names_what_separates_its_cells(tmp_path: Path, sign: str, name: str) -> None:
    file = crp_table(tmp_path, SHORT)
    file.write_text(file.read_text().replace(",", sign))
    refuse(f"separated by commas .*found {name}", "E-DATA-07", f"table:{file}")


def test_a_number_with_a_decimal_comma_is_named_as_one(tmp_path: Path) -> None:
    file = crp_table(tmp_path, ["1,5", *SHORT[1:]])
    refuse("line 2: crp: a decimal comma", "E-DATA-07", f"table:{file}")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_of_a_table_are_one_in_every_unicode_form(tmp_path: Path, form: str) -> None:
    table = unicodedata.normalize(form, "größe,ort,dx\n" + "".join(f"{k},Hüfte,{'äb'[k % 2]}\n" for k in range(60)))
    schema = 'label = "dx"\nclasses = ["ä", "b"]\n[columns."größe"]\ntype = "number"\nmin = 0\nmax = 99\n'
    schema += '[columns.ort]\ntype = "category"\ncategories = ["Hüfte", "Knie"]\n'
    other = unicodedata.normalize({"NFC": "NFD", "NFD": "NFC"}[form], schema)
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (tmp_path / "a.toml").write_text(other, encoding="utf-8")
    silo = load(f"table:{tmp_path / 'a.csv'}")
    assert silo.schema.classes == ("ä", "b")
    assert [column.name for column in silo.schema.columns] == ["größe", "ort"]
    pd.read_csv(tmp_path / "a.csv").to_parquet(tmp_path / "a.parquet")
    assert load(f"table:{tmp_path / 'a.parquet'}").fingerprint == silo.fingerprint
