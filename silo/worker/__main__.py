"""Entry point of a hospital's worker: enter the sandbox, then run tasks until the service closes the pipe.

`silo serve` starts it. The first line on standard input gives its home and writable folders; see `exchange`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from service_core.workers.lines import own_streams
from silo.worker import cage


def main() -> None:
    """Enter the sandbox before loading anything large."""
    line = own_streams()
    line.send(began=cage.Whereabouts.here())
    if (setup := line.read()) is None:
        return
    os.umask(0o077)
    os.chdir(setup["folder"] if Path(setup["folder"]).is_dir() else "/")
    os.environ |= {**setup["environment"], "TMPDIR": setup["scratch"]}
    walls = cage.enter(map(Path, setup["writable"]))
    cage.end_with_parent(signal.SIGKILL)
    if setup["service"] not in (0, os.getppid()):
        sys.exit(1)  # it ended before it could be followed
    from silo.worker import process  # loads torch, or NumPy

    process.serve(setup, walls, line)


if __name__ == "__main__":
    main()
