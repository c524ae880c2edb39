"""Names of objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from service_core.storage.digests import digest, file_digest


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"),
    ],
)
def test_objects_are_named_by_blake3(size: int, expected: str, tmp_path: Path) -> None:
    """The vectors of the algorithm's authors: https://github.com/BLAKE3-team/BLAKE3/tree/master/test_vectors."""
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert digest(data) == file_digest(tmp_path / "file") == expected
