"""The tables of the coordinator's database. Tensors are not here: an object is a file named by its digest."""

from __future__ import annotations

import json
import sqlite3

import sqlalchemy as sa

from service_core.storage.generation import FIRST_TABLE, incarnation_table
from service_core.storage.migration import Step, sql

metadata = sa.MetaData()
incarnation = incarnation_table(metadata)

silos = sa.Table(
    "silos",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("serial", sa.String, nullable=False),  # of the newest certificate
    sa.Column("since", sa.Float, nullable=False),
    sa.Column("proofs", sa.JSON, nullable=False),  # renewals: [[previous key, signature], ...]
    sa.Column("software", sa.String, nullable=False, default=""),
    sa.Column("data", sa.JSON),
    sa.Column("last_seen", sa.Float, nullable=False, default=0.0),
    sa.Column("validation_only", sa.Integer, nullable=False, server_default=sa.text("0")),  # 1: never asked to train
)

certificates = sa.Table(
    "certificates",
    metadata,
    sa.Column("serial", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("fingerprint", sa.String, nullable=False),
    sa.Column("pem", sa.Text, nullable=False),
    sa.Column("issued", sa.Float, nullable=False),
    sa.Column("until", sa.Float, nullable=False),
    sa.Column("enrolled", sa.Integer, nullable=False),  # 1: by an invitation, 0: by a renewal
    sa.Column("first_used", sa.Float),
)

revocations = sa.Table(
    "revocations",
    metadata,
    sa.Column("serial", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)

leads = sa.Table(
    "leads",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("serial", sa.String, nullable=False, unique=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("fingerprint", sa.String, nullable=False),
    sa.Column("issued", sa.Float, nullable=False),
    sa.Column("until", sa.Float, nullable=False),
    sa.Column("first_used", sa.Float),
)

alarms = sa.Table(  # identities that two parties may use
    "alarms",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)

invitations = sa.Table(
    "invitations",
    metadata,
    sa.Column("serial", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("issued", sa.Float, nullable=False),
    sa.Column("expires", sa.Float, nullable=False),
    sa.Column("withdrawn", sa.Float),
    sa.Column("used", sa.Float),
    sa.Column("fingerprint", sa.String),  # the key that used it
    sa.Column("certificate", sa.String),  # serial of the issued certificate
    sa.Column("validation_only", sa.Integer, nullable=False, server_default=sa.text("0")),
)

rosters = sa.Table(
    "rosters",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("document", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("request_id", sa.String, nullable=False, unique=True),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),
    sa.Column("manifest_digest", sa.String, nullable=False),
    sa.Column("method", sa.String, nullable=False),
    sa.Column("data", sa.String, nullable=False),
    sa.Column("rounds", sa.Integer, nullable=False),
    sa.Column("members", sa.JSON, nullable=False),
    sa.Column("state", sa.String, nullable=False, index=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("closed", sa.Integer, nullable=False),
    sa.Column("state_object", sa.String),
    sa.Column("model_digest", sa.String, nullable=False),
    sa.Column("accuracy", sa.Float, nullable=False),
    sa.Column("best_accuracy", sa.Float, nullable=False),
    sa.Column("bytes_up", sa.Integer, nullable=False),
    sa.Column("bytes_down", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("ended", sa.Float, nullable=False),
    sa.Column("coverage", sa.JSON(none_as_null=True)),  # as `ClassCoverage.facts`, from before round 1 on
    sa.Column("facts", sa.JSON(none_as_null=True)),  # as `DerivedFacts.to_dict`; null: an earlier version accepted it
    sa.Index("runs_newest_first", sa.desc("created"), "id"),
)

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("is_open", sa.Integer, nullable=False),
    sa.Column("cohort", sa.JSON, nullable=False),
    sa.Column("base_digest", sa.String, nullable=False),
    sa.Column("base_size", sa.Integer, nullable=False),
    sa.Column("opened", sa.Float, nullable=False),
    sa.Column("closed", sa.Float, nullable=False),
    sa.Column("record", sa.JSON(none_as_null=True)),  # as `RoundRecord.to_dict`, from the round's close on
)

secagg_seals = sa.Table(  # the fixed set of a masked round, until its close
    "secagg_seals",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("seal", sa.LargeBinary, nullable=False),  # the message that every member gets
)

steering = sa.Table(  # a lead's interventions in runs, and the classes that their rounds have shown
    "steering",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),  # how often it was resumed
    sa.Column("quorum", sa.Integer, nullable=False),  # 0: the manifest's
    sa.Column("excluded", sa.JSON, nullable=False),
    sa.Column("extended_round", sa.Integer, nullable=False),
    sa.Column("extended_s", sa.Float, nullable=False),
    sa.Column("holds", sa.JSON, nullable=False),  # {silo: classes}, from its last update
)

declared_sizes = sa.Table(  # silos' declared data sizes when the run was submitted
    "declared_sizes",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("silo", sa.String, primary_key=True),
    sa.Column("train", sa.Float, nullable=False),
    sa.Column("test", sa.Float, nullable=False),
)

contributions = sa.Table(
    "contributions",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("silo", sa.String, nullable=False),
    sa.Column("manifest_digest", sa.String, nullable=False),
    sa.Column("base_digest", sa.String, nullable=False),
    sa.Column("object_digest", sa.String, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("received", sa.Float),  # set when it was committed
    sa.Column("policy", sa.String),  # this and the next columns: its attestation; null: none
    sa.Column("seq", sa.Integer),
    sa.Column("head", sa.String),
    sa.Column("restored", sa.Integer),
    sa.Column("sealed", sa.LargeBinary),  # for each silo's newest committed update, and for uncommitted ones
    sa.Column("sealed_in_receipt", sa.Integer, nullable=False, server_default=sa.text("0")),  # 1: the silo is of 0.1.0
    sa.Index("contributions_of_round", "run_id", "round"),
    sa.Index("contributions_sealed", "silo", sqlite_where=sa.text("sealed IS NOT NULL")),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("silo", sa.String, primary_key=True),
    sa.Column("digest", sa.String, nullable=False),
)

objects = sa.Table(
    "objects",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Index("objects_of_run", "run_id", "kind"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("silo", sa.String, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.UniqueConstraint("run_id", "number"),
)


def row_values(table: sa.Table, record: object) -> dict[str, object]:
    """Return the column values of a record that has an attribute for every column."""
    return {column.name: getattr(record, column.name) for column in table.c}


# ---- files of earlier versions ---------------------------------------------------------------------------------------

_TABLES_OF_VERSION_1 = """
CREATE TABLE IF NOT EXISTS scores (
    run_id VARCHAR NOT NULL REFERENCES runs (id), round INTEGER NOT NULL, personal JSON NOT NULL,
    PRIMARY KEY (run_id, round));
CREATE TABLE IF NOT EXISTS attestations (
    id VARCHAR NOT NULL PRIMARY KEY, policy VARCHAR NOT NULL, seq INTEGER NOT NULL, head VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS policies (silo VARCHAR NOT NULL PRIMARY KEY, digest VARCHAR NOT NULL);
"""


def _scores_and_attestations(db: sqlite3.Connection) -> None:
    """Complete a file of version 1, whose number was not raised when tables and columns were added."""
    sql(_TABLES_OF_VERSION_1)(db)
    columns = {row[1] for row in db.execute("PRAGMA table_info(attestations)")}
    for column, kind in (("sealed", "BLOB NOT NULL DEFAULT x''"), ("restored", "INTEGER NOT NULL DEFAULT 0")):
        if column not in columns:
            db.execute(f"ALTER TABLE attestations ADD COLUMN {column} {kind}")


_LEADS_AND_ALARMS = """
CREATE TABLE leads (
    number INTEGER NOT NULL PRIMARY KEY, serial VARCHAR NOT NULL UNIQUE, name VARCHAR NOT NULL,
    fingerprint VARCHAR NOT NULL, issued FLOAT NOT NULL, until FLOAT NOT NULL, first_used FLOAT);
CREATE INDEX ix_leads_name ON leads (name);
CREATE TABLE alarms (name VARCHAR NOT NULL PRIMARY KEY, at FLOAT NOT NULL, text TEXT NOT NULL);
INSERT INTO counters VALUES ('leads_unlisted_before', CAST(strftime('%s', 'now') AS INTEGER));
"""
_STEERING = """
CREATE TABLE steering (
    run_id VARCHAR NOT NULL REFERENCES runs (id), attempt INTEGER NOT NULL, quorum INTEGER NOT NULL,
    excluded JSON NOT NULL, extended_round INTEGER NOT NULL, extended_s FLOAT NOT NULL, holds JSON NOT NULL,
    PRIMARY KEY (run_id));
"""
_JUDGEMENTS_AND_SIZES = """
CREATE TABLE judgements (
    run_id VARCHAR NOT NULL REFERENCES runs (id), round INTEGER NOT NULL, cut JSON NOT NULL, medians JSON NOT NULL,
    PRIMARY KEY (run_id, round));
CREATE TABLE declared_sizes (
    run_id VARCHAR NOT NULL REFERENCES runs (id), silo VARCHAR NOT NULL, train FLOAT NOT NULL, test FLOAT NOT NULL,
    PRIMARY KEY (run_id, silo));
"""
_CLINICAL = """
CREATE TABLE clinical (
    run_id VARCHAR NOT NULL REFERENCES runs (id), round INTEGER NOT NULL, metrics JSON NOT NULL,
    PRIMARY KEY (run_id, round));
"""
_CUT_ROWS_AND_ROUNDS_WITHOUT_A_BOUND = """
ALTER TABLE judgements ADD COLUMN cut_rows INTEGER NOT NULL DEFAULT 0;
ALTER TABLE judgements ADD COLUMN unbounded INTEGER NOT NULL DEFAULT 0;
"""
_CLOSED = """
SELECT run_id, round, kind, correct, examples, included, missing, clipped, coalesce(personal, '{}') AS personal,
       coalesce(cut, '{}') AS cut, coalesce(medians, '{}') AS medians, coalesce(metrics, 'null') AS clinical,
       coalesce(cut_rows, 0) AS cut_rows, coalesce(unbounded, 0) AS unbounded
FROM rounds LEFT JOIN scores USING (run_id, round) LEFT JOIN judgements USING (run_id, round)
     LEFT JOIN clinical USING (run_id, round)
WHERE is_open = 0"""


def _one_record_of_a_round(db: sqlite3.Connection) -> None:
    """Move the columns and tables of scores, judgements and metrics into the row of their round."""
    db.execute("ALTER TABLE rounds ADD COLUMN record JSON")
    rows = db.execute(_CLOSED)
    names = [column[0] for column in rows.description]
    for row in rows.fetchall():
        raw = dict(zip(names, row, strict=True))
        run_id, kind = raw.pop("run_id"), raw.pop("kind")
        record = {name: json.loads(value) if isinstance(value, str) else value for name, value in raw.items()}
        record |= {"kind": kind, "unbounded": bool(record["unbounded"])}
        where = (json.dumps(record), run_id, record["round"])
        db.execute("UPDATE rounds SET record = ? WHERE run_id = ? AND round = ?", where)
    for name in ("correct", "examples", "included", "missing", "clipped"):
        db.execute(f"ALTER TABLE rounds DROP COLUMN {name}")
    for table in ("scores", "judgements", "clinical"):
        db.execute(f"DROP TABLE {table}")


_SEALS = """
CREATE TABLE secagg_seals (
    run_id VARCHAR NOT NULL REFERENCES runs (id), round INTEGER NOT NULL, kind VARCHAR NOT NULL, seal BLOB NOT NULL,
    PRIMARY KEY (run_id, round, kind)
);
"""


def _validation_only_members(db: sqlite3.Connection) -> None:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    for table in {"silos", "invitations"} & tables:  # a file without them is refused later
        db.execute(f"ALTER TABLE {table} ADD COLUMN validation_only INTEGER NOT NULL DEFAULT 0")


def _of_runs(column: str) -> Step:
    def step(db: sqlite3.Connection) -> None:
        if db.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchone():  # otherwise refused later
            db.execute(f"ALTER TABLE runs ADD COLUMN {column} JSON")

    return step


# Only a ledger's newest sealed figures (1 kB, readable by its hospital only) are ever returned.
_ATTESTATIONS_WITH_UPDATES = """
ALTER TABLE contributions ADD COLUMN policy VARCHAR;
ALTER TABLE contributions ADD COLUMN seq INTEGER;
ALTER TABLE contributions ADD COLUMN head VARCHAR;
ALTER TABLE contributions ADD COLUMN restored INTEGER;
ALTER TABLE contributions ADD COLUMN sealed BLOB;
ALTER TABLE contributions ADD COLUMN sealed_in_receipt INTEGER NOT NULL DEFAULT 0;
UPDATE contributions SET policy = a.policy, seq = a.seq, head = a.head, restored = a.restored,
    sealed = nullif(a.sealed, x''), sealed_in_receipt = 1 FROM attestations a WHERE a.id = contributions.id;
UPDATE contributions SET sealed = NULL WHERE received IS NOT NULL AND id NOT IN (
    SELECT id FROM (SELECT id, max(received) FROM contributions WHERE policy IS NOT NULL GROUP BY silo));
CREATE INDEX contributions_sealed ON contributions (silo) WHERE sealed IS NOT NULL;
DROP TABLE attestations;
"""
MIGRATIONS: tuple[Step, ...] = (
    _scores_and_attestations,
    sql(FIRST_TABLE),
    sql(_LEADS_AND_ALARMS),
    sql(_STEERING),
    sql(_JUDGEMENTS_AND_SIZES),
    sql(_CLINICAL),
    sql(_CUT_ROWS_AND_ROUNDS_WITHOUT_A_BOUND),
    _one_record_of_a_round,
    sql(_SEALS),
    _validation_only_members,
    sql("CREATE INDEX runs_newest_first ON runs (created DESC, id);"),
    # A receipt (2 kB with its certificate) is signed again on request: the rows have all its fields.
    sql("ALTER TABLE contributions DROP COLUMN receipt;"),
    _of_runs("coverage"),
    sql(_ATTESTATIONS_WITH_UPDATES),
    _of_runs("facts"),
)
