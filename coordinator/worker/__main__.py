"""The worker of one run, which `coordinator serve` starts: it computes until the service closes its pipe."""

from __future__ import annotations

import os
import signal

from coordinator.runs.exchange import Place
from service_core.workers.lines import Line


def main() -> None:
    """Read where it works, then answer calls; what other code prints goes to standard error."""
    # systemd sends it to every process of a service; the service ends this one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    line = Line(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if (place := line.read()) is not None:
        from coordinator.worker import process  # loads torch

        process.serve(Place(**place), line)


if __name__ == "__main__":
    main()
