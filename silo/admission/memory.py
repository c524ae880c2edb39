"""What this hospital answered: so that one question has one answer, whoever asks, also after a restart.

Two sums about one model over different hospitals differ by these hospitals' updates. So the sum of a model is opened
for one set of hospitals in a masked run: `keep_to_one_set`. Each model that is measured on the test images says
something about them. So a task asks about one model for ever, and only so many runs a day measure at all: `claim`.

A home that was put back from a copy does not know what it answered since. The coordinator tells each session how many
answers in masked runs it has seen of this hospital; a home that knows of fewer gives its masked runs up.

A model is known by the digest of what was sent and, where this hospital read it, by its numbers: other bytes of the
same numbers are the same model. Nearly equal models are not. Rows stay for ever; a home that is put back lacks the
newest. What was told of records in surveys, `survey_history` holds a new answer to.
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
    """What was answered about models and people. Each method is one transaction, on the disk when it returns."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def claim(self, key: TaskKey, base_digest: str, content: str, coordinator: str, most: int = 0) -> None:
        """Note that a task is about a model, before any record is read.

        content: a digest of the model's numbers   coordinator: its incarnation, which has one model for each round of
        training: after a restoration there may be another   most: runs that measure models in a day; 0: any number.

        Raises RefusedError: E-RUN-33 where the task was about another model, E-POLICY-19 where the day is full.
        """
        with self._database.write() as db:
            of_run = db.execute(select(answers).where(answers.c.run_id == key.run_id)).all()
            of_task = [row for row in of_run if (row.kind, row.round) == (key.kind.value, key.round)]
            others = [row for row in of_task if row.base_digest != base_digest]
            if any(key.kind.ends_run or row.coordinator == coordinator for row in others):
                raise RefusedError(
                    "E-RUN-33",
                    f"expected {key} about the model {others[0].base_digest[:16]}, as it was asked for first, found "
                    f"{base_digest[:16]}: a task is about one model for ever; ask the lead for a new run",
                )
            if len(of_task) > len(others):
                return
            counted = bool(others) or not any(row.counted for row in of_run)
            if counted and most:
                _require_room(db, self._clock(), most)
            noted = {"content": content, "coordinator": coordinator, "counted": counted, "at": self._clock()}
            db.execute(insert(answers).values(**_place(key), base_digest=base_digest, **noted))

    def answerable(self, patients: SurveyedPatients, questions: Sequence[Countable], least: int) -> Told:
        """Name the cells of a survey whose numbers tell of no fewer than `least` people beside all earlier answers."""
        with self._database.read() as db:
            return SurveyHistory(db).decide(patients, questions, least)

    def claim_cells(self, run: str, patients: SurveyedPatients, questions: Sequence[Countable], least: int) -> Told:
        """Note that those that `answerable` names are answered, and name them: before any number leaves."""
        with self._database.write() as db:
            history = SurveyHistory(db)
            told = history.decide(patients, questions, least)
            history.write(db, told, run, self._clock())
        return told

    def require_room(self, run_id: str, most: int) -> None:
        """Raise RefusedError (E-POLICY-19) where a run would be one more than may measure models in a day."""
        with self._database.read() as db:
            mine = answers.c.run_id == run_id, answers.c.counted
            if most and db.execute(select(answers).where(*mine)).first() is None:
                _require_room(db, self._clock(), most)

    def measured_today(self) -> int:
        """Count the runs that measured models here within a day. A clock that is set back makes no room."""
        with self._database.read() as db:
            return _measured(db, self._clock())

    def masked_answers(self) -> int:
        """Count the answers in masked runs, which only grow; nothing of it follows from records."""
        with self._database.read() as db:
            return _masked(db)

    def catch_up(self, seen: int) -> None:
        """Count on from what the coordinator has seen of this hospital, once its masked runs are given up.

        Guarantees: of whatever number the count stays one that can grow.
        """
        with self._database.write() as db:
            if (lacks := min(seen, _MOST) - _masked(db)) > 0:
                number = db.scalar(select(func.count()).where(answers.c.kind == _PUT_BACK)) or 0
                row = {"run_id": "", "kind": _PUT_BACK, "round": lacks, "base_digest": str(number)}
                db.execute(insert(answers).values(**row, at=self._clock()))


def keep_to_one_set(db: Connection, key: TaskKey, base_digest: str, inside: Sequence[int]) -> None:
    """Note for which members the sum of a model is opened, inside the transaction that confirms them.

    Raises SecaggError (E-RUN-50) where the sum of this model was opened for others in this run, in whatever round.
    """
    of_kind = answers.c.run_id == key.run_id, answers.c.kind == key.kind.value
    rows = db.execute(select(answers).where(*of_kind)).all()
    contents = {row.content for row in rows if row.base_digest == base_digest} - {""}
    text = json.dumps(list(inside))
    for row in rows:
        if (row.base_digest == base_digest or row.content in contents) and row.inside not in ("", text):
            raise SecaggError(
                "E-RUN-50",
                f"a sum about the model of {key} was opened here for another set of members, in round {row.round + 1}: "
                "a second one would show the difference; the run ends, and a new one goes on from its last model",
            )
    this = [answers.c[name] == value for name, value in {**_place(key), "base_digest": base_digest}.items()]
    if not db.execute(update(answers).where(*this).values(inside=text)).rowcount:
        db.execute(insert(answers).values(**_place(key), base_digest=base_digest, inside=text))


def _place(key: TaskKey) -> dict[str, object]:
    return {"run_id": key.run_id, "kind": key.kind.value, "round": key.round}


def _masked(db: Connection) -> int:
    given = [
        select(func.count()).where(answers.c.inside != ""),
        select(func.count()).where(answers.c.content != ""),
        select(func.sum(answers.c.round)).where(answers.c.kind == _PUT_BACK),
    ]
    return sum(db.scalar(number) or 0 for number in given)


def _measured(db: Connection, now: float) -> int:
    recent = answers.c.counted, answers.c.at > now - DAY_S
    return db.scalar(select(func.count()).select_from(answers).where(*recent)) or 0


def _require_room(db: Connection, now: float, most: int) -> None:
    if _measured(db, now) >= most:
        raise RefusedError(
            "E-POLICY-19", f"expected at most {most} runs a day that measure models here, found one more"
        )
