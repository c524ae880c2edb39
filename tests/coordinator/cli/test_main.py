"""The command line as a whole: its help, its version, what a shell completes."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.markup import escape
from typer.main import get_command

from consilium.cli.main import program as consilium
from coordinator.cli.main import program as coordinator
from service_core.command_line import COMMON, RARE, Program, make_command
from service_core.version import software
from silo.cli.main import program as silo

COMPLETED = [
    ("coordinator sh", "1", "show"),
    ("coordinator show --js", "2", "--json"),
    ('coordinator export "unfinished --ou', "2", ""),
]


PROGRAMS = {"coordinator": coordinator, "silo": silo, "consilium": consilium}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_says_of_each_command_what_the_command_says_of_itself(name: str) -> None:
    program = PROGRAMS[name]()
    listed = get_command(program.build(["--help"])).commands
    for module, names in program.modules.items():
        loaded = importlib.import_module(module)
        for command in names:
            found = getattr(loaded, command, None) or loaded.app
            said = found.info.help if isinstance(found, typer.Typer) else found.__doc__
            assert listed[command].help == " ".join(said.split("\n\n")[0].split())


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_of_the_help_is_built_when_it_is_called(name: str) -> None:
    program = PROGRAMS[name]()
    listed = get_command(program.build(["--help"])).commands
    assert set(listed) == {command for commands in program.modules.values() for command in commands}
    for command in listed:
        assert command in get_command(program.build([command])).commands


def leaves(program: Program) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be called, as "ca sign", built as the program builds it."""

    def below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", {})
        for name, one in inner.items():
            yield from below(f"{path} {name}", one)
        if not inner:
            yield path, command

    for name in (name for commands in program.modules.values() for name in commands):
        yield from below(name, make_command(program.build([name]), program.examples).commands[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_is_in_one_panel_and_has_an_example_that_its_options_allow(name: str) -> None:
    program = PROGRAMS[name]()
    panels = {panel: list(dict.fromkeys(path.split()[0] for path in paths)) for panel, paths in program.panels.items()}
    listed = [command for commands in panels.values() for command in commands]
    assert sorted(listed) == sorted(command for commands in program.modules.values() for command in commands)
    examples = {path: words for paths in program.panels.values() for path, words in paths.items()}
    called = dict(leaves(program))
    assert sorted(called) == sorted(examples)
    for path, command in called.items():
        command.make_context(path, shlex.split(examples[path]))  # raises on an unknown or a missing word
        assert escape(f"{name} {path} {examples[path]}".rstrip()) in command.epilog


def test_the_first_panel_has_what_a_lead_and_a_hospital_need_first() -> None:
    first = {
        name: list(dict.fromkeys(path.split()[0] for path in program().panels["First steps"]))
        for name, program in PROGRAMS.items()
    }
    assert first["coordinator"] == ["init", "serve", "invite", "silos", "run", "watch", "show", "export", "explain"]
    assert first["silo"] == ["data", "join", "fingerprint", "serve", "approve", "status", "page"]
    assert [*coordinator().panels] == [
        *("First steps", "Runs", "Simulations", "People and certificates", "Look after the service", "Rare")
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_argument_and_option_is_described_in_a_sentence(name: str) -> None:
    for path, command in leaves(PROGRAMS[name]()):
        for parameter in command.params:
            text = str(parameter.help or "")
            where = f"{name} {path} {parameter.name}: {text}"
            assert re.match(r"\\?\[?[A-Z]|SHA", text), where
            assert text.endswith("."), where
            assert len(text.split()) > 2, where


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_usual_option_stands_before_rare_ones_and_a_help_cuts_nothing_off(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    for path, command in leaves(PROGRAMS[name]()):
        with pytest.raises(SystemExit):
            command(["--help"], prog_name=f"{name} {path}")
        shown = capsys.readouterr().out
        assert "…" not in shown, shown
        panels = re.findall(r"^╭─ ([\w ]+) ─", shown, re.MULTILINE)
        assert panels == sorted(panels, key=lambda panel: (panel in (RARE, COMMON), panel != "Arguments"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_and_version_load_neither_torch_nor_grpc(name: str) -> None:
    for words in (["--help"], ["--version"], ["unknown"]):
        program = (
            f"import sys; from {name}.cli import main\n"
            "try: main.main()\n"
            "except SystemExit: print('loaded', sorted({'torch', 'grpc', 'sqlalchemy', 'hydra'} & set(sys.modules)))"
        )
        found = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        assert found.stdout.splitlines()[-1] == "loaded []"
        if words == ["--version"]:
            assert found.stdout.startswith(software())


@pytest.mark.parametrize(("typed", "place", "expected"), COMPLETED)
def test_a_shell_completes_commands_and_their_options(typed: str, place: str, expected: str) -> None:
    env = {**os.environ, "_COORDINATOR_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": place}
    program = "import sys; sys.argv = ['coordinator']; from coordinator.cli.main import main; main()"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert found.stdout.strip() == expected
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("words", [["coordinator", "run"], ["coordinator", "init"], ["silo", "approve"]])
def test_the_help_names_no_type_beside_a_flag_and_one_beside_what_takes_a_value(words: list[str]) -> None:
    program = str(Path(sys.executable).parent / words[0])
    done = subprocess.run([program, words[1], "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--json" in done.stdout
    assert "bool" not in done.stdout
    assert "<path>" in done.stdout
