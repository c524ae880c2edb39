"""Where a run began, in words: with fresh weights, the last model of another run, or weights from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_FRESH = 5
"""Modules without pretrained weights that a line names."""


def start_json(manifest: str) -> Mapping[str, object] | None:
    """Say from which run or weights a run started; None where it began with fresh weights. manifest: JSON."""
    start = json.loads(manifest).get("start")
    names = ("run", "rounds", "model", "private", "weights")
    return start and {name: start[name] for name in names if name in start}


def started_from(manifest: str, parent: str = "") -> str:
    """Say the same in words; empty where it is None. parent: that run's manifest, to name who is new or gone."""
    start: Any = start_json(manifest)
    if start is None:
        return ""
    parts = []
    if start["run"]:
        parts.append(f"starts from {start['run']} after round {start['rounds']}, model {start['model']}")
        if not start["private"]:
            parts.append("that model was trained without differential privacy")
    if weights := start.get("weights"):
        parts.append(_weights_text(weights, begins=not start["run"]))
    text = "; ".join(parts)
    if json.loads(manifest)["privacy"]["name"] != "none":
        text += "; epsilon counts this run's own rounds, and each hospital's ledger adds them to those before"
    if parent:
        now, then = ([member["name"] for member in json.loads(text)["members"]] for text in (manifest, parent))
        new, gone = [name for name in now if name not in then], [name for name in then if name not in now]
        text += f"; new: {', '.join(new) or 'nobody'}; not in it: {', '.join(gone) or 'nobody'}"
    return text


def _weights_text(weights: Mapping[str, Any], begins: bool) -> str:
    source = f", by the lead from {weights['source']!r}" if weights["source"] else ""
    text = "starts from" if begins else "the first run of the chain began with"
    text += f" pretrained weights {weights['object']} (SHA-256 of the file: {weights['file']}{source})"
    fresh = [str(name) for name in weights["fresh"]]
    if fresh:
        more = f" and {len(fresh) - _FRESH} more" if len(fresh) > _FRESH else ""
        text += f"; anew from the seed: {', '.join(fresh[:_FRESH])}{more}"
    return text
