"""SELECTs that are asked in every call or round: written by SQLAlchemy once, and run by SQLite's driver itself.

What SQLAlchemy does around an execution and its transaction is more than a hundred calls of Python; this is ten.
"""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from protos.storage.sqlite import BUSY_SECONDS

_DIALECT = sqlite.dialect(paramstyle="named")


class Lookup:
    """A statement whose rows are named tuples, of the values that SQLAlchemy would give.

    Raises TypeError for one that takes a list of any length, since its text would not be the same each time, and for
    one with a parameter that SQLite holds otherwise than Python does (a date, say): it would silently match nothing.
    """

    def __init__(self, statement: Select[Any]) -> None:
        columns = statement.selected_columns
        compiled = statement.compile(dialect=_DIALECT)
        self.text = str(compiled)
        if "POSTCOMPILE" in self.text:
            raise TypeError(f"expected a statement with one value per parameter, found {self.text}")
        for name, bind in compiled.binds.items():
            if bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT) is not None:
                raise TypeError(f"expected parameters that SQLite takes as they are, found {name!r}, a {bind.type!r}")
        self.fixed = {name: bind.effective_value for name, bind in compiled.binds.items() if not bind.required}
        row = namedtuple("Row", [column.name for column in columns])  # type: ignore[misc]  # named by the statement
        self._row: Callable[[Sequence[object]], Any] = row._make
        readers = [column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None) for column in columns]
        self._readers = [(place, reader) for place, reader in enumerate(readers) if reader is not None]

    def row(self, found: Sequence[object]) -> Any:  # noqa: ANN401  # its names are the statement's
        """Read a row of what SQLite holds."""
        if not self._readers:
            return self._row(found)
        values = list(found)
        for place, reader in self._readers:
            values[place] = reader(values[place])
        return self._row(values)


class Lookups:
    """A connection to a SQLite file that only reads, one statement at a time, from any thread.

    Guarantees: each lookup is a transaction of its own and sees what was committed before it, by whomever; one that
    comes while or after another thread closes this is answered, or raises sqlite3.ProgrammingError.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        self._driver = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._driver.execute("PRAGMA query_only = ON")

    def all(self, lookup: Lookup, **given: object) -> list[Any]:
        """Return the rows of a statement as they are at this moment."""
        with self._lock:
            found = self._driver.execute(lookup.text, {**lookup.fixed, **given}).fetchall()
        return [lookup.row(row) for row in found]

    def first(self, lookup: Lookup, **given: object) -> Any:  # noqa: ANN401
        """Return the first row, None without one."""
        found = self.all(lookup, **given)
        return found[0] if found else None

    def close(self) -> None:
        """Give the file back, when the lookup under way has ended."""
        with self._lock:  # the driver takes a connection away from under a statement of another thread
            self._driver.close()
