"""The tables of the coordinator's database. Tensors are not here: an object is a file, its digest is its name."""

from __future__ import annotations

import sqlite3

from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

silos = Table(
    "silos",
    metadata,
    Column("name", String, primary_key=True),
    Column("state", String, nullable=False),
    Column("serial", String, nullable=False),  # of the newest certificate
    Column("since", Float, nullable=False),
    Column("proofs", JSON, nullable=False),  # renewals: [[previous key, signature], ...]
    Column("software", String, nullable=False, default=""),
    Column("data", JSON),
    Column("last_seen", Float, nullable=False, default=0.0),
)

certificates = Table(
    "certificates",
    metadata,
    Column("serial", String, primary_key=True),
    Column("name", String, nullable=False, index=True),
    Column("fingerprint", String, nullable=False),
    Column("pem", Text, nullable=False),
    Column("issued", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("enrolled", Integer, nullable=False),  # 1: by an invitation, 0: by a renewal
    Column("first_used", Float),
)

revocations = Table(
    "revocations",
    metadata,
    Column("serial", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", Float, nullable=False),
)

invitations = Table(
    "invitations",
    metadata,
    Column("serial", String, primary_key=True),
    Column("name", String, nullable=False, index=True),
    Column("issued", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("withdrawn", Float),
    Column("used", Float),
    Column("fingerprint", String),  # of the key that used it
    Column("certificate", String),  # serial of what it got
)

rosters = Table(
    "rosters",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("document", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", Integer, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("request_id", String, nullable=False, unique=True),
    Column("spec", Text, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("manifest_digest", String, nullable=False),
    Column("method", String, nullable=False),
    Column("data", String, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("members", JSON, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("reason", Text, nullable=False),
    Column("closed", Integer, nullable=False),
    Column("state_object", String),
    Column("model_digest", String, nullable=False),
    Column("accuracy", Float, nullable=False),
    Column("best_accuracy", Float, nullable=False),
    Column("bytes_up", Integer, nullable=False),
    Column("bytes_down", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("ended", Float, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("is_open", Integer, nullable=False),
    Column("cohort", JSON, nullable=False),
    Column("base_digest", String, nullable=False),
    Column("base_size", Integer, nullable=False),
    Column("correct", JSON, nullable=False),
    Column("examples", JSON, nullable=False),
    Column("included", JSON, nullable=False),
    Column("missing", JSON, nullable=False),
    Column("clipped", Integer, nullable=False),
    Column("opened", Float, nullable=False),
    Column("closed", Float, nullable=False),
)

scores = Table(  # of rounds in which personal models were measured
    "scores",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("personal", JSON, nullable=False),
)

contributions = Table(
    "contributions",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("kind", String, nullable=False),
    Column("silo", String, nullable=False),
    Column("manifest_digest", String, nullable=False),
    Column("base_digest", String, nullable=False),
    Column("object_digest", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("received", Float),  # set, with the receipt, when it was committed
    Column("receipt", LargeBinary),
    Index("contributions_of_round", "run_id", "round"),
)

attestations = Table(
    "attestations",
    metadata,
    Column("id", String, primary_key=True),  # of the contribution
    Column("policy", String, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("head", String, nullable=False),
    Column("sealed", LargeBinary, nullable=False, server_default=text("x''")),
    Column("restored", Integer, nullable=False, server_default=text("0")),
)

policies = Table(
    "policies",
    metadata,
    Column("silo", String, primary_key=True),
    Column("digest", String, nullable=False),
)

objects = Table(
    "objects",
    metadata,
    Column("digest", String, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("kind", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("size", Integer, nullable=False),
    Index("objects_of_run", "run_id", "kind"),
)

events = Table(
    "events",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("silo", String, nullable=False),
    Column("text", Text, nullable=False),
    UniqueConstraint("run_id", "number"),
)


def _scores_and_attestations(db: sqlite3.Connection) -> None:
    """Complete a file of version 1, which was not counted up when tables and columns were added."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS scores (run_id VARCHAR NOT NULL REFERENCES runs (id), round INTEGER NOT NULL, "
        "personal JSON NOT NULL, PRIMARY KEY (run_id, round))"
    )
    db.execute(
        "CREATE TABLE IF NOT EXISTS attestations (id VARCHAR NOT NULL PRIMARY KEY, policy VARCHAR NOT NULL, "
        "seq INTEGER NOT NULL, head VARCHAR NOT NULL)"
    )
    db.execute("CREATE TABLE IF NOT EXISTS policies (silo VARCHAR NOT NULL PRIMARY KEY, digest VARCHAR NOT NULL)")
    there = {row[1] for row in db.execute("PRAGMA table_info(attestations)")}
    for column, kind in (("sealed", "BLOB NOT NULL DEFAULT x''"), ("restored", "INTEGER NOT NULL DEFAULT 0")):
        if column not in there:
            db.execute(f"ALTER TABLE attestations ADD COLUMN {column} {kind}")


MIGRATIONS = (_scores_and_attestations,)
IN_EVERY_VERSION = frozenset(metadata.tables) - {"scores", "attestations", "policies"}
