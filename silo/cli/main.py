"""The hospital's command line: `silo`."""

from __future__ import annotations

import sys

from service_core import startup


def main() -> None:
    startup.begin()
    import logging

    from service_core.console import PrintableFormatter
    from service_core.tls.connect import require_tls13, silence_grpc_logs

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    require_tls13()  # before anything imports gRPC
    silence_grpc_logs()
    from silo.cli.service import run

    startup.raise_on_interrupt()
    startup.leave(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
