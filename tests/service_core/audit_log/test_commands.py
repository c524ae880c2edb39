"""`coordinator log`, `silo log`, and the lines that commands of both sides leave."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import program
from fl_core.errors import FederationError
from service_core.audit_log.commands import _show
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import LogEntry, LogLine
from service_core.audit_log.log import AuditLog, last_lines
from silo.cli.main import run as silo
from tests.support.audit_log import entries, tampered, texts
from tests.support.pki import authority, join, today


def coordinator(home: Path, *words: str) -> str:
    result = CliRunner().invoke(program().build(list(words)), [*words, "--home", str(home)])
    if result.exception is not None:
        raise result.exception
    return result.output


def lines(home: Path) -> list[tuple[str, str, str, str]]:
    return [(e.what, e.about, e.outcome, e.code) for e in entries(home)]


def test_commands_that_change_something_leave_a_line_however_they_end(tmp_path):
    home = tmp_path / "home"
    coordinator(home, "init", "demo", "--address", "127.0.0.1:1")
    token = json.loads(coordinator(home, "invite", "north", "--json"))["token"]
    with pytest.raises(FederationError, match="E-"):
        coordinator(home, "revoke", "nobody", "--reason", "x\n\x1b[31m")
    coordinator(home, "leads", "add", "anna")
    with pytest.raises(SystemExit):
        coordinator(home, "silos", "--nonsense")
    assert lines(home) == [
        ("command init", "consortium=demo address=127.0.0.1:1", "allowed", ""),
        ("command invite", "name=north hours=72.0", "allowed", ""),
        ("command revoke", "name=nobody reason=x\n\x1b[31m", "refused", "E-RUN-10"),
        ("command leads add", "name=anna", "allowed", ""),
    ]
    assert token not in "".join(texts(home))
    assert "\x1b" not in coordinator(home, "log", "show")
    assert "revoke" in coordinator(home, "log", "show", "--refused")
    assert "invite" not in coordinator(home, "log", "show", "--what", "revoke", "--who", "user")
    assert coordinator(home, "log", "show", "--since", "2999-01-01") == ""
    with pytest.raises(FederationError, match="E-CFG-02"):
        coordinator(home, "log", "show", "--since", "yesterday")
    assert json.loads(coordinator(home, "log", "verify", "--json"))["last"] == 4


def test_a_command_that_cannot_be_recorded_does_nothing(tmp_path):
    home = tmp_path / "home"
    coordinator(home, "init", "demo", "--address", "127.0.0.1:1")
    (home / "audit").chmod(0o755)
    with pytest.raises(FederationError, match="E-STATE-42"):
        coordinator(home, "invite", "north")
    (home / "audit").chmod(0o700)
    assert len(lines(home)) == 1


@pytest.fixture
def hospital(tmp_path):
    (tmp_path / "silo").mkdir(mode=0o700)
    return join(authority(tmp_path / "ca", today()), tmp_path / "silo", "h1")


def test_a_hospitals_commands_leave_lines_and_its_log_is_held_against_the_coordinators(hospital, tmp_path, capsys):
    home = ["--home", str(hospital.home)]
    assert silo(["join", "consilium1.secret-token", *home]) == 2
    assert silo(["request", "--out", str(tmp_path / "request"), *home]) == 0
    assert silo(["approve", "nothing", *home]) != 0
    assert silo(["fingerprint", *home]) == 0
    assert [(what, outcome) for what, _, outcome, _ in lines(hospital.home)] == [
        ("command request", "allowed"),
        ("command approve", "refused"),
    ]
    with closing(AuditLog(hospital.home / "audit")) as log:
        head = SignedHead.sign("silo://demo/h1", *log.head(), hospital.current_credentials())
    with closing(AuditLog(tmp_path / "coordinator" / "audit")) as log:
        log.append(LogEntry("silo://demo/h1", "Transfer/Open"), LogEntry("silo://demo/h1", "head", head=head))
    (tmp_path / "kept").write_text("\n".join(texts(tmp_path / "coordinator")))
    kept = str(tmp_path / "kept")
    capsys.readouterr()
    assert silo(["log", "verify", "--against", kept, "--json", *home]) == 0
    assert json.loads(capsys.readouterr().out)["agreed"] == 1
    tampered(hospital.home, "UPDATE event SET text = replace(text, 'command request', 'command REQUEST')")
    assert silo(["log", "verify", "--against", kept, *home]) == 1
    assert capsys.readouterr().err.startswith("E-STATE-80: line 1 does not follow")


@pytest.mark.parametrize("text", [b"", b"{}\n", b"[" * 200_000, b"\xff\xfe\n", b'{"head": 1}\n'])
def test_a_file_without_the_other_sides_lines_is_refused(hospital, tmp_path, capsys, text):
    (tmp_path / "lie").write_bytes(text)
    home = ["--home", str(hospital.home)]
    assert silo(["log", "verify", "--against", str(tmp_path / "lie"), *home]) == 2
    assert capsys.readouterr().err.startswith("E-CFG-02: --against")
    assert silo(["log", "verify", "--against", str(tmp_path / "none"), *home]) == 2


def test_the_newest_lines_are_shown_alone_whatever_else_the_file_holds(hospital, capsys):
    folder = hospital.home / "audit"
    with closing(AuditLog(folder)) as log:
        for k in range(40):
            log.append(LogEntry("silo://demo/h1", f"event {k}", "x" * 300 if k == 39 else ""))
    tampered(hospital.home, "UPDATE event SET text = 'no line' WHERE seq = 3")
    home = ["--home", str(hospital.home)]
    assert silo(["log", "show", "--last", "3", "--json", *home]) == 0
    said = capsys.readouterr()
    shown = [LogLine.decode(raw) for raw in said.out.splitlines()]
    assert [line.entry.what for line in shown] == ["event 37", "event 38", "event 39"]
    assert "line 3 cannot be read" in said.err
    assert last_lines(hospital.home, 3) == shown
    assert silo(["log", "show", "--last", "1", "--what", "event 1", *home]) == 0
    assert "event 19" in capsys.readouterr().out
    assert silo(["log", "show", "--last", "0", *home]) == 2


def test_lines_are_followed_as_they_are_added(tmp_path, monkeypatch, capsys):
    log = AuditLog(tmp_path / "audit")
    log.append(*(LogEntry("a", f"event {k}") for k in range(3)))
    added = iter(("more", "still more"))

    def meanwhile(_: float) -> None:
        if (what := next(added, None)) is None:
            raise KeyboardInterrupt
        log.append(LogEntry("a", what), LogEntry("b", "of another"))

    monkeypatch.setattr("service_core.audit_log.commands.time.sleep", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        _show(log, lambda line: line.entry.who == "a", as_json=True, last=1, follow=True)
    shown = [LogLine.decode(raw).entry.what for raw in capsys.readouterr().out.splitlines()]
    assert shown == ["event 2", "more", "still more"]


def test_the_newest_lines_of_no_log_or_of_a_damaged_one_are_those_that_can_be_read_and_nothing_is_made(tmp_path):
    assert last_lines(tmp_path, 5) == []
    with closing(AuditLog(tmp_path / "audit")) as log:
        log.append(LogEntry("a", "one"), LogEntry("a", "two"))
    tampered(tmp_path, "INSERT INTO event VALUES (3, 'no line', '', '')")
    before = sorted((tmp_path / "audit").iterdir())
    assert [line.entry.what for line in last_lines(tmp_path, 5)] == ["one", "two"]
    assert [line.entry.what for line in last_lines(tmp_path, 2)] == ["two"]
    assert sorted((tmp_path / "audit").iterdir()) == before
    (tmp_path / "audit/log.sqlite").write_bytes(b"no database" * 100)
    assert last_lines(tmp_path, 5) == []
