"""An audit log in a backup: whole while others write, and never silently an older one after it was put back."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cli import operations as coordinator_cli
from fl_core.errors import RefusedError, StateError
from protos.wire import log_heads
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import LogEntry
from service_core.audit_log.log import LOG_FILE, AuditLog, last_lines, mark_restored
from service_core.audit_log.recorder import Recorder
from service_core.storage.backup import _copy_database
from service_core.storage.private_files import Credentials
from tests.support.audit_log import entries, texts, verified
from tests.support.coordinator import World
from tests.support.pki import authority, today

OWN, OTHER = "coordinator://demo", "silo://demo/h1"


@pytest.fixture
def server(tmp_path: Path) -> Credentials:
    return authority(tmp_path / "ca", today()).issue_server()


def copy_log(home: Path, target: Path) -> None:
    """Copy a log as `backup` does, while others write."""
    _copy_database(home / LOG_FILE, target / LOG_FILE)


class Side:
    """A home with a log, the ends that it signs, and what another side says of them."""

    def __init__(self, folder: Path, server: Credentials) -> None:
        self.home, self.server, self.heads = folder / "home", server, list[SignedHead]()
        self._other = Recorder(AuditLog(folder / "other" / "audit"), OTHER)
        self.folder = folder

    def write(self, count: int) -> None:
        with closing(AuditLog(self.home / "audit")) as log:
            log.append(*(LogEntry(OTHER, f"call {k}") for k in range(count)))

    def cross(self) -> str | None:
        """Let the other side keep the end of this log; return what it finds wrong."""
        recorder = Recorder(AuditLog(self.home / "audit"), OWN)
        head = recorder.signed_head(self.server)
        assert head is not None
        self.heads.append(head)
        return self._other.keep(head)

    def restore(self, backup: str) -> int:
        shutil.rmtree(self.home)
        shutil.copytree(self.folder / backup, self.home)
        return mark_restored(self.home, 1_700_000_000.0)

    def back_up(self, name: str) -> None:
        copy_log(self.home, self.folder / name)

    def verify(self, *restored: int) -> tuple[str, ...]:
        return verified(self.home, *self.heads, restored=restored).notes

    def said(self) -> list[str]:
        return [entry.what for entry in entries(self.folder / "other")]


@pytest.fixture
def side(tmp_path: Path, server: Credentials) -> Side:
    return Side(tmp_path, server)


@pytest.mark.parametrize("grown", [1, 20, 21, 22, 200], ids=lambda n: f"then grown by {n}")
@pytest.mark.fault(
    "an operator",
    "restores a home with an older audit log, which then grows longer than before",
    "the other side reports it; `log verify --against` names the line of the restore",
)
def test_a_restored_log_is_noticed_as_a_cut_however_long_it_has_become(side: Side, grown: int) -> None:
    side.write(10)
    side.back_up("monday")
    side.write(20)
    assert side.cross() is None
    line = side.restore("monday")
    assert line == 11
    side.write(grown)
    wrong = side.cross()
    assert wrong is not None
    assert "restored at line 11" in wrong
    assert "log went back" in side.said()
    side.write(5)
    assert side.cross() is None  # once
    with pytest.raises(StateError, match=r"E-STATE-80.*home was restored: line 11 records it.*--restored 11"):
        side.verify()
    with pytest.raises(StateError, match="--restored 11"):
        side.verify(10)
    notes = side.verify(11)
    assert [note for note in notes if "restored: from a backup of 2023-11-14 22:13:20 UTC" in note]
    assert "lines 11 to 30 were lost when the home was restored" in notes


def test_the_same_backup_restored_twice_is_noticed_twice(side: Side) -> None:
    side.write(10)
    side.back_up("monday")
    for _ in range(2):
        side.write(20)
        side.cross()
        side.restore("monday")
        side.write(100)
        assert side.cross() is not None
    with pytest.raises(StateError, match="E-STATE-80"):
        side.verify()


def test_a_restored_log_that_lacks_nothing_that_others_hold_is_no_finding(side: Side) -> None:
    side.write(10)
    assert side.cross() is None
    side.write(3)
    side.back_up("monday")
    side.write(7)  # nobody holds an end of these
    side.restore("monday")
    side.write(1)
    assert side.cross() is None
    assert side.verify()  # with a note on the restore, and no need to acknowledge


def test_an_acknowledged_restore_excuses_no_other_change(side: Side) -> None:
    side.write(10)
    side.cross()
    side.back_up("monday")
    side.write(20)
    side.cross()
    line = side.restore("monday")
    side.write(5)
    side.cross()
    side.verify(line)
    kept = texts(side.home)
    shutil.rmtree(side.home / "audit")
    forged = AuditLog(side.home / "audit")
    forged.append(LogEntry("x", "another first line"), *(LogEntry(OTHER, f"call {k}") for k in range(1, 10)))
    forged.mark_restored("from a backup, says who rewrote the lines before it")
    forged.close()
    assert len(kept) == 16
    with pytest.raises(StateError, match="line 10 has another hash than the one that this side signed"):
        side.verify(line)


def test_a_side_without_a_log_in_its_backup_begins_one_that_others_notice(side: Side) -> None:
    side.write(10)
    assert side.cross() is None
    (side.folder / "monday").mkdir()
    assert side.restore("monday") == 1
    side.write(40)
    assert side.cross() is not None


@pytest.mark.parametrize(
    "lie", [{"restored": 3, "restored_hash": "ab" * 32}, {"restored": 12}, {"restored_hash": "cd" * 32}]
)
def test_where_a_log_was_restored_is_signed_with_its_end(side: Side, server: Credentials, lie) -> None:
    true = SignedHead.sign(OWN, 20, "ab" * 32, server, 11, "ef" * 32)
    true.require_signed(server.ca_pem)
    assert SignedHead.from_json(true.to_json()) == true
    assert log_heads.of_message(log_heads.to_message(true), OWN, server.ca_pem) == true
    with pytest.raises(RefusedError, match="E-ID-14"):
        replace(true, **lie).require_signed(server.ca_pem)
    with pytest.raises(RefusedError, match="E-ID-14"):
        replace(true, restored=0, restored_hash="").require_signed(server.ca_pem)


def test_a_backup_of_a_log_that_is_being_written_is_whole(tmp_path: Path) -> None:
    home, over, begun = tmp_path / "home", threading.Event(), threading.Event()

    def write() -> None:
        with closing(AuditLog(home / "audit")) as log:
            while not over.is_set():
                log.append(LogEntry(OTHER, "call"))
                log.sync()
                begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(10)
    try:
        for k in range(20):
            copy_log(home, tmp_path / f"copy{k}")
    finally:
        over.set()
        writer.join()
    for k in range(20):
        assert verified(tmp_path / f"copy{k}").notes == ()
        with closing(AuditLog(tmp_path / f"copy{k}" / "audit")) as log:
            log.append(LogEntry("after", "restore"))
        assert verified(tmp_path / f"copy{k}").notes == ()


def test_the_log_and_the_ends_that_are_kept_are_in_a_backup_and_the_restore_is_a_line(tmp_path: Path, capsys) -> None:
    world = World.create(tmp_path / "home", ["north"])
    world.start()
    server = world.server
    assert server is not None
    server._trail.recorder.keep(SignedHead.sign(OTHER, 3, "ab" * 32, world.people["north"]))
    coordinator_cli.backup(tmp_path / "backup", home=world.home, as_json=True)
    world.stop()
    names = json.loads((tmp_path / "backup/backup.json").read_text())["files"]
    assert [name for name in names if name.startswith("audit/")] == [LOG_FILE]
    capsys.readouterr()
    coordinator_cli.restore(tmp_path / "backup", home=tmp_path / "new", as_json=False)
    told = capsys.readouterr().err
    with closing(AuditLog(tmp_path / "new" / "audit")) as log:
        (last,) = last_lines(tmp_path / "new", 1)
        assert last.entry.what == "restored"
        assert f"--restored {last.number}" in told
        assert log.restored().seq == last.number
        kept = log.head_of(OTHER)
        assert kept is not None
        assert kept.number == 3
    assert len(verified(tmp_path / "new").notes) == 1
