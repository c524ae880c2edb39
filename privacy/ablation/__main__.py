"""`python -m privacy.ablation`: see docs/adr/0007; the program composes whole runs, so it lives above this layer."""

from __future__ import annotations

import importlib
import sys

PROGRAM = "coordinator.simulation.privacy_ablation"


def main(words: list[str]) -> int:
    """Load the program by its name and run it; return its exit status."""
    return int(importlib.import_module(PROGRAM).main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
