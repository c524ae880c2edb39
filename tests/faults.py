"""The table of faults and attacks in docs/operations/faults.md, made from a run of the tests that carry one.

A test declares its row with `@pytest.mark.fault(party, does, outcome)`: who attacks, fails or is absent, what it does,
and what happens.

python -m tests.faults [pytest's own arguments]   runs these tests; fails if one fails. The page is written
                                                  only if all of them were run
python -m tests.faults --check                    fails if the page differs from the marked tests; runs none
python -m tests.faults --writes [--masked] [--every N]       disturbs each N-th write of a run: see tests/writes.py
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/operations/faults.md"
_HEAD = """# Faults and attacks

What happens when a party attacks, fails or is absent. Each row is a test, and the last column is its last result.
`python -m tests.faults` runs these tests and writes this page. The [threat model](../privacy/threat-model.md) lists
what is not prevented.
"""
_COLUMNS = """| who | does | what happens | test | result |
|---|---|---|---|---|
"""
_SECTION_ROWS = 4
"""A party with as many rows has a section of its own."""


@dataclass(slots=True, eq=False)
class FaultTable:
    """A pytest plugin that records the marked tests and their results."""

    rows: dict[tuple[str, str, str, str], set[str]] = field(default_factory=dict)
    _row_of: dict[str, tuple[str, str, str, str]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record the row of each marked test; all cases of a parametrised test are one row."""
        for item in items:
            for mark in item.iter_markers("fault"):
                party, does, outcome = map(str, mark.args)
                row = (party, does, outcome, item.nodeid.partition("[")[0])
                self._row_of[item.nodeid] = row
                self.rows.setdefault(row, set())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of a test."""
        if report.nodeid in self._row_of and (report.when == "call" or not report.passed):
            self.rows[self._row_of[report.nodeid]].add(report.outcome)

    @property
    def complete(self) -> bool:
        """Whether every marked test was run to its end."""
        return {tuple(row) for row in self.rows} == marked() and all(self.rows.values())

    def page(self) -> str:
        """Return the page: a section for each frequent party, then one for all others; rows sorted."""
        counts = Counter(party for party, *_ in self.rows)
        sections: dict[str, list[str]] = {}
        for (party, does, outcome, test), outcomes in sorted(self.rows.items()):
            result = ", ".join(sorted(outcomes)) or "not run"
            title = party[:1].upper() + party[1:] if counts[party] >= _SECTION_ROWS else "Others"
            sections.setdefault(title, []).append(f"| {party} | {does} | {outcome} | `{test}` | {result} |\n")
        titles = sorted(sections, key=lambda title: (title == "Others", title))
        return _HEAD + "".join(f"\n## {title}\n\n{_COLUMNS}{''.join(sections[title])}" for title in titles)


def listed(page: str) -> set[tuple[str, ...]]:
    """Return the rows of a page without their results."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "`tests/" in line]
    return {(row[0].removeprefix("| "), *row[1:3], row[3].strip("`")) for row in rows}


def marked() -> set[tuple[str, ...]]:
    """Read the rows from the tests' source."""
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
    status = int(pytest.main(["-q", "-m", "fault", *words, str(ROOT / "tests")], [table]))
    if table.complete:
        PAGE.write_text(table.page(), encoding="utf-8")
    else:
        print(f"{PAGE.name} stays as it is: not every marked test was run")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
