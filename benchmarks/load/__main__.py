"""Measure what a lead waits while many members are connected and some of them send updates, without strangers and with.

python -m benchmarks.load --sessions 1000 --uploads 20 --strangers 2000 --minutes 3 --json
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

from benchmarks.load.measure import Load, measure  # noqa: E402
from benchmarks.round_trip.models import RESNET18  # noqa: E402
from fl_core.errors import FederationError  # noqa: E402


def main() -> int:
    """Measure and print one JSON line, or a few lines for people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000, help="members that hold a session")
    parser.add_argument("--uploads", type=int, default=20, help="updates on their way at once")
    parser.add_argument("--params", type=int, default=RESNET18, help="numbers in an update; 11183582 are 45 MB")
    parser.add_argument("--strangers", type=int, default=2000, help="connections of nobody in the second part; 0: none")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each part: without strangers, and with")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    words = parser.parse_args()
    load = Load(words.sessions, words.uploads, words.params, words.strangers, 60 * words.minutes)
    with TemporaryDirectory(prefix="consilium-load-") as scratch:
        try:
            found = measure(load, Path(scratch))
        except FederationError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    if words.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: Mapping[str, object], indent: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            print(f"{indent}{name}")
            _print(value, f"{indent}  ")
        else:
            print(f"{indent}{name:22} {value if value != {} else 'none'}")


if __name__ == "__main__":
    sys.exit(main())
