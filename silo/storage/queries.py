"""What the silo's store asks in every round: written once, because writing a statement takes longer than running it.

Columns that a call does not name get their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, insert, or_, select
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite import insert as upsert

from protos.storage.prepared_select import Lookup
from silo.storage.schema import bases, runs, tasks

BASES_PER_RUN = 2

KEY = ("run_id", "round", "kind")
STAGED = ("manifest_digest", "base_digest", "contribution_id", "object_digest", "size", "state_digest", "mirrored")
_HERE = and_(*(tasks.c[name] == bindparam(name) for name in KEY))
IS_OPEN = and_(tasks.c.closed.is_(None), tasks.c.staged.is_not(None))
RUN = Lookup(select(runs).where(runs.c.run_id == bindparam("run_id")))
TASK = select(tasks).where(_HERE)
TASK_NOW = Lookup(TASK)
OUTBOX = select(tasks).where(IS_OPEN).order_by(tasks.c.staged)
OUTBOX_NOW = Lookup(OUTBOX)
NEWEST_BASE = (
    select(bases.c.digest).where(bases.c.run_id == bindparam("run_id")).order_by(bases.c.number.desc()).limit(1)
)
_KEPT_BASES = (
    select(bases.c.number)
    .where(bases.c.run_id == bindparam("run_id"))
    .order_by(bases.c.number.desc())
    .limit(BASES_PER_RUN)
)
DROP_BASES = delete(bases).where(bases.c.run_id == bindparam("run_id"), bases.c.number.not_in(_KEPT_BASES))
ADD_BASE = insert(bases)
RUNS = select(runs.c.run_id, runs.c.manifest_digest, runs.c.state_digest, runs.c.ended)
BASES_IN_USE = select(bases.c.digest).join(runs, runs.c.run_id == bases.c.run_id).where(runs.c.ended.is_(None))


def _put(table: Table, key: Sequence[str], changed: Sequence[str], where: ColumnElement[bool] | None = None) -> Insert:
    """Write a row, or bring these columns of the row that is there in line with it, unless `where` forbids it."""
    row = upsert(table)
    return row.on_conflict_do_update(index_elements=key, set_={c: row.excluded[c] for c in changed}, where=where)


RUNNING = _put(runs, ["run_id"], ["name", "manifest_digest", "state", "reason", "ended"])
COMMIT = _put(
    runs, ["run_id"], ["state_digest", "state_round"],
    or_(runs.c.state_round.is_(None), runs.c.state_round < upsert(runs).excluded.state_round),
)  # fmt: skip
STAGE = _put(tasks, KEY, [*STAGED, "attested", "evaluation", "staged", "receipt", "refused"], tasks.c.closed.is_(None))
DELIVER = _put(tasks, KEY, ["receipt", "refused"])
REFUSE = _put(tasks, KEY, ["refused"])
CLOSE = _put(tasks, KEY, ["closed", "included"])
