"""Uploads under way: counted for each silo, and one writer each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.storage import uploads as module
from coordinator.storage.uploads import UploadRegistry
from fl_core.errors import UnavailableError


def test_bytes_are_counted_for_each_silo_until_the_upload_is_discarded(tmp_path: Path) -> None:
    uploads = UploadRegistry(tmp_path)
    assert uploads.pending("north") == uploads.size("north", "c") == 0
    uploads.path("north", "c").write_bytes(b"abc")
    uploads.path("north", "d").write_bytes(b"de")
    uploads.path("south", "c").write_bytes(b"s")
    assert (uploads.size("north", "c"), uploads.pending("north"), uploads.pending("south")) == (3, 5, 1)
    for _ in range(2):
        uploads.discard("north", "c")
    assert sorted(UploadRegistry(tmp_path).all()) == [("north", "d"), ("south", "c")]


def test_a_second_writer_ends_the_first_and_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        uploads, cut, entered = UploadRegistry(tmp_path), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with uploads.writing("c", cut.set):
                entered.set()
                await cut.wait()

        task = asyncio.create_task(first())
        await entered.wait()
        async with uploads.writing("c"):
            assert cut.is_set()
            await task
            monkeypatch.setattr(module, "_TAKEOVER_S", 0.01)
            with pytest.raises(UnavailableError, match="E-NET-12"):
                async with uploads.writing("c"):
                    pass

    asyncio.run(story())
