"""Transfer: objects up and down, resumable at every byte.

A stream has one chunk in hand and holds a thread while it lasts, so the server's thread pool bounds the memory of all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain

import grpc

from coordinator.api.authorization import Authorizer
from coordinator.api.upload_limits import max_update_bytes
from coordinator.pki.server_certificate import ServerCertificate
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.tasks import SiloTaskKey
from coordinator.storage.records import Contribution
from coordinator.storage.store import Store
from coordinator.storage.uploads import Upload, UploadRegistry
from fl_core.errors import FederationError, ProtocolError, StateError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.pki.identity import Kind
from protos.storage.digests import file_digest
from protos.storage.object_store import ObjectStore
from protos.storage.partial_file import open_partial
from protos.wire import receipts
from protos.wire.chunks import append_chunk, read_chunks
from protos.wire.tasks import FROM_WIRE, TO_WIRE, contribution_id

SEALED = 1 << 17
"""Bytes of sealed figures that are taken with an announcement; hospitals send at most half of that."""


class TransferService(rpc.TransferServicer):
    """Open, Put, Commit and Get."""

    def __init__(
        self,
        authorizer: Authorizer,
        store: Store,
        objects: ObjectStore,
        uploads: UploadRegistry,
        dispatcher: Dispatcher,
        certificate: ServerCertificate,
    ) -> None:
        self._authorizer = authorizer
        self._store = store
        self._objects = objects
        self._uploads = uploads
        self._dispatcher = dispatcher
        self._certificate = certificate
        self._limits: dict[str, int] = {}
        self._limits_lock = threading.Lock()

    def Open(self, request: pb.OpenRequest, context: grpc.ServicerContext) -> pb.OpenReply:  # noqa: N802
        """Take the announcement of an update and say how much of it is here."""
        silo = self._authorizer.caller(context).identity.name
        wanted = _announced(request, silo)
        known = self._store.contributions.contribution(wanted.id)
        if known is None or known.receipt is None:
            self._check_size(wanted)
            _require_digests(request)
        stated = request.attestation if request.HasField("attestation") else None
        found, anew = self._store.contributions.announce(wanted, stated)
        if found.receipt is not None:
            return pb.OpenReply(have=found.size, receipt=pb.Receipt.FromString(found.receipt))
        have = self._uploads.size(silo, found.id)
        if (anew and have) or have > found.size:
            with self._uploads.writing(found.id):
                self._uploads.discard(silo, found.id)
            have = 0
        if self._uploads.pending(silo) - have + found.size > self._uploads.quota:
            raise UnavailableError(
                "E-NET-12",
                f"expected unfinished uploads of {silo!r} below {self._uploads.quota} bytes: finish them first",
            )
        return pb.OpenReply(have=have)

    def Put(self, request_iterator: Iterator[pb.Chunk], context: grpc.ServicerContext) -> pb.PutReply:  # noqa: N802
        """Append chunks to an upload; what has arrived is kept, however the stream ends."""
        first = next(request_iterator, None)
        if first is None or not first.object:
            raise ProtocolError("E-WIRE-06", "expected a first chunk that names its contribution, found none")
        c = self._mine(first.object, context)
        if c.receipt is not None:
            return pb.PutReply(have=c.size)
        with (
            self._uploads.writing(c.id, context.cancel) as upload,
            open_partial(self._uploads.path(c.silo, c.id)) as file,
        ):
            upload.digest = None
            chunks = chain([first], request_iterator)
            del first
            for chunk in chunks:
                if chunk.object not in ("", c.id):
                    raise ProtocolError("E-WIRE-06", "expected one contribution in a stream, found a second")
                append_chunk(chunk, file, file.size, c.size)
                del chunk  # before the next one comes
            upload.digest = file.digest()
        return pb.PutReply(have=file.size)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.Receipt:  # noqa: N802
        """Verify an upload, take it and sign for it; object and record are on disk before the receipt leaves."""
        c = self._mine(request.contribution_id, context)
        if c.receipt is not None:
            return pb.Receipt.FromString(c.receipt)
        with self._uploads.writing(c.id) as upload:
            c = self._mine(c.id, context)
            if c.receipt is not None:  # a second Commit came before us
                return pb.Receipt.FromString(c.receipt)
            try:
                receipt = self._take(c, upload)
            except FileNotFoundError as error:  # its round ended while we read it, and its bytes are forgotten
                raise _forgotten(c) from error
        self._uploads.forget(c.id)
        self._dispatcher.delivered(SiloTaskKey(c.run_id, c.round, c.kind, c.silo), c.object_digest)
        return receipt

    def _take(self, c: Contribution, upload: Upload) -> pb.Receipt:
        if not self._store.contributions.is_open(c.id):
            raise _forgotten(c)
        have, partial = self._uploads.size(c.silo, c.id), self._uploads.path(c.silo, c.id)
        if have != c.size:
            raise ProtocolError("E-WIRE-04", f"expected {c.size} bytes before a commit, found {have}: send the rest")
        found = upload.digest or file_digest(partial)
        receipt = self._sign(c)
        with self._objects.lock:
            self._objects.commit(partial, c.object_digest, found)
            try:
                self._store.contributions.commit(c, receipt.at_unix, receipt.SerializeToString(deterministic=True))
            except FederationError:
                if c.object_digest not in self._store.contributions.referenced_digests():
                    self._objects.remove(c.object_digest)
                raise
        return receipt

    def _sign(self, c: Contribution) -> pb.Receipt:
        own = self._certificate.current()
        plain = pb.Receipt(
            contribution_id=c.id,
            run_id=c.run_id,
            round=c.round,
            kind=TO_WIRE[c.kind],
            silo=c.silo,
            manifest_digest=c.manifest_digest,
            object_digest=c.object_digest,
            size=c.size,
            at_unix=time.time(),
            attestation=self._store.attestations.of(c.id),
        )
        return receipts.sign(plain, own.key_pem, own.cert_pem)

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.Chunk]:  # noqa: N802
        """Read an object from an offset: a silo the manifests and bases of its runs, a lead anything."""
        who = self._authorizer.caller(context).identity
        silo = who.name if who.kind is Kind.SILO else None
        run_id = self._store.contributions.readable(request.digest, silo)
        if run_id is None:
            raise ProtocolError(
                "E-WIRE-12", f"there is no object {request.digest[:16]!r} for {who}: ask for the task anew"
            )
        file = self._objects.path(request.digest)
        size = file.stat().st_size
        if request.offset > size:
            raise ProtocolError(
                "E-WIRE-06", f"expected an offset of at most {size}, found {request.offset}: begin anew"
            )
        sent = 0
        try:
            for chunk in read_chunks(file, request.digest, request.offset):
                sent += len(chunk.data)
                yield chunk
                del chunk  # it has left; the next one takes its room
        finally:
            if silo is not None and sent:
                self._store.runs.add_traffic(run_id, sent)

    def _mine(self, contribution_id: str, context: grpc.ServicerContext) -> Contribution:
        c = self._store.contributions.contribution(contribution_id)
        if c is None or c.silo != self._authorizer.caller(context).identity.name:
            raise StateError(
                "E-WIRE-06", f"expected a contribution that was opened, found {contribution_id[:16]!r}: open it first"
            )
        return c

    def _check_size(self, c: Contribution) -> None:
        """Raise ProtocolError (E-WIRE-06) when an object is larger than any bundle of its run can be."""
        with self._limits_lock:
            limit = self._limits.get(c.run_id)
        if limit is None:
            limit = max_update_bytes(self._store.runs.get(c.run_id).manifest)
            with self._limits_lock:
                self._limits[c.run_id] = limit
        if not 0 < c.size <= limit:
            raise ProtocolError("E-WIRE-06", f"expected an update of at most {limit} bytes, found one of {c.size}")


def _forgotten(c: Contribution) -> StateError:
    return StateError(
        "E-RUN-06", f"expected an open round, found that round {c.round + 1} of {c.run_id} is over: discard this"
    )


def _require_digests(request: pb.OpenRequest) -> None:
    """Raise ProtocolError (E-WIRE-12) when an attestation holds something else than SHA-256 in hex."""
    for found in (request.attestation.policy_digest, request.attestation.ledger_head):
        if found and (len(found) != 64 or not set(found) <= set("0123456789abcdef")):
            raise ProtocolError("E-WIRE-12", f"expected a SHA-256 in lower-case hex, found {found[:80]!r}")
    if (size := len(request.attestation.ledger_sealed)) > SEALED:
        raise ProtocolError("E-WIRE-12", f"expected at most {SEALED} bytes of sealed figures, found {size}")


def _announced(request: pb.OpenRequest, silo: str) -> Contribution:
    """Read an announcement; raises ProtocolError (E-WIRE-12) when its id is not that of its task."""
    if request.kind not in FROM_WIRE:
        raise ProtocolError("E-WIRE-12", f"expected an update of a training or an evaluation, found {request.kind}")
    kind = FROM_WIRE[request.kind]
    name = contribution_id(request.run_id, request.round, kind, silo, request.base_digest)
    if name != request.contribution_id:
        raise ProtocolError(
            "E-WIRE-12",
            f"expected the contribution {name[:16]} for this task and silo, found {request.contribution_id[:16]!r}",
        )
    if len(request.object_digest) != 64 or not set(request.object_digest) <= set("0123456789abcdef"):
        raise ProtocolError("E-WIRE-12", f"expected a digest in lower-case hex, found {request.object_digest[:80]!r}")
    return Contribution(
        name,
        request.run_id,
        request.round,
        kind,
        silo,
        request.manifest_digest,
        request.base_digest,
        request.object_digest,
        request.size,
    )
