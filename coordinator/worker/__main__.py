"""The worker of one run, which `coordinator serve` starts: it computes until the service closes its pipe."""

from __future__ import annotations

from coordinator.runs.exchange import Place
from service_core.workers.lines import own_streams


def main() -> None:
    """Read where it works, then answer calls."""
    line = own_streams()
    if (place := line.read()) is not None:
        from coordinator.worker import process  # loads torch

        process.serve(Place(**place), line)


if __name__ == "__main__":
    main()
