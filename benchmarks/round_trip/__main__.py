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
from statistics import fmean, median  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import NamedTuple  # noqa: E402

from benchmarks.round_trip.bare import Bare  # noqa: E402
from benchmarks.round_trip.federation import Federation, Rounds  # noqa: E402
from benchmarks.round_trip.models import workload  # noqa: E402
from benchmarks.round_trip.processes import processes  # noqa: E402
from fl_core.errors import FederationError  # noqa: E402

Value = int | float | list[float]
LEG = 7
"""Rounds of one run at most, between two times of bare streams."""


def measure(silos: int, params: int, rounds: int, log: Path) -> Mapping[str, Value]:
    """Measure `rounds` rounds in a few runs, each after one to warm up, and bare streams before and after each run.

    A host whose speed changes within a minute is as fast for the ones as for the others.
    """
    chosen = workload(params)
    with TemporaryDirectory(prefix="consilium-bench-") as scratch, processes(log) as started:
        folder = Path(scratch)
        federation = Federation(started, folder, silos, chosen)
        try:
            first = federation.run(1)
            bare = Bare(started, federation.home, federation.silos)
            streams, runs = [_streams(bare, first, min(rounds, LEG))], list[Rounds]()
            for begin in range(0, rounds, LEG):
                leg = min(LEG, rounds - begin)
                runs.append(federation.run(leg + 1))
                streams.append(_streams(bare, first, leg))
            peak = federation.peak_mib()
        finally:
            federation.close()
    took = [seconds for run in runs for seconds in run.seconds]
    moved = [seconds for found in streams for seconds in found.seconds]
    weights = [len(run.seconds) for run in runs]
    return {
        "silos": silos,
        "params": chosen.params,
        "params_sent": chosen.sent,
        "rounds": rounds,
        "bytes_up": first.up,
        "bytes_down": first.down,
        "run_bytes_up": sum(run.total_up for run in runs),
        "run_bytes_down": sum(run.total_down for run in runs),
        "round_seconds": round(median(took), 4),
        "bare_stream_seconds": round(median(moved), 4),
        "ratio": round(median(took) / median(moved), 3),
        "coordinator_peak_mib": round(peak, 1),
        "coordinator_cpu_seconds": round(fmean([run.coordinator_cpu for run in runs], weights), 3),
        "silos_cpu_seconds": round(fmean([run.silos_cpu for run in runs], weights), 3),
        "bare_cpu_seconds": round(fmean([s.cpu for s in streams], [len(s.seconds) for s in streams]), 3),
        "round_seconds_each": [round(s, 3) for s in took],
        "bare_stream_seconds_each": [round(s, 3) for s in moved],
    }


class _Streams(NamedTuple):
    """The seconds of each round of bare streams, and the processor time of all its processes per round."""

    seconds: list[float]
    cpu: float


def _streams(bare: Bare, like: Rounds, rounds: int) -> _Streams:
    """Let bare streams move the bytes of as many rounds, after one to warm up."""
    bare.round(like.down, like.up)
    before = bare.cpu_seconds()
    took = [bare.round(like.down, like.up) for _ in range(rounds)]
    return _Streams(took, (bare.cpu_seconds() - before) / rounds)


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
    parser.add_argument("--rounds", type=int, default=35, help="measured rounds")
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
