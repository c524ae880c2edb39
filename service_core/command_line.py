"""Code of both command lines: turning functions into commands, lazy loading of commands, `--version`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from fl_core.errors.extras import requires_extra
from service_core import startup
from service_core.console import CommandResult, PrintableFormatter, show_reply
from service_core.operations.exit_status import status_of
from service_core.progress import still_working
from service_core.tls.connect import require_tls13, silence_grpc_logs
from service_core.version import PROTOCOL, software

COMMON, RARE = "Options of many commands", "Rarely needed"
"""Panels of options, below those that a command is usually called with."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.", rich_help_panel=COMMON)]
BackupFolder = Annotated[Path, typer.Argument(help="A new or empty folder, preferably on another disk.", metavar="TO")]
AcceptLoss = Annotated[bool, typer.Option("--accept-loss", help="Continue with an incomplete database.")]


@dataclass(frozen=True, slots=True)
class Depends:
    """Annotation of a parameter that is not an option: `make` creates it, and the parameters of `make` are options.

    make: returns the value; a generator yields it once and resumes after the reply is printed
    """

    make: Callable[..., Any]


def command(function: Callable[..., CommandResult | None]) -> Callable[..., None]:
    """Turn a function into a command that prints the returned CommandResult, as JSON with `--json`.

    A parameter with `Depends` is replaced by the options of its `make`. A function that needs `as_json` itself declares
    it as a parameter. A function that returns None prints by itself; it has `--json` only if it declares `as_json`.
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
        make_options = inspect.signature(make, eval_str=True).parameters
        made[name] = make, list(make_options)
        options |= {
            option: option_parameter for option, option_parameter in make_options.items() if option not in options
        }
    if signature.return_annotation is not None or "as_json" in options:  # the last one in the help
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        json_option = inspect.Parameter("as_json", kind, default=False, annotation=Json)
        options["as_json"] = options.pop("as_json", json_option)
    public = inspect.Signature(list(options.values()))

    def run(*args: object, **kwargs: object) -> None:
        bound = public.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        with ExitStack() as open_things:
            for name, (make, names) in made.items():
                needed = {option: bound.arguments[option] for option in names}
                if inspect.isgeneratorfunction(make):
                    arguments[name] = open_things.enter_context(contextmanager(make)(**needed))
                else:
                    arguments[name] = make(**needed)
            reply = function(**{name: arguments[name] for name in wanted})
            if reply is not None:
                show_reply(reply, bool(arguments["as_json"]))
        if reply is not None and reply.status:
            raise typer.Exit(reply.status)

    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    run.__signature__ = public  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, slots=True)
class Program:
    """A command line that imports only the module of the command called; the help imports none.

    modules: the commands of each module; a group has the name of its command, or `app`
    panels: title of a panel of the help -> command ("ca sign") -> words of an example, in the order of the help
    reading: commands that are not recorded in the audit log   home_of: finds the home that holds this log
    """

    name: str
    help: str
    modules: Mapping[str, Sequence[str]]
    panels: Mapping[str, Mapping[str, str]]
    reading: Collection[str]
    home_of: Callable[[Path | None], Path]

    def build(self, words: Sequence[str]) -> typer.Typer:
        """Build the application from the module of the command called; without one, from the names of all commands."""
        app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=self.help)
        app.callback(epilog=f"All about a command: {self.name} COMMAND --help")(version_option)
        module = self._module(words)
        if module is None:
            summaries = {name: _summaries(name) for name in self.modules}
            for panel, commands in self.panels.items():
                for command in dict.fromkeys(path.split()[0] for path in commands):
                    summary = summaries[self._module([command]) or ""]
                    text = summary.get(command, summary.get("app"))
                    app.command(name=command, help=text, rich_help_panel=panel)(lambda: None)
            return app
        loaded = importlib.import_module(module)
        for command in self.modules[module]:
            member = getattr(loaded, command, None) or loaded.app
            if isinstance(member, typer.Typer):
                app.add_typer(member, name=command)
            else:
                app.command(name=command)(member)
        if not set(self.modules[module]) <= set(self.reading):
            from service_core.audit_log.local_commands import record_commands

            record_commands(app, self.reading, self.home_of)
        return app

    def examples(self, path: str) -> list[str]:
        """Return the examples of a command, or of all commands of a group."""
        words = {name: example for commands in self.panels.values() for name, example in commands.items()}
        return [
            f"{self.name} {name} {example}".rstrip()
            for name, example in words.items()
            if f"{name} ".startswith(f"{path} ")
        ]

    def run(self, words: Sequence[str]) -> int:
        """Run one command line and return its exit status."""
        return status_of(lambda: self._run(words))

    def main(self, grpc_logs: bool = False) -> NoReturn:
        """Run the program and exit. Until the command begins, Ctrl-C ends the process at once.

        grpc_logs: keep the log of gRPC's core, which has the reasons of refused handshakes
        """
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(PrintableFormatter())
        require_tls13()  # before anything imports gRPC
        if not grpc_logs:
            silence_grpc_logs()
        startup.exit_process(status_of(lambda: self._run(sys.argv[1:], startup.raise_on_interrupt)))

    def _run(self, words: Sequence[str], ready: Callable[[], object] = lambda: None) -> None:
        typed = command_words(self.name, words)
        room = (self._module(typed) or "").split(".")
        name = f"{self.name} {_called(typed) or ''}".rstrip()
        with still_working(name), requires_extra(room[1] if room[0] == "consilium" else "torch", name):
            command = make_command(self.build(typed), self.examples)
            ready()
            command(list(words), prog_name=self.name)

    def _module(self, words: Sequence[str]) -> str | None:
        return next((name for name, commands in self.modules.items() if _called(words) in commands), None)


def _called(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _summaries(module: str) -> dict[str, str]:
    """Read the help of a module's commands from its source, without importing it.

    The help is the first paragraph of a function's docstring, or `help` of a group.
    """
    spec, summaries = importlib.util.find_spec(module), dict[str, str]()
    for node in ast.parse(Path(spec.origin).read_text()).body if spec is not None and spec.origin else ():
        if isinstance(node, ast.FunctionDef):
            summaries[node.name] = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)
        ):
            help_text = next((word.value for word in node.value.keywords if word.arg == "help"), None)
            if isinstance(help_text, ast.Constant):
                summaries[node.targets[0].id] = str(help_text.value)
    return summaries


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


def make_command(app: typer.Typer, examples: Callable[[str], Sequence[str]] = lambda _: ()) -> Any:  # noqa: ANN401
    """Make the Click command of an application.

    Its help ends with examples, escapes `[...]`, which Typer would drop as markup, and shows no "<bool>" after a flag.
    """
    command = typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        _add_examples(inner, name, examples)
    _prepare_help(command)
    return command


def _add_examples(command: Any, path: str, examples: Callable[[str], Sequence[str]]) -> None:  # noqa: ANN401
    if shown := examples(path):
        command.epilog = "\n\n".join(("Examples:" if len(shown) > 1 else "Example:", *(f"  {line}" for line in shown)))
    for name, inner in getattr(command, "commands", {}).items():
        _add_examples(inner, f"{path} {name}", examples)


def _prepare_help(command: Any) -> None:  # noqa: ANN401
    if command.help:
        command.help = "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.help).split("\n\n"))
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


def command_words(program: str, words: Sequence[str]) -> list[str]:
    """Return the words after the program's name, or those that a shell asks to complete."""
    if f"_{program.upper()}_COMPLETE" not in os.environ:
        return list(words)
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    try:
        return shlex.split(typed)[1:]
    except ValueError:  # an open quotation mark
        return typed.split()[1:]
