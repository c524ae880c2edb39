"""The public names: what `dir(consilium)` shows, what each says of itself, and what importing them loads."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import consilium
import consilium.extending
import consilium.testing


@pytest.mark.parametrize("module", [consilium, consilium.extending, consilium.testing])
def test_what_is_listed_is_there(module: object) -> None:
    assert all(hasattr(module, name) for name in module.__all__)  # type: ignore[attr-defined]


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(consilium) == sorted([*consilium.__all__, "extending", "testing"])
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        consilium.simulat  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", consilium.__all__)
def test_each_name_has_a_docstring_with_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(consilium, name)) or ""
    summary, _, rest = text.partition("\n\n")
    assert summary.endswith((".", ":"))
    assert re.match(r"    \S", rest), text


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import consilium; dir(consilium)", {"torch", "grpc", "hydra", "pandas", "numpy"}),
        ("import consilium; consilium.ConfigError", {"torch", "grpc", "hydra", "pandas"}),
        ("import consilium; consilium.connect", {"torch", "hydra", "pandas", "matplotlib"}),
        ("import consilium; consilium.load", {"grpc", "hydra", "pandas", "matplotlib"}),
    ],
)
def test_a_name_loads_what_it_needs_when_it_is_used(code: str, absent: set[str]) -> None:
    program = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert absent & set(ended.stdout.split()) == set()
