"""How large a manifest, an update and a broadcast may be: what the layout holds, twice over."""

from __future__ import annotations

import math

from fl_core.rounds.manifest import RunManifest
from fl_core.types.secagg import masking_bytes

MANIFEST_BYTES = 16 << 20
_BYTES_PER_NUMBER = 8
_HEADER_BYTES = 1 << 20
_HEADER_PER_TENSOR = 512


def max_object_bytes(manifest: RunManifest, broadcast: int = 0) -> int:
    """Bound the bytes of an update or a broadcast of this run: 8 per number of its layout, and room for the header.

    A method broadcasts what its updates have the layout of, and less, but for an evaluation without training: then
    `broadcast` is how many numbers its model has. A masked update has packages and commitments too.
    """
    shapes = [s for spec in manifest.layout.values() for s in (*spec.shapes.values(), spec.weight_shape)]
    masks = 0 if manifest.secagg is None else masking_bytes(len(manifest.members))
    numbers = _BYTES_PER_NUMBER * (sum(math.prod(s) for s in shapes) + (0 if manifest.kind.updates else broadcast))
    return masks + numbers + _HEADER_PER_TENSOR * len(shapes) + _HEADER_BYTES
