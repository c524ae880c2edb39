"""How a SQLite file is opened that many threads, and now and then a second process, use at once."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_SECONDS = 30.0
"""How long a statement waits for another process."""
_CONNECTIONS = 16


def open_engine(path: Path, synchronous: Literal["FULL", "NORMAL"]) -> Engine:
    """Open a file whatever it is called, in which transactions begin when they are told to.

    Guarantees (WAL): with FULL, a transaction that was committed survives a crash of the machine; with NORMAL the end
    of the process, however it ends, and a crash of the machine from the next FULL one on.
    """
    engine = create_engine(
        URL.create("sqlite", database=str(path)),  # as text, a ? or % of the path would be the URL's own
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        pool_size=_CONNECTIONS, max_overflow=-1,
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def _configure(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        del entry
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"expected a connection of sqlite3, found {type(connection).__name__}")
        # The driver would begin lazily and deferred; two threads that read and then write could then never finish.
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", f"synchronous = {synchronous}", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine
