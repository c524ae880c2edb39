"""A hospital's worker: it enters the cage, and does one task after the other until the service closes its pipe.

`silo serve` starts it. The first line on standard input says where its home is and what it may write; see `exchange`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from silo.worker import cage


def main() -> None:
    """Enter the cage before anything large is loaded; what other code prints goes to standard error."""
    # systemd sends it to every process of a service; the service ends this one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = json.loads(incoming.readline())
    os.environ["TMPDIR"] = setup["scratch"]
    walls = cage.enter(map(Path, setup["writable"]))
    cage.end_with_parent(signal.SIGKILL)
    if os.getppid() != setup["service"]:
        sys.exit(1)  # it ended before it could be followed
    from silo.worker import process  # loads torch

    process.serve(setup, walls, incoming, outgoing)


if __name__ == "__main__":
    main()
