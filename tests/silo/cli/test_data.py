"""What `silo data check` says to a hospital of its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from silo.cli.main import program
from silo.pacs import mirror
from tests.silo.admission.test_surveys import write_images
from tests.support.pacs import dicom, pacs, send


@pytest.mark.parametrize(("named", "said"), [(True, "groups 10"), (False, "none: there are no patient IDs")])
def test_a_check_says_whether_patients_are_named_and_how_to_name_them(tmp_path, named, said):
    reference = write_images(tmp_path / "images", range(10), named=named)
    result = CliRunner().invoke(program().build(["data"]), ["data", "check", reference], env={"COLUMNS": "400"})
    assert said in " ".join(result.output.split())
    assert ("column of the image list" in result.output) is not named


def test_a_table_of_labels_is_written_to_be_filled_in_and_never_over_another(tmp_path: Path) -> None:
    reference = write_images(tmp_path / "images", range(10), named=False)
    own = json.loads(called("data", "check", reference, "--json"))["classes"]
    words = ["data", "check", reference, "--classes", f"{own[0]},another", "--write-labels"]
    assert "to fill in" in called(*words)
    file = next(tmp_path.rglob("labels.toml"))
    lines = file.read_text().splitlines()
    assert lines[2] == "[labels]"
    assert [line.partition(" = ")[0] for line in lines[3:]] == [f'"{name}"' for name in own[1:]]
    assert all(" records" in line for line in lines[3:])
    unfilled = called("data", "check", reference, "--classes", f"{own[0]},another", status=1)
    assert "no name of a class" in unfilled
    assert "is not overwritten" in called(*words, status=1)
    file.write_text("\n".join([*lines[:3], *(line.replace('""', '"another"') for line in lines[3:])]))
    assert "renamed by it" in called("data", "check", reference, "--classes", f"{own[0]},another")
    assert "give both" in called("data", "check", reference, "--write-labels", status=1)


def called(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(program().build(["data"]), words, env={"COLUMNS": "400"})
    assert result.exit_code == status, (result.output, result.exception)
    return f"{result.output}{result.exception or ''}"


@pytest.mark.integration
def test_images_of_a_pacs_are_fetched_checked_registered_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(program().build([words[0]]), [*words, "--home", str(tmp_path / "home"), "--json"])
        assert result.exit_code == status, (result.output, result.exception)
        return f"{result.output}{result.exception or ''}"

    rows = ["AccessionNumber,finding"]
    with pacs() as source:
        for k in range(30):
            facts = {"AccessionNumber": f"A{k}", "PatientID": f"P{k}"}
            uid = f"1.2.{k}.1.7"
            source.add(f"1.2.{k}", f"1.2.{k}.1", uid, dicom(uid, seed=k, shade=k % 2 * 90) if k else b"broken", **facts)
            rows.append(f"A{k},{'ab'[k % 2]}")
        (tmp_path / "labels.csv").write_text("\n".join([*rows, "A99,a"]))
        reference = f"dicomweb:{source.url}?labels={tmp_path}/labels.csv:finding"
        assert "silo data fetch" in call("data", "check", reference, status=1)
        caged = list[bool]()
        decoded = mirror.inspected
        monkeypatch.setattr(
            mirror,
            "inspected",
            lambda folder, names, must, stop: (caged.append(must), decoded(folder, names, False, stop))[1],
        )
        busy = iter([True, True])
        source.before = lambda request: next(busy, False) and not send(request, 429)
        said, _, facts = call("data", "fetch", reference).partition("{")
        assert "waits for the PACS" in said
        assert "busy (HTTP 429)" in said
        found = json.loads(f"{{{facts}")
        (tmp_path / "home" / "policy.toml").write_text('[worker]\nisolation = "required"\n')
        call("data", "fetch", reference)
        assert caged == [False, True]
        (tmp_path / "home" / "policy.toml").write_text("")
        said = call("data", "check", reference, "--classes", "a,lesion", "--write-labels")
        assert "fetch and check again" in said
        assert '"b" = ""' in (tmp_path / "labels.toml").read_text()
        (tmp_path / "labels.toml").unlink()
    assert (found["images"], found["studies"], found["unmet"]) == (29, 30, 1)
    assert found["left_out"] == {"objects that cannot be read": 1}
    assert json.loads(call("data", "check", reference))["groups"] == 29
    registered = json.loads(call("ledger", "register", "--data", reference))["collections"]
    assert {f"dicomweb:{source.url}/{split}" for split in ("train", "test")} <= set(registered)
    doctor = call("doctor", "--data", reference)
    assert "29 images fetched" in doctor
    assert "1 left out" in doctor
    assert "every image was decoded" in doctor
