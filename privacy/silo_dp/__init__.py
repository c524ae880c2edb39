"""Silo-level DP: one clipped and noised update per hospital."""
