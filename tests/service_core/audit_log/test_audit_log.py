"""The audit log: its chain, its end, and what liars and power cuts do to it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest

from fl_core.errors import StateError, UnavailableError
from service_core.audit_log.lines import MAX_TEXT, LogEntry, LogLine, line_hash
from service_core.audit_log.log import FOLDER, LOG_FILE, AuditLog, mark_restored
from service_core.storage import private_files
from tests.support.audit_log import entries, tampered, texts, verified
from tests.support.older_homes import HOMES

LIES = ["", "\x7f\x9b", "\x1b[31mred\x00\r\n", "\ud800", "a" * 10_000, '"}\n{"number":1}', "é中", "{}", "\\u001b"]
OLD_LINES = 22
"""Of the log of 0.1.0 in `tests/data/homes/last`."""


def written(home: Path, count: int = 30) -> Path:
    with closing(AuditLog(home / FOLDER)) as log:
        for k in range(count):
            log.append(LogEntry(f"silo://demo/h{k % 3}", "Transfer/Put", f"round {k}", bytes=k))
    return home


def refused(home: Path, *words: str) -> str:
    with pytest.raises(StateError) as caught:
        verified(home)
    assert caught.value.code == "E-STATE-80"
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def changed(text: str, **fields: object) -> str:
    return json.dumps(json.loads(text) | fields, separators=(",", ":"))


def test_a_chain_goes_on_from_process_to_process(tmp_path):
    home = written(tmp_path)
    written(home, 5)
    found = verified(home)
    assert (found.lines, found.first, found.last, found.notes) == (35, 1, 35, ())
    lines = texts(home)
    assert [LogLine.decode(text).before for text in lines] == ["", *map(line_hash, lines[:-1])]
    assert (home / LOG_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.fault("an intruder", "edits a line of the audit log", "`log verify` names the line")
@pytest.mark.parametrize(
    "fields", [{"who": "silo://demo/x"}, {"before": "ab" * 32}, {"bytes": 7}, {"at": "2020-01-01T00:00:00Z"}]
)
@pytest.mark.parametrize("with_hash", [False, True], ids=["text alone", "and its hash"])
def test_an_edited_line_is_named(tmp_path, fields, with_hash):
    home = written(tmp_path)
    text = changed(texts(home)[11], **fields)
    also = f", hash = '{line_hash(text)}'" if with_hash else ""
    tampered(home, f"UPDATE event SET text = '{text}'{also} WHERE seq = 12")
    refused(home, "line 12 was edited")
    with closing(AuditLog(home / FOLDER)) as log:  # and it stops nobody
        log.append(LogEntry("a", "b"))
    refused(home, "line 12 was edited")


def test_an_edited_last_line_is_named(tmp_path):
    home = written(tmp_path)
    tampered(home, "UPDATE event SET text = replace(text, 'round 29', 'round 28') WHERE seq = 30")
    refused(home, "line 30 was edited")


@pytest.mark.parametrize("text", ["'{}'", "'['", "x'ff'", "'{\"number\":1e999}'", "'9'", "'[]'", "x'00'", "''"])
def test_text_that_is_no_line_is_named(tmp_path, text):
    home = written(tmp_path)
    tampered(home, f"UPDATE event SET text = CAST({text} AS TEXT) WHERE seq = 12")
    refused(home, "line 12 was edited")
    assert [e.about for e in entries(home)] == [f"round {k}" for k in range(30) if k != 11]
    with closing(AuditLog(home / FOLDER)) as log:
        log.append(LogEntry("a", "b"))
    refused(home, "line 12 was edited")


@pytest.mark.fault("an intruder", "removes a line of the audit log", "`log verify` names the line")
@pytest.mark.parametrize("number", [1, 2, 17, 29])
def test_a_missing_line_is_named(tmp_path, number):
    home = written(tmp_path)
    tampered(home, f"DELETE FROM event WHERE seq = {number}")
    refused(home, f"line {number} is missing")


@pytest.mark.fault("an intruder", "moves or repeats a line of the audit log", "`log verify` names the line")
def test_a_moved_line_is_named(tmp_path):
    home = written(tmp_path / "moved")
    tampered(home, *(f"UPDATE event SET seq = {b} WHERE seq = {a}" for a, b in ((7, 99), (8, 7), (99, 8))))
    refused(home, "line 7 has the text of line 8")
    home = written(tmp_path / "repeated")
    tampered(home, "UPDATE event SET text = (SELECT text FROM event WHERE seq = 7) WHERE seq = 8")
    refused(home, "line 8 has the text of line 7")


def test_neither_a_line_nor_the_file_is_changed_without_taking_its_triggers_away(tmp_path):
    with closing(sqlite3.connect(written(tmp_path) / LOG_FILE)) as db:
        for statement in ("UPDATE event SET text = ''", "DELETE FROM event"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)


@pytest.mark.fault("an intruder", "cuts off the end of the audit log, or edits its last line", "`log verify` says so")
def test_an_end_that_was_cut_off_is_named_and_going_on_does_not_heal_it(tmp_path):
    home = written(tmp_path)
    tampered(home, "DELETE FROM event WHERE seq > 28")
    refused(home, "line 30 was written", "the lines from 29 on were cut off")
    with closing(AuditLog(home / FOLDER)) as log:
        log.append(LogEntry("a", "b"))
    refused(home, "line 29 is missing")


@pytest.mark.parametrize("lie", [b"", b"no database" * 1000, b"SQLite format 3\0" + bytes(8192)])
def test_a_file_that_is_no_log_is_refused_with_what_to_do(tmp_path, lie):
    home = written(tmp_path)
    (home / LOG_FILE).write_bytes(lie)
    if lie:
        with pytest.raises(StateError, match=r"E-STATE-(80|22).*(move it away|from a backup)"):
            AuditLog(home / FOLDER)
    else:
        assert verified(home).lines == 0, "an empty log, which the other side notices"
    with pytest.raises(StateError, match=r"E-STATE-80.*there is no audit log"):
        verified(tmp_path / "nowhere")


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_what_a_peer_says_of_itself_stays_on_one_line_of_ascii(tmp_path, lie):
    with closing(AuditLog(tmp_path / FOLDER)) as log:
        log.append(LogEntry(lie, lie, lie, code=lie, address=lie), LogEntry("next", "call"))
    first, second = texts(tmp_path)
    assert all(32 <= ord(character) < 127 for character in first)
    assert LogLine.decode(first).entry.about == lie[:MAX_TEXT]
    assert LogLine.decode(second).entry.who == "next"
    assert verified(tmp_path).lines == 2


def _append(folder: Path, name: str) -> None:
    with closing(AuditLog(folder)) as log:
        for k in range(60):
            log.append(LogEntry(name, f"call {k}"))
            if k % 20 == 0:
                log.sync()


def test_processes_and_threads_append_to_one_chain(tmp_path):
    spawn = get_context("spawn")
    processes = [spawn.Process(target=_append, args=(tmp_path / FOLDER, f"p{k}")) for k in range(2)]
    for process in processes:  # the first two may be at once who makes it
        process.start()
    shared = AuditLog(tmp_path / FOLDER)
    threads = [
        threading.Thread(target=lambda: [shared.append(LogEntry("t", str(k))) for k in range(40)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for one in [*threads, *processes]:
        one.join()
    shared.close()
    found = verified(tmp_path)
    assert (found.lines, found.notes) == (2 * 60 + 3 * 40, ())


@pytest.mark.fault(
    "a power cut or a kill",
    "comes while a line of the audit log is written",
    "earlier lines are complete, and writing continues",
)
def test_a_process_that_is_killed_loses_no_line_that_was_written(tmp_path):
    child = os.fork()
    if not child:
        try:
            log = AuditLog(tmp_path / FOLDER)
            for k in range(5):
                log.append(LogEntry("a", f"call {k}"))
            log._open().execute("BEGIN IMMEDIATE")
            log._write(log._open(), LogEntry("a", "half"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with closing(AuditLog(tmp_path / FOLDER)) as log:
        log.append(LogEntry("a", "next"))
    assert [e.what for e in entries(tmp_path)] == [*(f"call {k}" for k in range(5)), "next"]
    assert verified(tmp_path).notes == ()


def test_what_was_synced_is_in_the_file_itself_whatever_becomes_of_its_log(tmp_path):
    log = AuditLog(tmp_path / FOLDER)
    log.append(LogEntry("a", "b"))
    log.sync()
    (tmp_path / "copy" / FOLDER).mkdir(parents=True, mode=0o700)
    (tmp_path / "copy" / FOLDER).chmod(0o700)
    shutil.copyfile(
        tmp_path / LOG_FILE, tmp_path / "copy" / LOG_FILE
    )  # without the write-ahead log, as a cut may leave it
    assert [e.what for e in entries(tmp_path / "copy")] == ["b"]
    log.close()


def test_what_was_synced_is_on_the_disk_although_somebody_reads(tmp_path, monkeypatch):
    log = AuditLog(tmp_path / FOLDER)
    log.append(LogEntry("a", "b"))
    log.sync()
    synced = []
    monkeypatch.setattr(private_files, "sync_path", lambda path: synced.append(path.read_bytes()))
    with AuditLog(tmp_path / FOLDER).reading() as reader:
        reader.execute("SELECT count(*) FROM event").fetchone()
        log.append(LogEntry("a", "written while somebody reads"))
        log.sync()
    assert b"written while somebody reads" in synced[-1]
    log.close()


def test_processes_that_make_the_log_at_once_all_write(tmp_path):
    def first(k: int) -> None:
        with closing(AuditLog(tmp_path / str(k // 8) / FOLDER)) as log:
            log.append(LogEntry("a", "b"))

    for k in range(5):
        (tmp_path / str(k)).mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first, range(40)))
    assert [verified(tmp_path / str(k)).lines for k in range(5)] == [8] * 5


def test_a_full_disk_leaves_whole_lines(tmp_path):
    log = AuditLog(tmp_path / FOLDER)
    log.append(LogEntry("a", "b"))
    log._open().execute("PRAGMA max_page_count = 1")
    many = [LogEntry("a", "x" * 300, "y" * 300)] * 200
    with pytest.raises(UnavailableError, match="E-STATE-63"):
        log.append(*many)
    assert log.head().seq == 1, "nothing of them"
    log._open().execute("PRAGMA max_page_count = 1073741823")
    log.append(LogEntry("a", "d"))
    log.close()
    found = verified(tmp_path)
    assert (found.lines, found.notes) == (2, ())


# ---- the log of 0.1.0 ------------------------------------------------------------------------------------------------


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A home with the log that a coordinator of 0.1.0 wrote: two files, ends of a silo's log, and a restore."""
    shutil.copytree(HOMES / "last" / FOLDER, tmp_path / "home" / FOLDER)
    (tmp_path / "home" / FOLDER).chmod(0o700)
    return tmp_path / "home"


