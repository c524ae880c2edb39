"""What the service asks of the C library and of the system's memory, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MESSAGES = """
import resource, threading
from coordinator.runs.malloc_tuning import give_back_large_blocks
assert give_back_large_blocks()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    source = bytes(1 << 20)
    for _ in range(3):
        before = faults()
        for _ in range(50):
            first = bytearray(source)
            second = bytes(first)
            del first, second
    print(faults() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
TENSORS = """
import torch
from coordinator.runs.malloc_tuning import give_back_large_blocks, use_huge_pages
give_back_large_blocks()
use_huge_pages()
x = torch.ones(8 << 20)
print(sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""
PIECES = """
import torch
from coordinator.runs.malloc_tuning import give_back_large_blocks, give_back_what_is_free
give_back_large_blocks()

def resident():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

pieces = [bytearray(b"x" * (64 << 10)) for _ in range(1024)]  # 64 MiB
del pieces[::2]
before = resident()
give_back_what_is_free()
print(before - resident())
"""


def answer(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these settings")
def test_messages_are_made_in_memory_that_earlier_ones_left() -> None:
    assert answer(MESSAGES) < 256  # a hundred messages of 256 pages each


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no transparent huge pages"
)
def test_large_tensors_lie_in_huge_pages() -> None:
    assert answer(TENSORS) >= 16 << 10  # KiB, of the tensor's 32 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives back what lies between pieces in use")
def test_what_is_free_is_given_back_from_between_what_is_in_use() -> None:
    assert answer(PIECES) >= 24 << 10  # KiB, of 32 MiB
