"""Every error code, explained offline: `coordinator explain CODE` and docs/errors.md show the same text."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from fl_core.errors import ConfigError


class Explanation(NamedTuple):
    """What a code means, why it happens and what to do; earlier: codes of earlier versions that it stands for."""

    title: str
    cause: str
    remedy: str
    earlier: tuple[str, ...] = ()


def _load() -> Mapping[str, Explanation]:
    """Read `catalogue.txt`: blocks of four lines (code and earlier codes, title, cause, remedy) between blank lines."""
    text = (resources.files("fl_core.errors") / "catalogue.txt").read_text(encoding="utf-8")
    found: dict[str, Explanation] = {}
    for block in text.split("\n\n"):
        lines = [line for line in block.strip().splitlines() if line and not line.startswith("#")]
        if lines:
            codes, title, cause, remedy = lines
            code, *earlier = codes.split()
            found[code] = Explanation(title, cause, remedy, tuple(earlier))
    return found


EXPLANATIONS: Mapping[str, Explanation] = _load()
EARLIER: Mapping[str, str] = {old: code for code, known in EXPLANATIONS.items() for old in known.earlier}
"""Which code a code of an earlier version is today: in logs, in run records, from a peer that was not upgraded yet."""


def current(code: str) -> str:
    """Return today's code of one that may be of an earlier version; an unknown one stays."""
    return EARLIER.get(code, code)


def explain_text(code: str) -> str:
    """Write the explanation of a code; raises ConfigError (E-CFG-01) with the nearest one for an unknown code."""
    asked = code.strip().upper()
    wanted = current(asked)
    if wanted not in EXPLANATIONS:
        near = difflib.get_close_matches(wanted, list(EXPLANATIONS), 3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError("E-CFG-01", f"there is no error code {code!r}{hint}; `coordinator explain` lists all")
    title, cause, remedy, _ = EXPLANATIONS[wanted]
    was = "" if asked == wanted else f" ({asked} of earlier versions)"
    return f"{wanted}{was}  {title}\n\nWhy: {cause}\n\nWhat to do: {remedy}"


def page() -> str:
    """Write docs/errors.md: every code under a heading of its own, so that `docs/errors.md#e-tls-05` is a link."""
    text = "# Error codes\n\nWhat `coordinator explain CODE` says; `make protos` writes this page.\n"
    for code, (title, cause, remedy, _) in sorted(EXPLANATIONS.items()):
        text += f"\n## {code}\n\n**{title}.** {cause}\n\nWhat to do: {remedy}\n"
    text += "\n## Codes of earlier versions\n\n| then | now |\n|---|---|\n"
    return text + "".join(f"| {old} | [{code}](#{code.lower()}) |\n" for old, code in sorted(EARLIER.items()))
