"""Labels from a query to the hospital's database: only read, and each cell is text."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fl_core.errors import ConfigError, DataError, UnavailableError
from fl_core.label_table import LabelRow, LabelTable
from silo.cancellation import CancelledError, CancelToken
from silo.pacs import label_query
from silo.pacs.label_query import read_labels, read_query
from tests.support import until
from tests.support.processes import free_port

INJECTED = "x'); DROP TABLE reports; --<script>"
ENDLESS = (
    'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS "AccessionNumber", i AS finding FROM n'
)
SILENT = f"{ENDLESS} WHERE i < 0"
QUERY = 'SELECT accession AS "AccessionNumber", finding, patient AS "PatientID" FROM reports'


def database(folder: Path) -> Path:
    file = folder / "ris.db"
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE reports (accession TEXT, finding TEXT, patient INTEGER)")
        db.executemany(
            "INSERT INTO reports VALUES (?, ?, ?)", [("A1", "nevus", 7), ("A2", INJECTED, 8), ("A3", None, 9)]
        )
    return file


def asked(folder: Path, url: str, query: str = QUERY, more: str = "") -> Path:
    file = folder / "labels.toml"
    file.write_text(f"url = '{url}'\n{more}\nquery = '''{query}'''\n")
    return file


def labels_of(file: Path, stop: CancelToken | None = None) -> LabelTable:
    return read_labels(file, "finding", stop or CancelToken())


def test_a_query_gives_the_labels_that_a_table_would(tmp_path: Path) -> None:
    file = asked(tmp_path, f"sqlite:///{database(tmp_path)}")
    labels = labels_of(file)
    assert labels.key == "AccessionNumber"
    assert labels.find({"AccessionNumber": "A1"}) == LabelRow("nevus", "7", "")
    assert labels.find({"AccessionNumber": "A3"}) is None  # without a finding
    (tmp_path / "labels.csv").write_text(f'AccessionNumber,finding,PatientID\nA1,nevus,7\nA2,"{INJECTED}",8\n')
    assert labels_of(tmp_path / "labels.csv").rows == labels.rows
    assert labels.source == f"query:{read_query(file).digest}"


@pytest.mark.fault("a database", "has a label that contains SQL and markup", "treated as text; nothing is executed")
def test_an_injected_label_is_only_text(tmp_path: Path) -> None:
    file = database(tmp_path)
    labels = labels_of(asked(tmp_path, f"sqlite:///{file}"))
    assert labels.find({"AccessionNumber": "A2"}) == LabelRow(INJECTED, "8", "")
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM reports").fetchone() == (3,)


WRITES = (
    "DELETE FROM reports",
    "INSERT INTO reports VALUES ('A9', 'x', 1) RETURNING accession AS \"AccessionNumber\", finding",
    "DROP TABLE reports",
    "SELECT 1; DELETE FROM reports",
    "COMMIT; DELETE FROM reports",
)


@pytest.mark.parametrize("query", WRITES)
def test_a_query_that_writes_is_refused_and_writes_nothing(tmp_path: Path, query: str) -> None:
    file = database(tmp_path)
    with pytest.raises((DataError, ConfigError)):
        labels_of(asked(tmp_path, f"sqlite:///{file}", query))
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM reports").fetchone() == (3,)


@pytest.mark.parametrize(
    ("url", "query", "said"),
    [
        ("mysql://a@db/ris", QUERY, "opened read-only"),
        ("postgresql://a:hunter2@db/ris", QUERY, "password = FILE"),
        ("nonsense", QUERY, "postgresql://USER@HOST/DATABASE"),
        ("sqlite:////nowhere/ris.db", QUERY, "does not exist"),
        ("sqlite://", QUERY, "does not exist"),
        ("sqlite:///{db}", "   ", "has no query: write one"),
        ("sqlite:///{db}", "SELECT finding FROM reports", "expected one of the columns SeriesInstanceUID"),
        ("sqlite:///{db}", 'SELECT accession AS "AccessionNumber" FROM reports', "including 'finding'"),
        ("sqlite:///{db}", 'SELECT accession AS finding, finding FROM reports', "columns of different names"),
        ("sqlite:///{db}", "SELEC", "syntax error"),
        ("sqlite:///{db}", "SELECT * FROM other", "no such table"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said_without_a_secret(tmp_path: Path, url: str, query: str, said: str) -> None:
    file = asked(tmp_path, url.replace("{db}", str(database(tmp_path))), query)
    with pytest.raises((ConfigError, DataError)) as refused:
        labels_of(file)
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_file_that_is_no_query_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="E-DATA-02"):
        labels_of(tmp_path / "labels.toml")
    for text in ("url = 3", "url = 'x'", "=", "url='x'\nquery='y'\nport=1"):
        (tmp_path / "labels.toml").write_text(text)
        with pytest.raises(DataError, match="E-DATA-07"):
            labels_of(tmp_path / "labels.toml")


def test_rows_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_query, "MAX_ROWS", 1000)
    with pytest.raises(DataError, match="more than 1000 rows"):
        labels_of(asked(tmp_path, f"sqlite:///{database(tmp_path)}", ENDLESS))


def test_rows_that_come_too_slowly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL bounds each piece of an answer, and this the whole."""
    clock = iter(range(0, 10**6, 60))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    rows = label_query._rows(iter([("A", "b")] * 100), ["AccessionNumber", "finding"], "the query", CancelToken())
    with pytest.raises(DataError, match="more than 600 s"):
        list(rows)


