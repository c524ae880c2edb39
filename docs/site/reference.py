"""The reference, made of the code: both command lines, a run's configuration, methods and models, Python."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

import consilium.extending
import consilium.testing
from consilium.cli.main import program as consilium_program
from coordinator.cli.main import program as coordinator_program
from coordinator.config.run_spec import RunSpec
from fl_core.methods import METHODS
from fl_core.models import MODELS
from service_core.command_line import Program
from silo.cli.main import program as silo_program


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {
        "coordinator.md": _program(coordinator_program()),
        "silo.md": _program(silo_program()),
        "consilium.md": _program(consilium_program()),
        "configuration.md": _configuration(),
        "methods.md": _registry("Methods", "method", METHODS),
        "models.md": _registry("Models", "model", MODELS),
        "python.md": _python(),
    }
    for name, content in made.items():
        files.append(File.generated(config, f"reference/{name}", content=content))
    return files


_WITH_MEMBERS = (consilium.Lead, consilium.Model, consilium.Run, consilium.Simulation)


def _python() -> str:
    """List what `__all__` of the package and of its modules names."""
    lines = ["# Python", "", "The public interface of the package `consilium`."]
    for module in (consilium, consilium.extending, consilium.testing):
        lines += ["", f"## `{module.__name__}`"]
        for name in module.__all__:
            found = getattr(module, name)
            lines += ["", f"### `{name}`", "", *_signature(name, found), *_prose(inspect.getdoc(found) or "")]
            for member, part in vars(found).items() if found in _WITH_MEMBERS else ():
                shown = part.fget if isinstance(part, property) else part
                if not member.startswith("_") and inspect.isfunction(shown) and shown.__doc__:
                    lines += ["", f"#### `.{member}`", "", *_prose(inspect.getdoc(shown) or "")]
    return "\n".join([*lines, ""])


def _signature(name: str, found: object) -> list[str]:
    if not inspect.isfunction(found):
        return []
    words = [str(p) for p in inspect.signature(found).parameters.values()]
    return ["```python", f"{name}(", *(f"    {word}," for word in words), ")", "```", ""]


def _program(program: Program) -> str:
    lines = [f"# `{program.name}`", "", "All commands and options, as `--help` shows them.", ""]
    for panel, paths in program.panels.items():
        lines += [f"## {panel}", ""]
        for name in dict.fromkeys(path.split()[0] for path in paths):
            lines += _command(program, [name], get_command(program.build([name])).commands[name])
    return "\n".join(lines)


def _command(program: Program, words: list[str], command: Any) -> list[str]:  # noqa: ANN401
    path = " ".join(words)
    lines = [f"### `{program.name} {path}`", "", inspect.cleandoc(command.help or ""), ""]
    if getattr(command, "commands", None):
        for name, inner in command.commands.items():
            lines += _command(program, [*words, name], inner)
        return lines
    lines += ["```sh", *program.examples(path), "```", ""]
    rows = [
        (
            ", ".join(f"`{o}`" for o in p.opts)
            if p.param_type_name == "option"
            else f"`{(p.metavar or p.name or '').upper()}`",
            p,
        )
        for p in command.params
    ]
    if rows:
        lines += ["| argument | means |", "|---|---|"]
        lines += [f"| {shown} | {_cell(getattr(p, 'help', None) or '')}{_default(p)} |" for shown, p in rows]
    return [*lines, ""]


def _default(param: Any) -> str:  # noqa: ANN401
    value = param.default
    return "" if value in (None, False, ()) or callable(value) or param.required else f" Default: `{value}`."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _configuration() -> str:
    lines = [
        "# Configuration of a run",
        "",
        "What `coordinator run` and `coordinator simulate` take as `key=value`.",
        "",
    ]
    return "\n".join([*lines, *_fields(RunSpec, "")])


def _fields(schema: type, prefix: str) -> list[str]:
    """Describe a dataclass: its docstring, a table of its fields, and then those that are dataclasses themselves."""
    kinds, inner, rows = get_type_hints(schema), list[str](), list[str]()
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner += [f"## `{prefix}{field.name}`", "", *_fields(kind, f"{prefix}{field.name}.")]
        else:
            rows.append(f"| `{prefix}{field.name}` | {_kind(kind)} | {_value(field)} |")
    table = ["| key | type | default |", "|---|---|---|", *rows, ""] if rows else []
    return [*_prose(inspect.getdoc(schema) or ""), "", *table, *inner]


def _kind(kind: Any) -> str:  # noqa: ANN401
    """Name a type in words; a literal by its values."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(base) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(base))
    text = inspect.formatannotation(base).replace("collections.abc.", "").replace(" | ", " or ")
    return "group" if text == "Mapping[str, object]" else text.replace("[", r"\[")


def _value(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_cell(str(field.default))}`" if field.default != "" else ""
    return f"`{_cell(str(field.default_factory()))}`" if field.default_factory is not dataclasses.MISSING else ""


def _prose(docstring: str) -> list[str]:
    """Turn a docstring into Markdown: "name: what it is", several to a line, becomes a list."""
    lines = list[str]()
    for line in docstring.splitlines():
        for piece in re.split(r" {3,}(?=\w+(?:, \w+)*: )", line):
            if found := re.match(r"([a-z]\w*(?:, \w+)*): (.*)", piece):
                names = ", ".join(f"`{name}`" for name in found[1].split(", "))
                lines += [""] * (bool(lines) and not lines[-1].startswith("- ")) + [f"- {names}: {found[2]}"]
            else:
                lines.append(f"  {piece.strip()}" if lines and lines[-1].startswith(("- ", "  ")) and piece else piece)
    return lines


def _registry(title: str, key: str, registered: Mapping[str, type]) -> str:
    lines = [f"# {title}", "", f"What `{key}=` takes; the options of each are given as `{key}.OPTION=value`.", ""]
    for name in sorted(registered):
        lines += [f"## `{key}={name}`", "", *_fields(registered[name], f"{key}.")]
    return "\n".join(lines)
