"""The command `consilium` as its user has it: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import csv
import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from pydicom.uid import generate_uid

from consilium.cli.main import program
from consilium.model.output import csv_text
from consilium.model.predictor import Prediction
from tests.support.data import write_dicom
from tests.support.exported import TAUGHT, Exported, exported_without

pytestmark = pytest.mark.integration

SERVICES = ("grpc", "hydra", "opacus", "sqlalchemy", "coordinator", "silo")


@pytest.fixture
def model(made: Exported, tmp_path: Path) -> Path:
    """Copy the model and its card alone: nothing else of the federation is there."""
    for suffix in (".safetensors", ".md"):
        shutil.copy(made.model.with_suffix(suffix), tmp_path)
    return tmp_path / made.model.name


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def consilium(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command line as the program does, in this process."""

    def run(*words: object) -> Done:
        capsys.readouterr()
        status = program().run([*map(str, words)])
        return Done(status, *capsys.readouterr())

    return run


def test_calibrate_then_predict(made: Exported, model: Path, consilium: Callable[..., Done]) -> None:
    done = consilium("calibrate", model, "--data", made.hospital)
    assert done.status == 0, done.err
    assert "contain the right class for 90 % of images like these" in done.out
    rows = re.findall(r"^\d\s+\d+\s+\d+\s+0\.\d+\s+all classes with fewer than 49", done.out, re.MULTILINE)
    assert len(rows) == 9
    file = model.with_name("digits-1.calibration.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    out = model.with_name("new.json"), model.with_name("new.csv")
    done = consilium("predict", model, "--data", made.new, "--split", "all", "--out", out[0], "--out", out[1])
    assert done.status == 0, done.err
    whole = json.loads(out[0].read_text())
    assert whole["calibration"]["coverage"] == 0.9
    assert whole["in_all"]["covered"] / whole["in_all"]["examples"] == pytest.approx(0.9, abs=0.04)
    assert re.search(rf"^all\s+{whole['in_all']['examples']}\s", done.out, re.MULTILINE)
    rows = list(csv.DictReader(out[1].open()))
    assert [row["example"] for row in rows] == [p["example"] for p in whole["predictions"]]
    for row, prediction in zip(rows, whole["predictions"], strict=True):
        found = [float(row[f"p({c})"]) for c in TAUGHT]
        assert found == pytest.approx(prediction["probabilities"], rel=1e-8)
        assert sum(found) == pytest.approx(1)
        assert row["set"].split("; ") == (prediction["set"] or [""])

    done = consilium("predict", model, "--data", made.hospital, "--json")
    assert json.loads(done.out)["calibration"]["model"] == whole["model"]["sha256"]
    done = consilium("predict", model, "--data", made.hospital)
    assert "was calibrated with these examples" in done.err


def test_an_answer_that_nobody_taught_is_marked_in_the_table_and_named_in_the_file(
    made: Exported, tmp_path: Path, consilium: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = exported_without(made, tmp_path, "3", "5"), tmp_path / "all.json"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for digit in "3456":
        shutil.copy(sorted((made.images / f"new/{digit}").iterdir())[0], tmp_path / f"in/{digit}.png")
    done = consilium("predict", model, "in", "--out", out)
    assert done.status == 0, done.err
    assert "not trained: no hospital had 3, 5, so the model cannot recognise them" in done.err
    whole = json.loads(out.read_text())
    assert whole["model"]["untaught"] == ["3", "5"]
    answers = {p["answer"] for p in whole["predictions"]}
    assert answers & {"3", "5"}
    assert answers - {"3", "5"}
    done = consilium("predict", model, "in")
    rows = dict(re.findall(r"\.png\s+(\d)\s+\d+\.\d %\s+-(.*)$", done.out, re.MULTILINE))
    assert {answer: note.strip() for answer, note in rows.items()} == {
        answer: f"not trained: no hospital had {answer}" if answer in "35" else "" for answer in answers
    }


def test_a_folder_of_images_a_broken_one_and_status_2(
    made: Exported, model: Path, tmp_path: Path, consilium: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    shutil.copy(next((made.images / "new/3").iterdir()), tmp_path / "in/a.png")
    (tmp_path / "in/b.png").write_bytes(b"none")
    done = consilium("predict", model, "in")
    assert done.status == 2
    assert re.search(r"^in/a\.png\s+\d\s+\d+\.\d %\s+-", done.out, re.MULTILINE)
    assert re.search(r"^in/b\.png\s+-\s+-\s+-\s+not an image in a", done.out, re.MULTILINE)
    assert "1 of 2 could not be classified" in done.err
    assert "not calibrated" in done.out


def test_dicom_images_get_structured_reports(
    made: Exported, model: Path, tmp_path: Path, consilium: Callable[..., Done]
) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(next((made.images / "new/3").iterdir()), tmp_path / "in/a.png")
    pixels = np.asarray(Image.open(tmp_path / "in/a.png"))
    write_dicom(tmp_path / "in/b.dcm", pixels, StudyInstanceUID=generate_uid(), SeriesInstanceUID=generate_uid())
    done = consilium("predict", model, tmp_path / "in", "--sr", tmp_path / "sr")
    assert (done.status, len(list((tmp_path / "sr").iterdir()))) == (0, 1), done.err
    assert f"wrote 1 structured report to {tmp_path / 'sr'}" in done.out
    assert "not DICOM, so without a structured report: 1 of 2" in done.err

    write_dicom(tmp_path / "in/c.dcm", pixels)
    done = consilium("predict", model, tmp_path / "in", "--sr", tmp_path / "sr", "--json")
    assert done.status == 2
    told = json.loads(done.out)["structured_reports"]
    assert list(told["files"]) == [str(tmp_path / "in/b.dcm")]
    assert list(told["problems"]) == [str(tmp_path / "in/c.dcm")]
    done = consilium("predict", model, tmp_path / "in", "--sr", tmp_path / "sr")
    assert f"{tmp_path / 'in/c.dcm'}: no structured report: expected SOPClassUID" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict"], "Missing argument"),
        (["predict", "MODEL"], "E-CFG-02: expected either INPUT... or --data"),
        (["predict", "MODEL", "x.png"], "E-DATA-02"),
        (["predict", "MODEL", ".", "--out", "x.xlsx"], "E-CFG-02: --out: expected a file ending in .csv or .json"),
        (["predict", "MODEL", ".", "--out", "no/x.csv"], "E-CFG-02: --out: there is no folder no"),
        (["predict", "MODEL", ".", "--sr", "MODEL"], "E-CFG-02: --sr: expected a folder, found the file"),
        (["predict", "MODEL", ".", "--sha256", "0" * 64], "E-STATE-22: expected SHA-256 0000"),
        (["predict", "MODEL", ".", "--card", "other.md"], "E-STATE-22: expected the card of digits-1.safetensors"),
        (["predict", "MODEL", ".", "--calibration", "none"], "E-CFG-02"),
        (["predict", "digits-1.md", "."], "E-CFG-02: expected the .safetensors file"),
        (["calibrate", "MODEL", "--data", "folder:nowhere"], "E-DATA-02"),
        (["calibrate", "MODEL", "--data", "digits/iid-2/0"], "E-"),
        (["calibrate", "MODEL", "--data", "folder:.", "--coverage", "1"], "E-CFG-02: expected a coverage from 0.5"),
        (["page", "MODEL", "--bind", "0.0.0.0:80"], "E-CFG-02: --bind"),
    ],
)
def test_what_cannot_be_is_said(
    model: Path, words: list[str], said: str, consilium: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    done = consilium(*(model.name if word == "MODEL" else word for word in words))
    assert done.status in (1, 2)
    assert said in done.err
    assert "Traceback" not in done.err


def test_another_file_under_the_name_of_the_exported_one_is_refused(
    model: Path, consilium: Callable[..., Done]
) -> None:
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(raw)
    done = consilium("predict", model, ".")
    assert done.status != 0
    assert "E-STATE-22" in done.err
    assert "this card belongs to another file" in done.err


OFFLINE = """
import sys
from pathlib import Path
from consilium.model.commands import ModelArguments
from fl_core.datasets.image_loader import ImageLoader
from consilium.model.inputs import from_paths
from consilium.model.predictor import Predictor

model = ModelArguments(Path(sys.argv[1])).load()
found = Predictor(model).predictions(from_paths([Path(sys.argv[2])], model.facts, ImageLoader(cache_bytes=0)))
assert len(found) > 100 and not any(p.problem for p in found)
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[3:])))
"""


def test_a_prediction_loads_nothing_of_a_federation_or_its_network(made: Exported, model: Path) -> None:
    words = [sys.executable, "-c", OFFLINE, str(model), str(made.images / "unknown"), *SERVICES]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "[]"


def test_cells_are_no_formulas_and_names_no_control_characters() -> None:
    found = [
        Prediction("=HYPERLINK(1).png", (0.25, 0.75), "@b", ("-a", "@b"), True, "", ""),
        Prediction("x\x1b[2J\n.png", problem="+broken"),
    ]
    rows = list(csv.reader(csv_text(found, ["-a", "@b"]).splitlines()))
    assert rows[1][:4] == ["'=HYPERLINK(1).png", "none of the classes", "'@b", "'-a; @b"]
    assert rows[2][0] == "x\\x1b[2J\\n.png"
    assert rows[2][6] == "'+broken"
    assert all(len(row) == len(rows[0]) for row in rows)
