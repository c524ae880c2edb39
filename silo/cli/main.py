"""The hospital's command line: `silo`."""

from __future__ import annotations

import gc
import sys

from protos.tls.connect import hush_core, require_tls13

require_tls13()  # before anything imports gRPC
hush_core()

from silo.cli.service import run  # noqa: E402


def main() -> None:
    """Run the command line; see `silo.cli.service.run`."""
    try:
        sys.exit(run(sys.argv[1:]))
    finally:
        gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second


if __name__ == "__main__":
    main()
