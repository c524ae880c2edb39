"""The files of a running service in the coordinator's home."""

from __future__ import annotations

ADDRESS_FILE = "service.json"
"""Where the service listens, written once it does."""

LOCK_FILE = "service.lock"
"""Held by the one service of a home."""
