"""What both command lines have in common: what makes a command of a function, how a program runs, `--version`."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from service_core import startup
from service_core.console import PrintableFormatter, Reply, show_reply
from service_core.operations.exit_status import status_of
from service_core.tls.connect import require_tls13, silence_grpc_logs
from service_core.version import PROTOCOL, software

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
BackupFolder = Annotated[
    Path, typer.Argument(help="A folder that is new or empty, best on another disk.", metavar="TO")
]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Go on with what is in the home, although its database is behind.")
]


@dataclass(frozen=True, slots=True)
class Depends:
    """Beside a parameter's type: it is no option, but made by a function whose own parameters are options.

    make: returns it; a generator yields it once, and goes on when the reply is printed.
    """

    make: Callable[..., Any]


def command(function: Callable[..., Reply | None]) -> Callable[..., None]:
    """Make a command of a function that returns what it found: it prints that, as JSON with `--json`.

    A parameter with `Depends` is replaced by the options that it is made from. A function that has to know `as_json`
    while it works names it as a parameter. One that returns None prints by itself, and has no `--json` unless it does.
    """
    signature = inspect.signature(function, eval_str=True)
    wanted = signature.parameters
    made: dict[str, tuple[Callable[..., Any], list[str]]] = {}  # what makes a parameter, and its options
    options: dict[str, inspect.Parameter] = {}
    for name, parameter in wanted.items():
        marks = getattr(parameter.annotation, "__metadata__", ())
        make = next((mark.make for mark in marks if isinstance(mark, Depends)), None)
        if make is None:
            options[name] = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            continue
        own = inspect.signature(make, eval_str=True).parameters
        made[name] = contextmanager(make if inspect.isgeneratorfunction(make) else _yielding(make)), list(own)
        options |= {option: found for option, found in own.items() if option not in options}
    if signature.return_annotation is not None or "as_json" in options:  # the last one in the help
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own_json = inspect.Parameter("as_json", kind, default=False, annotation=Json)
        options["as_json"] = options.pop("as_json", own_json)
    public = inspect.Signature(list(options.values()))

    def run(*given: object, **named: object) -> None:
        bound = public.bind(*given, **named)
        bound.apply_defaults()
        found = dict(bound.arguments)
        with ExitStack() as open_things:
            for name, (make, own) in made.items():
                needed = {option: bound.arguments[option] for option in own}
                found[name] = open_things.enter_context(make(**needed))
            reply = function(**{name: found[name] for name in wanted})
            if reply is not None:
                show_reply(reply, bool(found["as_json"]))
        if reply is not None and reply.status:
            raise typer.Exit(reply.status)

    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    run.__signature__ = public  # type: ignore[attr-defined]
    return run


def _yielding(make: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def yielding(**options: object) -> Iterator[Any]:
        yield make(**options)

    return yielding


def run_program(prepare: Callable[[], Callable[[], object]], grpc_logs: bool = False) -> NoReturn:
    """Run a program to its exit status. prepare: imports what it needs; Ctrl-C ends that at once.

    grpc_logs: keep the lines of gRPC's core, which say why a handshake was refused.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    require_tls13()  # before anything imports gRPC
    if not grpc_logs:
        silence_grpc_logs()
    run = prepare()
    startup.raise_on_interrupt()
    startup.leave(status_of(run))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{software()}, protocol {PROTOCOL}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def made_command(app: typer.Typer) -> Any:  # noqa: ANN401 - of Click, which Typer has within itself
    """Make what runs an application.

    Its help shows every character that was written: Typer would read `[...]` as markup and leave it out. It names no
    type beside a flag: Typer's "<bool>" looks like a value.
    """
    command = typer.main.get_command(app)
    _prepare_help(command)
    return command


def _prepare_help(command: Any) -> None:  # noqa: ANN401
    _escape(command, "help", "short_help", "epilog")
    for parameter in command.get_params(command.context_class(command)):  # with --help
        _escape(parameter, "help")
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _prepare_help(inner)


def _escape(described: object, *names: str) -> None:
    for name in names:
        if text := getattr(described, name, None):
            setattr(described, name, escape(text))


def command_words(program: str) -> list[str]:
    """Return the words after the program's name: those of this call, or those that a shell wants completed."""
    if f"_{program.upper()}_COMPLETE" not in os.environ:
        return sys.argv[1:]
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    try:
        return shlex.split(typed)[1:]
    except ValueError:  # an open quotation mark
        return typed.split()[1:]
