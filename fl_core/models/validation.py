"""Whether a model can take the images of a run."""

from __future__ import annotations

from collections.abc import Collection

from fl_core.errors import ConfigError
from fl_core.types.records import Schema


def image_shape(owner: str, schema: Schema, *, channels: Collection[int], sizes: Collection[int]) -> tuple[int, int]:
    """Read (channels, side) off a schema of square images; raises ConfigError E-CFG-23 when the model cannot take it.

    sizes: the sides it takes, in pixels (a `range` for an open choice).
    """
    if len(schema.classes) < 2:
        raise ConfigError("E-CFG-23", f"{owner} needs at least 2 classes, found {schema.classes}: name the label space")
    shape = schema.shape
    if len(shape) == 3 and shape[0] in channels and shape[1] == shape[2] and shape[1] in sizes:
        return shape[0], shape[1]
    sides = f"{min(sizes)} to {max(sizes)}" if isinstance(sizes, range) else " or ".join(map(str, sorted(sizes)))
    wanted = f"{' or '.join(map(str, sorted(channels)))} channel(s) and a square side of {sides} pixels"
    raise ConfigError("E-CFG-23", f"{owner} takes {wanted}, found {shape}: change image_size or the model")
