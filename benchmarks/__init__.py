"""Reproducible studies: a script, its numbers, and what they do not show."""
