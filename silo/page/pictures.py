"""The pictures and verdicts that `silo audit` wrote into a folder."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service_core.web.site import Download

SUMMARY = "audit.json"
_MOST_BYTES = 16 << 20
_MOST_PICTURES = 24


@dataclass(frozen=True, slots=True)
class Picture:
    """One audit: its name, its picture's id, and what it found, in words."""

    audit: str
    id: str
    verdicts: tuple[str, ...]


def pictures(folder: Path | None) -> list[Picture]:
    """Read what the audits found; empty without a folder, or where nothing in it can be read."""
    raw = None if folder is None else _read(folder / SUMMARY)
    try:
        found: Any = {} if raw is None else json.loads(raw)
        audits = {str(name): value for name, value in found.items() if isinstance(value, dict) and "picture" in value}
        made = [
            Picture(name, str(value["picture"]), tuple(map(_verdict, value.get("verdicts", ()))))
            for name, value in audits.items()
        ]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return []
    return made[:_MOST_PICTURES]


def picture(folder: Path | None, id: str) -> Download | None:
    """Return a picture that the summary names; no other file of the folder, and no link."""
    if folder is None or id not in {found.id for found in pictures(folder)} or Path(id).name != id:
        return None
    content = _read(folder / id)
    if content is None or not content.startswith(b"\x89PNG\r\n"):
        return None
    return Download(id, "image/png", content)


def _verdict(raw: Mapping[str, object]) -> str:
    audit, expected, found = (str(raw[key]) for key in ("audit", "expected", "found"))
    if raw["holds"] is None:
        return f"{audit}: {found} ({expected})"
    return f"{audit}: {'holds' if raw['holds'] else 'fails'}, expected {expected}, found {found}"


def _read(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        content = file.read(_MOST_BYTES + 1)
    return content if len(content) <= _MOST_BYTES else None
