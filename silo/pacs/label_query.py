"""Read labels with one read-only SQL query to the hospital's own database (`labels=FILE.toml:COLUMN`).

url = "postgresql://consilium@db.hospital/ris"   # or sqlite:////data/ris.db
password = "db.password"                         # optional: a file of mode 0600, beside this one
query = '''SELECT accession AS "AccessionNumber", finding, patient AS "PatientID" FROM reports'''
"""

from __future__ import annotations

import re
import socket
import sqlite3
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3
from sqlalchemy import URL, Connection, CursorResult, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from fl_core.converter import ConversionError, structure
from fl_core.errors import ConfigError, DataError, UnavailableError
from fl_core.errors.extras import require
from fl_core.label_table import KEYS, LabelTable
from fl_core.text import composed, read_text
from service_core.console import printable
from service_core.storage.private_files import read_private
from silo.cancellation import CancelToken

SUFFIX = ".toml"
MAX_ROWS, SECONDS = 5_000_000, 600
"""Limits of one query: rows, and total time."""
_CHARS, _STEPS, _CONNECT_S = 1 << 16, 100_000, 30
_ALIVE = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""libpq keepalives, which detect a dead host within a minute."""


@dataclass(frozen=True, slots=True)
class LabelQuery:
    """Contents of a query file. password: path of the password file, relative to the query file or absolute."""

    url: str
    query: str
    password: str = ""

    @property
    def digest(self) -> str:
        """Digest of the query. A different query means different data."""
        return blake3(self.query.encode()).hexdigest()[:16]


def read_labels(file: Path, column: str, stop: CancelToken, keys: Sequence[str] = KEYS) -> LabelTable:
    """Read labels from a table file or a database; raises as `LabelTable.read` and `ask`."""
    return ask(file, column, stop, keys) if file.suffix == SUFFIX else LabelTable.read(file, column, keys)


def read_query(file: Path) -> LabelQuery:
    """Read a query file; raises DataError: E-DATA-02 if there is no such file, E-DATA-07 if it is invalid."""
    try:
        query = structure(LabelQuery, tomllib.loads(read_text(file, _CHARS)), "")
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"there is no query for labels at {file}: check the path") from error
    except (OSError, ValueError, RecursionError) as error:
        what = error.message if isinstance(error, ConfigError) else str(error)
        kind = "url and query" if isinstance(error, (ConfigError, ConversionError)) else "TOML in UTF-8"
        raise DataError("E-DATA-07", f"{file} must contain {kind}: {what[:300]}. Correct it") from error
    if not query.query.strip():
        raise DataError("E-DATA-07", f"{file} has no query: write one")
    return query


def ask(file: Path, column: str, stop: CancelToken, keys: Sequence[str] = KEYS) -> LabelTable:
    """Run the query and return its rows as text, with the query's column names. stop: cancels it at once.

    Raises UnavailableError (E-DATA-21) if the database does not answer; ConfigError (E-DATA-22) if it refuses;
    DataError (E-DATA-07) if the query is invalid, and as `LabelTable.of`.

    Guarantees: the query cannot write; it ends after `SECONDS`; no error repeats the password.
    """
    query = read_query(file)
    url = _address(query, file)
    where = f"the query in {file}"
    with _said(url, file, stop), _connected(url, stop) as db:
        answer = db.execution_options(stream_results=True, no_parameters=True).exec_driver_sql(query.query)
        if not answer.returns_rows:
            raise DataError("E-DATA-07", f"the statement of {where} returns no rows: write a SELECT")
        header = [composed(name) for name in answer.keys()]  # noqa: SIM118 - no mapping
        if len(set(header)) < len(header) or column not in header:
            raise DataError(
                "E-DATA-07", f"expected columns of different names, including {column!r}, from {where}, found {header}"
            )
        return LabelTable.of(header, _rows(answer, header, where, stop), column, where, f"query:{query.digest}", keys)


def _rows(answer: CursorResult[Any], header: Sequence[str], where: str, stop: CancelToken) -> Iterator[dict[str, str]]:
    """Stream the rows; raises DataError (E-DATA-07) above `MAX_ROWS` rows or after `SECONDS`."""
    until = time.monotonic() + SECONDS
    for number, row in enumerate(answer):
        stop.raise_if_cancelled()
        if number >= MAX_ROWS or time.monotonic() > until:
            raise DataError(
                "E-DATA-07",
                f"{where} returned more than {MAX_ROWS} rows, or took more than {SECONDS:g} s: ask for fewer rows",
            )
        yield dict(zip(header, map(_text, row), strict=True))


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _address(query: LabelQuery, file: Path) -> URL:
    """Return the URL with the password from its file; raises ConfigError (E-CFG-02), which never repeats the URL."""
    try:
        url = make_url(query.url)
    except SQLAlchemyError:
        url = None
    if url is None or url.password is not None:
        raise ConfigError(
            "E-CFG-02",
            f"expected url in {file} like postgresql://USER@HOST/DATABASE or sqlite:////FILE, found "
            f"{'another form' if url is None else 'a password in it: put it into a file, password = FILE'}",
        )
    kind = url.get_backend_name()
    if kind == "sqlite":
        if not url.database or not Path(url.database).is_file():
            raise DataError("E-DATA-02", f"the database file that {file} names does not exist: check its url")
        place = Path(url.database).absolute().as_uri()
        return URL.create("sqlite", database=place, query={"mode": "ro", "uri": "true"})
    if kind != "postgresql":
        raise ConfigError(
            "E-CFG-02",
            f"expected a database that can be opened read-only (sqlite, postgresql) in {file}, found {kind}: export "
            "a table of labels from it (labels=FILE.csv:COLUMN)",
        )
    require("psycopg", "sql", "labels from PostgreSQL")
    secret = read_private(file.parent / query.password).decode().strip() if query.password else None
    return url.set(drivername="postgresql+psycopg", password=secret)


@contextmanager
def _connected(url: URL, stop: CancelToken) -> Iterator[Connection]:
    options: dict[str, Any] = {"timeout": float(_CONNECT_S)}
    if url.get_backend_name() != "sqlite":
        reading = f"-c default_transaction_read_only=on -c statement_timeout={SECONDS * 1000:.0f}"
        options = {"options": reading, "connect_timeout": _CONNECT_S, **_ALIVE}
    engine = create_engine(url, connect_args=options, poolclass=NullPool, hide_parameters=True)
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", lambda connection, _: _bounded(connection, stop))
    try:
        with engine.connect() as db, stop.on_cancel(partial(_cut_off, db.connection.driver_connection)):
            stop.raise_if_cancelled()
            yield db
    finally:
        engine.dispose()


def _bounded(connection: Any, stop: CancelToken) -> None:  # noqa: ANN401 - of sqlite3
    until = time.monotonic() + SECONDS
    connection.set_progress_handler(lambda: stop.is_cancelled or time.monotonic() > until, _STEPS)
    with closing(connection.cursor()) as cursor:
        cursor.execute("PRAGMA query_only = ON")


def _cut_off(driver: Any) -> None:  # noqa: ANN401 - of psycopg, or sqlite3, which checks the token itself
    """Cancel a query and shut down its connection, from another thread."""
    if not isinstance(driver, sqlite3.Connection):
        with suppress(Exception):  # the server cannot be reached, or the connection is closed
            driver.cancel_safe(timeout=2.0)
        with suppress(Exception), socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
            line.shutdown(socket.SHUT_RDWR)


@contextmanager
def _said(url: URL, file: Path, stop: CancelToken) -> Iterator[None]:
    """Translate database errors into errors with a code."""
    host = url.host or "this machine"
    try:
        yield
    except DBAPIError as error:
        stop.raise_if_cancelled()
        if error.connection_invalidated or _is_away(_line(error)):
            raise UnavailableError(
                "E-DATA-21",
                f"the database at {host} did not answer: {_line(error)}. It will be asked again",
            ) from None
        if isinstance(error, OperationalError):
            raise ConfigError("E-DATA-22", f"cannot read the database at {host}: {_line(error)}") from None
        raise DataError("E-DATA-07", f"the query in {file} failed: {_line(error)}. It may only read") from None
    except SQLAlchemyError as error:
        raise DataError("E-DATA-07", f"the query in {file} failed ({type(error).__name__}): correct it") from None


_AWAY = re.compile(
    "connection (refused|reset|timeout|timed out|is lost|is closed|not open)|timeout expired|failed to resolve|"
    "could not (connect|translate|receive|send)|unreachable|no route|starting up|shutting down|recovery|"
    "too many (clients|connections)|connection slots|terminating connection|closed the connection|database is locked",
    re.IGNORECASE,
)
"""Driver messages of a temporarily unavailable database. Other errors are not retried."""


def _is_away(text: str) -> bool:
    return _AWAY.search(text) is not None


def _line(error: DBAPIError) -> str:
    return printable(" ".join(str(error.orig).split()))[:200]
