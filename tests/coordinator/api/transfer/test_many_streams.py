"""What all streams together hold in memory: one chunk each, and no more downloads than have a turn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from coordinator.api import transfer
from coordinator.api.limits import Limits
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import chunks
from tests.support import until
from tests.support.coordinator import FAST, running

TURNS, READERS, CHUNKS = 40, 60, 4
NOTHING_AHEAD = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
"""What a reader lets the server send before it reads: 64 KiB, and not more as the link proves to be fast."""


class Counted:
    """Counts the chunks that were made and have not left, over all streams."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.streams = self.in_hand = self.most_streams = self.most_in_hand = 0

    def _count(self, streams: int, in_hand: int) -> None:
        with self.lock:
            self.streams, self.in_hand = self.streams + streams, self.in_hand + in_hand
            self.most_streams = max(self.most_streams, self.streams)
            self.most_in_hand = max(self.most_in_hand, self.in_hand)

    def read_chunks(self, path: Path, name: str, offset: int) -> Iterator[chunks.Chunk]:
        self._count(1, 0)
        try:
            for chunk in chunks.read_chunks(path, name, offset):
                self._count(0, 1)
                try:
                    yield chunk
                finally:
                    self._count(0, -1)
        finally:
            self._count(-1, 0)


def test_readers_that_do_not_read_hold_one_chunk_each_and_those_beyond_the_turns_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512 << 10)
    monkeypatch.setattr(transfer, "read_chunks", counted.read_chunks)
    settings = replace(FAST, limits=Limits(downloads=TURNS, downloads_each=READERS))
    data = os.urandom(CHUNKS * chunks.CHUNK_BYTES)
    with running(tmp_path / "home", (), settings) as world:
        assert world.server is not None
        monkeypatch.setattr(world.server.store.contributions, "readable", lambda *_: "run")
        request = pb.GetRequest(digest=world.server.objects.put(data))
        own = world.people["lead"]
        secure = grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.cert_pem)
        line = grpc.secure_channel(f"127.0.0.1:{world.port}", secure, NOTHING_AHEAD)
        calls = [rpc.TransferStub(line).Get(request) for _ in range(READERS)]
        until(lambda: counted.streams == TURNS, "the first streams")
        time.sleep(0.5)  # more would begin, or go on, if anything let them
        assert counted.most_streams == TURNS
        assert counted.most_in_hand <= TURNS
        received: list[bytes] = []
        readers = [
            threading.Thread(target=lambda c=call: received.append(b"".join(chunk.data for chunk in c)))
            for call in calls
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
        line.close()
        assert received == [data] * READERS
        assert counted.most_streams == TURNS
        assert counted.most_in_hand <= TURNS
