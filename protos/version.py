"""Which protocol both sides speak."""

PROTOCOL = 2
"""Since 2, objects are named by BLAKE3 (ADR 0013)."""
