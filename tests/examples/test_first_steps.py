"""The notebook of first steps: what it says is short, and it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples/first_steps.ipynb"


def cells() -> list[str]:
    return [cell.source for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"]


def test_the_notebook_is_committed_without_outputs_and_its_own_method_has_less_than_ten_lines() -> None:
    book = nbformat.read(FILE, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)
    (method,) = [source for source in cells() if "class Smoothed" in source]
    lines = [line for line in method[method.index("@dataclass") :].splitlines() if line.strip()]
    assert len(lines) < 10


@pytest.mark.integration
def test_its_cells_run_on_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheap stand-in: the same cells, shortened to a step, in this process."""
    import types

    book = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", book)
    for source in cells():
        if "check_method" not in source:  # tests/consilium
            exec(source.replace("rounds=10", "rounds=1, train__max_steps=1"), vars(book))
    assert vars(book)["mine"].manifest.extensions[0].name == "__main__:Smoothed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_in_a_kernel_from_its_first_cell_to_its_last() -> None:
    book = nbformat.read(FILE, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc")  # no port
    NotebookClient(book, km=kernel, timeout=400, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]
