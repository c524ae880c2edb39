"""Earlier answers of this hospital. One question gets one answer, from any coordinator and after a restart.

If one model's updates were summed over two sets of hospitals, the difference would reveal updates of the hospitals in
only one set. So a masked run opens the sum of a model for one set only: `keep_to_one_set`. Each measurement on the test
images reveals something about them. So a task is about one model for ever, and the number of measuring runs a day is
limited: `claim`.

A home restored from a copy lacks its latest answers. In each session the coordinator states how many answers in masked
runs it has seen from this hospital; a home that has fewer gives up its masked runs.

A model is identified by the digest of the message and, if this hospital read it, by its numbers: other bytes with the
same numbers are the same model. Nearly equal models count as different. Rows are never deleted.
`survey_history` stores answers about people.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection, func, insert, select, update

from fl_core.errors import RefusedError
from privacy.secagg.terms import SecaggError
from protos.wire.tasks import TaskKey
from service_core.storage.sqlite import Database
from silo.admission.survey_history import Countable, SurveyedPatients, SurveyHistory, Told
from silo.storage.schema import answers

DAY_S = 86_400.0
_PUT_BACK = "put back"
_MOST = 1 << 53


class AnswerMemory:
    """Answers about models and people. Each method is one transaction, on the disk when it returns."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def claim(self, key: TaskKey, base_digest: str, content: str, coordinator: str, most: int = 0) -> None:
        """Record that a task is about a model, before any record is read.

        content: a digest of the model's numbers   coordinator: its incarnation; each sends one model per round of
        training, so a restored one may send another   most: runs a day that may measure models; 0: no limit.

        Raises RefusedError: E-RUN-33 if the task was about another model, E-POLICY-19 if the day's limit is reached.
        """
        with self._database.write() as db:
            of_run = db.execute(select(answers).where(answers.c.run_id == key.run_id)).all()
            of_task = [row for row in of_run if (row.kind, row.round) == (key.kind.value, key.round)]
            others = [row for row in of_task if row.base_digest != base_digest]
            if any(key.kind.ends_run or row.coordinator == coordinator for row in others):
                raise RefusedError(
                    "E-RUN-33",
                    f"expected {key} about the model {others[0].base_digest[:16]}, as in the first request, found "
                    f"{base_digest[:16]}: a task never changes its model; ask the lead for a new run",
                )
            if len(of_task) > len(others):
                return
            counted = bool(others) or not any(row.counted for row in of_run)
            if counted and most:
                _require_room(db, self._clock(), most)
            noted = {"content": content, "coordinator": coordinator, "counted": counted, "at": self._clock()}
            db.execute(insert(answers).values(**_place(key), base_digest=base_digest, **noted))

    def answerable(self, patients: SurveyedPatients, questions: Sequence[Countable], least: int) -> Told:
        """Name the cells of a survey that, with all earlier answers, reveal no group of fewer than `least` people."""
        with self._database.read() as db:
            return SurveyHistory(db).decide(patients, questions, least)

    def claim_cells(self, run: str, patients: SurveyedPatients, questions: Sequence[Countable], least: int) -> Told:
        """Record the cells that `answerable` names as answered, and return them: before any number leaves."""
        with self._database.write() as db:
            history = SurveyHistory(db)
            released = history.decide(patients, questions, least)
            history.write(db, released, run, self._clock())
        return released

    def require_room(self, run_id: str, most: int) -> None:
        """Raise RefusedError (E-POLICY-19) if the run would exceed the day's limit of runs that measure models."""
        with self._database.read() as db:
            mine = answers.c.run_id == run_id, answers.c.counted
            if most and db.execute(select(answers).where(*mine)).first() is None:
                _require_room(db, self._clock(), most)

    def measured_today(self) -> int:
        """Count the runs that measured models here within a day. Setting the clock back frees no room."""
        with self._database.read() as db:
            return _measured(db, self._clock())

    def masked_answers(self) -> int:
        """Count the answers in masked runs. The count only grows and does not depend on records."""
        with self._database.read() as db:
            return _masked(db)

    def catch_up(self, seen: int) -> None:
        """Raise the count to the coordinator's number, after the masked runs were given up.

        Guarantees: the number is capped at 2^53, so the count can still grow.
        """
        with self._database.write() as db:
            if (lacks := min(seen, _MOST) - _masked(db)) > 0:
                number = db.scalar(select(func.count()).where(answers.c.kind == _PUT_BACK)) or 0
                row = {"run_id": "", "kind": _PUT_BACK, "round": lacks, "base_digest": str(number)}
                db.execute(insert(answers).values(**row, at=self._clock()))


def keep_to_one_set(db: Connection, key: TaskKey, base_digest: str, inside: Sequence[int]) -> None:
    """Record the members in a model's sum, inside the transaction that confirms the set.

    Raises SecaggError (E-RUN-50) if this run opened the sum of this model for other members, in any round.
    """
    of_kind = answers.c.run_id == key.run_id, answers.c.kind == key.kind.value
    rows = db.execute(select(answers).where(*of_kind)).all()
    contents = {row.content for row in rows if row.base_digest == base_digest} - {""}
    text = json.dumps(list(inside))
    for row in rows:
        if (row.base_digest == base_digest or row.content in contents) and row.inside not in ("", text):
            raise SecaggError(
                "E-RUN-50",
                f"in round {row.round + 1}, a sum about the model of {key} was opened here for another set of "
                "members: a second sum would reveal the difference; this run ends, and a new one can continue from "
                "its last model",
            )
    this = [answers.c[name] == value for name, value in {**_place(key), "base_digest": base_digest}.items()]
    if not db.execute(update(answers).where(*this).values(inside=text)).rowcount:
        db.execute(insert(answers).values(**_place(key), base_digest=base_digest, inside=text))


def _place(key: TaskKey) -> dict[str, object]:
    return {"run_id": key.run_id, "kind": key.kind.value, "round": key.round}


def _masked(db: Connection) -> int:
    counts = [
        select(func.count()).where(answers.c.inside != ""),
        select(func.count()).where(answers.c.content != ""),
        select(func.sum(answers.c.round)).where(answers.c.kind == _PUT_BACK),
    ]
    return sum(db.scalar(number) or 0 for number in counts)


def _measured(db: Connection, now: float) -> int:
    recent = answers.c.counted, answers.c.at > now - DAY_S
    return db.scalar(select(func.count()).select_from(answers).where(*recent)) or 0


def _require_room(db: Connection, now: float, most: int) -> None:
    if _measured(db, now) >= most:
        raise RefusedError(
            "E-POLICY-19",
            f"this hospital allows at most {most} runs a day that evaluate models here, and this is one more: try "
            "again later",
        )
