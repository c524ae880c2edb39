"""Which protocol this software speaks, and what it calls itself."""

import hashlib
import os
from functools import cache
from importlib import metadata
from pathlib import Path

PROTOCOL = 4
"""Since 2, objects are named by BLAKE3 (ADR 0013); since 3, chunks carry no sum of their own (ADR 0017); since 4, silos
answer a preflight (ADR 0019): one that knows none would leave a run waiting without a word."""
PACKAGES = ("consilium", "coordinator", "fl_core", "privacy", "protos", "service_core", "silo")
"""Whose files make a build: all packages but `configs`, whose values stand in each manifest."""
_KINDS = (".py", ".pyi", ".typed", ".txt", ".proto", ".sql", ".html", ".j2", ".css", ".js", ".svg")
_BUILD_CHARS = 12


def version() -> str:
    """Name the version, which stands in each manifest and decides which runs this software takes part in."""
    return f"consilium-fl {metadata.version('consilium-fl')}"


@cache
def software() -> str:
    """Name version and build, as this side calls itself to people and to the other side (ADR 0062)."""
    return f"{version()}+{build(Path(__file__).parents[1])}"


def build(folder: Path) -> str:
    """Return a digest of the packages' files in a folder: checkout, wheel and container of one commit have the same."""
    files = [
        Path(place, name).relative_to(folder).as_posix()
        for package in PACKAGES
        for place, _, names in os.walk(folder / package)
        for name in names
        if name.endswith(_KINDS) and not name.startswith(".")
    ]
    digest = hashlib.sha256()
    for name in sorted(files):
        content = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:_BUILD_CHARS]
