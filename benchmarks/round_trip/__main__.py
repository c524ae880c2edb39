"""Measure whole rounds of real processes, and beside them the bare gRPC stream of the same bytes.

python -m benchmarks.round_trip --silos 3 --params 11183582 --json
python -m benchmarks.round_trip --silos 3,12 --params 11183582 --rounds 3 --json    also compares the peaks of memory
"""

from __future__ import annotations

from protos.tls import hush_core, require_tls13

require_tls13()  # before anything imports gRPC
hush_core()

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

from benchmarks.round_trip.bare import Bare  # noqa: E402
from benchmarks.round_trip.federation import Federation  # noqa: E402
from benchmarks.round_trip.models import workload  # noqa: E402
from benchmarks.round_trip.processes import processes  # noqa: E402
from fl_core.errors import FederationError  # noqa: E402

Value = int | float | list[float]


def measure(silos: int, params: int, rounds: int, log: Path) -> Mapping[str, Value]:
    """Measure `rounds` rounds after one to warm up, and as many of the bare stream, half before and half after."""
    chosen = workload(params)
    with TemporaryDirectory(prefix="consilium-bench-") as scratch, processes(log) as started:
        folder = Path(scratch)
        federation = Federation(started, folder, silos, chosen)
        try:
            first = federation.run(1)
            bare = Bare(started, federation.home, federation.silos)
            streams, used = _streams(bare, first.down, first.up, rounds)
            found = federation.run(rounds + 1)
            peak = federation.peak_mib()
            more, used_more = _streams(bare, found.down, found.up, rounds)
            streams += more
        finally:
            federation.close()
    took = [after - before for before, after in zip(found.closed, found.closed[1:], strict=False)]
    return {
        "silos": silos,
        "params": chosen.params,
        "params_sent": chosen.sent,
        "rounds": rounds,
        "bytes_up": found.up,
        "bytes_down": found.down,
        "run_bytes_up": found.total_up,
        "run_bytes_down": found.total_down,
        "round_seconds": round(median(took), 4),
        "bare_stream_seconds": round(median(streams), 4),
        "ratio": round(median(took) / median(streams), 3),
        "coordinator_peak_mib": round(peak, 1),
        "coordinator_cpu_seconds": round(found.coordinator_cpu, 3),
        "silos_cpu_seconds": round(found.silos_cpu, 3),
        "bare_cpu_seconds": round((used + used_more) / 2, 3),
        "round_seconds_each": [round(s, 3) for s in took],
        "bare_stream_seconds_each": [round(s, 3) for s in streams],
    }


def _streams(bare: Bare, down: int, up: int, rounds: int) -> tuple[list[float], float]:
    """Return the seconds of each round after one to warm up, and the processor time per round."""
    bare.round(down, up)
    before = bare.cpu_seconds()
    took = [bare.round(down, up) for _ in range(rounds)]
    return took, (bare.cpu_seconds() - before) / rounds


def compared(found: Sequence[Mapping[str, Value]]) -> Mapping[str, object]:
    """Put several numbers of silos side by side: by how much the peak of the coordinator's memory differs."""
    peaks = [float(str(one["coordinator_peak_mib"])) for one in found]
    return {"measured": list(found), "peak_difference_mib": round(max(peaks) - min(peaks), 1)}


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    """Measure and print one JSON line, or a few lines for people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=_numbers, default=[3], help="how many; several numbers are compared: 3,12")
    parser.add_argument("--params", type=int, default=11_183_582, help="numbers in the model; 11183582 is ResNet-18")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds, after one to warm up")
    parser.add_argument("--log", type=Path, help="file for what the processes say")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    words = parser.parse_args()
    with TemporaryDirectory(prefix="consilium-bench-log-") as scratch:
        log = words.log or Path(scratch) / "log"
        try:
            measured = [measure(silos, words.params, words.rounds, log) for silos in words.silos]
        except FederationError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    found: Mapping[str, object] = measured[0] if len(measured) == 1 else compared(measured)
    if words.json:
        print(json.dumps(found))
    else:
        for one in measured:
            for name, value in one.items():
                print(f"{name:26} {value}")
            print()
        if len(measured) > 1:
            print(f"{'peak_difference_mib':26} {found['peak_difference_mib']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
