"""Lists of images as chest X-ray sets come: a column for each finding, or all findings in one cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fl_core import datasets
from fl_core.datasets import DataRequest, SiloDataset
from fl_core.errors import ConfigError, DataError
from fl_core.types.targets import UNKNOWN
from tests.support.data import write_csv

FINDINGS = ("Edema", "Effusion", "Nodule")
SPLITS = ("train", "train", "test", "train", "test")


def images(folder: Path, n: int = len(SPLITS)) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{k:03d}.png" for k in range(n)]
    for k, name in enumerate(names):
        Image.new("L", (12, 12), 40 * k + 10).save(folder / name)
    return names


def listed(folder: Path, header: list[str], rows: list[list[str]], description: str) -> str:
    file = write_csv(folder / "images.csv", header, rows)
    file.with_suffix(".toml").write_text(description)
    return f"manifest:{file}"


def loaded(reference: str, *labels: str) -> SiloDataset:
    return datasets.load(reference, DataRequest(labels or FINDINGS, 12))


def columns(folder: Path) -> str:
    """A list as CheXpert's: 1, 0, -1 for uncertain, and blank."""
    rows = [["1.0", "0.0", ""], ["0.0", "1.0", "-1.0"], ["1", "1", "0"], ["", "-1", ""], ["0", "0", "1"]]
    body = [[name, *row, split] for name, row, split in zip(images(folder), rows, SPLITS, strict=True)]
    description = f'path = "Path"\nlabels = {list(FINDINGS)}\nsplit = "split"\n'.replace("'", '"')
    return listed(folder, ["Path", *FINDINGS, "split"], body, description)


def joined(folder: Path) -> str:
    """A list as ChestX-ray14's, with words for nothing found in the dictionary."""
    cells = ["Edema", "Effusion|Nodule", "No Finding", "", "Edema|Effusion"]
    body = [[name, cell, split] for name, cell, split in zip(images(folder), cells, SPLITS, strict=True)]
    (folder / "labels.toml").write_text('[labels]\n"No Finding" = []\n')
    return listed(folder, ["Image Index", "Finding Labels", "split"], body, (
        'path = "Image Index"\nlabel = "Finding Labels"\nseparator = "|"\nsplit = "split"\n'
    ))  # fmt: skip


def test_a_column_for_each_finding_is_read_with_uncertain_and_blank_as_unknown(tmp_path: Path) -> None:
    found = loaded(columns(tmp_path))
    assert found.schema.multi_label
    assert found.schema.classes == FINDINGS
    assert found.train.labels.tolist() == [[1, 0, UNKNOWN], [0, 1, UNKNOWN], [UNKNOWN] * 3]
    assert found.test.labels.tolist() == [[1, 1, 0], [0, 0, 1]]
    x, y = found.train.batch(torch.tensor([1]))
    assert x.shape == (1, 3, 12, 12)
    assert y.tolist() == [[0, 1, UNKNOWN]]


def test_findings_joined_in_a_cell_are_found_and_the_others_of_the_list_are_not(tmp_path: Path) -> None:
    found = loaded(joined(tmp_path))
    assert found.train.labels.tolist() == [[1, 0, 0], [0, 1, 1], [UNKNOWN] * 3]
    assert found.test.labels.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_a_finding_that_no_cell_names_is_unknown_and_not_absent(tmp_path: Path) -> None:
    found = loaded(joined(tmp_path), *FINDINGS, "Hernia")
    assert found.train.labels[:, 3].unique().tolist() == [UNKNOWN]


def test_the_same_findings_are_the_same_targets_in_columns_and_in_one_cell(tmp_path: Path) -> None:
    names, answers = images(tmp_path / "a"), [[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]]
    images(tmp_path / "b")
    cells = ["|".join(f for f, a in zip(FINDINGS, row, strict=True) if a) or "None" for row in answers]
    (tmp_path / "b" / "labels.toml").write_text("[labels]\nNone = []\n")
    split = [*zip(names, SPLITS, strict=True)]
    a = listed(tmp_path / "a", ["path", *FINDINGS, "split"], [
        [name, *map(str, row), half] for (name, half), row in zip(split, answers, strict=True)
    ], 'labels = ["Edema", "Effusion", "Nodule"]\nsplit = "split"\n')  # fmt: skip
    b = listed(tmp_path / "b", ["path", "label", "split"], [
        [name, cell, half] for (name, half), cell in zip(split, cells, strict=True)
    ], 'separator = "|"\nsplit = "split"\n')  # fmt: skip
    left, right = loaded(a), loaded(b)
    assert torch.equal(left.train.labels, right.train.labels)
    assert torch.equal(left.test.labels, right.test.labels)