def old_texts(home: Path) -> list[str]:
    return [text for file in sorted((home / FOLDER).glob("*.jsonl")) for text in file.read_text().splitlines()]


def test_a_log_of_0_1_0_is_taken_over_byte_for_byte_and_goes_on(older):
    before = old_texts(older)
    assert len(before) == OLD_LINES
    for _ in range(2):  # once
        with closing(AuditLog(older / FOLDER)) as log:
            log.append(LogEntry("a", "b"))
            assert log.restored().seq == 19
            head = log.head_of("silo://test/north")
            assert head is not None
            assert head.number == 9
    assert texts(older)[:OLD_LINES] == before == old_texts(older)
    assert [e.what for e in entries(older)[OLD_LINES:]] == ["taken over", "b", "b"]
    found = verified(older)
    assert (found.lines, found.hash) == (OLD_LINES + 3, line_hash(texts(older)[-1]))
    assert f"{OLD_LINES} lines of 2 files of 0.1.0" in found.notes[-1]


def test_a_backup_that_0_1_0_made_is_restored_with_a_line(older):
    line = mark_restored(older, 1_700_000_000.0)
    assert [e.what for e in entries(older)[OLD_LINES:]] == ["taken over", "restored"]
    with closing(AuditLog(older / FOLDER)) as log:
        assert log.restored() == (line, log.head().hash)


