"""Which images can be read is decided by a process in a cage, which an image may end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fl_core.errors import RefusedError, StateError
from silo.cancellation import CancelledError, CancelToken
from silo.worker import inspection
from silo.worker.inspection import inspected
from tests.support.pacs import dicom

CHILD = """
import json, os, sys, time
walls = json.loads(sys.argv[1])
for number, line in enumerate(sys.stdin):
    name = json.loads(line).get("name", "")
    if name == "bomb":
        os.kill(os.getpid(), 9)
    if name == "slow":
        time.sleep(600)
    answer = {"reason": "no \\ud800\\x1b[31mimage" if name == "broken" else ""} if number else {"walls": walls}
    print(json.dumps(answer), flush=True)
"""


def programmed(monkeypatch: pytest.MonkeyPatch, walls: str = '["", "", ""]', code: str = CHILD) -> None:
    words = [sys.executable, "-c", textwrap.dedent(code), walls]
    monkeypatch.setattr(inspection, "worker_words", lambda module: words)


@pytest.mark.fault(
    "a hospital's PACS",
    "has an image that crashes its decoder or is decoded without end",
    "this image is left out and listed; the others are read",
)
def test_an_image_that_ends_its_decoder_or_takes_for_ever_is_the_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch)
    monkeypatch.setattr(inspection, "IMAGE_S", 1.0)
    names = ["a", "bomb", "b", "slow", "broken", "c"]
    reasons = dict(inspected(tmp_path, names, False, CancelToken()))
    assert list(reasons) == names
    assert [name for name, why in reasons.items() if not why] == ["a", "b", "c"]
    assert "killed by SIGKILL" in reasons["bomb"]
    assert "ended the process" in reasons["slow"]
    assert reasons["broken"] == r"no \ud800\x1b[31mimage"


def test_without_a_cage_nothing_is_decoded_where_the_policy_requires_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, '["none", "none", ""]')
    with pytest.raises(RefusedError, match="E-POLICY-21"):
        list(inspected(tmp_path, ["a"], True, CancelToken()))
    assert list(inspected(tmp_path, ["a"], False, CancelToken())) == [("a", "")]


def test_a_process_that_does_not_start_is_an_error_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programmed(monkeypatch, code="import os; os._exit(7)")
    with pytest.raises(StateError, match=r"E-RUN-55.*status 7"):
        list(inspected(tmp_path, ["a"], False, CancelToken()))


def test_it_ends_at_once_when_the_task_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programmed(monkeypatch)
    stop = CancelToken()
    reading = inspected(tmp_path, ["a", "b"], False, stop)
    assert next(reading) == ("a", "")
    stop.cancel("the run was aborted")
    with pytest.raises(CancelledError):
        next(reading)


@pytest.mark.integration
def test_the_process_that_decodes_has_no_socket_and_can_open_none(tmp_path: Path) -> None:
    try:
        child = inspection._started(tmp_path, caged=True)
    except RefusedError as error:
        if subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode == 0:
            raise  # this machine gives namespaces, so the refusal is wrong
        pytest.skip(str(error))
    try:
        opened = [os.readlink(file) for file in Path(f"/proc/{child.pid}/fd").iterdir()]  # noqa: PTH115 - no path
        assert len(opened) >= 3
        assert not [place for place in opened if place.startswith("socket:")]
    finally:
        child.end()
        child.line.incoming.close()


@pytest.mark.integration
def test_the_process_decodes_in_its_cage(tmp_path: Path) -> None:
    (tmp_path / "whole.dcm").write_bytes(dicom("1.2"))
    (tmp_path / "cut.dcm").write_bytes(dicom("1.2")[:-20])
    found = dict(inspected(tmp_path, ["whole.dcm", "cut.dcm", "gone.dcm"], False, CancelToken()))
    assert found["whole.dcm"] == ""
    assert found["cut.dcm"]
    assert found["gone.dcm"]
