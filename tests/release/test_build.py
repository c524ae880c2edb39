"""A release is what git has of a commit, and the same bytes from any checkout."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from release.build import LOCKS, SUMS, ReleaseError, make, require_clean

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small project with a lock."""
    folder = tmp_path / "checkout"
    (folder / "one").mkdir(parents=True)
    (folder / "one/__init__.py").write_text('"""One."""\n')
    project = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    project += '[project]\nname = "one"\nversion = "2.0"\ndescription = "d"\nlicense = "MIT"\ndependencies = ["a"]\n'
    project += '[project.optional-dependencies]\ndev = ["b"]\n[tool.setuptools]\npackages = ["one"]\n'
    (folder / "pyproject.toml").write_text(project)
    lock = f"a==1 \\\n    --hash=sha256:{'0' * 64}\n    # via one (pyproject.toml)\n"
    for name in LOCKS:
        (folder / name).write_text(lock)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def content(files: list[Path]) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in files}


def test_a_commit_gives_the_same_bytes_from_another_checkout_with_other_times_and_modes(
    checkout: Path, tmp_path: Path
) -> None:
    first = content(make(checkout, tmp_path / "a"))
    other = tmp_path / "other"
    mask = os.umask(0o077)
    try:
        git(tmp_path, "clone", "--quiet", str(checkout), str(other))
        (other / "one/forgotten.py").write_text("")  # in no commit
        os.utime(other / "one/__init__.py", (0, 0))
        second = content(make(other, tmp_path / "b"))
    finally:
        os.umask(mask)
    assert first == second
    assert set(first) == {
        "one-2.0-py3-none-any.whl",
        "one-2.0.cdx.json",
        "requirements.lock",
        "requirements-silo.lock",
        "requirements-cpu.lock",
        "requirements-ray.lock",
        "requirements-without-torch.lock",
        SUMS,
    }


def test_checksums_are_those_of_all_files_and_the_bill_is_of_the_wheel(checkout: Path, tmp_path: Path) -> None:
    files = make(checkout, tmp_path / "out")
    listed = dict(reversed(line.split("  ")) for line in files[-1].read_text().splitlines())
    assert listed == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files[:-1]}
    bill = json.loads((tmp_path / "out/one-2.0.cdx.json").read_text())
    assert bill["metadata"]["component"]["hashes"][0]["content"] == listed["one-2.0-py3-none-any.whl"]


def test_what_no_commit_has_is_not_in_it_and_is_said(checkout: Path, tmp_path: Path) -> None:
    require_clean(checkout)
    (checkout / "one/new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"expected a checkout without changes, found 1 \(\?\? one/new.py\)"):
        require_clean(checkout)
    make(checkout, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out/one-2.0-py3-none-any.whl") as wheel:
        assert [name for name in wheel.namelist() if name.startswith("one/")] == ["one/__init__.py"]


@pytest.mark.integration
def test_an_earlier_release_is_replaced_and_nothing_else_is_touched(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(checkout, out)
    text = (checkout / "pyproject.toml").read_text().replace("2.0", "2.1")
    (checkout / "pyproject.toml").write_text(text)
    git(checkout, "commit", "--quiet", "--all", "--message", "two")
    assert {file.name for file in make(checkout, out)} == {file.name for file in out.iterdir()}
    assert not (out / "one-2.0-py3-none-any.whl").exists()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ReleaseError, match=r"found thesis\.txt in it"):
        make(checkout, out)
    assert (out / "thesis.txt").read_text() == "mine"


def test_no_checkout_and_a_project_that_does_not_build_are_said(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="expected a checkout of git"):
        make(tmp_path, tmp_path / "out")
    (checkout / "pyproject.toml").write_text("[project")
    git(checkout, "commit", "--quiet", "--all", "--message", "broken")
    with pytest.raises(ReleaseError, match="expected a wheel"):
        make(checkout, tmp_path / "out")


@pytest.mark.slow
def test_this_project_is_released_alike_twice(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    assert content(make(ROOT, tmp_path / "a")) == content(make(ROOT, tmp_path / "b"))
