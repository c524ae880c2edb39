"""The authority's key under a passphrase: who has the file alone signs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli.main import program
from coordinator.pki import passphrase
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.pki.server_certificate import ServerCertificate
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError, StateError
from service_core.pki import certificates
from service_core.pki.invitation import InvitationToken
from tests.support.pki import today

SECRET = "correct horse battery"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(passphrase, "SOURCE", passphrase.PassphraseSource())
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("NEXT", SECRET[::-1])
    monkeypatch.setenv("SHORT", "short")
    return tmp_path / "home"


def command(home: Path, *words: str) -> None:
    line = [*words, "--home", str(home)]
    program().build(line)(line, standalone_mode=False)


def init(home: Path) -> None:
    command(home, "init", "demo", "--address", "localhost:8443", "--ca-passphrase-env", "SECRET")


@pytest.mark.fault(
    "a thief", "has the key file of the authority", "the key cannot sign anything without its passphrase"
)
def test_nothing_is_signed_without_the_passphrase(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(home)
    pem = (home / "pki" / "ca.key").read_bytes()
    assert b"ENCRYPTED" in pem
    with pytest.raises(StateError, match="E-STATE-43"):
        certificates.load_key(pem, "the key")
    attempts: list[Callable[[], object]] = [
        lambda: command(home, "invite", "a"),
        lambda: command(home, "invite", "a", "--ca-passphrase-env", "NEXT"),
        lambda: command(home, "leads", "add", "anna"),
        lambda: command(home, "ca", "passphrase", "--new-env", "NEXT"),
        lambda: command(home, "serve", "--bind", "127.0.0.1:0"),
        lambda: Authority.open(home).issue_server(),
    ]
    for attempt in attempts:
        with pytest.raises(StateError, match="E-STATE-47"):
            attempt()
    assert SECRET not in "".join(capsys.readouterr())
    with closing(CoordinatorStore(home)) as store:
        assert [lead.name for lead in Leads(home, store).all()] == ["lead"]


def test_with_the_passphrase_everything_is_as_before(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(home)
    capsys.readouterr()
    file = home.parent / "passphrase"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    command(home, "invite", "a", "--ca-passphrase-file", str(file))
    assert InvitationToken.decode(capsys.readouterr().out).name == "a"
    command(home, "leads", "add", "anna", "--ca-passphrase-env", "SECRET")
    clock = today()
    clock.advance(days=61)
    assert ServerCertificate(home, clock).renew_if_due()
    file.chmod(0o644)
    with pytest.raises(StateError, match="E-STATE-42"):
        command(home, "invite", "b", "--ca-passphrase-file", str(file))


def test_it_is_changed_and_removed_by_a_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(home)
    before = Authority.open(home).fingerprint()
    with pytest.raises(ConfigError, match=r"E-CFG-02.*at least 12"):
        command(home, "ca", "passphrase", "--new-env", "SHORT", "--ca-passphrase-env", "SECRET")
    command(home, "ca", "passphrase", "--new-env", "NEXT", "--ca-passphrase-env", "SECRET")
    with pytest.raises(StateError, match="E-STATE-47"):
        command(home, "invite", "a", "--ca-passphrase-env", "SECRET")
    command(home, "invite", "a", "--ca-passphrase-env", "NEXT")
    command(home, "ca", "passphrase", "--remove", "--ca-passphrase-env", "NEXT")
    command(home, "invite", "a")
    assert Authority.open(home).fingerprint() == before


def test_a_terminal_is_asked_once_and_again_after_a_wrong_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init(home)
    monkeypatch.setattr(passphrase, "SOURCE", passphrase.PassphraseSource())
    answers = ["wrong passphrase", SECRET]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(passphrase, "getpass", lambda _: answers.pop(0))
    with pytest.raises(StateError, match="E-STATE-47"):
        Authority.open(home).unlock()
    Authority.open(home).unlock()
    Authority.open(home).unlock()
    assert answers == []
    assert SECRET not in repr(passphrase.SOURCE)
