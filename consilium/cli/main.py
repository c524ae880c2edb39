"""The command line for an exported model: `consilium`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from service_core import startup


def _prepare() -> Callable[[], object]:
    from consilium.model.commands import app
    from service_core.command_line import made_command

    return partial(made_command(app), sys.argv[1:], prog_name="consilium")


def main() -> None:
    startup.begin()
    from service_core.command_line import run_program

    run_program(_prepare)


if __name__ == "__main__":
    main()
