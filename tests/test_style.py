"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fl_core.errors.catalogue import EXPLANATIONS
from service_core.version import PACKAGES

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "protos/consilium"
SOURCES = sorted(p for pkg in PACKAGES for p in (ROOT / pkg).rglob("*.py") if not p.is_relative_to(GENERATED))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _lines(path: Path) -> int:
    """Count lines of code: neither docstrings nor comments nor blank lines."""
    text = path.read_text()
    prose: set[int] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and k not in prose for k, line in numbered)


def test_every_module_is_within_its_ceiling() -> None:
    lines = {str(path.relative_to(ROOT)): _lines(path) for path in SOURCES}
    outgrown = {path: n for path, n in lines.items() if n > 500}
    assert outgrown == {}, "these have outgrown their idea: split them where they have two"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_is_in_it_and_every_package_names_its_folders(package: str) -> None:
    folders = {p.parent for p in SOURCES if p.is_relative_to(ROOT / package)}
    docstrings = {folder: ast.get_docstring(_tree(folder / "__init__.py")) for folder in folders}
    assert all(docstrings.values())
    inside = [p.name for p in (ROOT / package).iterdir() if p in folders]
    assert [name for name in inside if f"{name}/" not in str(docstrings[ROOT / package])] == []


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, modules: Collection[str]) -> set[str]:
    """Name the modules that one imports: at its top, inside functions, and for types alone."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in inner}
    return found & set(modules) - {_name(path)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {_name(path): path for path in SOURCES}
    imports = {(name, other) for name, path in modules.items() for other in _imported(path, modules)}
    sorter = TopologicalSorter[str]()
    for name, other in imports:
        sorter.add(name, other)
    sorter.prepare()  # raises CycleError, which names them


def test_what_set_up_compiles_is_what_is_installed() -> None:
    (line,) = re.findall(r"^PACKAGES = (\(.*\))$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    installed = ast.literal_eval(line)
    (compiled,) = re.findall(r"^PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(compiled.split()) == sorted(installed) == sorted(PACKAGES)


def _codes(paths: list[Path]) -> set[str]:
    return {code for path in paths for code in re.findall(r"E-[A-Z]+-\d\d", path.read_text())}


def test_every_error_code_is_explained_and_every_explanation_is_used() -> None:
    used = _codes(SOURCES)
    assert used - set(EXPLANATIONS) == set()
    assert set(EXPLANATIONS) - used == set()


def test_global_random_state_is_not_touched() -> None:
    """Randomness comes from fl_core.rng; jitter of a network back-off may come from the system's own source."""
    calls = r"np\.random\.(?!Generator|default_rng|RandomState)|^import random\b|torch\.manual_seed"
    bad = re.compile(calls, re.MULTILINE)
    offenders = {str(p.relative_to(ROOT)) for p in SOURCES if bad.search(p.read_text())}
    assert offenders <= {"fl_core/rng.py"}


def test_files_that_people_rely_on_are_replaced_at_once() -> None:
    """Through `service_core.storage.private_files`; in place: a log, a lock, what is renamed or checked later."""
    calls = r"""\.(?:write_text|write_bytes)\(|\.open\((?:mode=)?["'][wxa]|savefig\((?!buffer|picture|FILE)"""
    in_place = {p.name for p in SOURCES if re.search(calls, p.read_text())}
    logs_and_locks = {"processes.py", "pinned_peers.py", "cage.py", "shared_folder.py"}  # cage.py: of /proc
    renamed_or_checked = {"client.py", "export.py", "checkpoints.py", "log.py", "liveness.py", "census.py"}
    assert in_place <= logs_and_locks | renamed_or_checked


def test_only_the_named_modules_open_the_door_to_a_heavy_library() -> None:
    def importers(library: str) -> set[str]:
        pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
        return {str(p.relative_to(ROOT).parts[0]) for p in SOURCES if pattern.search(p.read_text())}

    assert importers("grpc") <= {"coordinator", "silo"}
    assert importers("hydra") <= {"coordinator", "consilium"}
    assert importers("opacus") <= {"privacy"}
    to_own_processes = {ROOT / "consilium/research/engines/worker.py", ROOT / "silo/training/helpers.py"}
    assert {p for p in SOURCES if re.search(r"^\s*(import|from) pickle\b", p.read_text(), re.MULTILINE)} == (
        to_own_processes
    )
