"""Silo-level differential privacy: the whole hospital is the unit, so its whole update is clipped and noised."""
