"""What computes nothing loads no torch: it takes 450 MB and seconds in a process that only waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def loaded_by(code: str) -> set[str]:
    """Return the packages that a new process has loaded after this code."""
    program = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "from fl_core.methods import METHODS, programs; assert 'fedavg' in METHODS and 'survey' in list(programs())",
        "import protos.wire.codec",
    ],
)
def test_what_only_names_things_loads_no_torch(code: str) -> None:
    assert loaded_by(code) & {"torch", "torchvision", "scipy"} == set()
