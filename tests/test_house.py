"""The counting program counts what it says."""

from __future__ import annotations

import pytest

from tests.house import code_lines, measure, walk

MODULE = '''"""A docstring
of two lines."""

import os  # a comment


# a comment of its own
class Run:
    """One."""

    name = """a text
    of two lines"""

    def of(
        self,
    ) -> None:
        """None."""
        return None if os else TaskKind.TRAIN
'''


def test_lines_of_code_are_lines_with_a_token_less_docstrings() -> None:
    assert code_lines(MODULE) == 8


def test_the_table_counts_source_and_tests_apart() -> None:
    files = {"silo/service/a.py": MODULE, "consilium/b.py": MODULE, "tests/c.py": MODULE}
    measured = measure(files)
    assert measured["core, lines of code"] == measured["spine, lines of code"] == 8
    assert measured["all source, lines of code"] == 16
    assert measured["files that name TaskKind"] == 2
    assert measured["class names taken twice"] == 1
    assert measured["test lines"] == MODULE.count("\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "through", "never"),
    [("secagg=off", "run.py", "masked_rounds.py"), ("secagg=on", "masked_rounds.py", "plain_rounds.py")],
)
def test_an_update_walks_through_the_rounds_of_its_own_kind_alone(words: str, through: str, never: str) -> None:
    """A plain round asks nothing of an update after it was staged."""
    files = walk(words).files
    assert {"silo/connection/transfer.py", "coordinator/api/transfer.py", f"coordinator/runs/{through}"} <= set(files)
    assert f"coordinator/runs/{never}" not in files
