"""What a service records: floods are counted, ends of other logs are kept, a full disk stops nobody."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import pytest

from fl_core.errors import FederationError, RefusedError, StateError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import log_heads
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import REFUSED, LogEntry
from service_core.audit_log.log import LOG_FILE, AuditLog
from service_core.audit_log.recorder import WINDOW_S, Recorder
from service_core.audit_log.verification import heads_in
from service_core.storage.private_files import Credentials
from tests.support.audit_log import entries, tampered, texts, verified
from tests.support.pki import authority, join, today

OWN = "coordinator://demo"


class Now:
    """A clock by hand."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def recorder(tmp_path, now):
    return Recorder(AuditLog(tmp_path / "audit"), OWN, now)


def refusal(who: str, about: str = "", what: str = "Lead/Submit") -> LogEntry:
    return LogEntry(who, what, about, REFUSED, "E-ID-11", serial="ab", address="ipv4:10.0.0.1:9")


@pytest.mark.fault("a hospital", "is refused 100,000 times", "one line per minute in the audit log, with the count")
def test_a_flood_of_refusals_is_counted(tmp_path, recorder, now):
    for minute in range(5):
        now.s = minute * WINDOW_S
        recorder.flush()
        for k in range(20_000):
            recorder.record(refusal("silo://demo/h1", f"whatever {k}"))
    recorder.close()
    found = [e.times for e in entries(tmp_path) if e.what == "Lead/Submit"]
    assert found == [1, 19_999, *[20_000] * 4]  # the first at once, then a line for each minute
    assert verified(tmp_path).notes == ()


def test_what_differs_is_a_line_of_its_own(tmp_path, recorder):
    recorder.record(refusal("silo://demo/h1"))
    recorder.record(refusal("silo://demo/h2"))
    recorder.record(refusal("silo://demo/h1", what="Lead/Runs"))
    recorder.record(LogEntry("silo://demo/h1", "Transfer/Get", "a", bytes=5))
    recorder.record(LogEntry("silo://demo/h1", "Transfer/Get", "b", bytes=5))
    for k in range(3, 5000):  # callers without end
        recorder.record(refusal(f"silo://demo/h{k}"))
    assert len(entries(tmp_path)) == 5 + 4997


def test_a_full_disk_is_said_and_counted(tmp_path, recorder, monkeypatch, caplog):
    recorder.record(LogEntry("a", "before"))

    def full(*_: object) -> None:
        raise UnavailableError("E-STATE-63", "found the disk full")

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "_write", full)
        for k in range(10):
            recorder.record(LogEntry("a", f"lost {k}"))
    recorder.record(LogEntry("a", "after"))
    said = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1
    assert "E-STATE-63" in said[0].getMessage()
    assert [e.what for e in entries(tmp_path)] == ["before", "lost", "after"]
    assert "10 lines" in verified(tmp_path).notes[0]


# ---- heads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_sides(tmp_path):
    """A coordinator with a log and its credentials, the authority, and a hospital's credentials."""
    ca = authority(tmp_path / "ca", today())
    server = ca.issue_server()
    silo = join(ca, tmp_path / "silo", "h1").current_credentials()
    return ca.ca_pem, server, silo


def other_side(tmp_path, heads: list[SignedHead]):
    """The lines of a side that kept these heads."""
    home = tmp_path / f"other{len(list(tmp_path.iterdir()))}"
    with closing(AuditLog(home / "audit")) as log:
        for head in heads:
            log.append(LogEntry(head.of, "head", head=head))
    (tmp_path / f"{home.name}.json").write_text("\n".join(texts(home)))
    return tmp_path / f"{home.name}.json"


