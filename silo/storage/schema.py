"""The tables of the silo's database. A column's default applies when an insert does not name it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

from sqlalchemy import Boolean, Column, Double, Index, Integer, LargeBinary, MetaData, String, Table, text

from fl_core.types.enums import TaskKind
from protos.wire.receipts import shorten_receipt
from protos.wire.tasks import TaskKey
from service_core.storage.generation import FIRST_TABLE, incarnation_table
from service_core.storage.migration import Step, sql
from silo.storage.tasks import OutboxEntry, read_attestation

metadata = MetaData()
incarnation = incarnation_table(metadata)

runs = Table(  # runs that this silo took part in
    "runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("name", String, nullable=False, default=""),
    Column("manifest_digest", String, nullable=False, default=""),
    Column("state", String, nullable=False, default="running"),
    Column("reason", String, nullable=False, default=""),
    Column("started", Double, nullable=False, default=0.0),
    Column("ended", Double),
    Column("leaves", String, nullable=False, default=""),  # numbers of an update by part, as JSON
    Column("privacy", String, nullable=False, default=""),  # the run's guarantee, in words
)

states = Table(  # committed silo states
    "states",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("digest", String, nullable=False),
    Column("coordinator", String, nullable=False, default=""),  # the coordinator's incarnation that closed the round
)

run_data = Table(  # the version of the data that a run began with
    "run_data",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("fingerprint", String, nullable=False),
    Column("files", LargeBinary),  # name, bytes and digest of each record in a file, as compressed JSON
    Column("broken", String, nullable=False, default="[]"),  # names of excluded records, as JSON
)

bases = Table(  # broadcast models, kept because a task may need them again
    "bases",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String, nullable=False, index=True),
    Column("digest", String, nullable=False),
)

tasks = Table(  # the outbox entry while the round is open; its outcome is kept for ever
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
    Column("receipt", LargeBinary),  # the parts of the receipt that this row lacks
    Column("signer", Integer),  # the receipt's signer, in `signers`; null: the receipt is complete
    Column("refused", String),
    Column("closed", Double),
    Column("included", Boolean),
    Column("attested", String, nullable=False, default=""),
    Column("sealed", LargeBinary),  # the ledger's spending; null except for its newest end and open tasks
    Column("coordinator", String, nullable=False, default=""),  # the coordinator's incarnation that offered it
    Index("tasks_sealed", "closed", sqlite_where=text("sealed IS NOT NULL")),
)

signers = Table(  # certificates that signed receipts
    "signers",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("pem", LargeBinary, nullable=False, unique=True),
)

unprotected = Table(  # updates without privacy: listed for ever, before a byte leaves
    "unprotected",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("object_digest", String, primary_key=True),  # a repeated task may send another update
    Column("fingerprint", String, nullable=False, default=""),  # of the data
    Column("splits", String),  # splits, with commas; null: unknown, from an earlier version
)

trainings = Table(  # tasks in progress, and those during which the service was killed
    "trainings",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("attempt", Integer, nullable=False, default=0),  # how often the lead had resumed the run
    Column("under_way", Boolean, nullable=False, default=True),
    Column("kills", Integer, nullable=False, default=0),
)

approvals = Table(  # runs that wait for the hospital's decision, and decided ones
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

secagg_runs = Table(  # this silo's secrets for masked runs; the row stays when the keys are gone
    "secagg_runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("state", String, nullable=False),  # keyed, ready or gone
    Column("terms", String, nullable=False),  # the run's terms from its manifest, as JSON
    Column("entry", LargeBinary, nullable=False, default=b""),  # public keys, signed, as they were sent
    Column("agree", LargeBinary),  # private keys, until all members' keys are here
    Column("sign", LargeBinary),
    Column("keys_object", String, nullable=False, default=""),  # all members' keys
    Column("keys_digest", LargeBinary),
    Column("place", Integer),  # of this silo among the members
    Column("peers", LargeBinary),  # public keys for confirmations, concatenated
    Column("chains", LargeBinary),  # chains with every member, concatenated
    Column("position", Integer, nullable=False, default=0),  # position in the chains: earlier rounds are closed
    Column("holders", String),  # as `ClassCoverage.facts`, once the census is proved; of 0.1.0 a list of counts
)

secagg_rounds = Table(  # open rounds: the one masked update and the one confirmed set
    "secagg_rounds",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("base_digest", LargeBinary, nullable=False),
    Column("object_digest", LargeBinary, nullable=False, default=b""),
    Column("seal_hash", LargeBinary, nullable=False, default=b""),
    Column("inside", String, nullable=False, default="[]"),  # members of the set, as JSON
)

surveys = Table(  # data versions with answers without noise, kept for ever (`silo.admission.survey_history`)
    "surveys",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run", String, nullable=False, default=""),
    Column("salt", LargeBinary, nullable=False),
    Column("names", LargeBinary, nullable=False),  # digests of its people, in rows of 0.1.0; otherwise empty
    Column("contents", LargeBinary, nullable=False),
    Column("questions", String, nullable=False),  # question -> answer, as JSON
    Column("answered", Double, nullable=False, default=0.0),
)

survey_people = Table(  # all people who were ever counted in an answer without noise
    "survey_people",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("keys", LargeBinary, nullable=False),  # digests of names and records
    Column("seen", String, nullable=False),  # versions, as JSON
    Column("counts", String, nullable=False),  # question -> how the person was counted, as JSON
)

answers = Table(  # models that this hospital answered about, kept for ever (`silo.admission.memory`)
    "answers",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("base_digest", String, primary_key=True),
    Column("content", String, nullable=False, default=""),  # digest of its numbers, if this hospital read them
    Column("inside", String, nullable=False, default=""),  # members whose sum is opened, as JSON
    Column("coordinator", String, nullable=False, default=""),  # the coordinator's incarnation
    Column("counted", Boolean, nullable=False, default=False),  # counts in the day's limit of runs that measure models
    Column("at", Double, nullable=False, default=0.0),
)


_ATTESTED_AND_APPROVALS = """
ALTER TABLE tasks ADD COLUMN attested VARCHAR NOT NULL DEFAULT '';
CREATE TABLE approvals (
    run_id VARCHAR NOT NULL, manifest_digest VARCHAR NOT NULL, name VARCHAR NOT NULL, about VARCHAR NOT NULL,
    asked DOUBLE NOT NULL, decided BOOLEAN, PRIMARY KEY (run_id, manifest_digest));
