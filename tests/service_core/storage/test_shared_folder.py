"""Folders and locks that processes of several machines share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_core.errors import StateError
from service_core.storage import shared_folder
from service_core.storage.shared_folder import await_file, held_locks, require_locks, require_unused


@contextmanager
def another_process(code: str, folder: Path) -> Iterator[str]:
    """Run code that prints a line, until the block ends."""
    words = [sys.executable, "-c", f"from service_core.storage.shared_folder import *\n{code}", str(folder)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


HOLDS = """
import sys
with held_locks(Path(sys.argv[1])) as word:
    print(word, flush=True)
    sys.stdin.read()
"""
USES = "import sys\nuse(Path(sys.argv[1]) / 'worker.lock')\nprint(flush=True)\nsys.stdin.read()"


def test_locks_of_another_process_hold_and_are_gone_with_it(tmp_path: Path) -> None:
    with another_process(HOLDS, tmp_path) as word:
        require_locks(tmp_path, word)
    with pytest.raises(StateError, match=r"E-RUN-55.*fcntl locks do not hold"):
        require_locks(tmp_path, word)


@pytest.mark.parametrize("kind", ["fcntl", "flock"])
def test_either_kind_of_lock_that_stays_on_its_machine_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Lustre with localflock, a share without a lock manager: the call succeeds, and locks nobody out."""
    monkeypatch.setattr(shared_folder, "_KINDS", {**shared_folder._KINDS, kind: lambda *_: None})
    with another_process(HOLDS, tmp_path) as word, pytest.raises(StateError, match=f"its {kind} locks do not hold"):
        require_locks(tmp_path, word)


def test_another_folder_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    with another_process(HOLDS, tmp_path), pytest.raises(StateError, match="another folder of this name"):
        require_locks(tmp_path, "0" * 32)
    with held_locks(tmp_path) as word, pytest.raises(StateError, match="No such file"):
        require_locks(tmp_path / "nowhere", word)


@pytest.mark.fault(
    "a worker of an earlier service",
    "still runs where the new service cannot see it",
    "the service waits for it, then refuses to start: E-STATE-20",
)
def test_a_file_is_free_once_nobody_uses_it(tmp_path: Path) -> None:
    require_unused(tmp_path / "worker.lock")
    with another_process(USES, tmp_path), pytest.raises(StateError, match="E-STATE-20"):
        require_unused(tmp_path / "worker.lock", 0.2)
    require_unused(tmp_path / "worker.lock", 20)


def test_a_file_that_is_seen_late_is_waited_for_and_a_missing_one_for_some_time(tmp_path: Path) -> None:
    maker = threading.Timer(0.3, (tmp_path / "late").touch)
    maker.start()
    await_file(tmp_path / "late", 20)
    assert (tmp_path / "late").exists()
    began = time.monotonic()
    await_file(tmp_path / "never", 0.3)
    assert 0.3 <= time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == [tmp_path / "late"]
