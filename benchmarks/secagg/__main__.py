"""Time what masks cost a hospital and the coordinator, against the bare cipher and the same round in clear.

python -m benchmarks.secagg --silos 6,20,50 --params 11183582 --turns 3
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import timing
from benchmarks.secagg.steps import measure, peak_of_masking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--silos", default="6,20,50")
    parser.add_argument("--params", type=int, default=11_183_582)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ring", choices=("ring32", "ring64"), default="ring32")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for n in map(int, given.silos.split(",")):
        found = measure(n, given.params, given.turns, given.ring)
        timing.show({**found, "peak_mib": round(peak_of_masking(n, given.params), 2)}, given.json)


if __name__ == "__main__":
    main()