"""
_STATES = """
CREATE TABLE states (
    run_id VARCHAR NOT NULL, round INTEGER NOT NULL, digest VARCHAR NOT NULL, coordinator VARCHAR NOT NULL DEFAULT '',
    PRIMARY KEY (run_id, round));
INSERT INTO states SELECT run_id, state_round, state_digest, '' FROM runs
    WHERE state_digest IS NOT NULL AND state_round IS NOT NULL;
ALTER TABLE runs DROP COLUMN state_digest;
ALTER TABLE runs DROP COLUMN state_round;
ALTER TABLE tasks ADD COLUMN coordinator VARCHAR NOT NULL DEFAULT '';
"""
_REQUESTS_AND_WHAT_LEAVES = """
ALTER TABLE approvals ADD COLUMN request VARCHAR NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN leaves VARCHAR NOT NULL DEFAULT '';
"""
# Take over every earlier update: the ledger shows whether it was protected.
_UNPROTECTED_AND_TRAININGS = """
ALTER TABLE runs ADD COLUMN privacy VARCHAR NOT NULL DEFAULT '';
CREATE TABLE unprotected (
    run_id VARCHAR NOT NULL, round INTEGER NOT NULL, kind VARCHAR NOT NULL, object_digest VARCHAR NOT NULL,
    fingerprint VARCHAR NOT NULL DEFAULT '', splits VARCHAR, PRIMARY KEY (run_id, round, kind, object_digest));
INSERT INTO unprotected SELECT t.run_id, t.round, t.kind, t.object_digest,
    coalesce(substr(d.fingerprint, 1, instr(d.fingerprint || ':', ':') - 1), ''), NULL
    FROM tasks t LEFT JOIN run_data d ON d.run_id = t.run_id WHERE t.object_digest <> '';
CREATE TABLE trainings (
    run_id VARCHAR NOT NULL, round INTEGER NOT NULL, kind VARCHAR NOT NULL, attempt INTEGER NOT NULL DEFAULT 0,
    under_way BOOLEAN NOT NULL DEFAULT 1, kills INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run_id, round, kind));
"""
_TABLES_OF_MASKED_RUNS = """
CREATE TABLE secagg_runs (
    run_id VARCHAR NOT NULL, state VARCHAR NOT NULL, terms VARCHAR NOT NULL, entry BLOB NOT NULL, agree BLOB, sign BLOB,
    keys_object VARCHAR NOT NULL, keys_digest BLOB, place INTEGER, peers BLOB, chains BLOB, position INTEGER NOT NULL,
    holders VARCHAR, PRIMARY KEY (run_id));
CREATE TABLE secagg_rounds (
    run_id VARCHAR NOT NULL, kind VARCHAR NOT NULL, round INTEGER NOT NULL, base_digest BLOB NOT NULL,
    object_digest BLOB NOT NULL, seal_hash BLOB NOT NULL, inside VARCHAR NOT NULL, PRIMARY KEY (run_id, kind, round));
