"""How large an update may be: what its layout holds, twice over."""

from __future__ import annotations

import math

from fl_core.rounds.manifest import RunManifest

_BYTES_PER_NUMBER = 8
_HEADER_BYTES = 1 << 20
_HEADER_PER_TENSOR = 512


def max_update_bytes(manifest_json: str) -> int:
    """Bound the bytes of a bundle of this run: 8 per number of its layout, and room for the header."""
    layout = RunManifest.from_json(manifest_json).layout
    shapes = [s for spec in layout.values() for s in (*spec.shapes.values(), spec.weight_shape)]
    return _BYTES_PER_NUMBER * sum(math.prod(s) for s in shapes) + _HEADER_PER_TENSOR * len(shapes) + _HEADER_BYTES
