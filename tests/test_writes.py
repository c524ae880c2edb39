"""A share of the enumeration of all writes: `python -m tests.faults --writes` tries every one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import writes
from tests.support.processes import ENV, ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(writes.compiler() is None, reason="no C compiler: the library that counts writes cannot be built")
@pytest.mark.fault(
    "a coordinator, a hospital or a worker",
    "is killed at any write of a private run, or finds the disk full",
    "homes open again, no round is charged twice, and the model is the same",
)
@pytest.mark.parametrize("masked", [(), ("--masked",)])
def test_a_side_that_dies_at_a_write_goes_on_to_the_same_model_and_is_charged_once(masked: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.faults", "--writes", "--every", "150", *masked]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "homes refused 0, double charges 0, other digests 0" in said
    table = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    disturbed = {file for file, _, *times in table if any(number.isdigit() and int(number) for number in times)}
    assert {
        "coordinator: coordinator.sqlite",
        "coordinator worker: blobs",
        "north: silo.db",
        "north worker: silo.db",
        "north worker: ledger.db",
    } <= disturbed
