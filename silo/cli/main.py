"""The hospital's command line: `silo`."""

from __future__ import annotations

import gc
import sys

from protos.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

from silo.cli.service import run  # noqa: E402


def main() -> None:
    """Run the command line; see `silo.cli.service.run`."""
    try:
        sys.exit(run(sys.argv[1:]))
    finally:
        gc.freeze()  # else the interpreter looks at all that torch has made before it ends: most of a second


if __name__ == "__main__":
    main()
