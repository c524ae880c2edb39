"""The table of faults and attacks in docs/operations/faults.md, made from a run of the tests that carry one.

A test says what it stands for with `@pytest.mark.fault(party, does, outcome)`: who is bad, broken or absent, what it
does, and what then happens.

python -m tests.faults [pytest's own arguments]   runs those tests; fails where one fails. Once all of them have been
                                                  run the page is written, and otherwise stays as it was
python -m tests.faults --check                    fails when the page lists others than the marked tests; runs none
python -m tests.faults --writes [--masked] [--every N]       disturbs each N-th write of a run: see tests/writes.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/operations/faults.md"
_HEAD = """# Faults and attacks

What a bad, a broken or an absent party does, and what then happens. Each row is a test; the last column is how it last
ended. Written by `python -m tests.faults`. What nothing here stops: [threat model](../privacy/threat-model.md).

| who | does | what happens | test | |
|---|---|---|---|---|
"""


@dataclass(slots=True, eq=False)
class FaultTable:
    """A pytest plugin that notes the marked tests, and how each ended."""

    rows: dict[tuple[str, str, str, str], set[str]] = field(default_factory=dict)
    _row_of: dict[str, tuple[str, str, str, str]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the row of each marked test; cases of one parametrised test are one row."""
        for item in items:
            for mark in item.iter_markers("fault"):
                party, does, outcome = map(str, mark.args)
                row = (party, does, outcome, item.nodeid.partition("[")[0])
                self._row_of[item.nodeid] = row
                self.rows.setdefault(row, set())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended."""
        if report.nodeid in self._row_of and (report.when == "call" or not report.passed):
            self.rows[self._row_of[report.nodeid]].add(report.outcome)

    @property
    def complete(self) -> bool:
        """Whether every marked test there is was run to an end."""
        return {tuple(row) for row in self.rows} == marked() and all(self.rows.values())

    def page(self) -> str:
        """Return the page, sorted by who and what."""
        lines = []
        for row, found in sorted(self.rows.items()):
            party, does, outcome, test = row
            held = "held" if found == {"passed"} else ", ".join(sorted(found)) or "not run"
            lines.append(f"| {party} | {does} | {outcome} | `{test}` | {held} |\n")
        return _HEAD + "".join(lines)


def listed(page: str) -> set[tuple[str, ...]]:
    """Return the rows of a page without their results."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "`tests/" in line]
    return {(row[0].removeprefix("| "), *row[1:3], row[3].strip("`")) for row in rows}


def marked() -> set[tuple[str, ...]]:
    """Read the rows off the tests' source."""
    return {
        (*row, "::".join((path.relative_to(ROOT).as_posix(), *names)))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for names, row in _marks(ast.parse(path.read_text(encoding="utf-8")))
    }


def _marks(tree: ast.AST, *around: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault":
                    yield (*around, node.name), tuple(str(ast.literal_eval(word)) for word in call.args)
            if isinstance(node, ast.ClassDef):
                yield from _marks(node, *around, node.name)


def main(words: list[str]) -> int:
    """Write the page, or check it."""
    if words[:1] == ["--writes"]:
        from tests import writes

        return writes.run(words[1:])
    if words == ["--check"]:
        if differ := listed(PAGE.read_text(encoding="utf-8")) ^ marked():
            print(f"{PAGE.name} and the marked tests differ in {sorted(differ)}: run `python -m tests.faults`")
        return int(bool(differ))
    table = FaultTable()
    found = int(pytest.main(["-q", "-m", "fault", *words, str(ROOT / "tests")], [table]))
    if table.complete:
        PAGE.write_text(table.page(), encoding="utf-8")
    else:
        print(f"{PAGE.name} stays as it is: not every marked test was run")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
