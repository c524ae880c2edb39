"""Every error code, explained offline: `coordinator explain CODE` and docs/errors.md show the same text."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from fl_core.errors import ConfigError


class Explanation(NamedTuple):
    """What a code means, why it happens and what to do."""

    title: str
    cause: str
    remedy: str


def _load() -> Mapping[str, Explanation]:
    """Read `catalogue.txt`: blocks of four lines (code, title, cause, remedy) between blank lines."""
    text = (resources.files("fl_core.errors") / "catalogue.txt").read_text(encoding="utf-8")
    explanations: dict[str, Explanation] = {}
    for block in text.split("\n\n"):
        lines = [line for line in block.strip().splitlines() if line and not line.startswith("#")]
        if lines:
            code, *explanation = lines
            explanations[code] = Explanation(*explanation)
    return explanations


EXPLANATIONS: Mapping[str, Explanation] = _load()


def explain_text(code: str) -> str:
    """Write the explanation of a code; raises ConfigError (E-CFG-01) with the nearest one for an unknown code."""
    wanted = code.strip().upper()
    if wanted not in EXPLANATIONS:
        near = difflib.get_close_matches(wanted, list(EXPLANATIONS), 3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError("E-CFG-01", f"there is no error code {code!r}{hint}; `coordinator explain` lists all")
    title, cause, remedy = EXPLANATIONS[wanted]
    return f"{wanted}  {title}\n\nWhy: {cause}\n\nWhat to do: {remedy}"


def page() -> str:
    """Write docs/errors.md: every code under a heading of its own, so that `docs/errors.md#e-tls-05` is a link."""
    text = "# Error codes\n\nThese are the texts of `coordinator explain CODE`. `make protos` writes this page.\n"
    for code, (title, cause, remedy) in sorted(EXPLANATIONS.items()):
        text += f"\n## {code}\n\n**{title}.** {cause}\n\nWhat to do: {remedy}\n"
    return text
