"""The documentation as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.main import COMMANDS
from fl_core.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_names_every_command_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    reference = (tmp_path / "reference/coordinator.html").read_text()
    assert all(f"coordinator {name}" in reference for commands in COMMANDS.values() for name in commands)
    methods = (tmp_path / "reference/methods.html").read_text()
    assert all(f"method={name}" in methods for name in METHODS)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?(https?:[^"' >]+)""", page.read_text())
        assert loaded == [], page
