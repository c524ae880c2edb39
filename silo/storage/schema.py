"""The tables of the silo's database. A column's default is what an insert that does not name it writes."""

from __future__ import annotations

import sqlite3

from sqlalchemy import Boolean, Column, Double, Integer, LargeBinary, MetaData, String, Table

from service_core.storage.generation import incarnation_table

metadata = MetaData()
incarnation = incarnation_table(metadata)

runs = Table(  # that this silo took part in
    "runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("name", String, nullable=False, default=""),
    Column("manifest_digest", String, nullable=False, default=""),
    Column("state", String, nullable=False, default="running"),
    Column("reason", String, nullable=False, default=""),
    Column("started", Double, nullable=False, default=0.0),
    Column("ended", Double),
    Column("leaves", String, nullable=False, default=""),  # how many numbers of which part an update has, as JSON
    Column("privacy", String, nullable=False, default=""),  # what it promises, in words
)

states = Table(  # what the silo keeps between rounds, as of the last committed ones
    "states",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("digest", String, nullable=False),
    Column("coordinator", String, nullable=False, default=""),  # incarnation that closed the round
)

run_data = Table(  # which version of the data a run began with
    "run_data",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("fingerprint", String, nullable=False),
)

bases = Table(  # models that were broadcast, kept because a task may need them again
    "bases",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String, nullable=False, index=True),
    Column("digest", String, nullable=False),
)

tasks = Table(  # the outbox entry while the round is open, and for ever what came of it
    "tasks",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("manifest_digest", String, nullable=False, default=""),
    Column("base_digest", String, nullable=False, default=""),
    Column("contribution_id", String, nullable=False, default=""),
    Column("object_digest", String, nullable=False, default=""),
    Column("size", Integer, nullable=False, default=0),
    Column("state_digest", String),
    Column("mirrored", Boolean, nullable=False, default=True),
    Column("evaluation", String, nullable=False, default=""),
    Column("staged", Double),
    Column("receipt", LargeBinary),
    Column("refused", String),
    Column("closed", Double),
    Column("included", Boolean),
    Column("attested", String, nullable=False, default=""),
    Column("coordinator", String, nullable=False, default=""),  # incarnation that offered it
)

unprotected = Table(  # updates with nothing that bounds what they tell of records: noted before a byte leaves, for ever
    "unprotected",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("object_digest", String, primary_key=True),  # a task that is done again may send another update
    Column("fingerprint", String, nullable=False, default=""),  # of the data
    Column("splits", String),  # whose records, with commas; null: by an earlier version, which may have protected them
)

trainings = Table(  # under way, and those during which the service was killed
    "trainings",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("attempt", Integer, nullable=False, default=0),  # how often the lead had resumed the run
    Column("under_way", Boolean, nullable=False, default=True),
    Column("kills", Integer, nullable=False, default=0),
)

approvals = Table(  # runs that wait for the hospital's decision, or had it
    "approvals",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("manifest_digest", String, primary_key=True),
    Column("name", String, nullable=False, default=""),
    Column("about", String, nullable=False, default=""),
    Column("asked", Double, nullable=False, default=0.0),
    Column("decided", Boolean),  # null: not yet
    Column("request", String, nullable=False, default=""),  # what is asked for, as JSON
)

contact = Table(  # the last session with the coordinator: one row
    "contact",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("address", String, nullable=False, default=""),
    Column("software", String, nullable=False, default=""),
    Column("since", Double),
    Column("until", Double),
    Column("why", String, nullable=False, default=""),
)


def _mirrored(db: sqlite3.Connection) -> None:
    """Tell states apart: what was staged before is discarded unless it is included."""
    db.execute("ALTER TABLE tasks ADD COLUMN mirrored BOOLEAN NOT NULL DEFAULT 1")


def _attested_and_approvals(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE tasks ADD COLUMN attested VARCHAR NOT NULL DEFAULT ''")
    db.execute(
        "CREATE TABLE approvals (run_id VARCHAR NOT NULL, manifest_digest VARCHAR NOT NULL, name VARCHAR NOT NULL, "
        "about VARCHAR NOT NULL, asked DOUBLE NOT NULL, decided BOOLEAN, PRIMARY KEY (run_id, manifest_digest))"
    )


def _states_and_incarnations(db: sqlite3.Connection) -> None:
    """Count changes from here on, and keep more than one committed state: a coordinator may be restored."""
    db.execute(
        "CREATE TABLE incarnation (id INTEGER NOT NULL PRIMARY KEY, incarnation VARCHAR NOT NULL, "
        "generation INTEGER NOT NULL)"
    )
    db.execute("INSERT INTO incarnation VALUES (1, lower(hex(randomblob(16))), 1)")
    db.execute(
        "CREATE TABLE states (run_id VARCHAR NOT NULL, round INTEGER NOT NULL, digest VARCHAR NOT NULL, "
        "coordinator VARCHAR NOT NULL DEFAULT '', PRIMARY KEY (run_id, round))"
    )
    db.execute(
        "INSERT INTO states SELECT run_id, state_round, state_digest, '' FROM runs "
        "WHERE state_digest IS NOT NULL AND state_round IS NOT NULL"
    )
    for column in ("state_digest", "state_round"):
        db.execute(f"ALTER TABLE runs DROP COLUMN {column}")
    db.execute("ALTER TABLE tasks ADD COLUMN coordinator VARCHAR NOT NULL DEFAULT ''")


def _run_data(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE run_data (run_id VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL, PRIMARY KEY (run_id))")


def _requests_and_what_leaves(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE approvals ADD COLUMN request VARCHAR NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE runs ADD COLUMN leaves VARCHAR NOT NULL DEFAULT ''")


def _unprotected_and_trainings(db: sqlite3.Connection) -> None:
    """Take over every update that an earlier version made: whether anything protected it, the ledger says."""
    db.execute("ALTER TABLE runs ADD COLUMN privacy VARCHAR NOT NULL DEFAULT ''")
    db.execute(
        "CREATE TABLE unprotected (run_id VARCHAR NOT NULL, round INTEGER NOT NULL, kind VARCHAR NOT NULL, "
        "object_digest VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL DEFAULT '', splits VARCHAR, "
        "PRIMARY KEY (run_id, round, kind, object_digest))"
    )
    db.execute(
        "INSERT INTO unprotected SELECT t.run_id, t.round, t.kind, t.object_digest, "
        "coalesce(substr(d.fingerprint, 1, instr(d.fingerprint || ':', ':') - 1), ''), NULL "
        "FROM tasks t LEFT JOIN run_data d ON d.run_id = t.run_id WHERE t.object_digest <> ''"
    )
    db.execute(
        "CREATE TABLE trainings (run_id VARCHAR NOT NULL, round INTEGER NOT NULL, kind VARCHAR NOT NULL, "
        "attempt INTEGER NOT NULL DEFAULT 0, under_way BOOLEAN NOT NULL DEFAULT 1, kills INTEGER NOT NULL DEFAULT 0, "
        "PRIMARY KEY (run_id, round, kind))"
    )


MIGRATIONS = (
    _mirrored,
    _attested_and_approvals,
    _states_and_incarnations,
    _run_data,
    _requests_and_what_leaves,
    _unprotected_and_trainings,
)
IN_EVERY_VERSION = frozenset(metadata.tables) - {
    "approvals",
    "incarnation",
    "states",
    "run_data",
    "unprotected",
    "trainings",
}
