"""What is found by name is there, and what is missing is named with the extra that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fl_core.errors import ConfigError
from fl_core.errors.extras import load, require, requires_extra
from tests.house import CORE

ROOT = Path(__file__).resolve().parents[3]
PLACES = sorted(
    {
        place.replace("{module}", module)
        for package in CORE
        for file in (ROOT / package).rglob("*.py")
        for place in re.findall(r'f?"(consilium\.[\w.{}]+:\w+)"', file.read_text())
        for module in ("spiral", "leaf")
    }
)
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == LIBRARY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = WORDS
from PROGRAM.cli.main import main
main()
"""


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_the_core_names_is_there(place: str) -> None:
    assert callable(load(place, "a test"))


def test_the_core_names_trackers_pictures_pages_and_readers() -> None:
    assert len(PLACES) == 5


@pytest.mark.parametrize(
    ("words", "library", "extra"),
    [
        (["coordinator", "page", "--home", "HOME"], "starlette", "pages"),
        (["silo", "page", "--home", "HOME"], "starlette", "pages"),
        (["consilium", "page", "model.safetensors"], "starlette", "model"),
        (["coordinator", "simulate", "data=digits", "federation=p5c2", "rounds=1"], "sklearn", "research"),
    ],
    ids=lambda found: found[:2] if isinstance(found, list) else found,
)
@pytest.mark.integration
def test_a_command_without_its_libraries_says_which_extra_brings_them(
    words: list[str], library: str, extra: str, tmp_path: Path
) -> None:
    code = WITHOUT.replace("LIBRARY", repr(library)).replace("PROGRAM", words[0])
    code = code.replace("WORDS", repr([word.replace("HOME", str(tmp_path)) for word in words]))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert f"pip install 'consilium-fl[{extra}]'" in done.stderr


def test_a_library_that_is_missing_is_an_error_with_a_code_and_a_module_of_ours_is_not() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-08: expected surely_missing for tests.*consilium-fl\[pages\]"):
        require("surely_missing", "pages", "tests")
    for ours in ("consilium.nothing", "consilium.pages.nothing"):
        with pytest.raises(ModuleNotFoundError), requires_extra("pages", "tests"):
            __import__(ours)
    with pytest.raises(AttributeError):
        load("consilium.web.command:nothing", "tests")
