"""The history of surveys answered without noise. It keeps answers from revealing few people in combination.

Answers are sums over people. People whom all earlier answers count alike, cell by cell and version by version, form a
*group*: any sum or difference of these answers counts all of a group or none of it. So a new answer may split groups
only into parts of at least `least` people, and may add no smaller group. A cell that would break this rule is
suppressed together with others, or the whole question is suppressed. If the size of a data version alone would break
it, no question about that version is answered. In addition, no number differs by 1 to `least` - 1 from the same cell's
number in another version.

People are matched by content: by all records of a patient with their classes, by single records, and by name. So
renamed, regrouped, reordered and split data are recognised. For each person who was ever counted, the hospital keeps
digests of these under a secret salt, the data versions with this person, and the cells that counted the person.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select

from silo.storage.schema import survey_people, surveys

_BYTES = 16
Shares = Mapping[str, float]
"""Finest cell -> the share of a person's records in it."""
Group = tuple[tuple[int, ...], str, tuple[str, ...]]
"""People whom all answers count alike: data versions, digest of earlier counts, and the cell in each version."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SurveyedPatients:
    """The people in a hospital's data, in order: name, content of each record, and content with class and split.

    grouped: whether the data name patients. If not, each record is a person, named by its file: weaker evidence.
    """

    names: Sequence[str]
    contents: Sequence[Sequence[str]]
    labelled: Sequence[Sequence[str]]
    grouped: bool


@dataclass(frozen=True, slots=True)
class Countable:
    """A question that can be answered, patient by patient.

    form: the question's wording   cells: finest cell -> the question's cell   shares: of each patient
    patients: number in each cell   free: cells that may leave if only this data version is considered.
    """

    name: str
    form: str
    cells: Mapping[str, str]
    shares: Sequence[Shares]
    patients: Mapping[str, int]
    free: frozenset[str]


Told = dict[str, frozenset[str]]
"""Question -> the cells that may leave; a missing question is suppressed as a whole."""


class _Keys(NamedTuple):
    """Digests that identify a person in later data; repeated records have numbered copies."""

    whole: tuple[bytes]
    records: tuple[bytes, ...]
    name: tuple[bytes]


class _Count(NamedTuple):
    """How a person was counted in a question. path: digest of earlier, different counts   since: data version."""

    path: str
    since: int
    shares: Shares


@dataclass(slots=True)
class _Person:
    """A person who was or will be counted. seen: versions   counts: by question   now: shares in the new version."""

    keys: set[bytes] = field(default_factory=set)
    seen: tuple[int, ...] = ()
    counts: dict[str, _Count] = field(default_factory=dict)
    now: dict[str, dict[str, float]] | None = None

    def row(self, number: int) -> dict[str, object]:
        texts = {"seen": json.dumps(self.seen), "counts": json.dumps(self.counts)}
        return {"number": number, "keys": b"".join(sorted(self.keys)), **texts}


class SurveyHistory:
    """Earlier answers, read in one transaction."""

    def __init__(self, db: Connection) -> None:
        rows = db.execute(select(surveys).order_by(surveys.c.number)).all()
        self._salt = rows[0].salt if rows else os.urandom(_BYTES)
        self._older = frozenset(name for row in rows if row.names for name in _split(row.names))
        self._digests = {row.number: row.contents for row in rows if not row.names}
        self._answers = {row.number: json.loads(row.questions) for row in rows if not row.names}
        self._next = max((row.number for row in rows), default=0) + 1
        self._people, self._cache = dict[int, _Person](), dict[Hashable, tuple[str, ...]]()
        for row in db.execute(select(survey_people).order_by(survey_people.c.number)):
            counts = {name: _Count(*count) for name, count in json.loads(row.counts).items()}
            self._people[row.number] = _Person(set(_split(row.keys)), tuple(json.loads(row.seen)), counts)
        self._asked, self._states, self._digest = dict[str, Countable](), dict[str, str](), b""

    def decide(self, patients: SurveyedPatients, questions: Sequence[Countable], least: int) -> Told:
        """Decide which cells leave, by the rules in the module docstring."""
        sizes = [{"": float(len(records))} for records in patients.contents]
        everybody = Countable("", "", {"": ""}, sizes, {"": len(sizes)}, frozenset({""}))
        keys, released = _keys(self._salt, patients), Told()
        self._asked = {question.name: question for question in (everybody, *questions)}
        self._states = {name: _state(keys, question.shares) for name, question in self._asked.items()}
        self._digest = _digest(self._salt, b"version", *sorted(key.whole[0] for key in keys))
        units = self._linked(keys, patients.grouped)
        if any(key.name[0] in self._older for key in keys):
            log.warning("survey withheld: an earlier version of this software surveyed these data")
            return released
        for k, person in enumerate(units):
            person.now = person.now or {name: {} for name in self._asked}
            for name, question in self._asked.items():
                person.now[name] = _added(person.now[name], question.shares[k])
        before = self._same()
        names = {name for person in self._people.values() if person.now is not None for name in person.counts}
        earlier = [Countable(name, "", {}, (), {}, frozenset()) for name in names]  # the size may split groups
        if "" not in before and (
            not self._free(everybody, least) or any(self._too_few(question, set(), least) for question in earlier)
        ):
            log.warning("survey withheld: the data differ by fewer than %d people from data surveyed before", least)
            return released
        for question in questions:
            answer = before.get(question.name)
            if answer is None:
                cells = self._free(question, least)
            else:
                cells = frozenset(answer["told"] if answer["form"] == question.form else ())
            if cells:
                released[question.name] = cells
            if cells < question.free:
                log.warning(
                    "%s: cells withheld that, with earlier answers, would reveal groups of fewer than %d people",
                    question.form,
                    least,
                )
        return released

    def _same(self) -> dict[str, Any]:
        """Return earlier answers about exactly these people, records and shares, by question."""
        answers = [self._answers[n] for n, digest in self._digests.items() if digest == self._digest]
        states = self._states
        return {n: answer[n] for answer in answers for n in states if n in answer and answer[n]["state"] == states[n]}

    def _linked(self, keys: Sequence[_Keys], grouped: bool) -> list[_Person]:
        """Match the people in the new data with earlier ones; merge earlier ones that match the same person."""
        index = {key: number for number, person in self._people.items() for key in person.keys}
        matches = [set[int]() for _ in keys]
        for tier in ("whole", "name", "records") if grouped else ("whole", "records", "name"):
            taken = set[int]().union(*matches) if tier == "name" else set[int]()
            for match, key in zip(matches, keys, strict=True):
                if not match:
                    match |= {index[k] for k in getattr(key, tier) if k in index} - taken
        joined = dict[int, set[int]]()
        for match in matches:
            everyone = match.union(*(joined.get(number, ()) for number in match))
            joined.update(dict.fromkeys(everyone, everyone))
        for number, everyone in joined.items():
            if len(everyone) > 1 and number == min(everyone):
                self._people[number] = self._merged([self._people[n] for n in sorted(everyone)])
        units, last = list[_Person](), max(self._people, default=0)
        for k, (match, key) in enumerate(zip(matches, keys, strict=True), start=last + 1):
            number = min(joined[min(match)]) if match else k
            person = self._people.setdefault(number, _Person())
            person.keys.update(*key)
            units.append(person)
        for number, everyone in joined.items():
            if number != min(everyone):
                self._people.pop(number, None)
        return units

    def _merged(self, people: Sequence[_Person]) -> _Person:
        """Merge people into one; counts with the same path are added up, others get a new path."""
        whole = _Person(set().union(*(p.keys for p in people)), tuple(sorted({n for p in people for n in p.seen})))
        for name in {name for person in people for name in person.counts}:
            parts = [person.counts.get(name) for person in people]
            paths = {(p.seen, c and (c.path, c.since)) for p, c in zip(people, parts, strict=True)}
            shares = dict[str, float]()
            for part in parts:
                shares = _added(shares, part.shares if part else {})
            if len(paths) == 1 and parts[0]:
                whole.counts[name] = _Count(parts[0].path, parts[0].since, shares)
            else:
                groups = {group for person in people for group, _ in self._groups(name, person)}
                whole.counts[name] = _Count(_path(groups), self._next, shares)
        return whole

    def _groups(self, name: str, person: _Person) -> set[tuple[Group, str]]:
        """Return a person's groups, one per finest cell that counted the person, each with that cell."""
        count = person.counts.get(name)
        if count is None:
            return {((person.seen, "", ()), "")}
        return {
            ((person.seen, count.path, self._places(name, person.seen, count.since, cell)), cell)
            for cell in count.shares
        }

    def _places(self, name: str, seen: tuple[int, ...], since: int, cell: str) -> tuple[str, ...]:
        """Return where each version counted a finest cell: in a released cell, or in the rest."""
        key = name, seen, since, cell
        if key not in self._cache:
            answers = [(n, self._answers[n][name]) for n in seen if n >= since and name in self._answers[n]]
            cells = [(n, answer["cells"].get(cell, cell), answer["told"]) for n, answer in answers]
            self._cache[key] = tuple(f"{n} {coarse if coarse in released else ''}" for n, coarse, released in cells)
        return self._cache[key]

    def _free(self, question: Countable, least: int) -> frozenset[str]:
        """Return the cells of a question that may leave; all others are suppressed."""
        released = set(question.free)
        versions = {n for person in self._people.values() if person.now is not None for n in person.seen}
        answers = [self._answers[n].get(question.name) for n in versions]
        earlier = [answer for answer in answers if answer and answer["form"] == question.form]
        while released:
            more = self._too_near(question, released, earlier, least) or self._too_few(question, released, least)
            if "" in more:
                return frozenset()
            if not more:
                break
            released -= more
        return frozenset(released if any(question.patients.get(cell) for cell in released) else ())

    def _too_near(
        self, question: Countable, released: set[str], earlier: Sequence[Mapping[str, Any]], least: int
    ) -> set[str]:
        """Name cells to suppress because their number, or the rest's, is too close to that of another version."""

        def near(cells: Iterable[str], numbers: Mapping[str, int]) -> bool:
            return 0 < abs(sum(question.patients.get(c, 0) - numbers.get(c, 0) for c in cells)) < least

        for answer in earlier:
            numbers, rest = answer["numbers"], {*question.patients, *answer["numbers"]} - (released & {*answer["told"]})
            if more := {cell for cell in released - rest if near([cell], numbers)}:
                return more
            if near(rest, numbers):
                return _fewest(question, released)
        return set()

    def _too_few(self, question: Countable, released: set[str], least: int) -> set[str]:
        """Name cells to suppress because they would single out fewer than `least` people; "": the whole question."""
        blocks = _blocks(question, released)
        inside, parts = Counter[tuple[Group, str]](), defaultdict[Group, set[str]](set)
        gone, related = defaultdict[Group, set[int]](set), defaultdict[Group, set[str]](set)
        for number, person in self._people.items():
            groups = self._groups(question.name, person)
            if person.now is None:
                for group, _ in groups:
                    gone[group].add(number)
                continue
            count = person.counts.get(question.name)
            now = _in_blocks(person.now.get(question.name, count.shares if count else {}), blocks)
            if count is None:
                parted = {(group, place) for group, _ in groups for place in now}
            else:
                before, path = _in_blocks(count.shares, blocks), _path(group for group, _ in groups)
                changed = {place for place in {*before, *now} if before.get(place) != now.get(place)}
                parted = {(((), path, (str(place in now),)), place) for place in changed}
                for group, _ in parted:
                    related[group] |= changed
                parted |= {(group, place) for group, cell in groups if (place := blocks.get(cell, "")) not in changed}
            inside.update(parted)
            for group, cell in groups if person.seen else ():
                place = blocks.get(cell, "")
                parts[group] |= {place} if place in now and count is not None else now.keys()
        more = set[str]()
        for (group, place), n in inside.items():
            if n < least:
                cells = ({place} | related[group]) - {""}
                more |= cells or _fewest(question, released & {other for one, other in inside if one == group}) or {""}
        left = defaultdict[str, set[int]](set)
        for group, places in parts.items():
            for place in places:
                left[place] |= gone[group]
        for place, people in left.items():
            if 0 < len(people) < least:
                more |= {place} if place else _fewest(question, released) or {""}
        return more

    def write(self, db: Connection, released: Told, run: str, now: float) -> None:
        """Record the released cells, and how each person is counted."""
        before = self._same()
        released = {name: cells for name, cells in released.items() if name not in before}
        if not released:
            return
        released[""] = frozenset({""})
        for person in self._people.values():
            if person.now is not None:
                person.counts.update({name: self._count(person, name, cells) for name, cells in released.items()})
                person.seen = (*person.seen, self._next)
        answers = {name: self._answer(self._asked[name], cells) for name, cells in released.items()}
        row = {"number": self._next, "run": run, "answered": now, "salt": self._salt, "names": b""}
        db.execute(insert(surveys).values(**row, contents=self._digest, questions=json.dumps(answers)))
        db.execute(delete(survey_people))
        db.execute(insert(survey_people), [person.row(number) for number, person in self._people.items()])

    def _answer(self, question: Countable, released: frozenset[str]) -> dict[str, object]:
        """Return the stored form of an answer: all its numbers, and the names of the released cells."""
        cells = {cell: coarse for cell, coarse in question.cells.items() if cell != coarse}
        kept = {"form": question.form, "state": self._states[question.name], "told": sorted(released)}
        return {**kept, "numbers": dict(question.patients), "cells": cells}

    def _count(self, person: _Person, name: str, released: frozenset[str]) -> _Count:
        """Return how a person is counted from now on; unchanged if the released cells show no difference."""
        assert person.now is not None
        now, count, blocks = person.now[name], person.counts.get(name), _blocks(self._asked[name], released)
        if count is None:
            return _Count("", self._next, now)
        if _in_blocks(count.shares, blocks) == _in_blocks(now, blocks):
            return count
        return _Count(_path(group for group, _ in self._groups(name, person)), self._next, now)


