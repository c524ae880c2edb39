"""The nearest valid word to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(word: str, valid: Collection[str]) -> str:
    """Return a question with the nearest valid word; empty if none is near."""
    near = difflib.get_close_matches(word, list(valid), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def suggest(word: str, valid: Collection[str]) -> str:
    """List the valid words, preceded by the nearest one if it is near enough: "did you mean 'a'? valid: a, b"."""
    hint = did_you_mean(word, valid)
    return f"{hint}{hint and ' '}valid: {', '.join(sorted(valid)) or 'none'}"
