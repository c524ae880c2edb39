"""Which surveys this hospital answered without noise, of which patients: so that two answers tell nobody's record.

The difference of two answers about data that differ by a few patients is an answer about these few. So the hospital
remembers of each version of its data that it answered about who was in it, as digests under a salt of its own: names
(whose records) and contents (what records, of which class, in which split). A survey of data in which fewer than
`least` patients differ from a version that was answered before, by name or by content, is refused, whatever it asks and
whoever asks; so is another form of a question (narrower bins) about the same data. The same questions about the same
data have the same answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from fl_core.errors import RefusedError
from fl_core.types.survey import Question
from service_core.storage.sqlite import Database
from silo.storage.schema import surveys

_BYTES = 16


@dataclass(frozen=True, slots=True)
class SurveyedPatients:
    """Who is in a hospital's data, name by name, and a digest of the records of each."""

    contents: Mapping[str, bytes]

    def digests(self, salt: bytes) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """Return digests of names and of contents under a salt."""
        names = frozenset(_digest(salt, b"name", name.encode()) for name in self.contents)
        return names, frozenset(_digest(salt, b"records", n.encode(), c) for n, c in self.contents.items())


class SurveyMemory:
    """The surveys that were answered without noise, for ever. Each method is one transaction."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def require(self, patients: SurveyedPatients, questions: Sequence[Question], least: int) -> None:
        """Raise RefusedError (E-POLICY-19) on questions whose answer would tell of fewer than `least` patients."""
        with self._database.read() as db:
            _same_version(db, patients, questions, least)

    def record(self, run: str, patients: SurveyedPatients, questions: Sequence[Question], least: int) -> None:
        """Note that questions are answered, before anything leaves; raises as `require`."""
        asked = {question.name: str(question) for question in questions}
        with self._database.write() as db:
            known = _same_version(db, patients, questions, least)
            if known is not None:
                answered = json.loads(known.questions) | asked
                db.execute(update(surveys).where(surveys.c.number == known.number).values(questions=_text(answered)))
                return
            first = db.execute(select(surveys.c.salt).limit(1)).first()
            salt = os.urandom(_BYTES) if first is None else first.salt
            names, contents = patients.digests(salt)
            row = {"names": _joined(names), "contents": _joined(contents), "questions": _text(asked)}
            db.execute(insert(surveys).values(run=run, salt=salt, answered=self._clock(), **row))


def _same_version(
    db: Connection, patients: SurveyedPatients, questions: Sequence[Question], least: int
) -> Row[Any] | None:
    """Return the row of data that are the same, None without one; raises RefusedError on data that are nearly so."""
    same = None
    salted: dict[bytes, tuple[frozenset[bytes], frozenset[bytes]]] = {}
    for row in db.execute(select(surveys)):
        if row.salt not in salted:
            salted[row.salt] = patients.digests(row.salt)
        names, contents = salted[row.salt]
        others = len(names ^ _split(row.names))
        changed = (len(contents ^ _split(row.contents)) - others) // 2  # one digest before and one after
        if 0 < others < least or (not others and 0 < changed < least):
            raise RefusedError(
                "E-POLICY-19",
                f"expected the data that a survey was answered about before, or at least {least} other patients, found "
                "fewer that differ: the difference of the two answers would tell of them",
            )
        if not others and not changed:
            same = row
    if same is not None:
        answered = json.loads(same.questions)
        for question in questions:
            if (before := answered.get(question.name, str(question))) != str(question):
                raise RefusedError(
                    "E-POLICY-19",
                    f"expected {before}, as it was answered about these data before, found {question}: other bins of "
                    "the same records would tell of fewer patients",
                )
    return same


def _digest(salt: bytes, *parts: bytes) -> bytes:
    h = hashlib.blake2b(key=salt, digest_size=_BYTES)
    for part in parts:
        h.update(len(part).to_bytes(8, "little") + part)
    return h.digest()


def _joined(digests: frozenset[bytes]) -> bytes:
    return b"".join(sorted(digests))


def _split(joined: bytes) -> frozenset[bytes]:
    return frozenset(joined[i : i + _BYTES] for i in range(0, len(joined), _BYTES))


def _text(answered: Mapping[str, str]) -> str:
    return json.dumps(answered, sort_keys=True)
