"""A silo's end of transfers, against the fake coordinator, and the places at which a test cuts them."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from helpers_silo import PATIENCE, Host, until
from helpers_transfer import BYTES, CONSORTIUM, FakeTransfer, authority

from fl_core.errors import FederationError
from fl_core.types.values import TaskKind
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.storage.object_store import ContributionStore
from protos.wire.chunks import CHUNK_BYTES
from protos.wire.tasks import TaskKey, contribution_id
from silo.connection.retry import CancelledError, CancelToken
from silo.connection.transfer import ReceiptVerifier, Transfer
from silo.storage.tasks import OutboxEntry

KEY = TaskKey("run-1", 2, TaskKind.TRAIN)
CUTS = [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, 17, CHUNK_BYTES + 5, len(BYTES) - 1]
IDS = ["first byte", "chunk 1", "chunk 2", "chunk 3", "inside 1", "inside 2", "last byte"]


def still(done: int, total: int) -> None:
    """Care about no progress."""


class Rig:
    def __init__(self, folder, patience=PATIENCE):
        self.fake = FakeTransfer()
        self.host = Host(self.fake)
        self.channel = self.host.channel()
        self.told: list[FederationError] = []
        self.objects = ContributionStore(folder / "objects")
        self.stop = CancelToken()
        self.witness = ReceiptVerifier(authority().ca_pem, CONSORTIUM, "center1")
        self.transfer = Transfer(lambda: rpc.TransferStub(self.channel), self.objects, patience, self.told.append)

    def entry(self, data=BYTES):
        name = contribution_id(*KEY, "center1", "b" * 64)
        return OutboxEntry(KEY, "a" * 64, "b" * 64, name, self.objects.put(data), len(data))

    def upload(self, entry=None, moved=still):
        entry = entry or self.entry()
        return self.transfer.upload(entry, self.objects.path(entry.object_digest), self.witness, self.stop, moved)

    @contextmanager
    def uploading(self):
        """Upload beside the block, held at its first chunk until that ends; gives the receipt, or why there is none."""
        self.fake.hold, found = threading.Event(), []

        def send():
            try:
                found.append(self.upload())
            except CancelledError as error:
                found.append(error.reason)

        sender = threading.Thread(target=send)
        sender.start()
        assert self.fake.holding.wait(20)
        yield found
        self.fake.hold.set()
        sender.join(20)

    @contextmanager
    def silent(self):
        """Let nothing move inside the block until the silo has told of it."""
        self.fake.hold = threading.Event()

        def release():
            until(lambda: self.told)
            self.fake.hold, held = None, self.fake.hold
            held.set()

        helper = threading.Thread(target=release)
        helper.start()
        yield
        helper.join(20)

    def close(self):
        self.channel.close()
        self.host.stop()