def _blocks(question: Countable, released: Collection[str]) -> dict[str, str]:
    """Map each finest cell to the released cell that contains it; "" if that one is suppressed."""
    return {cell: coarse if coarse in released else "" for cell, coarse in question.cells.items()}


def _fewest(question: Countable, cells: set[str]) -> set[str]:
    """Return the non-empty cell with the fewest people."""
    some = [(question.patients[cell], cell) for cell in cells if question.patients.get(cell, 0)]
    return {min(some)[1]} if some else set()


def _in_blocks(shares: Shares, blocks: Mapping[str, str]) -> dict[str, float]:
    return _added({}, *({blocks.get(cell, ""): share} for cell, share in shares.items()))


def _added(*parts: Shares) -> dict[str, float]:
    total = dict[str, float]()
    for part in parts:
        for cell, share in part.items():
            total[cell] = total.get(cell, 0.0) + share
    return total


def _path(groups: Iterable[Group]) -> str:
    return hashlib.blake2b(repr(sorted(groups)).encode(), digest_size=8).hexdigest()


def _keys(salt: bytes, patients: SurveyedPatients) -> list[_Keys]:
    copies = Counter[bytes]()

    def key(kind: bytes, *texts: str) -> bytes:
        digest = _digest(salt, kind, *(text.encode() for text in texts))
        copies[digest] += 1
        return digest if copies[digest] == 1 else _digest(salt, digest, str(copies[digest]).encode())

    each = zip(patients.names, patients.contents, patients.labelled, strict=True)
    return [
        _Keys(
            (key(b"whole", *sorted(labelled)),), tuple(key(b"record", one) for one in contents), (key(b"name", name),)
        )
        for name, contents, labelled in each
    ]


def _state(keys: Sequence[_Keys], shares: Sequence[Shares]) -> str:
    rows = sorted((key.whole[0].hex(), sorted(cells.items())) for key, cells in zip(keys, shares, strict=True))
    return hashlib.blake2b(repr(rows).encode(), digest_size=_BYTES).hexdigest()


def _digest(salt: bytes, *parts: bytes) -> bytes:
    h = hashlib.blake2b(key=salt, digest_size=_BYTES)
    for part in parts:
        h.update(len(part).to_bytes(8, "little") + part)
    return h.digest()


def _split(joined: bytes) -> frozenset[bytes]:
    return frozenset(joined[i : i + _BYTES] for i in range(0, len(joined), _BYTES))
