"""Which protocol this software speaks, and what it calls itself."""

from importlib import metadata

PROTOCOL = 4
"""Since 2, objects are named by BLAKE3 (ADR 0013); since 3, chunks carry no sum of their own (ADR 0017); since 4, silos
answer a preflight (ADR 0019): one that knows none would leave a run waiting without a word."""


def software() -> str:
    return f"consilium-fl {metadata.version('consilium-fl')}"
