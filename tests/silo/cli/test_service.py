"""The command line: what it prints, and how it fails: one line with a code, never a traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_core.datasets.checks import SHOWN
from fl_core.errors import ConfigError
from fl_core.training.devices import choose_device
from protos.consilium.v1 import federation_pb2 as pb
from silo.cli.main import run
from silo.cli.options import text_of
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import Hospital, authority, enrolled


def fails(capsys, code, status, *words):
    assert run(list(words)) == status
    err = capsys.readouterr().err
    assert err.startswith(f"{code}: ")
    assert err.count("\n") == 1
    return err


def answer(capsys, *words):
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["join", "nonsense"], "E-ID-01"),
        (["join"], "E-CFG-02"),
        (["join", "a", "--token-file", "b"], "E-CFG-02"),
        (["join", "--token-file", "/nowhere/token"], "E-CFG-02"),
        (["data", "check", "digit/hospital0"], "E-CFG-01"),
        (["data", "describe", "isic2019/center9"], "E-CFG-01"),
        (["data", "check", "folder:/nowhere"], "E-DATA-02"),
    ],
)
def test_usage_and_data_errors_are_one_line_and_status_2(capsys, tmp_path, words, code):
    fails(capsys, code, 2, *words)


@pytest.mark.parametrize(
    "words", [["status"], ["approve"], ["fingerprint"], ["page"], ["serve", "--data", "digits/hospital0"]]
)
def test_a_home_that_has_not_joined_is_status_1(capsys, tmp_path, words):
    fails(capsys, "E-STATE-44", 1, *words, "--home", str(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--data", "digits/hospital9"], "E-CFG-01"),
        (["--data", "digits/hospital0", "--device", "tpu"], "E-CFG-02"),
        (["--data", "digits/hospital0", "--device", "cuda:99"], "E-CFG-02"),
        (["--data", "digits/hospital0", "--nominal-size", "-1"], "E-CFG-02"),
    ],
)
def test_serve_refuses_settings_before_it_connects(capsys, tmp_path, words, code):
    fails(capsys, code, 2, "serve", *words, "--home", str(enrolled(tmp_path).path))


@pytest.mark.parametrize("words", [["serve"], ["status", "--hom", "x"], ["data"], ["sing"]])
def test_a_wrong_command_line_is_status_2(capsys, words):
    assert run(words) == 2


def test_help_is_status_0(capsys):
    assert run(["serve", "--help"]) == 0
    assert "--no-prototypes" in capsys.readouterr().out


def test_two_services_on_one_home_are_refused(capsys, tmp_path):
    home = enrolled(tmp_path)
    with home.locked():
        said = fails(capsys, "E-STATE-20", 1, "serve", "--data", "digits/hospital0", "--home", str(tmp_path))
    assert str(os.getpid()) in said
    with Home(tmp_path).locked():
        pass


@pytest.mark.fault("an operator", "deletes the lock file under a running silo", "a second silo is refused: E-STATE-20")
def test_a_second_service_is_refused_when_the_lock_file_of_the_first_is_gone(capsys, tmp_path):
    home = enrolled(tmp_path)
    with home.locked():
        (tmp_path / "serve.lock").unlink()
        fails(capsys, "E-STATE-20", 1, "serve", "--data", "digits/hospital0", "--home", str(tmp_path))
        assert home.is_locked()


def test_data_describe_counts_classes_per_split(capsys):
    found = answer(capsys, "data", "describe", "digits/hospital2")
    assert found["shape"] == [1, 8, 8]
    assert found["classes"] == list("0123456789")
    assert sum(found["counts"]["train"]) > sum(found["counts"]["test"]) > 0
    assert found["problems"] == []
    assert run(["data", "check", "digits/hospital2"]) == 0
    assert "class" not in capsys.readouterr().err


def test_data_check_names_problems_and_ends_with_status_2(capsys, tmp_path):
    from PIL import Image

    for name in ("train/nevus", "test/nevus", "train/melanoma"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / name / "a.png")
    (tmp_path / "train/nevus/broken.png").write_bytes(b"not an image")
    assert run(["data", "check", f"folder:{tmp_path}", "--deep", "--json"]) == 2
    captured = capsys.readouterr()
    assert "E-DATA-04" in [p["code"] for p in json.loads(captured.out)["problems"]]
    assert captured.err.startswith("E-DATA-")


def test_data_check_counts_what_it_does_not_show_and_not_images(capsys, tmp_path):
    from PIL import Image

    for name in (*(f"class{k}" for k in range(SHOWN)), "x", "y"):
        for k in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (k, 0, 0)).save(tmp_path / name / f"{k}.png")
    words = ["data", "check", f"folder:{tmp_path}", "--no-deep", "--classes"]
    assert run([*words, "x,a"]) == 2
    assert "and 1 more" in capsys.readouterr().out  # 51 unknown classes, of which 50 are listed
    assert run([*words, ",".join(("a", "x", *(f"class{k}" for k in range(SHOWN))))]) == 2
    assert "more" not in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_that_is_named_on_the_command_line_may_have_a_byte_order_mark(tmp_path, encoding):
    (tmp_path / "token").write_text("consilium1.AAAA\n", encoding=encoding)
    assert text_of(tmp_path / "token") == "consilium1.AAAA\n"


@pytest.mark.parametrize("raw", ["consilium1.".encode("utf-16"), b"caf\xe9"], ids=["utf-16", "latin 1"])
def test_a_file_in_another_encoding_is_refused(tmp_path, monkeypatch, raw):
    (tmp_path / "token").write_bytes(raw)
    with pytest.raises(ConfigError, match="E-CFG-02"):
        text_of(tmp_path / "token")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    with pytest.raises(ConfigError, match="E-CFG-02"):
        text_of(None)


def test_a_label_space_may_be_wider_than_the_data(capsys, tmp_path):
    from PIL import Image

    for name in ("train/nevus", "test/nevus"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / name / "a.png")
    found = answer(capsys, "data", "describe", f"folder:{tmp_path}", "--classes", "melanoma, nevus")
    assert found["classes"] == ["melanoma", "nevus"]
    assert found["counts"] == {"train": [0, 1], "test": [0, 1]}
    assert run(["data", "check", f"folder:{tmp_path}", "--classes", "nevus"]) == 2
    problems = capsys.readouterr().err.splitlines()
    assert problems[0].startswith("E-CFG-23: ")
    assert len(problems) > 1  # beside all others


def test_status_and_fingerprint_of_a_silo_that_has_worked(capsys, tmp_path):
    hospital = Hospital(tmp_path / "home")
    try:
        hospital.start()
        hospital.train()
        found = answer(capsys, "status", "--home", str(tmp_path / "home"))  # while the service runs
        assert found["silo"] == "center1"
        assert found["session"]["until"] is None
        assert found["outbox"] == [
            {"run": "run-1", "round": 0, "kind": "train", "refused": None, "receipt": True}
            | {"bytes": found["outbox"][0]["bytes"]}
        ]
        (waited,) = found["outbox"]
        hospital.settle()
    finally:
        hospital.end()
    found = answer(capsys, "status", "--home", str(tmp_path / "home"))
    (one,) = found["runs"]
    (evaluation,) = one["evaluations"]
    assert (one["run"], one["name"], found["receipts"], found["outbox"]) == ("run-1", "small", 1, [])
    assert evaluation["included"] is True
    assert found["left"]["verdict"] == "No image has left this hospital"
    assert (found["left"]["updates"], found["left"]["bytes"]) == (1, waited["bytes"])
    assert len(evaluation["correct"]) == len(evaluation["examples"]) == 10
    assert run(["status", "--home", str(tmp_path / "home")]) == 0
    assert "round 1" in capsys.readouterr().out
    keys = answer(capsys, "fingerprint", "--home", str(tmp_path / "home"))
    assert keys["authority"] == authority().fingerprint()
    assert keys["fingerprint"] == found["fingerprint"]


def test_devices():
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")


@pytest.mark.integration
def test_serve_ends_in_good_order_on_ctrl_c(tmp_path):  # SIGTERM: tests/e2e/test_operations.py
    home = enrolled(tmp_path / "home")
    words = ["serve", "--data", "digits/hospital0", "--home", str(home.path), "--device", "cpu", "--json"]
    log = (tmp_path / "log").open("w")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*"}
    home.write_addresses(home.addresses())
    silo = Path(sys.executable).with_name("silo")
    process = subprocess.Popen([str(silo), *words], stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        until(lambda: "serving" in (tmp_path / "log").read_text() or process.poll() is not None, seconds=60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert events[:2] == ["privacy", "serving"]


def test_the_command_line_answers_before_anything_heavy_is_imported():
    program = "import sys, importlib; from silo.cli.main import COMMANDS; [*map(importlib.import_module, COMMANDS)]; "
    program += "print(sorted({'torch', 'opacus'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_check_lists_every_fault_and_what_it_does_not_read(capsys, tmp_path):
    from tests.support.data import write_image

    for name in ("train/nevus", "test/nevus", "train/melanoma"):
        write_image(tmp_path / name / "a.png", 90 + len(name))
    (tmp_path / "train/nevus/notes.txt").write_text("x")
    for k in range(7):
        (tmp_path / f"train/nevus/broken{k}.png").write_bytes(b"not an image")
    assert run(["data", "check", f"folder:{tmp_path}"]) == 2
    shown = capsys.readouterr().out
    assert all(f"train/nevus/broken{k}.png: not an image" in shown for k in range(7))
    assert any(line.split() == ["not", "read", "1", "files", "(.txt:", "1)"] for line in shown.splitlines())
    assert run(["data", "check", f"folder:{tmp_path}", "--no-deep"]) == 0
    capsys.readouterr()
    assert run(["data", "check", f"folder:{tmp_path}", "--window", "40"]) == 2


def test_a_run_that_failed_is_told_in_words(capsys, tmp_path):
    hospital = Hospital(tmp_path / "home")
    try:
        hospital.start()
        hospital.train()
        ended = pb.RunEnded(run_id="run-1", state="failed", reason="E-RUN-31: center2 cannot go on")
        hospital.control.last.send(run_ended=ended)
        until(lambda: "ended" in hospital.events())
    finally:
        hospital.end()
    assert run(["status", "--home", str(tmp_path / "home")]) == 0
    shown = capsys.readouterr().out
    assert "small (run-1): could not be finished: E-RUN-31: center2 cannot go on" in shown
    assert "failed" not in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_called_one(tmp_path):
    program = "import sys; from silo.cli.main import run; sys.exit(run(['policy', 'show', '--home', sys.argv[1]]))"
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "E-STATE-63: the disk is full: free some space, and run the command again\n"


@pytest.mark.integration
@pytest.mark.fault("an operator", "closes a silo's terminal, or sends it SIGHUP", "it continues")
def test_serve_goes_on_after_a_hangup_and_says_so(tmp_path):
    home, log = enrolled(tmp_path / "home"), tmp_path / "log"
    words = ["serve", "--data", "digits/hospital0", "--home", str(home.path), "--device", "cpu", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*"}
    home.write_addresses(home.addresses())
    silo = Path(sys.executable).with_name("silo")
    with log.open("w") as out:
        process = subprocess.Popen([str(silo), *words], stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        until(lambda: "serving" in log.read_text() or process.poll() is not None, seconds=120)
        process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP ignored" in log.read_text() or process.poll() is not None, seconds=60)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
