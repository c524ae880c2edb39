"""What a build is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from service_core.version import PACKAGES, build

ROOT = Path(__file__).resolve().parents[2]
TRACKED = [
    Path(name)
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
    if (ROOT / name).is_file()
]  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_changed_file_of_any_kind_is_another_build_and_changed_back_the_same(copy: Path) -> None:
    first = build(copy)
    assert first == build(ROOT)
    one_of_each = {file.suffix or file.name: file for file in TRACKED}
    for file in one_of_each.values():
        before = (copy / file).read_bytes()
        (copy / file).write_bytes(before + b" ")
        assert build(copy) != first, f"{file} is no part of a build: name its kind in service_core/version.py"
        (copy / file).write_bytes(before)
    assert build(copy) == first


def test_a_file_that_is_renamed_added_or_removed_is_another_build(copy: Path) -> None:
    found, file = [build(copy)], copy / "fl_core/rng.py"
    file.rename(copy / "fl_core/rng2.py")
    found.append(build(copy))
    (copy / "fl_core/rng2.py").unlink()
    found.append(build(copy))
    (copy / "fl_core/rng3.py").touch()
    found.append(build(copy))
    assert len(set(found)) == 4


def test_what_python_and_editors_leave_behind_is_no_other_build(copy: Path) -> None:
    before = build(copy)
    (copy / "fl_core/__pycache__").mkdir(exist_ok=True)
    for left in ("fl_core/__pycache__/x.pyc", "fl_core/rng.py~", "fl_core/.rng.py.swp", "fl_core/rng.py.orig"):
        (copy / left).write_text("left")
    (copy / "fl_core/.#rng.py").symlink_to("nowhere")
    assert build(copy) == before
