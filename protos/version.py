"""Which protocol both sides speak."""

PROTOCOL = 3
"""Since 2, objects are named by BLAKE3 (ADR 0013); since 3, chunks carry no sum of their own (ADR 0017)."""
