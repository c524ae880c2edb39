"""What the pages name exists: paths, links, commands, error codes. Decision records and old changes are history."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from consilium.cli.main import program as consilium_program
from coordinator.cli.main import program
from fl_core.errors.catalogue import EXPLANATIONS
from silo.cli.main import program as silo_program

ROOT = Path(__file__).resolve().parents[2]
TOPS = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - {"runs"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if not {"adr", "errors"} & set(p.relative_to(ROOT).parts)),
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its blocks of commands and listings."""
    return FENCED.sub("", page.read_text())


def codes() -> Iterator[tuple[str, str]]:
    """Yield (page, what it writes as code within a line)."""
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            yield str(page.relative_to(ROOT)), code


NAMED = sorted({*codes()})


def test_every_path_in_the_repository_that_is_named_exists() -> None:
    history = {"CHANGELOG.md"}
    here = {
        (page, w)
        for page, code in NAMED
        if page not in history and not code.startswith("git ")
        for w in re.split(r"[\s,:()]+", code)
    }
    paths = {
        (page, w.rstrip("/"))
        for page, w in here
        if w.partition("/")[0] in TOPS and "/" in w and not re.search(r"[<>{}=]|NAME", w)
    }
    assert sorted((page, p) for page, p in paths if not list(ROOT.glob(p))) == []


def test_every_link_leads_somewhere() -> None:
    links = {(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))}
    near = {(page, link) for page, link in links if not link.startswith("http")}
    assert [(page, link) for page, link in near if not (page.parent / link).resolve().exists()] == []


@cache
def _program(name: str, wanted: tuple[str, ...]) -> typer.core.TyperGroup:
    """Build a program as it does itself: of its commands only those that the first word wants."""
    programs = {"silo": silo_program, "coordinator": program, "consilium": consilium_program}
    return typer.main.get_command(programs[name]().build(list(wanted)))


def _command(words: list[str]) -> object:
    """Follow words to a command; return what is wrong, or None. Words after the command are its arguments."""
    name, *rest = words
    found = _program(name, tuple(rest[:1]))
    while hasattr(found, "commands"):
        if not rest:
            return None  # a group, named as such
        if rest[0] not in found.commands:
            return f"no command {rest[0]!r}"
        found, rest = found.commands[rest[0]], rest[1:]
    options = {"--help", *(o for parameter in found.params for o in parameter.opts)}
    unknown = [word for word in rest if word.startswith("--") and word not in options]
    return f"no option {unknown}" if unknown else None


def test_every_command_that_is_named_exists_with_its_options() -> None:
    called = {(page, code) for page, code in NAMED if re.match(r"(silo|coordinator|consilium) [a-z]", code)}
    wrong = {f"{page}: {code}": _command(code.split()) for page, code in called}
    assert {where: why for where, why in wrong.items() if why} == {}
    assert len(called) > 30


@pytest.mark.parametrize("unit", sorted((ROOT / "examples/systemd").iterdir()), ids=lambda p: p.stem)
def test_units_start_commands_that_exist_and_shut_them_off(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    starts = [line.partition("=")[2] for line in lines if line.startswith("Exec")]
    hinted = [line.lstrip("# ") for line in lines if re.match(r"# +(silo|coordinator) ", line)]
    assert len(starts) == len(hinted) == 1
    for line in (*starts, *hinted):
        program, *words = line.split()
        assert _command([Path(program).name, *words]) is None
    settings = {"Type=notify", "NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes", "UMask=0077"}
    assert settings <= set(lines)
    assert any(line.startswith("LimitNOFILE=") for line in lines)


def test_every_error_code_that_is_named_is_explained() -> None:
    named = {(page.name, code) for page in PAGES for code in re.findall(r"E-[A-Z]+-\d\d", page.read_text())}
    assert {(page, code) for page, code in named if code not in EXPLANATIONS and page != "errors.md"} == set()


def test_no_page_names_an_index_that_has_no_consilium() -> None:
    """Behind `pip install` stands a checkout or a wheel, or an extra of what is installed already."""
    for page in PAGES:
        for named in re.findall(r"pip install ['\"]?(consilium[\w-]*)(\[?)", page.read_text()):
            assert named == ("consilium-fl", "["), page
    for first in ("README.md", *(f"docs/tutorials/{name}.md" for name in ("researcher", "hospital", "administrator"))):
        assert "pip install 'consilium-fl" not in (ROOT / first).read_text()
    assert "Consilium is not on any package index" in (ROOT / "docs/operations/install.md").read_text()


def test_the_makefile_says_how_much_is_downloaded_and_the_page_on_installing_says_the_same() -> None:
    said = re.search(
        r"Installs (\d+) packages.*?([\d.]+ GB) are downloaded \(([\d.]+ GB)", (ROOT / "Makefile").read_text()
    )
    assert said is not None
    page = (ROOT / "docs/operations/install.md").read_text()
    assert f"(`make setup`) | {said[1]} | 6.2 GB; to download {said[2]}, of which {said[3]} are CUDA" in page
    assert f"{said[2]} to download" in (ROOT / "README.md").read_text()
    locked = re.findall(r"^[a-z][\w.-]*==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert int(said[1]) <= len(locked) + 1


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    reached = text + "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [p.name for p in (ROOT / "docs").glob("*.md") if not re.search(rf"[(/]{p.name}\)", reached)] == []


def test_the_index_of_decisions_has_each_of_them_once() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    records = sorted((ROOT / "docs/adr").glob("0*.md"))
    assert len({record.name[:4] for record in records}) == len(records)
    for record in records:
        assert len(re.findall(rf"^\| \[{record.name[:4]}\]\({record.name}\)", index, re.MULTILINE)) == 1, record.name


def test_the_vocabulary_has_at_most_twenty_words_of_our_own() -> None:
    table = (ROOT / "docs/architecture.md").read_text().partition("| our word | is |")[2].partition("\n\n")[0]
    words = [word for row in table.splitlines()[2:] for word in row.split("|")[1].split(",")]
    assert 0 < len(words) <= 20
