"""Tables with a column for each label: found, not found, or not looked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fl_core.datasets import DataRequest, check, load
from fl_core.errors import DataError
from fl_core.types.enums import Split
from tests.support.data import write_csv

RUN = ("edema", "effusion", "nodule")
INPUT = '[columns.age]\ntype = "integer"\nmin = 0\nmax = 120\n'
BODY = (
    (30, "1", "0", "train"),
    (40, "yes", "", "train"),
    (50, "", "", "train"),
    (60, "0", "TRUE", "train"),
    (70, "", "false", "test"),
)


def table(
    root: Path,
    labels: Sequence[str] = ("edema", "effusion"),
    body: Sequence[Sequence[object]] = BODY,
    dictionary: str = "",
) -> str:
    path = write_csv(root / "patients.csv", ("age", *labels, "split"), body)
    path.with_suffix(".toml").write_text(f"labels = {list(labels)}\nsplit = 'split'\n{INPUT}")
    if dictionary:
        (root / "labels.toml").write_text(f"[labels]\n{dictionary}")
    return f"table:{path}"


def test_an_empty_cell_is_unknown_and_so_is_a_label_without_a_column(tmp_path: Path) -> None:
    silo = load(table(tmp_path), DataRequest(classes=RUN))
    assert silo.schema.multi_label
    assert silo.schema.classes == RUN
    assert silo.train.labels.tolist() == [[1, 0, -1], [1, -1, -1], [-1, -1, -1], [0, 1, -1]]
    assert silo.test.labels.tolist() == [[-1, 0, -1]]
    assert silo.train.batch(torch.tensor([3]))[1].tolist() == [[0, 1, -1]]


def test_a_check_counts_what_was_found_and_says_what_was_looked_for(tmp_path: Path) -> None:
    report = check(table(tmp_path), DataRequest(classes=RUN))
    assert not report.problems
    assert report.counts == {Split.TRAIN: (2, 1, 0), Split.TEST: (0, 0, 0)}
    notes = " | ".join(report.notes)
    assert "records (of 5) examined for each label: edema: 3, effusion: 3" in notes
    assert "no record here was examined for: nodule; they are unknown, not absent" in notes
    assert "not examined for any label: 1; they are not used for training" in notes


def test_columns_have_names_of_their_own_and_two_for_one_label_say_what_either_found(tmp_path: Path) -> None:
    names = ("Oedem", "R60", "scar")
    body = [(30, a, b, "1", "train") for a in ("1", "0", "") for b in ("1", "0", "")] + [(40, "0", "0", "", "test")]
    dictionary = 'Oedem = "edema"\nR60 = "edema"\nscar = []\n'
    silo = load(table(tmp_path, names, body, dictionary), DataRequest(classes=RUN))
    found = silo.train.labels[:, 0].reshape(3, 3).tolist()
    assert found == [[1, 1, 1], [1, 0, -1], [1, -1, -1]]  # unless one found it, both must have looked
    assert silo.train.labels[:, 1:].unique().tolist() == [-1]
    assert silo.dictionary.digest
    assert load(table(tmp_path, names, body, dictionary)).schema.classes == ("edema",)
    with pytest.raises(DataError, match="coarse labels need records with one class"):
        load(table(tmp_path, names, body, dictionary.replace("[]", '["edema", "nodule"]')), DataRequest(classes=RUN))


def test_faults_are_named_by_their_lines_and_never_by_their_cells(tmp_path: Path) -> None:
    report = check(table(tmp_path, body=[*BODY, (30, "maybe", "", "train")]), DataRequest(classes=RUN))
    assert report.problems[0].first == ("line 7: a label: neither found (1), nor not found (0), nor empty",)
    strange = check(table(tmp_path), DataRequest(classes=("edema", "nodule")))
    assert strange.problems[0].code == "E-DATA-05"
    assert strange.problems[0].first == ("'effusion': 1",)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_split_in_which_nobody_looked_for_anything_is_empty(tmp_path: Path, empty: str) -> None:
    body = [(row[0], *(["", ""] if row[3] == empty else row[1:3]), row[3]) for row in BODY]
    report = check(table(tmp_path, body=body), DataRequest(classes=RUN))
    assert [p.code for p in report.problems] == ["E-DATA-08"]
    assert report.problems[0].first == (empty,)


@pytest.mark.parametrize(
    "schema",
    [
        'labels = ["age"]\n',
        'labels = ["a", "a"]\n',
        'labels = ["a"]\nlabel = "b"\n',
        'labels = ["a"]\nclasses = ["x", "y"]\n',
        'labels = ["split"]\nsplit = "split"\n',
        "labels = []\n",
    ],
)
def test_schemas_that_contradict_themselves_are_refused(tmp_path: Path, schema: str) -> None:
    reference = table(tmp_path)
    (tmp_path / "patients.toml").write_text(schema + INPUT)
    with pytest.raises(DataError, match="E-DATA-07"):
        load(reference)


def test_what_was_looked_for_is_part_of_what_the_data_are(tmp_path: Path) -> None:
    one = load(table(tmp_path)).fingerprint
    body = [(30, "1", "", "train"), *BODY[1:]]
    assert load(table(tmp_path, body=body)).fingerprint != one
