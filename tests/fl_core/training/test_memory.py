"""What is free on a machine and in its control groups, read off files that a test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core.errors import RefusedError
from fl_core.training import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available and no control groups."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def group(folder: Path, limit: str, used: int, cached: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}
    most, usage, prefix = names[version]
    (folder / most).write_text(f"{limit}\n")
    (folder / usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cached}\n")


def test_a_machine_without_groups_leaves_what_it_says_is_available(machine: Path) -> None:
    assert memory.free_memory(memory.CPU) == 8 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_group_around_the_process_decides(machine: Path, version: int) -> None:
    line, base = ("0::/a/b", "") if version == 2 else ("4:cpu,memory:/a/b", "memory")
    (machine / "proc/self/cgroup").write_text(f"{line}\n9:name=systemd:/\n")
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    group(machine / "cgroup" / base / "a/b", unlimited, GIB, version=version)
    assert memory.free_memory(memory.CPU) == 8 * GIB
    group(machine / "cgroup" / base / "a", str(4 * GIB), 3 * GIB, cached=GIB, version=version)
    assert memory.free_memory(memory.CPU) == 2 * GIB
    group(machine / "cgroup" / base / "a/b", str(GIB), 3 * GIB, version=version)  # above its limit, for a moment
    assert memory.free_memory(memory.CPU) == 0


def test_a_system_that_says_nothing_refuses_nothing(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    assert memory.free_memory(memory.CPU) is None
    memory.require(2**80, memory.CPU, "all", "nothing")


def test_what_is_free_is_told_only_where_it_may_be(machine: Path) -> None:
    memory.require(8 * GIB, memory.CPU, "a model", "shrink it")
    with pytest.raises(RefusedError, match=r"E-RUN-38: expected at least 8193 MiB .* model, found less: shrink it"):
        memory.require(8 * GIB + 1, memory.CPU, "a model", "shrink it")
    with pytest.raises(RefusedError, match="found 8192 MiB"):
        memory.require(8 * GIB + 1, memory.CPU, "a model", "shrink it", disclose=True)
