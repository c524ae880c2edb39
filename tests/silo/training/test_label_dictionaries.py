"""What a hospital tells of its label dictionary, and which runs it refuses because of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.datasets.label_dictionary import read_dictionary
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import Dictionary, NamedOptions, RunManifest, make_members
from tests.support.data import write_image
from tests.support.fake_coordinator import MEMBERS, Hospital, enrolled, manifest

CLASSES = ("melanoma", "nevus")
TABLE = '[labels]\nnaevus = "nevus"\nlesion = ["melanoma", "nevus"]\n'


def images(root: Path, table: str = TABLE) -> Path:
    for split in ("train", "test"):
        for label in ("melanoma", "naevus", "lesion"):
            for k in range(3):
                write_image(root / split / label / f"{k}.png", 20 + 10 * k + len(label + split), (32, 32))
    (root / "labels.toml").write_text(table)
    return root


def asks(labels: str = "", method: str = "fedavg") -> RunManifest:
    schema = datasets.schema_of("folder", datasets.DataRequest(classes=CLASSES, image_size=32))
    layout = derive_layout(build_method(method, {}), build_model("lenet", {}, schema, 3), schema)
    members = make_members(MEMBERS, 3, 1.0, dictionaries={"center1": Dictionary(labels, bool(labels))})
    facts = {"image_size": 32, "members": members, "method": NamedOptions(method, {})}
    return manifest(data="folder", schema=schema, model=NamedOptions("lenet", {}), layout=layout, **facts)


@contextmanager
def serving(folder: Path, run: RunManifest, policy: str = "") -> Iterator[Hospital]:
    enrolled(folder / "home").policy.write_text(policy)
    hospital = Hospital(folder / "home", run, data=f"folder:{folder / 'data'}")
    try:
        hospital.start()
        yield hospital
    finally:
        hospital.end()


def test_the_digest_is_told_and_no_name_of_the_table(tmp_path: Path) -> None:
    digest = read_dictionary(images(tmp_path / "data")).digest
    with serving(tmp_path, asks(digest)) as hospital:
        told = hospital.control.last.hello.data
        assert (told.labels_digest, told.coarse_labels) == (digest, True)
        assert b"naevus" not in told.SerializeToString()
        hospital.train()


def test_a_policy_that_requires_masks_keeps_the_digest_too(tmp_path: Path) -> None:
    images(tmp_path / "data")
    with serving(tmp_path, asks(), "[secagg]\nrequire = true\n") as hospital:
        told = hospital.control.last.hello.data
        assert (told.labels_digest, told.coarse_labels) == ("", False)


@pytest.mark.parametrize(
    ("method", "digest", "code", "said"),
    [
        ("fedmr", "", "E-CFG-08", "method fedmr cannot be used with coarse labels"),
        ("fedavg", "0" * 64, "E-DATA-05", "expected the label dictionary 0000000000000000"),
    ],
)
def test_a_run_of_another_dictionary_or_without_coarse_labels_is_refused_by_name(
    tmp_path: Path, method: str, digest: str, code: str, said: str
) -> None:
    images(tmp_path / "data")
    with serving(tmp_path, asks(digest, method)) as hospital:
        hospital.offer()
        refused = hospital.refused()
        assert refused.code == code
        assert said in refused.reason
        assert "naevus" not in refused.reason
