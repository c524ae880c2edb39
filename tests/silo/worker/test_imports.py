"""What a hospital without torch loads imports it through `fl_core.tensors` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOTS = (
    "silo.worker.process",
    "fl_core.methods.disjoint.analytic",
    "fl_core.models.frozen",
    "fl_core.survey.program",
    "privacy.mechanisms.record.private_data",
)
OURS = ("fl_core", "privacy", "protos", "service_core", "silo")
HEAVY = {"torch", "torchvision", "opacus"}
SEAM = "fl_core.tensors"


def file_of(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Give what runs when a module is imported where torch is not installed."""
    for one in body:
        if isinstance(one, ast.If):
            without = ast.unparse(one.test) in ("TYPE_CHECKING", "TORCH")
            yield from statements(one.orelse if without else [*one.body, *one.orelse])
        elif not isinstance(one, ast.FunctionDef):
            yield one
            yield from statements(getattr(one, "body", []))


def imports_of(file: Path) -> Iterator[str]:
    for one in statements(ast.parse(file.read_text()).body):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names)
        elif isinstance(one, ast.ImportFrom) and one.module is not None:
            yield one.module
            yield from (f"{one.module}.{alias.name}" for alias in one.names)


def test_its_import_graph_has_no_torch() -> None:
    waiting, seen, heavy = list(ROOTS), set[str](), list[str]()
    while waiting:
        module = waiting.pop()
        if module in seen or module == SEAM or (file := file_of(module)) is None:
            continue
        seen.add(module)
        for name in imports_of(file):
            package = name.partition(".")[0]
            if package in HEAVY:
                heavy.append(f"{module} imports {name}")
            elif package in OURS:
                waiting += [name, name.rpartition(".")[0]]
    assert heavy == []
    assert len(seen) > 150, "the graph was not followed"
