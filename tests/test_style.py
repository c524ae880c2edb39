"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from fl_core.explanations import EXPLANATIONS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fl_core", "privacy", "protos", "coordinator", "silo")
SOURCES = sorted(p for pkg in PACKAGES for p in (ROOT / pkg).rglob("*.py") if "consilium" not in p.parts)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_is_within_its_ceiling(path: Path) -> None:
    limit = 150 if path.parent.name == "methods" else 300
    assert _lines(path) <= limit, f"{path.name} has outgrown its idea: split it"


def test_what_set_up_compiles_is_what_is_installed() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
        "include"
    ]
    (compiled,) = re.findall(r"^PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(compiled.split()) == sorted(name.removesuffix("*") for name in installed)


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long


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


def test_only_the_named_modules_open_the_door_to_a_heavy_library() -> None:
    def importers(library: str) -> set[str]:
        pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
        return {str(p.relative_to(ROOT).parts[0]) for p in SOURCES if pattern.search(p.read_text())}

    assert importers("grpc") <= {"coordinator", "silo"}
    assert importers("hydra") <= {"coordinator"}
    assert importers("opacus") <= {"privacy"}
    assert importers("pickle") == set()
