"""Objects on disk: whole under their digest, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.storage.object_store import Blobs
from fl_core.errors import ProtocolError, StateError
from protos.wire import codec


def test_an_object_is_under_its_digest_and_twice_is_once(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = blobs.put_bytes(b"abc")
    assert digest == codec.digest(b"abc") == blobs.put_bytes(b"abc")
    assert blobs.path(digest).read_bytes() == b"abc"
    assert not list((tmp_path / "aside").iterdir())


def test_an_upload_is_adopted_only_with_its_digest(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    partial = blobs.partial("north", "c")
    partial.write_bytes(b"abc")
    assert (blobs.have("north", "c"), blobs.pending("north"), list(blobs.uploads())) == (3, 3, [("north", "c")])
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        blobs.adopt(partial, codec.digest(b"abd"))
    assert blobs.have("north", "c") == 0
    partial.write_bytes(b"abc")
    assert blobs.adopt(partial, codec.digest(b"abc")).read_bytes() == b"abc"
    assert list(blobs.uploads()) == []


def test_a_digest_cannot_leave_the_folder_and_a_missing_object_is_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    for bad in ("../../etc/passwd", "A" * 64, "", "g" * 64):
        with pytest.raises(ProtocolError, match="E-WIRE-15"):
            blobs.path(bad)
    with pytest.raises(StateError, match="E-STATE-21"):
        blobs.path("0" * 64)


def test_a_sweep_keeps_what_is_named_and_a_start_forgets_half_written_files(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    kept, gone = blobs.put_bytes(b"kept"), blobs.put_bytes(b"gone")
    (tmp_path / "aside" / "half").write_bytes(b"ha")
    blobs = Blobs(tmp_path)
    blobs.sweep({kept})
    assert (blobs.has(kept), blobs.has(gone)) == (True, False)
    assert not list((tmp_path / "aside").iterdir())


def test_a_state_becomes_an_object_and_a_second_one_of_the_same_numbers_is_the_first(tmp_path: Path) -> None:
    blobs, state = Blobs(tmp_path), {"w": {"a": torch.arange(3.0)}}
    packed = codec.pack_state(state)
    for _ in range(2):
        assert blobs.put_state(state) == (codec.digest(packed), len(packed))
    assert blobs.path(codec.digest(packed)).read_bytes() == packed
    assert not list((tmp_path / "aside").iterdir())


def test_what_is_removed_is_gone_at_once_and_its_room_is_given_back_later(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = blobs.put_bytes(b"abc")
    blobs.remove(digest)
    blobs.remove(digest)
    assert not blobs.has(digest)
    assert len(list((tmp_path / "aside").iterdir())) == 1
    blobs.empty()
    assert not list((tmp_path / "aside").iterdir())


def test_what_was_not_given_back_before_a_crash_is_at_the_next_start(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.remove(blobs.put_bytes(b"abc"))
    Blobs(tmp_path)
    assert not list((tmp_path / "aside").iterdir())
