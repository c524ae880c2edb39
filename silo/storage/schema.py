"""The silo's database: which tables there are, and how transactions on them begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fl_core.errors import StateError
from protos.storage.sqlite import open_engine

VERSION = 3


class Base(DeclarativeBase):
    """The tables of one silo."""


class RunRow(Base):
    """A run that this silo took part in. state_*: what the silo keeps between rounds, as of the last committed one."""

    __tablename__ = "runs"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="")
    manifest_digest: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(default="running")
    reason: Mapped[str] = mapped_column(default="")
    started: Mapped[float] = mapped_column(default=0.0)
    ended: Mapped[float | None] = mapped_column(default=None)
    state_digest: Mapped[str | None] = mapped_column(default=None)
    state_round: Mapped[int | None] = mapped_column(default=None)


class BaseRow(Base):
    """A model that was broadcast, kept because a task may need it again."""

    __tablename__ = "bases"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(index=True)
    digest: Mapped[str]


class TaskRow(Base):
    """A task: its outbox entry while the round is open, and for ever what came of it."""

    __tablename__ = "tasks"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    manifest_digest: Mapped[str] = mapped_column(default="")
    base_digest: Mapped[str] = mapped_column(default="")
    contribution_id: Mapped[str] = mapped_column(default="")
    object_digest: Mapped[str] = mapped_column(default="")
    size: Mapped[int] = mapped_column(default=0)
    state_digest: Mapped[str | None] = mapped_column(default=None)
    mirrored: Mapped[bool] = mapped_column(default=True)
    evaluation: Mapped[str] = mapped_column(default="")
    staged: Mapped[float | None] = mapped_column(default=None)
    receipt: Mapped[bytes | None] = mapped_column(default=None)
    refused: Mapped[str | None] = mapped_column(default=None)
    closed: Mapped[float | None] = mapped_column(default=None)
    included: Mapped[bool | None] = mapped_column(default=None)
    attested: Mapped[str] = mapped_column(default="")


class ApprovalRow(Base):
    """A run that waits for the hospital's decision, or had it. decided: None, approved or denied."""

    __tablename__ = "approvals"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    manifest_digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="")
    about: Mapped[str] = mapped_column(default="")
    asked: Mapped[float] = mapped_column(default=0.0)
    decided: Mapped[bool | None] = mapped_column(default=None)


class ContactRow(Base):
    """The last session with the coordinator (one row)."""

    __tablename__ = "contact"
    id: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str] = mapped_column(default="")
    software: Mapped[str] = mapped_column(default="")
    since: Mapped[float | None] = mapped_column(default=None)
    until: Mapped[float | None] = mapped_column(default=None)
    why: Mapped[str] = mapped_column(default="")


runs, bases, tasks, contact = (Base.metadata.tables[name] for name in ("runs", "bases", "tasks", "contact"))
"""What statements are written over: a session around a row costs several times what SQLite does with it."""


def open_database(path: Path) -> Engine:
    """Open or create the database; raises StateError (E-STATE-62) on a damaged file or one of a newer version.

    Guarantees: a transaction that was committed survives a crash of the machine (WAL, synchronous=FULL).
    """
    engine = open_engine(path, "FULL")
    try:
        with begin(engine) as connection:
            found = int(connection.execute(text("PRAGMA user_version")).scalar_one())
            if found > VERSION:
                raise StateError(
                    "E-STATE-62",
                    f"expected {path} of version {VERSION} or older, found version {found}: a newer `silo` wrote it; "
                    "use that one again, or upgrade this one",
                )
            Base.metadata.create_all(connection)
            if found == 1:  # before states were told apart: what it had staged is discarded unless it is included
                connection.execute(text("ALTER TABLE tasks ADD COLUMN mirrored BOOLEAN NOT NULL DEFAULT 1"))
            if found in (1, 2):  # before updates carried what the hospital states with them
                connection.execute(text("ALTER TABLE tasks ADD COLUMN attested VARCHAR NOT NULL DEFAULT ''"))
            connection.execute(text(f"PRAGMA user_version = {VERSION}"))
    except DatabaseError as error:
        raise StateError(
            "E-STATE-62",
            f"expected the silo's database in {path}, found a file that SQLite cannot use ({error.orig}): restore it "
            "from a backup, or move it away and serve again (open rounds are then trained anew)",
        ) from error
    return engine


def for_notes(path: Path) -> Engine:
    """Open a database that is there for transactions that wait for no disk: a later one of `open_database` takes them.

    Guarantees: they survive the end of the process, however it ends; a crash of the machine may take the last of them.
    """
    return open_engine(path, "NORMAL")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that only reads: it sees one moment, and waits for no writer that waits for the disk."""
    with engine.begin() as connection:
        connection.exec_driver_sql("BEGIN")
        yield connection


@contextmanager
def begin(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that no other writer is inside, in this process or another."""
    with engine.begin() as connection:
        lock(connection)
        yield connection


def lock(connection: Connection) -> None:
    """Begin in the database what SQLAlchemy has begun in memory; without an event, which slows every statement."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