@pytest.mark.fault(
    "an intruder at one side",
    "rewrites the whole audit log with a new chain",
    "`log verify --against` the other side's lines names the first line that differs",
)
def test_a_log_that_was_replaced_is_found_by_what_the_other_side_holds(tmp_path, two_sides):
    authority_pem, server, _ = two_sides
    with closing(AuditLog(tmp_path / "audit")) as log:
        heads = []
        for k in range(9):
            log.append(LogEntry("silo://demo/h1", f"call {k}"))
            heads.append(SignedHead.sign(OWN, *log.head(), server))
    kept = other_side(tmp_path, heads[2::3])
    found = heads_in(kept, OWN, authority_pem)
    assert verified(tmp_path, *found).agreed == 3

    def again(name: str, calls: int, changed: int) -> Path:
        with closing(AuditLog(tmp_path / name / "audit", clock=iter(range(99)).__next__)) as log:
            for k in range(calls):
                log.append(LogEntry("silo://demo/h1", f"call {k}{'!' * (k == changed)}"))
        return tmp_path / name

    with pytest.raises(StateError, match=r"line 3 .*the whole log up to this line was replaced"):
        verified(again("other", 9, 0), *found)
    with pytest.raises(StateError, match=r"signed the hash of line 9.*the log ends at line 2"):
        verified(again("short", 2, -1), *found[2:])
    with pytest.raises(StateError, match="there is no audit log"):
        verified(tmp_path / "nowhere", *found)

    tampered(tmp_path, "DELETE FROM event WHERE seq > 4", "UPDATE sqlite_sequence SET seq = 4 WHERE name = 'event'")
    with closing(AuditLog(tmp_path / "audit")) as log:
        log.append(*(LogEntry("silo://demo/h1", f"other {k}") for k in range(9)))
    assert verified(tmp_path).lines == 13, "sound by itself"
    with pytest.raises(StateError, match=r"line 6 .*lines 4 to 6 were replaced"):
        verified(tmp_path, *found)


def test_an_end_that_this_side_never_signed_is_refused(tmp_path, two_sides):
    authority_pem, server, silo = two_sides
    stranger = authority(tmp_path / "stranger", today()).issue_server()
    sound = SignedHead.sign(OWN, 7, "ab" * 32, server)
    for lie in (
        SignedHead.sign(OWN, 7, "ab" * 32, silo),
        SignedHead.sign(OWN, 7, "ab" * 32, stranger),
        SignedHead(OWN, 8, sound.hash, sound.signature, sound.certificate),
        SignedHead(OWN, 7, sound.hash, b"", sound.certificate),
        SignedHead(OWN, 7, sound.hash, sound.signature, b""),
        SignedHead(OWN, 7, sound.hash, sound.signature, b"-----BEGIN CERTIFICATE-----\nAA\n"),
    ):
        with pytest.raises(RefusedError, match="E-ID-14"):
            heads_in(other_side(tmp_path, [sound, lie]), OWN, authority_pem)
    with pytest.raises(FederationError, match="has no lines of the other side"):
        heads_in(other_side(tmp_path, [sound]), "silo://demo/h1", authority_pem)


@pytest.mark.parametrize(
    "lie",
    [
        {"number": 0},
        {"number": 2**63},
        {"number": 2**64 - 1},
        {"hash": b""},
        {"hash": b"a" * 10_000},
        {"signature": b"s" * 1000},
        {"certificate_pem": b"c" * 100_000},
        {"certificate_pem": b"\xff\x00"},
    ],
)
def test_a_message_of_another_form_is_refused(two_sides, lie):
    authority_pem, _, silo = two_sides
    message = log_heads.to_message(SignedHead.sign("silo://demo/h1", 7, "ab" * 32, silo))
    assert log_heads.of_message(message, "silo://demo/h1", authority_pem).number == 7
    bad = pb.LogHead(**{f.name: value for f, value in message.ListFields()} | lie)
    with pytest.raises(FederationError, match=r"E-WIRE-06|E-ID-14"):
        log_heads.of_message(bad, "silo://demo/h1", authority_pem)


def test_what_stands_around_a_certificate_is_not_kept(two_sides):
    authority_pem, _, silo = two_sides
    dirty = Credentials(silo.key_pem, b"\x1b[31m secret \xff\n" + silo.cert_pem, silo.ca_pem)
    message = log_heads.to_message(SignedHead.sign("silo://demo/h1", 7, "ab" * 32, dirty))
    try:
        kept = log_heads.of_message(message, "silo://demo/h1", authority_pem)
    except FederationError:
        return
    assert kept.certificate == silo.cert_pem


