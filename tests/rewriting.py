"""Test files as pytest rewrites them, for several workers in a fresh checkout: each writes a share of them first.

Pytest caches what it rewrites, but workers that begin together rewrite every file at the same time, each for itself.
The names of `_pytest` are not public; where they change, this file goes and runs only take longer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def cached(file: Path) -> Path:
    """Name the file in which pytest looks for what it has rewritten."""
    return rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)


def share(config: pytest.Config) -> list[Path]:
    """List what this worker writes, of all files below the folders that are asked for."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return []
    folders = [found for found in (Path(arg).absolute() for arg in config.args) if found.is_dir()]
    files = sorted({file for folder in folders for file in folder.rglob("test_*.py")})
    return files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]


def write(files: Iterable[Path], config: pytest.Config) -> None:
    for file in files:
        found = cached(file)
        if not found.exists() and rewrite.try_makedirs(found.parent):
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, found)
