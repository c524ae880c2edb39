"""The checks that both doctors share, against machines that have one thing wrong with them."""

from __future__ import annotations

import json
import math
import shutil
import socket
import sqlite3
from contextlib import closing
from datetime import timedelta

import pytest

from fl_core.errors import ConfigError
from service_core.console import show_reply
from service_core.operations import checks
from service_core.operations.checks import FindingLevel
from service_core.operations.health import HealthAnswer, health_metadata
from service_core.pki import certificates
from service_core.pki.identity import Address
from service_core.version import PROTOCOL, software
from tests.support.pki import authority, join, today


def levels(findings):
    return [finding.level for finding in findings]


def usage(free, total=100 << 30):
    return lambda _: shutil._ntuple_diskusage(total, total - free, free)


@pytest.mark.parametrize(
    ("free", "level"),
    [
        (50 << 30, FindingLevel.OK),
        (3 << 29, FindingLevel.WARNING),
        (1 << 29, FindingLevel.PROBLEM),
        (0, FindingLevel.PROBLEM),
    ],
)
def test_a_disk_without_its_reserve_is_a_problem(monkeypatch, tmp_path, free, level):
    monkeypatch.setattr(shutil, "disk_usage", usage(free))
    assert levels(checks.disk(tmp_path / "not" / "made" / "yet"))[0] is level
    assert not (tmp_path / "not").exists()


def test_a_clock_behind_what_was_made_is_a_problem():
    now = certificates.utc_now()
    assert levels(checks.clock({"a": now}, now)) == [FindingLevel.OK]
    (found,) = checks.clock({"the certificate": now + timedelta(days=120), "a": now}, now)
    assert found.level is FindingLevel.PROBLEM
    assert "the certificate" in found.found


def test_a_port_that_is_taken_is_a_problem_and_a_free_one_is_given_back():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert levels(checks.port(place)) == [FindingLevel.PROBLEM]
    assert levels(checks.port(place)) == [FindingLevel.OK] * 1
    assert levels(checks.port(place)) == [FindingLevel.OK]


@pytest.mark.parametrize("bind", ["", "nonsense", "127.0.0.1:99999", "127.0.0.1:-1", "203.0.113.7:0"])
def test_an_address_that_is_none_of_this_machines_is_a_problem(bind):
    assert levels(checks.port(bind)) == [FindingLevel.PROBLEM]


@pytest.mark.parametrize("bind", ["8443", ":8443", "0.0.0.0:84x", "0.0.0.0:65536", "http://0.0.0.0:8443", "[::]8443"])
def test_an_address_in_another_form_is_refused_with_the_form(bind):
    with pytest.raises(ConfigError, match=r"E-CFG-02: --bind: expected HOST:PORT"):
        checks.host_and_port(bind)


def test_an_address_is_read_with_its_port():
    assert checks.host_and_port("0.0.0.0:8443") == ("0.0.0.0", 8443)
    assert checks.host_and_port("[::1]:0") == ("::1", 0)


def test_a_key_that_others_may_read_is_a_problem_and_a_file_in_a_closed_home_is_none(tmp_path):
    key, file = tmp_path / "a key", tmp_path / "db"
    for path in (key, file):
        path.write_bytes(b"")
        path.chmod(0o644)
    tmp_path.chmod(0o700)
    assert levels(checks.file_modes(tmp_path, [file], [])) == [FindingLevel.OK]
    (found,) = checks.file_modes(tmp_path, [file], [key])
    assert found.level is FindingLevel.PROBLEM
    assert f"'{key}'" in found.remedy
    tmp_path.chmod(0o755)
    assert levels(checks.file_modes(tmp_path, [file], [])) == [FindingLevel.PROBLEM]


def test_a_database_is_looked_through_without_a_trace(tmp_path):
    file = tmp_path / "a ?%.db"
    assert levels(checks.database(file, list)) == [FindingLevel.WARNING]
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t (x)")
        db.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 100)
        db.commit()
        assert levels(checks.database(file, list)) == [FindingLevel.OK]
    before = sorted(path.name for path in tmp_path.iterdir())
    assert levels(checks.database(file, list)) == [FindingLevel.OK]
    assert sorted(path.name for path in tmp_path.iterdir()) == before == [file.name]
    file.write_bytes(file.read_bytes()[:6000] + b"\xff" * 9000)
    assert levels(checks.database(file, list)) == [FindingLevel.PROBLEM]


def test_a_transaction_that_a_crash_interrupted_is_no_damage(tmp_path):
    """A file without a log, as the ledger: what the crash left beside it says what was there before."""
    file, copy = tmp_path / "db", tmp_path / "copy"
    copy.mkdir()
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        db.execute("CREATE TABLE t (x)")
        db.executemany("INSERT INTO t VALUES (?)", [("x" * 900,)] * 50)
        db.execute("BEGIN")
        db.execute("UPDATE t SET x = x || x")
        content = file.read_bytes()
        (copy / "db").write_bytes(content[:8192] + b"\xff" * 2048 + content[10240:])  # one is half written
        shutil.copy(tmp_path / "db-journal", copy)
    assert levels(checks.database(copy / "db", list)) == [FindingLevel.OK]
    (copy / "db").write_bytes(b"\xff" * 4096 + (copy / "db").read_bytes()[4096:])
    assert levels(checks.database(copy / "db", list)) == [FindingLevel.PROBLEM]


