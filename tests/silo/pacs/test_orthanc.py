"""A real PACS from its list to a model: 300 studies, of which many are not what one would wish."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_core.errors import ConfigError
from silo.cancellation import CancelToken
from silo.cli.options import open_store
from silo.pacs.mirror import Mirror
from silo.storage.home import Home
from tests.support import until
from tests.support.orthanc import USER, Orthanc, missing, orthanc
from tests.support.pacs import dicom
from tests.support.processes import World, world

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
STUDIES, EMPTY, THREE_SERIES, BARE, BROKEN = 300, 48, 20, 30, 10
POLICY = '[survey]\nallow = ["classes", "images", "patients"]\n'
IMAGES = STUDIES - EMPTY + 2 * THREE_SERIES - BROKEN


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Orthanc]:
    with orthanc(tmp_path / "pacs") as made:
        yield made


def objects() -> dict[str, bytes]:
    """Make what the PACS holds, by number; the broken ones come first, then the bare ones, empty studies last."""
    made = dict[str, bytes]()
    for k in range(STUDIES):
        study = f"1.2.826.{k}"
        tags = {"StudyInstanceUID": study, "Modality": "CT", "PatientID": f"patient-{k // 2}", "StudyDate": "20240131"}
        tags |= {"AccessionNumber": f"A{k}", "StudyDescription": "Chest", "PatientName": f"Doe^{k}"}
        if BROKEN <= k < BROKEN + BARE:
            tags = {"StudyInstanceUID": study}
        without = ""
        if k < BROKEN:
            without = "BitsStored" if k % 2 else "PhotometricInterpretation"
        if k >= STUDIES - EMPTY:
            tags["Modality"], without = "SR", "PixelData"
        for j in range(3 if 100 <= k < 100 + THREE_SERIES else 1):
            uid = f"{study}.{j}.1"
            series = {"SeriesInstanceUID": f"{study}.{j}", "SeriesNumber": j + 1}
            made[uid] = dicom(uid, seed=3 * k + j, side=32, shade=k % 2 * 90, without=without, **tags, **series)
    return made


def test_a_pacs_from_its_list_to_surveys_models_and_evaluations(tmp_path: Path, source: Orthanc) -> None:
    stored = objects()
    assert all(source.store(data) for data in stored.values())
    labels, password = tmp_path / "labels.csv", tmp_path / "password"
    labels.write_text("StudyInstanceUID,label\n" + "".join(f"1.2.826.{k},{'ab'[k % 2]}\n" for k in range(STUDIES)))
    password.write_text(USER)
    password.chmod(0o600)
    data = f"dicomweb:{source.url}?modality=CT,MR&labels={labels}:label&credentials={password}"
    (wrong := tmp_path / "wrong").write_text("ward:another")
    wrong.chmod(0o600)
    refused = Mirror.of(Home(tmp_path / "refused").make(), data.replace(str(password), str(wrong)))
    assert refused is not None
    with pytest.raises(ConfigError, match=r"E-DATA-22.*credentials=FILE"):
        refused.refresh(CancelToken(), lambda *_: None)
    with world(tmp_path) as made:
        names = ["clinic", "export", "copy"]
        made.init()
        made.serve()
        for name in names:
            made.enrol(name)
            (made.folder / name / "policy.toml").write_text(POLICY)
        source.kill()  # the service starts, and waits
        made.silo("clinic", data, "--device", "cpu")
        until(lambda: "waits for the PACS" in made.log("clinic"), seconds=120)
        source.start()
        made.online(["clinic"])
        said = made.log("clinic")
        assert f"{IMAGES} images of {STUDIES} studies listed" in said
        assert f"{EMPTY} studies without an image" in said
        assert f"{BROKEN} objects that cannot be read" in said
        assert f"whose study counts as a patient: {BARE}" in said
        served = Mirror.of(Home(made.folder / "clinic"), data)
        assert served is not None
        named = (served.folder / "left-out.csv").read_text()
        assert all(f"1.2.826.{k}.0.1" in named for k in range(BROKEN))
        assert all(f"1.2.826.{k}," in named for k in range(STUDIES - EMPTY, STUDIES))

        with Path(served.data().removeprefix("manifest:")).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == IMAGES
        for name in names[1:]:
            (folder := tmp_path / f"{name}-images").mkdir()
            for row in rows:
                (folder / row["path"]).write_bytes(stored[row["path"].removesuffix(".dcm")])
            with (folder / "images.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, ("path", "label", "group", "split"), extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            made.silo(name, f"manifest:{folder / 'images.csv'}", "--device", "cpu")
        made.online(names)

        run = ("data=manifest", "data.classes=[a,b]", "data.image_size=32", "secagg=off")
        answers = made.lead("survey", "classes", "images", *run[:3])
        assert sum(cell["images"] for cell in answers["answers"][0]["cells"]) == 3 * IMAGES
        analytic = made.submit("method=analytic", "model=random_features", "name=closed", *run)
        source.kill()  # in the middle of a run, whose images are here
        made.wait(analytic, seconds=300)
        assert {name: _version(made, name, analytic) for name in names} == dict.fromkeys(
            names, _version(made, "export", analytic)
        )
        source.start()
        training = made.submit("method=fedavg", "model=simple_cnn", "rounds=2", "train.epochs=1", "name=trained", *run)
        made.wait(training, seconds=300)
        assert _version(made, "clinic", training) == _version(made, "export", training)
        measured = made.lead("evaluate", training)
        made.wait(measured["run"], seconds=300)
        shown = made.info(training)
        assert shown["state"] == "finished"
    shutil.rmtree(tmp_path / "pacs" / "packages")


def _version(made: World, name: str, run: str) -> str:
    with open_store(made.folder / name / "silo.db") as store:
        kept = store.run_data.find(run)
        assert kept is not None, made.log(name)
        return kept.version
