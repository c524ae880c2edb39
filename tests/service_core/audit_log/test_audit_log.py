"""The audit log: its chain, its end, and what liars and power cuts do to it."""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest

from fl_core.errors import StateError
from service_core.audit_log.lines import MAX_TEXT, Entry, Line, line_hash
from service_core.audit_log.log import AuditLog, LogFolder
from service_core.audit_log.verification import read_lines, verify

LIES = ["", "\x7f\x9b", "\x1b[31mred\x00\r\n", "\ud800", "a" * 10_000, '"}\n{"number":1}', "é中", "{}", "\\u001b"]


def written(folder: Path, count: int = 30, file_bytes: int = 1000) -> LogFolder:
    with closing(AuditLog(folder, file_bytes=file_bytes)) as log:
        for k in range(count):
            log.append(Entry(f"silo://demo/h{k % 3}", "Transfer/Put", f"round {k}", bytes=k))
    return LogFolder(folder)


def every_line(log: LogFolder) -> list[bytes]:
    return [raw for _, _, raw in read_lines(log)]


def rewrite(log: LogFolder, lines: list[bytes]) -> None:
    """Put lines in place of those of the last file but one, or of the only one."""
    names = log.numbers()
    log.file(names[len(names) // 2]).write_bytes(b"".join(lines))


def middle(log: LogFolder) -> list[bytes]:
    names = log.numbers()
    return log.file(names[len(names) // 2]).read_bytes().splitlines(keepends=True)


def refused(log: LogFolder, *words: str) -> str:
    with pytest.raises(StateError) as caught:
        verify(log)
    assert caught.value.code == "E-STATE-80"
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def number(raw: bytes) -> int:
    return Line.decode(raw).number


def test_a_chain_goes_on_from_file_to_file_and_from_process_to_process(tmp_path):
    log = written(tmp_path / "audit")
    written(tmp_path / "audit", 5)
    assert len(log.numbers()) > 3
    assert all(log.file(n).stat().st_size <= 1000 for n in log.numbers())
    found = verify(log)
    assert (found.lines, found.first, found.last, found.notes) == (35, 1, 35, ())
    lines = every_line(log)
    assert [Line.decode(raw).before for raw in lines] == ["", *map(line_hash, lines[:-1])]
    assert {log.file(n).stat().st_mode & 0o777 for n in log.numbers()} == {0o600}


@pytest.mark.fault("an intruder", "edits a line of the audit log", "`log verify` names file and number of the line")
def test_an_edited_line_is_named(tmp_path):
    for field, value in (("who", "silo://demo/x"), ("before", "ab" * 32), ("bytes", 7), ("at", "2020-01-01T00:00:00Z")):
        log = written(tmp_path / field)
        lines = middle(log)
        changed = json.loads(lines[2]) | {field: value}
        rewrite(log, [*lines[:2], json.dumps(changed, separators=(",", ":")).encode() + b"\n", *lines[3:]])
        names = log.numbers()
        refused(log, f"line {number(lines[2])} (", log.file(names[len(names) // 2]).name, "edited")


@pytest.mark.parametrize(
    "text", [b"{}\n", b"[" * 100_000 + b"\n", b"\xff\n", b'{"number":1e999}\n', b"9" * 9999 + b"\n"]
)
def test_text_that_is_no_line_is_named(tmp_path, text):
    log = written(tmp_path / "audit")
    lines = middle(log)
    rewrite(log, [lines[0], text, *lines[2:]])
    refused(log, f"expected line {number(lines[1])}", "edited")
    with closing(AuditLog(log.path)) as again:  # and it stops nobody
        again.append(Entry("a", "b"))
    refused(log, f"expected line {number(lines[1])}", "edited")


@pytest.mark.fault("an intruder", "removes a line of the audit log", "`log verify` names it")
def test_a_missing_line_is_named(tmp_path):
    log = written(tmp_path / "audit")
    lines = middle(log)
    rewrite(log, [*lines[:1], *lines[2:]])
    refused(log, f"line {number(lines[1])} is missing")


@pytest.mark.fault("an intruder", "moves or repeats a line of the audit log", "`log verify` names it")
def test_a_moved_line_is_named(tmp_path):
    log = written(tmp_path / "moved")
    lines = middle(log)
    rewrite(log, [lines[0], lines[2], lines[1], *lines[3:]])
    refused(log, f"line {number(lines[1])} stands out of its place")
    log = written(tmp_path / "repeated")
    lines = middle(log)
    rewrite(log, [*lines[:2], lines[1], *lines[2:]])
    refused(log, f"expected line {number(lines[2])}", "a second time")


def test_a_missing_file_is_named_unless_it_was_archived(tmp_path):
    log = written(tmp_path / "audit")
    first = log.numbers()[0]
    kept = len(log.file(first).read_bytes().splitlines())
    log.file(first).unlink()
    refused(log, "line 1 is missing")
    assert verify(log, archived=True).first == kept + 1
    log.file(log.numbers()[1]).unlink()
    with pytest.raises(StateError, match="is missing"):
        verify(log, archived=True)


@pytest.mark.fault("an intruder", "cuts off the end of the audit log, or edits its last line", "`log verify` says so")
def test_the_end_is_anchored(tmp_path):
    log = written(tmp_path / "cut")
    last = log.file(log.numbers()[-1])
    lines = last.read_bytes().splitlines(keepends=True)
    last.write_bytes(b"".join(lines[:-1]))
    refused(log, "expected the log to reach line 30", "line 30 and what followed were cut off")
    with closing(AuditLog(log.path)) as again:  # going on does not heal it
        again.append(Entry("a", "b"))
    refused(log, "line 30 is missing")

    log = written(tmp_path / "edited")
    last = log.file(log.numbers()[-1])
    last.write_bytes(last.read_bytes().replace(b"round 29", b"round 28"))
    refused(log, "line 30", "edited")

    log = written(tmp_path / "anchor")
    log.anchor_file.unlink()
    refused(log, "anchor")
    AuditLog(log.path).close()
    assert "damaged" in verify(log).notes[0]

    log = written(tmp_path / "emptied")
    for n in log.numbers():
        log.file(n).unlink()
    refused(log, "found none")
    AuditLog(log.path).close()
    refused(log, "line 1 is missing")


@pytest.mark.fault("a power cut", "leaves half a line in the audit log", "kept aside, and the next line says so")
@pytest.mark.parametrize("torn", [b'{"number":31,"at":"20', b"\0" * 700, b'{"number":31}\n'[:1] + b"\0\n\0"])
def test_a_torn_line_is_moved_aside_and_said(tmp_path, torn):
    log = written(tmp_path / "audit")
    last = log.file(log.numbers()[-1])
    with last.open("ab") as file:
        file.write(torn)
    with closing(AuditLog(log.path)) as again:
        again.append(Entry("a", "b"))
    found = verify(log)
    assert found.last == 32
    (note,) = found.notes
    assert note.startswith("line 31")
    assert f"{len(torn)} bytes" in note
    (aside,) = log.path.glob("torn-*")
    assert aside.read_bytes() == torn


def test_a_crash_before_the_first_sync_is_no_damage(tmp_path):
    log = AuditLog(tmp_path / "audit")
    log.append(Entry("a", "b"))
    again = AuditLog(tmp_path / "audit")  # the first one never closed
    again.append(Entry("a", "c"))
    again.close()
    assert verify(LogFolder(tmp_path / "audit")).notes == ()


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_what_a_peer_says_of_itself_stays_on_one_line_of_ascii(tmp_path, lie):
    with closing(AuditLog(tmp_path / "audit")) as log:
        log.append(Entry(lie, lie, lie, code=lie, address=lie), Entry("next", "call"))
    first, second = every_line(LogFolder(tmp_path / "audit"))
    assert first.isascii()
    assert all(32 <= byte < 127 for byte in first[:-1])
    assert Line.decode(first).entry.about == lie[:MAX_TEXT]
    assert Line.decode(second).entry.who == "next"
    assert verify(LogFolder(tmp_path / "audit")).lines == 2


def _append(folder: Path, name: str) -> None:
    with closing(AuditLog(folder, file_bytes=2000)) as log:
        for k in range(60):
            log.append(Entry(name, f"call {k}"))
            if k % 20 == 0:
                log.sync()


def test_processes_and_threads_append_to_one_chain(tmp_path):
    folder = tmp_path / "audit"
    fork = get_context("fork")
    processes = [fork.Process(target=_append, args=(folder, f"p{k}")) for k in range(2)]
    shared = AuditLog(folder, file_bytes=2000)
    for process in processes:
        process.start()
    threads = [
        threading.Thread(target=lambda: [shared.append(Entry("t", str(k))) for k in range(40)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for one in [*threads, *processes]:
        one.join()
    shared.close()
    found = verify(LogFolder(folder))
    assert (found.lines, found.notes) == (2 * 60 + 3 * 40, ())


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    log = AuditLog(tmp_path / "audit")
    log.append(Entry("a", "b"))

    def half(file, data):
        os.write(file.fileno(), bytes(data[:20]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("service_core.audit_log.log.write_all", half)
        with pytest.raises(OSError, match="No space"):
            log.append(Entry("a", "c"))
    log.append(Entry("a", "d"))
    log.close()
    found = verify(LogFolder(tmp_path / "audit"))
    assert (found.lines, found.notes) == (2, ())
