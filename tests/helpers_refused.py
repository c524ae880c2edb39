"""A data set that must be refused: its code, and what the message says."""

from __future__ import annotations

import pytest

from fl_core.datasets import load
from fl_core.errors import DataError


def refuse(match: str, code: str, reference: str, **options: object) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(reference, **options)
    assert caught.value.code == code
