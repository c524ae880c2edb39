"""The nearest valid word to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(word: str, valid: Collection[str]) -> str:
    """Name the valid words, after the nearest one when it is near enough: "did you mean 'a'? valid: a, b"."""
    near = difflib.get_close_matches(word, list(valid), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}valid: {', '.join(sorted(valid)) or 'none'}"