def test_a_log_of_0_1_0_that_was_taken_over_by_half_is_taken_over_again(older, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            AuditLog(older / FOLDER)
    assert verified(older).lines == OLD_LINES + 1


def edit(number: int, change) -> None:
    def edited(home: Path) -> None:
        for file in (home / FOLDER).glob("*.jsonl"):
            lines = file.read_text().splitlines(keepends=True)
            numbers = [json.loads(line)["number"] for line in lines]
            if number in numbers:
                place = numbers.index(number)
                lines[place : place + 1] = change(lines[place])
                file.write_text("".join(lines))

    return edited


def without_lines(home: Path) -> None:
    for file in (home / FOLDER).glob("*.jsonl"):
        file.write_text("")


def without_files(home: Path) -> None:
    for file in (home / FOLDER).glob("*.jsonl"):
        file.unlink()


def without_end_and_anchor(home: Path) -> None:
    edit(OLD_LINES, lambda line: [])(home)
    (home / FOLDER / "anchor.json").unlink()


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (without_lines, "is missing"),
        (without_files, "is missing"),
        (without_end_and_anchor, f"line {OLD_LINES} is missing"),
        (edit(5, lambda line: [line.replace("outcome", "OUTCOME")]), "line 5 was edited"),
        (edit(5, lambda line: []), "line 5 is missing"),
        (edit(5, lambda line: ["no line\n"]), "line 5 is missing"),
        (edit(OLD_LINES, lambda line: []), f"line {OLD_LINES} is missing"),
        (edit(OLD_LINES, lambda line: [line.replace("h2", "h9")]), f"line {OLD_LINES} was edited"),
        (edit(OLD_LINES, lambda line: [line[:-40]]), f"line {OLD_LINES} is missing"),
    ],
)
def test_what_was_done_to_a_log_of_0_1_0_is_found_after_it_was_taken_over(older, lie, said):
    lie(older)
    for _ in range(2):
        refused(older, said)
        with closing(AuditLog(older / FOLDER)) as log:
            log.append(LogEntry("a", "b"))


def test_a_log_of_0_1_0_whose_oldest_file_was_moved_away_begins_where_it_begins(older):
    first = len((older / FOLDER / "000001.jsonl").read_text().splitlines())
    (older / FOLDER / "000001.jsonl").unlink()
    refused(older, "line 1 is missing")
    found = verified(older, archived=True)
    assert (found.first, found.last) == (first + 1, OLD_LINES + 1)


def test_half_a_line_at_the_end_of_a_log_of_0_1_0_is_said(older):
    with (older / FOLDER / "000002.jsonl").open("a") as file:
        file.write('{"number":23,"at":"20')
    assert "1 more lines of them are torn" in verified(older).notes[-1]
