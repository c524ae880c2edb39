"""The notebook of a federation on this machine: real services, led from Python."""

from __future__ import annotations

import re
import types
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples/federation.ipynb"


def test_the_notebook_is_committed_without_outputs_and_paths_of_a_machine() -> None:
    book = nbformat.read(FILE, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)
    assert not re.search(r"/(home|root|tmp|work|Users)\b", FILE.read_text())


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_its_cells_lead_a_federation_of_real_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = types.ModuleType("notebook")
    sources = [cell.source for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"]
    try:
        for source in sources:
            exec(source, vars(book))
        made = vars(book)
        assert made["run"].id in made["files"].model.name
        assert made["simulated"].digest == made["model"].predictor.model.facts.model_digest
        assert (made["model"].predict(made["digits"].images / 16).astype(int) == made["digits"].target).mean() > 0.9
        assert all(service.returncode is not None for service in made["services"])
    finally:
        if stop := vars(book).get("stop"):
            stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_in_a_kernel_from_its_first_cell_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(FILE, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc")  # no port
    NotebookClient(book, km=kernel, timeout=400, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert any("<table>" in "".join(output.get("data", {}).get("text/html", "")) for output in shown)
    views = [output.data["text/html"] for output in shown if "<pre>" in output.get("data", {}).get("text/html", "")]
    assert any("finished  round 1/1" in view and "balanced accuracy" in view for view in views)