def test_a_column_for_each_class_of_which_one_is_1_is_one_class(tmp_path: Path) -> None:
    """As the ground truth of the ISIC challenges: names without a suffix, classes in columns."""
    images(tmp_path / "jpg")
    rows = [[f"{k:03d}", str(float(k % 2 == 0)), str(float(k % 2)), "0.0"] for k in range(5)]
    reference = listed(tmp_path, ["image", "MEL", "NV", "BCC"], rows, (
        'path = "image"\nfolder = "jpg"\nsuffix = ".png"\none_hot = ["MEL", "NV", "BCC"]\n'
    ))  # fmt: skip
    report = datasets.check(reference, DataRequest(("MEL", "NV", "BCC")))
    assert sum(sum(n) for n in report.counts.values()) == 5
    assert not [p for p in report.problems if p.code != "E-DATA-08"]
    rows[1][3] = "1.0"
    reference = listed(tmp_path, ["image", "MEL", "NV", "BCC"], rows, Path(tmp_path, "images.toml").read_text())
    with pytest.raises(DataError, match="line 3: 2 class columns are 1"):
        loaded(reference, "MEL", "NV", "BCC")


def test_without_a_column_of_splits_a_fifth_is_held_out_patients_together(tmp_path: Path) -> None:
    rows = [[name, FINDINGS[k % 3], f"p{k // 4}"] for k, name in enumerate(images(tmp_path, 80))]
    found = loaded(listed(tmp_path, ["path", "label", "group"], rows, 'group = "group"\n'))
    assert found.train.groups is not None
    assert found.test.groups is not None
    assert not {*found.train.groups} & {*found.test.groups}
    assert 0 < len(found.test) < 40


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ('labels = ["Edema"]\nlabel = "x"\n', "one of label, labels and one_hot, found label and labels"),
        ('labels = ["Edema"]\nseparator = "|"\n', "a separator only with one label column"),
        ('path = "Edema"\nlabels = ["Edema"]\n', "a separate column for each role"),
        ('labels = ["Edema"]\ncolour = 1\n', "colour"),
        ("labels = 3\n", "labels"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(tmp_path: Path, description: str, expected: str) -> None:
    reference = columns(tmp_path)
    (tmp_path / "images.toml").write_text(description)
    with pytest.raises(DataError, match=expected):
        loaded(reference)


def test_a_cell_that_is_no_answer_is_named_by_its_line_and_not_repeated(tmp_path: Path) -> None:
    reference = columns(tmp_path)
    file = tmp_path / "images.csv"
    file.write_text(file.read_text().replace("0.0,1.0,-1.0", "0.0,perhaps,-1.0"))
    with pytest.raises(DataError, match=r"line 3: neither found \(1\), nor not found \(0\), nor empty") as refused:
        loaded(reference)
    assert "perhaps" not in str(refused.value)


def test_a_list_in_which_nobody_names_a_finding_is_refused(tmp_path: Path) -> None:
    reference = joined(tmp_path)
    file = tmp_path / "images.csv"
    head, *rows = (line.split(",") for line in file.read_text().splitlines())
    file.write_text("\n".join(",".join(cells) for cells in (head, *([name, "", half] for name, _, half in rows))))
    with pytest.raises(DataError, match="without any label"):
        loaded(reference)


def test_lists_of_findings_are_divided_evenly_and_not_by_class(tmp_path: Path) -> None:
    rows = [[name, *(str((k >> bit) % 2) for bit in range(3))] for k, name in enumerate(images(tmp_path, 40))]
    reference = listed(tmp_path, ["path", *FINDINGS], rows, f"labels = {list(FINDINGS)}\n".replace("'", '"'))
    whole = loaded(reference)
    shares = [datasets.load(f"{reference}#iid-2/{k}", DataRequest(FINDINGS, 12)).train for k in range(2)]
    assert sum(len(share) for share in shares) == len(whole.train)
    assert all(share.labels.shape[1] == 3 for share in shares)
    with pytest.raises(ConfigError, match="expected federation=iid-N for records of several labels"):
        datasets.load(f"{reference}#p2c1/0", DataRequest(FINDINGS, 12))
