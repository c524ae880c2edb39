"""The protocol number, the version and the build of this software."""

import hashlib
import os
from functools import cache
from importlib import metadata
from pathlib import Path

PROTOCOL = 4
"""Since 2, objects are named by BLAKE3 (ADR 0013); since 3, chunks carry no sum of their own (ADR 0017); since 4, silos
answer a preflight (ADR 0019): an older silo would leave the run waiting."""
PACKAGES = ("consilium", "coordinator", "fl_core", "privacy", "protos", "service_core", "silo")
"""The packages of a build: all but `configs`, whose values are in each manifest."""
_KINDS = (".py", ".pyi", ".typed", ".txt", ".proto", ".sql", ".html", ".j2", ".css", ".js", ".svg")
_BUILD_CHARS = 12


def version() -> str:
    """Return the version, which is in each manifest and decides which runs this software accepts."""
    return f"consilium-fl {metadata.version('consilium-fl')}"


@cache
def software() -> str:
    """Return version and build, as shown to people and sent to the other side (ADR 0062)."""
    return f"{version()}+{build(Path(__file__).parents[1])}"


def build(folder: Path) -> str:
    """Return a digest of the packages' files, the same for checkout, wheel and container of one commit."""
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