def test_a_certificate_is_called_old_before_it_is_over(tmp_path):
    own = join(authority(tmp_path / "ca", today()), tmp_path / "silo", "north").current_credentials()
    now = certificates.utc_now()
    for days, level in (
        (0, FindingLevel.OK),
        (80, FindingLevel.WARNING),
        (91, FindingLevel.PROBLEM),
        (-400, FindingLevel.PROBLEM),
    ):
        assert levels(checks.certificate("own", own, "", now + timedelta(days=days))) == [level]
    other = join(authority(tmp_path / "ca2", today()), tmp_path / "silo2", "north").current_credentials()
    mixed = own._replace(key_pem=other.key_pem)
    assert levels(checks.certificate("own", mixed, "", now)) == [FindingLevel.PROBLEM]
    assert levels(checks.certificate("own", own._replace(ca_pem=other.ca_pem), "", now)) == [FindingLevel.PROBLEM]


@pytest.mark.fault("a proxy", "refuses the tunnel to the coordinator", "the doctor names it, but not its password")
def test_a_proxy_that_opens_no_tunnel_is_named_without_its_password(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://user:geheim@127.0.0.1:{number}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("grpc_proxy", raising=False)
        monkeypatch.setattr(checks, "TIMEOUT_S", 0.2)
        (found,) = checks.proxy([Address("fl.example.org", 8443)])
    assert found.level is FindingLevel.PROBLEM
    assert f"127.0.0.1:{number}" in found.found
    assert "geheim" not in str(found)


def answered(time="0", protocol=str(PROTOCOL), software="x", problems="", asked=100.0):
    said = [
        ("consilium-time", time),
        ("consilium-protocol", protocol),
        ("consilium-software", software),
        ("consilium-problems", problems),
        ("consilium-bytes-bin", b"\xff"),
    ]
    return HealthAnswer.of(True, said, asked, asked + 2)


@pytest.mark.parametrize(
    ("time", "level"),
    [
        ("101", FindingLevel.OK),
        ("71", FindingLevel.OK),
        ("140", FindingLevel.WARNING),
        ("900", FindingLevel.PROBLEM),
        ("-1e9", FindingLevel.PROBLEM),
    ],
)
def test_a_clock_that_is_far_from_the_coordinators_is_told(time, level):
    assert levels(checks.other_side(answered(time=time), "there"))[1] is level


@pytest.mark.fault("a coordinator", "sends nonsense as its time and version", "the doctor ignores the values")
@pytest.mark.parametrize(
    "word", ["nan", "inf", "-inf", "1e999", "", "abc", "9" * 400, "\x00", "１２", "-3", "4.0", "1_0"]
)
def test_what_a_coordinator_says_of_itself_may_be_anything(word):
    answer = answered(time=word, protocol=word, software=word, problems=word)
    assert answer.offset_s is None or math.isfinite(answer.offset_s)
    assert answer.protocol is None
    show_reply(checks.report(checks.other_side(answer, "there")), as_json=False)


def test_another_protocol_names_the_side_to_upgrade():
    newer, older = (answered(time="101", protocol=str(PROTOCOL + k)) for k in (1, -1))
    assert [f.remedy for f in (*checks.other_side(newer, ""), *checks.other_side(older, "")) if f.remedy] == [
        "upgrade this side",
        "upgrade that side",
    ]


def test_another_build_of_the_same_protocol_is_a_warning_that_names_both():
    (same,) = [f for f in checks.other_side(answered(software=software()), "there") if f.check == "versions"]
    (other,) = [f for f in checks.other_side(answered(software="x 1+b"), "there") if f.check == "versions"]
    assert (same.level, other.level) == (FindingLevel.OK, FindingLevel.WARNING)
    assert software() in other.found
    assert "x 1+b" in other.found


def test_what_is_said_is_what_is_read():
    answer = HealthAnswer.of(True, health_metadata("consilium\n\x1b[31m 1", ("disk", "database")), 0, 0)
    assert (answer.protocol, answer.software, answer.problems) == (PROTOCOL, "consilium[31m 1", ("disk", "database"))


@pytest.mark.fault("a coordinator", "sends control characters to the doctor", "none reaches the terminal")
def test_control_characters_do_not_reach_the_terminal(capsys):
    found = checks.ok("x", "a\x1b[2J\u202eb\r\n\x9bc\u2028d" + "e" * 10**6)
    reply = checks.report([found])
    show_reply(reply, as_json=False)
    assert reply.status == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert text.strip().isprintable()
    assert len(text) < 2000


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(capsys):
    def falls_ill():
        yield checks.ok("a", "begun")
        raise RuntimeError("unforeseen")

    found = checks.run_checks({"a": falls_ill, "b": lambda: [checks.ok("b", "fine")]})
    reply = checks.report(found)
    assert reply.status == 1
    show_reply(reply, as_json=True)
    out = json.loads(capsys.readouterr().out)
    assert out["healthy"] is False
    assert [(f["check"], f["level"]) for f in out["findings"]] == [
        ("a", "ok"),
        ("a", "problem"),
        ("b", "ok"),
    ]
