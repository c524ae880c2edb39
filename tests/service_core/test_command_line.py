"""A function that returns what it found becomes a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from service_core.command_line import Depends, Json, command, make_command
from service_core.console import CommandResult, KeyValues

Place = Annotated[Path | None, typer.Option("--place")]
ended: list[str] = []


def _parent(place: Place = None) -> Path:
    return (place or Path("/default")).parent


def _opened(place: Place = None) -> Iterator[str]:
    yield f"opened {place}"
    ended.append("closed")


@command
def look(
    word: str,
    times: Annotated[int, typer.Option()] = 1,
    *,
    place: Annotated[Path, Depends(_parent)],
    door: Annotated[str, Depends(_opened)],
) -> CommandResult:
    """Look."""

    def shown() -> Iterator[str | KeyValues]:
        assert not ended  # what was opened is open while it is shown
        yield door
        yield KeyValues([("word", word * times)])

    return CommandResult({"word": word, "place": str(place)}, shown(), ["noted"], status=3)


@command
def serve(place: Annotated[Path, Depends(_parent)]) -> None:
    """Serve."""
    typer.echo(f"serving {place}")


@command
def follow(as_json: Json = False) -> None:
    """Follow."""
    typer.echo(str(as_json))


@command
def bracketed(
    data: Annotated[str, typer.Option(help="Images: data.path=[north,south]; a policy's [survey] allow.")] = "",
) -> None:
    r"""Look at data.path=[a,b], [V6]:PORT and [red]what is no colour[/red] \[x]."""


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    ended.clear()
    app = typer.Typer()
    for each in (look, serve, follow, bracketed):
        app.command()(each)
    with pytest.raises(SystemExit) as end:
        make_command(app)(list(words), prog_name="x")
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_a_reply_is_printed_for_people_with_notes_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(capsys, "look", "ab", "--times", "2", "--place", "/a/b")
    assert (status, out, err) == (3, "opened /a/b\nword    abab\n", "noted\n")
    assert ended == ["closed"]


def test_the_same_reply_is_one_json_value_for_machines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(capsys, "look", "ab", "--place", "/a/b", "--json")
    assert (status, json.loads(out), err) == (3, {"word": "ab", "place": "/a"}, "")
    assert out.count("\n") == 1


def test_what_two_parameters_depend_on_is_one_option_and_has_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "look", "ab", "--json")[1] == '{"place": "/", "word": "ab"}\n'
    assert called(capsys, "look", "--help")[1].count("--place") == 1


def test_a_command_that_prints_by_itself_has_json_only_where_it_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "serve", "--place", "/a/b") == (0, "serving /a\n", "")
    assert called(capsys, "serve", "--json")[0] == 2
    assert called(capsys, "follow", "--json")[1] == "True\n"


def test_help_shows_square_brackets_as_they_were_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    for words in (("bracketed", "--help"), ("--help",)):
        out = called(capsys, *words)[1]
        assert r"Look at data.path=[a,b], [V6]:PORT and [red]what is no colour[/red] \[x]." in out
    assert "Images: data.path=[north,south]; a policy's [survey] allow." in called(capsys, "bracketed", "--help")[1]
