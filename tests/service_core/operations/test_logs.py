"""Logs: one line per event, with its facts, and without secrets, data or names of files, whatever is fed through."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_core.errors import ConfigError, DataError
from service_core.operations import logs
from service_core.operations.logs import LogFormat, OneLineFormatter, mask
from service_core.pki import certificates
from silo.cli.foreground import log_event
from silo.events import error_event, event

HOME = "/var/lib/consilium"


@pytest.fixture(params=LogFormat)
def written(request):
    """Give a function that logs, and returns the line."""

    def write(text: str, *arguments: object, format=request.param, **extra: object) -> str:
        stream, logger = io.StringIO(), logging.getLogger("test.logs")
        handler = logging.StreamHandler(stream)
        handler.setFormatter(OneLineFormatter(format, Path(HOME)))
        logger.addHandler(handler)
        logger.propagate = False
        try:
            logger.warning(text, *arguments, exc_info=extra.pop("exc_info", None), extra=extra)
        finally:
            logger.removeHandler(handler)
        return stream.getvalue()

    return write


def test_a_line_says_run_round_silo_and_code(written):
    line = written(
        "refused: E-ID-12: revoked", run="run-1", round=0, silo="north", event="refused", format=LogFormat.JSON
    )
    found = json.loads(line)
    assert found.pop("at").endswith("+00:00")
    assert found == {
        "level": "warning",
        "logger": "test.logs",
        "message": "refused: E-ID-12: revoked",
        "event": "refused",
        "run": "run-1",
        "round": 0,
        "silo": "north",
        "code": "E-ID-12",
    }
    assert "run=run-1 round=1 silo=north" in written("x", run="run-1", round=0, silo="north", format=LogFormat.TEXT)


SECRETS = [
    "consilium1.AAAAbbbbCCCC_-==",
    "Jane Doe 1970",
    "Jane_Doe",
    "geheim",
    "MIGHAgEAMBMGByqGSM49",
    "O'Brien.dcm",
]
TEXTS = [
    "token consilium1.AAAAbbbbCCCC_-==",
    "cannot read /data/Jane Doe 1970/scan 3: permission denied",
    "cannot read '/data/Jane_Doe.png'",
    "error:/data/Jane_Doe",
    "twice //data/Jane_Doe and ~/Jane_Doe and ../Jane_Doe",
    f"{HOME}/../../data/Jane_Doe",
    "Jane_Doe.png, Jane Doe 1970.TIFF and O'Brien.dcm are broken",
    "images.csv: row 3 names Jane_Doe.jpeg",
    "E-DATA-04: expected an image, found none: Jane_Doe (in train/Jane Doe 1970)",
    "run-1 round 1: E-DATA-07: the group Jane Doe 1970 lies in both splits",
    "serves folder:Jane Doe 1970/images data, manifest:Jane_Doe",
    "proxy http://user:geheim@proxy.example.org:3128 answers 407",
    "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----",
    "key b'-----BEGIN PRIVATE KEY-----\\nMIGHAgEAMBMGByqGSM49",
]


@pytest.mark.fault("an error", "contains a patient's file name, a token or a key", "the log contains none of them")
@pytest.mark.parametrize("text", TEXTS)
def test_no_secret_and_no_name_of_a_file_comes_through(written, text):
    try:
        raise ValueError(text)
    except ValueError as error:
        lines = [written("%s", text), written(text.replace("%", "")), written("failed", exc_info=error)]
    lines += [written("x", **{field: text}) for field in logs.FIELDS]
    for line in lines:
        assert [secret for secret in SECRETS if secret in line] == [], line


def test_a_new_key_does_not_come_through(written):
    key = certificates.new_key().decode()
    body = "".join(key.splitlines()[1:-1])
    for text in (key, repr(key), body, f"{body}=="):
        assert body[:40] not in written("%s", text)


def test_what_an_operator_needs_stays(written):
    for text in (
        f"disk full at {HOME}/blobs/objects",
        "refused /consilium.v1.Lead/Show to silo://demo/north (certificate 12ab) ipv4:10.0.0.1:4711",
        "manifest 0123456789abcdef of run-1 round 3/20",
        "digest " + "0123456789abcdef" * 4,
    ):
        assert text in written("%s", text)


@pytest.mark.integration
@pytest.mark.fault(
    "the other side", "puts line breaks and control characters into its text", "its entry in the log is one line"
)
@given(text=st.text(max_size=300))
def test_an_event_is_one_printable_line(text):
    for format in LogFormat:
        record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
        record.run = text
        line = OneLineFormatter(format, Path(HOME)).format(record)
        assert line.isprintable()
        if format is LogFormat.JSON:
            assert json.loads(line)["message"].isprintable() or json.loads(line)["message"] == ""


@pytest.mark.fault("the other side", "sends a text that is slow to mask", "the log truncates it first")
@pytest.mark.parametrize(
    "piece", ["a", "/", "a.", "://", "-----BEGIN", "a/", "E-DATA-", "consilium1.", "../", "=", "'/"]
)
def test_masking_takes_no_time_to_speak_of(written, piece):
    began = time.thread_time()  # of this thread alone: others may have the machine
    assert len(written("%s", piece * 300_000)) < 10_000
    assert time.thread_time() - began < 1.0


def test_measurements_of_a_hospital_stay_out_of_its_log(caplog):
    with caplog.at_level(logging.INFO):
        log_event(
            event(
                "staged",
                "round 1: the received model is right on 17 of 40 of this hospital's test images",
                None,
                {"correct": 17},
            ),
            "n",
        )
        log_event(error_event(DataError("E-DATA-04", "Jane_Doe.png is broken")), "n")
    assert "17" not in "".join(caplog.messages)
    assert [r.event for r in caplog.records] == ["staged", "trouble"]
    assert caplog.records[1].code == "E-DATA-04"
    assert "Jane" not in mask(caplog.records[1].getMessage(), HOME)


def test_the_environment_chooses_and_a_wrong_word_is_refused(monkeypatch):
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    assert logs.chosen_format(None) is None
    monkeypatch.setenv(logs.VARIABLE, "json")
    assert logs.chosen_format(None) is LogFormat.JSON
    assert logs.chosen_format(LogFormat.TEXT) is LogFormat.TEXT
    monkeypatch.setenv(logs.VARIABLE, "xml")
    with pytest.raises(ConfigError, match="E-CFG-02"):
        logs.chosen_format(None)


def test_what_a_library_writes_to_standard_error_is_a_line_of_json_too(tmp_path):
    program = (
        "import os, logging, sys\n"
        "from pathlib import Path\n"
        "from service_core.operations import logs\n"
        "logs.set_up(logs.LogFormat.JSON, Path('/x'))\n"
        "os.write(2, b'E0000 handshaker.cc:42] failed\\xff\\nhalf')\n"
        "os.write(2, b' a line\\n')\n"
        "logging.getLogger('a').info('b')\n"
        "sys.stderr.write('E-NET-20: the last line\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["code"] for line in found if "code" in line] == ["E-NET-20"]
    assert {line["message"] for line in found} == {
        "E0000 handshaker.cc:42] failed\ufffd",
        "E-NET-20: the last line",
        "b",
        "half a line",
    }
