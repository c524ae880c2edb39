"""Free memory, and the refusal of tasks that would not fit into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fl_core.errors import RefusedError
from fl_core.tensors import torch

CPU = torch.device("cpu")
FEW = (2, 4)
"""Numbers of examples in the two measured steps; memory is assumed to be linear in the number of examples."""
_MIB = 1 << 20
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_BY_VERSION = {  # folder below _CGROUPS, files with the limit, the usage, and the reclaimable part of the usage
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if the system does not report it.

    On the CPU the minimum over the machine and the control groups of this process (a container, a service's MemoryMax).
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    limits = [*_machine_memory(), *_cgroup_memory()]
    return max(0, min(limits)) if limits else None


def require(need: int, device: torch.device, what: str, remedy: str, disclose: bool = False) -> None:
    """Raise RefusedError (E-RUN-38) if less than `need` bytes are free on a device.

    disclose: whether the message has the free memory, which a hospital does not reveal to the lead.
    """
    free = free_memory(device)
    if free is None or need <= free:
        return
    available = mib(free) if disclose else "less"
    raise RefusedError(
        "E-RUN-38", f"expected at least {mib(need)} of free memory on {device} for {what}, found {available}: {remedy}"
    )


def mib(count: int) -> str:
    """Format a number of bytes in MiB, rounded up."""
    return f"{-(-count // _MIB)} MiB"


def _machine_memory() -> Iterator[int]:
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for name, _, value in (line.partition(":") for line in lines):
        if name == "MemAvailable":
            yield 1024 * int(value.split()[0])


def _cgroup_memory() -> Iterator[int]:
    """Yield the free memory of each control group around this process; groups without a limit are skipped."""
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        version = 2 if number == "0" else 1
        if version == 1 and "memory" not in kinds.split(","):
            continue
        base, limit, usage, reclaimable = _BY_VERSION[version]
        group = _CGROUPS / base / path.lstrip("/")
        for folder in (group, *group.parents):
            if (left := _cgroup_headroom(folder, limit, usage, reclaimable)) is not None:
                yield left
            if folder == _CGROUPS / base:
                break


def _cgroup_headroom(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + int(stats.get(reclaimable, 0))
    except (OSError, ValueError):  # the group is not visible here, or its limit is "max"
        return None
