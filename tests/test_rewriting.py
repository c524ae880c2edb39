"""What workers write before they collect is what pytest would have written."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests import rewriting


def test_a_file_that_was_written_before_is_taken_by_pytest_and_explains_what_fails(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test() -> None:\n    assert 1 + 1 == 3\n")
    rewriting.write([file], request.config)
    code = rewrite._read_pyc(file, rewriting.cached(file))
    assert code is not None
    module = types.ModuleType("test_it")
    exec(code, module.__dict__)
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        module.test()
    file.write_text("def test() -> None:\n    assert True\n")
    assert rewrite._read_pyc(file, rewriting.cached(file)) is None, "what was written of another text counts no more"


def test_the_shares_of_all_workers_are_all_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in "abcde":
        (tmp_path / f"test_{name}.py").touch()
    shares = []
    for worker in range(3):
        config = types.SimpleNamespace(
            workerinput={"workerid": f"gw{worker}", "workercount": 3}, args=[str(tmp_path), "test_x.py::test"]
        )
        shares += rewriting.share(config)  # type: ignore[arg-type]
    assert sorted(shares) == sorted(tmp_path.glob("*.py"))
