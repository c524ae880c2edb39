"""The command line as a whole: its help, its version, what a shell completes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from consilium.cli.main import program as consilium
from coordinator.cli.main import program as coordinator
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
