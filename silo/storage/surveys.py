"""Which surveys this hospital answered without noise, of which patients: so that two answers tell nobody's record.

The difference of two answers about data that differ by a few patients is an answer about these few. So the hospital
remembers of each version of its data that it answered about who was in it, as digests under a salt of its own: names
(whose records) and contents (what records, of which class, in which split). A survey of data in which fewer than
`least` patients differ from a version that was answered before, by name or else by content, is held back as a whole,
whatever it asks and whoever asks; so is another form of a question (other bins) about the same data. The same questions
about the same data have the same answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from fl_core.types.survey import Question
from service_core.storage.sqlite import Database
from silo.storage.schema import surveys

_BYTES = 16
log = logging.getLogger(__name__)


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

    def answerable(self, patients: SurveyedPatients, questions: Sequence[Question], least: int) -> frozenset[str]:
        """Name the questions whose answers would tell of no fewer than `least` patients beside what was answered."""
        with self._database.read() as db:
            return _looked_up(db, patients, questions, least).answerable

    def claim(self, run: str, patients: SurveyedPatients, questions: Sequence[Question], least: int) -> frozenset[str]:
        """Note that those that `answerable` names are answered, and name them: before any number is made."""
        with self._database.write() as db:
            known = _looked_up(db, patients, questions, least)
            asked = {question.name: str(question) for question in questions if question.name in known.answerable}
            if known.same is not None:
                answered = json.loads(known.same.questions) | asked
                this = surveys.c.number == known.same.number
                db.execute(update(surveys).where(this).values(questions=_text(answered)))
            elif asked:
                salt = os.urandom(_BYTES) if known.salt is None else known.salt
                names, contents = patients.digests(salt)
                row = {"names": _joined(names), "contents": _joined(contents), "questions": _text(asked)}
                db.execute(insert(surveys).values(run=run, salt=salt, answered=self._clock(), **row))
        return known.answerable


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of data. same: the row of an equal version   salt: of earlier rows, None without any."""

    answerable: frozenset[str]
    same: Row[Any] | None = None
    salt: bytes | None = None


def _looked_up(db: Connection, patients: SurveyedPatients, questions: Sequence[Question], least: int) -> _Known:
    same, salt, near = None, None, False
    names, contents = frozenset[bytes](), frozenset[bytes]()
    for row in db.execute(select(surveys)):
        if row.salt != salt:  # one for all rows
            salt = row.salt
            names, contents = patients.digests(row.salt)
        others = len(names ^ _split(row.names))
        changed = (len(contents ^ _split(row.contents)) - others) // 2  # one digest before and one after
        if others == changed == 0:
            same = row
        elif others < least if others else changed < least:
            near = True
            log.warning(
                "a survey is held back: %d patients are others than in data that were surveyed before, and the "
                "difference of two answers would tell of so few",
                others or changed,
            )
    answered = {} if same is None else json.loads(same.questions)
    free = {q.name for q in questions if answered.get(q.name, str(q)) == str(q)}
    for question in questions:
        if question.name not in free:
            log.warning(
                "%s is held back: the same records were surveyed as %s, and other bins would tell of fewer patients",
                question,
                answered[question.name],
            )
    return _Known(frozenset() if near else frozenset(free), same, salt)


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