"""
_TABLE_OF_SURVEYS = """
CREATE TABLE surveys (
    number INTEGER NOT NULL, run VARCHAR NOT NULL, salt BLOB NOT NULL, names BLOB NOT NULL, contents BLOB NOT NULL,
    questions VARCHAR NOT NULL, answered DOUBLE NOT NULL, PRIMARY KEY (number));
"""
_BROKEN_RECORDS = """
ALTER TABLE run_data ADD COLUMN files BLOB;
ALTER TABLE run_data ADD COLUMN broken VARCHAR NOT NULL DEFAULT '[]';
"""
_PEOPLE_OF_SURVEYS = """
CREATE TABLE survey_people (
    number INTEGER NOT NULL, keys BLOB NOT NULL, seen VARCHAR NOT NULL, counts VARCHAR NOT NULL, PRIMARY KEY (number));
"""
_MODELS_ANSWERED_ABOUT = """
CREATE TABLE answers (
    run_id VARCHAR NOT NULL, kind VARCHAR NOT NULL, round INTEGER NOT NULL, base_digest VARCHAR NOT NULL,
    content VARCHAR NOT NULL, inside VARCHAR NOT NULL, coordinator VARCHAR NOT NULL, counted BOOLEAN NOT NULL,
    at DOUBLE NOT NULL, PRIMARY KEY (run_id, kind, round, base_digest));
"""
# For each restoration of the ledger, its newest end states the spending so far.
DROP_SEALED = """
UPDATE tasks SET sealed = NULL
WHERE sealed IS NOT NULL AND closed IS NOT NULL AND receipt IS NOT NULL AND rowid NOT IN (SELECT rowid FROM (
    SELECT rowid, max(json_extract(attested, '$[1]')) FROM tasks WHERE sealed IS NOT NULL
    GROUP BY json_extract(attested, '$[4]')));
"""
_PARTS_OF_RECEIPTS = """
ALTER TABLE tasks ADD COLUMN signer INTEGER;
ALTER TABLE tasks ADD COLUMN sealed BLOB;
CREATE INDEX tasks_sealed ON tasks (closed) WHERE sealed IS NOT NULL;
CREATE TABLE signers (number INTEGER NOT NULL, pem BLOB NOT NULL, PRIMARY KEY (number), UNIQUE (pem));
"""
_WITH_ATTESTATIONS = """
SELECT run_id, round, kind, manifest_digest, base_digest, contribution_id, object_digest, size, attested, receipt, rowid
FROM tasks WHERE attested <> '' OR receipt IS NOT NULL
"""
SIGNER = "INSERT INTO signers (pem) VALUES (?) ON CONFLICT (pem) DO UPDATE SET pem = pem RETURNING number"


def _parts_of_receipts(db: sqlite3.Connection) -> None:
    """Store of each receipt only what its row lacks, each certificate once, and only the sealed figures in use."""
    if not db.execute("SELECT name FROM sqlite_master WHERE name = 'tasks'").fetchone():
        return  # refused later, like any other file
    sql(_PARTS_OF_RECEIPTS)(db)
    for run_id, round, kind, *facts, attested, receipt, row in db.execute(_WITH_ATTESTATIONS).fetchall():
        stated, pem = read_attestation(attested), b""
        entry = replace(OutboxEntry(TaskKey(run_id, round, TaskKind(kind)), *facts), attested=stated)
        if receipt is not None:
            receipt, pem = shorten_receipt(receipt, entry.signed_facts())
        signer = db.execute(SIGNER, (pem,)).fetchone()[0] if pem else None
        values = json.dumps(stated.signed), bytes.fromhex(stated.sealed) or None, receipt, signer, row
        db.execute("UPDATE tasks SET attested = ?, sealed = ?, receipt = ?, signer = ? WHERE rowid = ?", values)
    db.execute(DROP_SEALED)


MIGRATIONS: tuple[Step, ...] = (
    # Earlier staged states are discarded unless their update is included.
    sql("ALTER TABLE tasks ADD COLUMN mirrored BOOLEAN NOT NULL DEFAULT 1;"),
    sql(_ATTESTED_AND_APPROVALS),
    sql(FIRST_TABLE + _STATES),
    sql("CREATE TABLE run_data (run_id VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL, PRIMARY KEY (run_id));"),
    sql(_REQUESTS_AND_WHAT_LEAVES),
    sql(_UNPROTECTED_AND_TRAININGS),
    sql(_TABLES_OF_MASKED_RUNS),
    sql(_TABLE_OF_SURVEYS),
    sql(_BROKEN_RECORDS),
    sql(_PEOPLE_OF_SURVEYS),
    sql(_MODELS_ANSWERED_ABOUT),
    _parts_of_receipts,
)
