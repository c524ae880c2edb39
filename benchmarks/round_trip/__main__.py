"""Measure whole rounds of real processes, and beside them the bare gRPC stream of the same bytes.

python -m benchmarks.round_trip --silos 3 --params 11183582 --json
python -m benchmarks.round_trip --silos 3,12 --params 11183582 --rounds 3 --json    also compares the peaks of memory
python -m benchmarks.round_trip --silos 1 --rounds 4 --delay-ms 100     both over one delaying line of 1 Gbit/s
python -m benchmarks.round_trip --silos 6 --rounds 12 --masks           the same rounds under masks in between as well
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import fmean, median  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import NamedTuple  # noqa: E402

from benchmarks.round_trip.bare import Bare  # noqa: E402
from benchmarks.round_trip.federation import Federation, Peaks, Rounds  # noqa: E402
from benchmarks.round_trip.line import BYTES_PER_S  # noqa: E402
from benchmarks.round_trip.models import Workload, workload  # noqa: E402
from benchmarks.round_trip.processes import Processes, processes  # noqa: E402
from fl_core.errors import FederationError  # noqa: E402

Value = int | float | list[float]
WARM_UP = 3
"""Rounds that a run begins with and that are not counted: they make the files that all later ones write over."""
LEG = 12
"""Rounds of one run that are, at most; bare streams stand before and after it."""
STARTS = 4
"""How often all processes are started at most, of rounds and of bare streams alike."""


def measure(
    silos: int, params: int, rounds: int, log: Path, delay_ms: float, masks: bool = False
) -> Mapping[str, Value]:
    """Measure `rounds` rounds of a few starts of all processes, each as `_measure_start` does.

    One start takes up to a tenth longer for the same rounds, and for bare streams, than the next. The load is the
    machine's average over a minute, before the first start and at the end, when the benchmark itself is part of it.
    """
    chosen, legs = workload(params), [min(LEG, rounds - begin) for begin in range(0, rounds, LEG)]
    starts, load = min(STARTS, len(legs)), os.getloadavg()[0]
    with processes(log) as started:
        found = [_measure_start(started, silos, chosen, legs[k::starts], delay_ms, masks) for k in range(starts)]
    first, peak = found[0].first, max((one.peak for one in found), key=lambda peaks: peaks.total)
    streams, runs = [s for one in found for s in one.streams], [run for one in found for run in one.runs]
    took = [seconds for run in runs for seconds in run.seconds]
    moved = [seconds for stream in streams for seconds in stream.seconds]
    weights = [len(run.seconds) for run in runs]
    coordinator = fmean([run.coordinator_cpu for run in runs], weights)
    silo = fmean([run.silos_cpu for run in runs], weights)
    bare = fmean([s.cpu for s in streams], [len(s.seconds) for s in streams])
    return {
        "silos": silos,
        "params": chosen.params,
        "params_sent": chosen.sent,
        "rounds": rounds,
        "starts": starts,
        "delay_ms": delay_ms,
        "line_seconds": round(silos * (first.up + first.down) / BYTES_PER_S, 3),
        "bytes_up": first.up,
        "bytes_down": first.down,
        "run_bytes_up": sum(run.total_up for run in runs),
        "run_bytes_down": sum(run.total_down for run in runs),
        "round_seconds": round(median(took), 4),
        "bare_stream_seconds": round(median(moved), 4),
        "ratio": round(median(took) / median(moved), 3),
        "coordinator_peak_mib": round(peak.total, 1),
        **{f"{name}_peak_mib": round(mib, 1) for name, mib in peak._asdict().items()},
        "coordinator_cpu_seconds": round(coordinator, 3),
        "silos_cpu_seconds": round(silo, 3),
        "bare_cpu_seconds": round(bare, 3),
        "cpu_ratio": round((coordinator + silo) / bare, 3),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "warm_up_seconds_each": [round(s, 3) for run in runs for s in run.warm_up],
        "round_seconds_each": [round(s, 3) for s in took],
        "bare_stream_seconds_each": [round(s, 3) for s in moved],
        **_under_masks(found, median(took)),
    }


def _under_masks(found: Sequence[_Start], plain: float) -> dict[str, Value]:
    """Say what the same rounds under masks took; nothing where none were measured."""
    runs = [run for one in found for run in one.masked]
    if not runs:
        return {}
    took = [seconds for run in runs for seconds in run.seconds]
    return {
        "masked_bytes_up": runs[0].up,
        "masked_round_seconds": round(median(took), 4),
        "masked_ratio": round(median(took) / plain, 3),
        "masked_coordinator_peak_mib": round(max(one.masked_peak.total for one in found), 1),
        "masked_round_seconds_each": [round(s, 3) for s in took],
    }


class _Streams(NamedTuple):
    """The seconds of each round of bare streams, and the processor time of all its processes per round."""

    seconds: list[float]
    cpu: float


class _Start(NamedTuple):
    """What was measured between the start of the processes and their end. first: the run before all others.

    peak: of the coordinator's memory before any run was masked   masked_peak: after all of them.
    """

    first: Rounds
    runs: list[Rounds]
    streams: list[_Streams]
    peak: Peaks
    masked: list[Rounds]
    masked_peak: Peaks


def _measure_start(
    started: Processes, silos: int, chosen: Workload, legs: Sequence[int], delay_ms: float, masks: bool
) -> _Start:
    """Measure runs of so many rounds, and bare streams before and after each run.

    A host whose speed changes within a minute is as fast for the ones as for the others.
    """
    with TemporaryDirectory(prefix="consilium-bench-") as scratch:
        federation = Federation(started, Path(scratch), silos, chosen, delay_ms)
        try:
            first = federation.run(0, 1)
            bare = Bare(started, federation.home, federation.silos, delay_ms)
            streams, runs, masked = [_streams(bare, first, legs[0])], list[Rounds](), list[Rounds]()
            peak = Peaks()
            for leg in legs:
                runs.append(federation.run(leg, WARM_UP))
                peak = peak if masked else federation.peaks_mib
                if masks:
                    masked.append(federation.run(leg, WARM_UP, masks=True))
                streams.append(_streams(bare, first, leg))
            return _Start(first, runs, streams, peak, masked, federation.peaks_mib)
        finally:
            federation.close()
            started.stop()


def _streams(bare: Bare, like: Rounds, rounds: int) -> _Streams:
    """Let bare streams move the bytes of as many rounds, after one to warm up."""
    bare.round(like.down, like.up)
    before = bare.cpu_seconds()
    took = [bare.round(like.down, like.up) for _ in range(rounds)]
    return _Streams(took, (bare.cpu_seconds() - before) / rounds)


def compared(found: Sequence[Mapping[str, Value]]) -> Mapping[str, object]:
    """Put several numbers of silos side by side: by how much the peak of the coordinator's memory differs."""
    peaks = [float(str(one["coordinator_peak_mib"])) for one in found]
    difference = max(peaks) - min(peaks)
    return {
        "measured": list(found),
        "peak_difference_mib": round(difference, 1),
        "peak_difference_ratio": round(difference / min(peaks), 3),
    }


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    """Measure and print one JSON line, or a few lines for people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=_numbers, default=[3], help="how many; several numbers are compared: 3,12")
    parser.add_argument("--params", type=int, default=11_183_582, help="numbers in the model; 11183582 is ResNet-18")
    parser.add_argument("--rounds", type=int, default=48, help="measured rounds")
    parser.add_argument("--log", type=Path, help="file for what the processes say")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip of the line of 1 Gbit/s between")
    parser.add_argument("--masks", action="store_true", help="also measure each run's rounds under masks")
    words = parser.parse_args()
    with TemporaryDirectory(prefix="consilium-bench-log-") as scratch:
        log = words.log or Path(scratch) / "log"
        try:
            measured = [measure(n, words.params, words.rounds, log, words.delay_ms, words.masks) for n in words.silos]
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