@pytest.mark.fault("a database", "answers a query slowly while the service stops", "the query ends at once")
def test_a_query_ends_when_the_service_stops(tmp_path: Path) -> None:
    file = asked(tmp_path, f"sqlite:///{database(tmp_path)}", SILENT)
    assert_ends_at_once(file, lambda: False)


def assert_ends_at_once(file: Path, began: Callable[[], bool]) -> None:
    """Ask a query that would take minutes; began: whether the database works on it."""
    stop, ended = CancelToken(), list[BaseException]()

    def ask() -> None:
        try:
            labels_of(file, stop)
        except CancelledError as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 1.0
    while not began() and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.cancel("the service is stopped")
    asking.join(30)
    assert len(ended) == 1


def test_a_query_that_never_answers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_query, "SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"E-DATA-22.*interrupted"):
        labels_of(asked(tmp_path, f"sqlite:///{database(tmp_path)}", SILENT))


@pytest.mark.parametrize(
    ("said", "away"),
    [
        ('connection to server at "127.0.0.1", port 5432 failed: Connection refused', True),
        ("failed to resolve host 'db': [Errno -2] Name or service not known", True),
        ("connection timeout expired", True),
        ("FATAL: the database system is starting up", True),
        ("terminating connection due to administrator command", True),
        ("database is locked", True),
        ("the connection is closed", True),
        ("FATAL: sorry, too many clients already", True),
        ('unterminated quoted string at or near "\'x"', False),
        ("could not determine data type of parameter $1", False),
        ("too many SQL variables", False),
        ('FATAL: password authentication failed for user "ward"', False),
        ('FATAL: database "riss" does not exist', False),
        ("canceling statement due to statement timeout", False),
        ("no such table: reports", False),
    ],
)
def test_only_a_database_that_may_answer_later_is_waited_for(said: str, away: bool) -> None:
    assert label_query._is_away(said) is away


# ---- PostgreSQL ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real PostgreSQL on loopback: its address, and the file of its password."""
    found = [shutil.which("postgres"), *sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))]
    if (program := next((Path(p).resolve() for p in found if p), None)) is None:
        pytest.skip("no PostgreSQL here: install Debian's postgresql")
    pytest.importorskip("psycopg", reason="the extra sql is not installed")
    folder = tmp_path_factory.mktemp("postgres")
    secret = folder / "db.password"
    secret.write_text("hunter2\n")
    secret.chmod(0o600)
    data, word, port = folder / "data", folder / "word", free_port()
    data.mkdir()
    word.write_text("hunter2\n")
    ordinary = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        ordinary = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for path in (data, word):
            shutil.chown(path, 65534, 65534)
        for parent in (folder, *folder.parents[:-1]):
            if parent.stat().st_uid == 0 and str(parent).count("pytest"):
                parent.chmod(parent.stat().st_mode | 0o001)
    initdb = [*ordinary, str(program.with_name("initdb")), "-D", str(data), "-U", "ward", "-A", "scram-sha-256"]
    subprocess.run([*initdb, f"--pwfile={word}", "-N"], check=True, capture_output=True, timeout=120, cwd="/")
    more = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", f"unix_socket_directories={data}", "-F"]
    process = subprocess.Popen([*ordinary, str(program), "-D", str(data), *more], cwd="/", stderr=subprocess.DEVNULL)
    import psycopg

    def connected() -> bool:
        assert process.poll() is None
        try:
            with psycopg.connect(f"postgresql://ward:hunter2@127.0.0.1:{port}/postgres", connect_timeout=5) as db:
                db.execute("CREATE TABLE IF NOT EXISTS reports (accession text, finding text, patient int)")
                db.execute("TRUNCATE reports")
                rows = [("A1", "100% nevus", 7), ("A2", INJECTED, 8), ("A3", None, 9)]
                db.cursor().executemany("INSERT INTO reports VALUES (%s, %s, %s)", rows)
            return True
        except psycopg.OperationalError:
            return False

    try:
        until(connected, "PostgreSQL", 60)
        yield f"postgresql://ward@127.0.0.1:{port}/postgres", secret
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_postgresql_is_asked_and_only_read(postgres: tuple[str, Path], tmp_path: Path) -> None:
    url, secret = postgres
    more = f"password = '{secret}'"
    labels = labels_of(asked(tmp_path, url, f"{QUERY} WHERE finding LIKE '%%' OR finding LIKE '%'", more))
    assert labels.rows == {"A1": LabelRow("100% nevus", "7"), "A2": LabelRow(INJECTED, "8")}
    for query in (*WRITES, "SET default_transaction_read_only = off; DELETE FROM reports", "SELECT pg_sleep(0), 1/0"):
        with pytest.raises((DataError, ConfigError)):
            labels_of(asked(tmp_path, url, query, more))
    assert len(labels_of(asked(tmp_path, url, QUERY, more)).rows) == 2
    (tmp_path / "wrong").write_text("hunter3")
    (tmp_path / "wrong").chmod(0o600)
    with pytest.raises(ConfigError, match="E-DATA-22") as refused:
        labels_of(asked(tmp_path, url, QUERY, "password = 'wrong'"))
    assert "hunter3" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"E-DATA-22.*does not exist"):
        labels_of(asked(tmp_path, url.replace("/postgres", "/nothing"), QUERY, more))
    assert_ends_at_once(asked(tmp_path, url, f"SELECT pg_sleep(600), x.* FROM ({QUERY}) x", more), lambda: False)
    with pytest.raises(UnavailableError, match="E-DATA-21"):
        labels_of(asked(tmp_path, f"postgresql://ward@127.0.0.1:{free_port()}/postgres", QUERY, more))
