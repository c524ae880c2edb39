"""`silo audit`: what it writes, whom it is for, and what it refuses before it trains anything."""

from __future__ import annotations

import json
import socket
import stat

import pytest
from PIL import Image

from consilium.audit import canaries, runner
from consilium.audit import command as audit_commands
from consilium.audit.runner import AuditVerdict, Outcome
from silo.cli.main import run

DATA = "digits/hospital0"


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("an audit opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)


@pytest.fixture
def untrained(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was trained")

    monkeypatch.setattr(canaries.AuditTraining, "run", refuse)


def test_an_audit_writes_its_numbers_and_its_picture_for_the_hospital_alone(capsys, tmp_path, offline):
    out = tmp_path / "found"
    words = ["audit", "--data", DATA, "--epsilon", "8", "--only", "white-box", "--out", str(out)]
    assert run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((out / "audit.json").read_text())
    assert shown["about"] == {
        "data": "digits/hospitals6/0",
        "records": 360,
        "classes": 2,
        "unit": "record",
        "epsilon": 8.0,
        "delta": 1e-5,
        "seeds": 1,
    }
    bounds = shown["white-box"]["bounds"]
    assert bounds["epsilon 8"][0]["epsilon"] <= 8
    assert 1.5 < bounds["no privacy"][0]["epsilon"] <= shown["white-box"]["ceiling"]
    assert [v["holds"] for v in shown["white-box"]["verdicts"]] == [None, True]
    picture = out / shown["white-box"]["picture"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {0o600}
    assert run(words) == 2
    assert capsys.readouterr().err.startswith("E-CFG-02: ")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--only", "whitebox"], "E-CFG-02", "white-box"),
        (["--seeds", "0"], "E-CFG-02", "at least 1"),
        (["--epsilon", "0"], "E-PRIV-20", "epsilon"),
        (["--epsilon", "inf"], "E-PRIV-20", "finite"),
        (["--delta", "0.1"], "E-PRIV-20", "0.001"),
        (["--data", "digits/hospital9"], "E-CFG-01", "hospitals6"),
        (["--data", "nothing/3"], "E-CFG-01", "digits"),
        (["--data", "spiral/p5c2/0"], "E-PRIV-29", "images"),
        (["--data", "digits/iid-60/0"], "E-PRIV-29", "at least 100"),
        (["--data", "folder:/nowhere"], "E-DATA-02", "/nowhere"),
        (["--image-size", "64"], "E-CFG-23", "8"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_anything_is_trained(capsys, tmp_path, untrained, words, code, says):
    given = {"--data": DATA, "--out": str(tmp_path / "found")} | dict(zip(words[::2], words[1::2], strict=True))
    assert run(["audit", *(word for pair in given.items() for word in pair)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{code}: "), err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "found").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(capsys, tmp_path, untrained):
    (tmp_path / "found").write_text("")
    assert run(["audit", "--data", DATA, "--out", str(tmp_path / "found")]) == 2
    assert capsys.readouterr().err.startswith("E-CFG-02: ")


def test_a_refuted_claim_is_status_1_after_all_audits_and_names_them(capsys, tmp_path, monkeypatch):
    def audit(name, holds):
        return lambda subject, setting, out: Outcome({}, [AuditVerdict(name, "at most 8", "9.1", holds)], "none.png")

    found = {"first": audit("first", False), "second": audit("second", True), "third": audit("third", None)}
    monkeypatch.setattr(runner, "AUDITS", found)
    assert run(["audit", "--data", DATA, "--out", str(tmp_path / "found")]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "FAILED first: expected at most 8, measured 9.1",
        "passed second: expected at most 8, measured 9.1",
        "shows  third: 9.1 (at most 8)",
    ]
    said = shown.err.splitlines()
    assert said[0] == "first (1 of 3), some minutes in total"
    assert said[2] == "third (3 of 3), less than a minute left"
    assert said[3].startswith("E-PRIV-28: ")
    assert "by these attacks: first." in shown.err
    assert set(json.loads((tmp_path / "found/audit.json").read_text())) == {"about", "first", "second", "third"}


def test_the_help_says_that_nothing_leaves(capsys):
    assert run(["audit", "--help"]) == 0
    assert "Nothing is sent" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("size", "side"), [(None, 32), (16, 16)])
def test_a_folder_of_images_is_audited_at_32_pixels_or_as_asked(tmp_path, size, side):
    for name, colour in (("melanoma", (90, 40, 30)), ("nevus", (200, 150, 120))):
        (tmp_path / name).mkdir()
        for k in range(60):
            shade = tuple(c + k % 40 for c in colour)
            Image.new("RGB", (48, 40), shade).save(tmp_path / name / f"{k}.png")
    subject = audit_commands._target(f"folder:{tmp_path}", None, "melanoma, nevus", size)
    assert subject.x.shape == (120, 3, side, side)
    assert subject.classes == [0, 1]
    assert subject.network(0)(subject.x[:2]).shape == (2, 2)
