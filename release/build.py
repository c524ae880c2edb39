"""A release of a commit: wheel, locks, bill of materials, checksums.

It is made of what git has of the commit, in a folder of its own, by the setuptools of the lock, with the commit's time:
the same commit gives the same bytes in any checkout, at any time, for anybody who may want to check.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from release import sbom

SUMS = "SHA256SUMS"
_KINDS = ("", "-silo", "-cpu", "-without-torch", "-ray")
LOCKS = tuple(f"requirements{kind}.lock" for kind in _KINDS)
_BUILD = "import os, sys; os.umask(0o022); from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


class ReleaseError(Exception):
    """A release cannot be made; the message says what was expected, what was found, what to do."""


def require_clean(root: Path) -> None:
    """Raise ReleaseError where a checkout has what no commit has."""
    changed = _git(root, "status", "--porcelain").decode()
    if changed:
        lines = changed.splitlines()
        raise ReleaseError(
            f"expected a checkout without changes, found {len(lines)} ({lines[0].strip()}): commit them, or "
            "put them aside (git stash --include-untracked)"
        )


def make(root: Path, out: Path, commit: str = "HEAD") -> list[Path]:
    """Write the release of a commit into a folder; return the files, checksums last.

    out: new, empty, or with an earlier release, which is replaced. Raises ReleaseError.
    """
    made = int(_git(root, "show", "--no-patch", "--format=%ct", f"{commit}^{{commit}}"))
    with TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        built.mkdir()
        with tarfile.open(
            fileobj=io.BytesIO(
                _git(root, "-c", "tar.umask=0022", "-c", "core.autocrlf=false", "archive", "--format=tar", commit)
            )
        ) as archive:
            archive.extractall(source, filter="data")
        wheel = _wheel(source, built, made)
        for name in LOCKS:
            shutil.copyfile(source / name, built / name)
        lock, project = (source / "requirements.lock").read_text(), (source / "pyproject.toml").read_text()
        bill = built / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
        bill.write_text(sbom.bill(lock, project, (wheel.name, _sha256(wheel)), made), encoding="utf-8")
        files = sorted(built.iterdir(), key=lambda file: file.name)
        (built / SUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))
        _clear(out)
        return [Path(shutil.copyfile(file, out / file.name)) for file in (*files, built / SUMS)]


def _wheel(source: Path, built: Path, made: int) -> Path:
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(made), "PYTHONHASHSEED": "0"}
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", _BUILD, str(built)], cwd=source, env=env, capture_output=True, text=True, check=False
    )
    wheels = list(built.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ReleaseError(f"expected a wheel, found that setuptools made none: {done.stderr[-2000:]}")
    return wheels[0]


def _clear(out: Path) -> None:
    """Take an earlier release out of a folder; raises ReleaseError where there is anything else in it."""
    out.mkdir(parents=True, exist_ok=True)
    present = {file.name for file in out.iterdir()}
    listed = (out / SUMS).read_text().splitlines() if SUMS in present else []
    ours = {SUMS, *(line.partition("  ")[2] for line in listed)}
    if others := sorted(present - ours):
        raise ReleaseError(
            f"expected {out} to be new, or to hold an earlier release, found {_few(others)} in it: name another folder"
        )
    for name in present:
        (out / name).unlink()


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)  # noqa: S603, S607
    if done.returncode:
        raise ReleaseError(
            f"expected a checkout of git at {root}, found: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