@pytest.mark.fault(
    "an intruder at one side", "restores an older audit log", "the other side detects it at the next round and says so"
)
def test_a_log_that_went_back_is_noticed(tmp_path, recorder, two_sides):
    _, _, silo = two_sides
    ends = [SignedHead.sign("silo://demo/h1", n, h * 32, silo) for n, h in ((5, "ab"), (9, "cd"), (9, "ef"), (4, "ab"))]
    assert recorder.keep(ends[0]) is None
    assert recorder.keep(ends[1]) is None
    assert recorder.keep(ends[1]) is None
    recorder.close()
    again = Recorder(AuditLog(tmp_path / "audit"), OWN)  # and a restart forgets nothing
    assert "line 9" in str(again.keep(ends[2]))
    assert "line 4" in str(again.keep(ends[3]))
    again.close()
    assert [e.what for e in entries(tmp_path)].count("log went back") == 2


def test_damaged_heads_are_begun_anew(tmp_path, two_sides):
    _, _, silo = two_sides
    head = SignedHead.sign("silo://demo/h1", 5, "ab" * 32, silo)
    log = AuditLog(tmp_path / "audit")
    for text in ("", "[]", "[" * 100_000, '{"a": 1}', json.dumps({"x": {"of": 1}})):
        log.keep(head)
        tampered(tmp_path, f"UPDATE kept SET value = '{text}'")
        assert log.head_of(head.of) is None
    assert log.keep(head) is None
    assert log.head_of(head.of) == head


def test_of_many_heads_of_the_other_side_one_an_hour_and_the_last_are_lines(tmp_path, two_sides):
    """A head vouches for every line before it: 500 rounds of 200 hospitals were 205 MB of lines that nobody needed."""
    _, _, silo = two_sides
    now = [0.0]
    recorder = Recorder(AuditLog(tmp_path / "audit"), OWN, clock=lambda: now[0])
    for number in range(1, 501):  # a round a minute
        now[0] += 60.0
        assert recorder.keep(SignedHead.sign("silo://demo/h1", number, f"{number:064x}", silo)) is None
    recorder.close()
    heads = [entry.head for entry in entries(tmp_path) if entry.what == "head"]
    assert [head.number for head in heads] == [1, *range(61, 500, 60), 500]
    assert all(head.hash == f"{head.number:064x}" for head in heads)
    assert (tmp_path / LOG_FILE).stat().st_size < 60_000


def test_where_a_log_went_back_both_ends_are_lines_at_once(tmp_path, two_sides):
    _, _, silo = two_sides
    recorder = Recorder(AuditLog(tmp_path / "audit"), OWN, clock=lambda: 0.0)
    for number in (5, 9):
        assert recorder.keep(SignedHead.sign("silo://demo/h1", number, f"{number:064x}", silo)) is None
    assert "line 9" in str(recorder.keep(SignedHead.sign("silo://demo/h1", 4, "ab" * 32, silo)))
    said = [(entry.what, entry.head and entry.head.number) for entry in entries(tmp_path)]
    assert said == [("head", 5), ("head", 9), ("head", 4), ("log went back", None)]
    recorder.close()


def test_a_head_that_waits_for_its_hour_becomes_a_line_by_itself(tmp_path, two_sides):
    _, _, silo = two_sides
    now = [0.0]
    recorder = Recorder(AuditLog(tmp_path / "audit"), OWN, clock=lambda: now[0])
    for number in (5, 9):
        recorder.keep(SignedHead.sign("silo://demo/h1", number, f"{number:064x}", silo))
    recorder.flush()
    assert [e.head.number for e in entries(tmp_path) if e.head] == [5]
    now[0] = 3601.0
    recorder.flush()
    assert [e.head.number for e in entries(tmp_path) if e.head] == [5, 9]
    recorder.close()
