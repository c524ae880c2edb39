"""What the service asks of the C library and of the system's memory, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MESSAGES = """
import resource, threading
from coordinator.memory import give_back_large_blocks
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
from coordinator.memory import give_back_large_blocks, use_huge_pages
give_back_large_blocks()
use_huge_pages()
x = torch.ones(8 << 20)
print(sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
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
