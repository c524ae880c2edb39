"""Transfer: uploads and downloads of objects, resumable at every byte.

A stream processes one chunk while a window is buffered; `coordinator.api.admission` limits the windows of all streams.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from coordinator.api.admission import DownloadTurns, LeadsFirst, Slot, UploadSlots
from coordinator.api.authorization import Authorizer, Context
from coordinator.api.event_loop import Workers
from coordinator.api.limits import Limits
from coordinator.api.open_streams import PutStream
from coordinator.pki.server_certificate import ServerCertificate
from coordinator.runs.dispatcher import Dispatcher
from coordinator.storage.records import Contribution
from coordinator.storage.store import CoordinatorStore
from coordinator.storage.uploads import OpenUpload, UploadRegistry
from fl_core.errors import REASON_CHARS, FederationError, ProtocolError, StateError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import receipts
from protos.wire.chunks import Chunk, append_chunk, read_chunks
from protos.wire.size_limits import max_object_bytes
from protos.wire.tasks import FROM_WIRE, TO_WIRE, contribution_id
from service_core.pki.identity import CertificateRole, PeerCertificate
from service_core.storage import disk
from service_core.storage.digests import file_digest
from service_core.storage.object_store import ObjectStore, open_partial

log = logging.getLogger(__name__)
Chunks: TypeAlias = Generator[Chunk, None, None]
SEALED = 1 << 17
"""Size limit of the sealed figures in an announcement, in bytes; hospitals send at most half of it."""


class TransferService(rpc.TransferServicer):
    """Open, Put, Commit and Get."""

    def __init__(
        self,
        authorizer: Authorizer,
        store: CoordinatorStore,
        objects: ObjectStore,
        uploads: UploadRegistry,
        dispatcher: Dispatcher,
        certificate: ServerCertificate,
        workers: Workers,
        leads: Workers,
        limits: Limits,
        leads_first: LeadsFirst,
        check: Callable[[Contribution, Path], None],
    ) -> None:
        """Set up. check: as `RunWorkers.check`."""
        self._authorizer = authorizer
        self._store = store
        self._objects = objects
        self._uploads = uploads
        self._dispatcher = dispatcher
        self._certificate = certificate
        self._workers = workers
        self._leads = leads
        self._limits = limits
        self._slots = UploadSlots(limits.upload_bytes, limits.window)
        self._turns = DownloadTurns(limits.downloads, limits.downloads_each)
        self._lead_turns = DownloadTurns(limits.downloads, limits.downloads_each)
        self._largest: dict[str, int] = {}
        self._largest_lock = threading.Lock()
        self._leads_first = leads_first
        self._check_update = check

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenReply:  # noqa: N802
        """Accept the announcement of an update; return the number of bytes received so far."""
        silo = self._authorizer.caller(context).identity.name
        contribution, anew = await self._workers.run(self._announce, request, silo)
        if contribution.received is not None:
            return pb.OpenReply(have=contribution.size, receipt=self._receipt(contribution))
        have = self._uploads.size(silo, contribution.id)
        if (anew and have) or have > contribution.size:
            async with self._uploads.writing(contribution.id):
                await self._workers.run(self._uploads.discard, silo, contribution.id)
            have = 0
        await self._workers.run(self._require_room, contribution, have, self._slots.left)
        self._slots.open(contribution.id, silo, contribution.size - have)
        return pb.OpenReply(have=have)

    def _announce(self, request: pb.OpenRequest, silo: str) -> tuple[Contribution, bool]:
        announced = _announced(request, silo)
        stored = self._store.contributions.contribution(announced.id)
        if stored is None or stored.received is None:
            self._check_size(announced)
            _require_digests(request)
        stated = request.attestation if request.HasField("attestation") else None
        return self._store.contributions.announce(announced, stated, request.ledger_sealed)

    def _require_room(self, c: Contribution, have: int, coming: int) -> None:
        """Raise UnavailableError: E-NET-12 above a silo's quota, E-RUN-38 if the disk's reserve would be used."""
        if self._uploads.pending(c.silo) - have + c.size > self._uploads.quota:
            raise UnavailableError(
                "E-NET-12",
                f"the unfinished uploads of {c.silo!r} reach the limit of {self._uploads.quota} bytes: finish them "
                "first",
            )
        free = disk.available(self._objects.folder)
        if c.size - have > free - coming:
            log.error("the disk of %s has %d bytes above its reserve: uploads wait", self._objects.folder, free)
            raise UnavailableError("E-RUN-38", "the coordinator's disk has no room for this update: try again later")

    async def Put(self, request_iterator: object, context: Context) -> pb.PutReply:  # noqa: ARG002, N802
        """Append chunks to an upload; received bytes stay, however the stream ends."""
        silo = self._authorizer.caller(context).identity.name
        self._slots.require(silo)
        stream = PutStream(context, self._limits.put_idle_s)
        first = await stream.next()
        if first is None or not first.object:
            raise ProtocolError("E-WIRE-06", "the first chunk must name its contribution, and it does not")
        c = await self._workers.run(self._contribution_of, first.object, silo)
        if c.received is not None:
            return pb.PutReply(have=c.size)
        with self._slots.using(c.id, silo) as slot:
            async with self._uploads.writing(c.id, stream.end) as upload:
                return pb.PutReply(have=await self._append(c, first, stream, upload, slot))

    async def _append(self, c: Contribution, first: Chunk, stream: PutStream, upload: OpenUpload, slot: Slot) -> int:
        with ExitStack() as stack:
            file = await self._workers.run(lambda: stack.enter_context(open_partial(self._uploads.path(c.silo, c.id))))
            upload.digest = None
            chunk: Chunk | None = first
            del first
            while chunk is not None:
                if chunk.object not in ("", c.id):
                    raise ProtocolError("E-WIRE-06", "a stream carries one contribution, and a second one came")
                await self._workers.run(append_chunk, chunk, file, file.size, c.size)
                slot.left = c.size - file.size
                chunk = None  # before the next one comes
                self._slots.yield_to_others(slot)
                await self._leads_first.give_way()
                chunk = await stream.next()
            upload.digest = file.digest()
            return file.size

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.Receipt:  # noqa: N802
        """Verify and accept an upload, and return a signed receipt. Object and record are on disk before that."""
        silo = self._authorizer.caller(context).identity.name
        c = await self._workers.run(self._contribution_of, request.contribution_id, silo)
        if c.received is not None:
            return self._receipt(c)
        async with self._uploads.writing(c.id) as upload:
            return await self._workers.run(self._commit, c.id, silo, upload)

    def _commit(self, contribution_id: str, silo: str, upload: OpenUpload) -> pb.Receipt:
        c = self._contribution_of(contribution_id, silo)
        if c.received is not None:  # another Commit was faster
            return self._receipt(c)
        try:
            receipt = self._take(c, upload)
        except FileNotFoundError as error:  # its round ended meanwhile, and its bytes were deleted
            raise _forgotten(c) from error
        # Here and not after the await: the run gets the update even if the caller has left.
        self._uploads.forget(c.id)
        self._dispatcher.delivered(c)
        return receipt

    def _take(self, c: Contribution, upload: OpenUpload) -> pb.Receipt:
        if not self._store.contributions.is_open(c.id):
            raise _forgotten(c)
        have, partial = self._uploads.size(c.silo, c.id), self._uploads.path(c.silo, c.id)
        if have != c.size:
            raise ProtocolError(
                "E-WIRE-04", f"{have} of {c.size} bytes have arrived, and a commit needs all: send the rest"
            )
        digest = upload.digest or file_digest(partial)
        if digest == c.object_digest:  # otherwise the commit below reports damaged bytes
            self._check(c, partial)
        receipt = self._sign(c, time.time())
        with self._objects.lock:
            self._objects.commit(partial, c.object_digest, digest)
            try:
                self._store.contributions.commit(c, receipt.at_unix)
            except FederationError:
                if c.object_digest not in self._store.contributions.referenced_digests():
                    self._objects.remove(c.object_digest)
                raise
        return receipt

    def _check(self, c: Contribution, file: Path) -> None:
        """Refuse an invalid update and delete its bytes; raises as `RunWorkers.check`."""
        try:
            self._check_update(c, file)
        except ProtocolError as error:
            self._uploads.discard(c.silo, c.id)
            # The silo chooses names in the file, of any length; the reason goes to every lead.
            shortened = ProtocolError(error.code, error.message[: 2 * REASON_CHARS])
            self._dispatcher.reject(c, shortened)
            raise shortened from error

    def _receipt(self, c: Contribution) -> pb.Receipt:
        """Return the receipt of a committed update, signed anew from stored fields."""
        return self._sign(c, c.received or 0.0)

    def _sign(self, c: Contribution, at: float) -> pb.Receipt:
        credentials = self._certificate.current()
        plain = pb.Receipt(
            contribution_id=c.id,
            run_id=c.run_id,
            round=c.round,
            kind=TO_WIRE[c.kind],
            silo=c.silo,
            manifest_digest=c.manifest_digest,
            object_digest=c.object_digest,
            size=c.size,
            at_unix=at,
            attestation=self._store.attestations.of(c.id),
        )
        return receipts.sign(plain, credentials.key_pem, credentials.cert_pem)

    async def Get(  # type: ignore[override]  # noqa: N802 - the stub knows generators alone
        self, request: pb.GetRequest, context: Context
    ) -> None:
        """Read an object from an offset: a silo the manifests and bases of its runs, a lead any object."""
        peer = self._authorizer.caller(context)
        silo = peer.identity.name if peer.identity.kind is CertificateRole.SILO else None
        workers = self._leads if silo is None else self._workers
        run_id, chunks = await workers.run(self._readable, request, peer, silo)
        turns, sent = self._lead_turns if silo is None else self._turns, 0
        try:
            async with turns.turn(peer.serial) as yield_to_others:
                while (chunk := await workers.run(next, chunks, None)) is not None:
                    await _write(chunk, context, self._limits.get_idle_s)
                    sent += len(chunk.data)
                    del chunk  # before the next one is read
                    yield_to_others()
        finally:
            await workers.always(self._end_download, chunks, silo, run_id, sent)

    def _readable(self, request: pb.GetRequest, peer: PeerCertificate, silo: str | None) -> tuple[str, Chunks]:
        run_id = self._store.contributions.readable(request.digest, silo)
        if run_id is None:
            raise ProtocolError(
                "E-WIRE-12", f"no object {request.digest[:16]!r} for {peer.identity}: request the task again"
            )
        file = self._objects.verified(request.digest)
        size = file.stat().st_size
        if request.offset > size:
            raise ProtocolError(
                "E-WIRE-06", f"expected an offset of at most {size}, found {request.offset}: start again"
            )
        if silo is None:
            self._store.contributions.note_fetched(request.digest, peer.identity.name)
        return run_id, read_chunks(file, request.digest, request.offset)

    def _end_download(self, chunks: Chunks, silo: str | None, run_id: str, sent: int) -> None:
        chunks.close()
        if silo is not None and sent:
            self._store.runs.add_traffic(run_id, sent)

    def _contribution_of(self, contribution_id: str, silo: str) -> Contribution:
        c = self._store.contributions.contribution(contribution_id)
        if c is None or c.silo != silo:
            raise StateError("E-WIRE-06", f"the contribution {contribution_id[:16]!r} is not open: open it first")
        return c

    def _check_size(self, c: Contribution) -> None:
        """Raise ProtocolError (E-WIRE-06) if an object is larger than any bundle of its run."""
        with self._largest_lock:
            limit = self._largest.get(c.run_id)
        if limit is None:
            limit = max_object_bytes(RunManifest.from_json(self._store.runs.get(c.run_id).manifest))
            with self._largest_lock:
                self._largest[c.run_id] = limit
        if not 0 < c.size <= limit:
            raise ProtocolError("E-WIRE-06", f"an update of {c.size} bytes is larger than the limit of {limit} bytes")


async def _write(chunk: Chunk, context: Context, idle_s: float) -> None:
    try:
        async with asyncio.timeout(idle_s):
            await context.write(chunk)
    except TimeoutError:
        raise UnavailableError(
            "E-NET-12", f"nothing was read for {idle_s:g} s: continue from where it stopped"
        ) from None


def _forgotten(c: Contribution) -> StateError:
    return StateError("E-RUN-06", f"round {c.round + 1} of {c.run_id} is over: discard this update")


def _require_digests(request: pb.OpenRequest) -> None:
    """Raise ProtocolError (E-WIRE-12) if a digest in an attestation is no SHA-256 in hex."""
    for digest in (request.attestation.policy_digest, request.attestation.ledger_head):
        if digest and (len(digest) != 64 or not set(digest) <= set("0123456789abcdef")):
            raise ProtocolError("E-WIRE-12", f"expected a SHA-256 in lower-case hex, found {digest[:80]!r}")
    if (size := max(len(request.attestation.ledger_sealed), len(request.ledger_sealed))) > SEALED:
        raise ProtocolError("E-WIRE-12", f"expected at most {SEALED} bytes of sealed figures, found {size}")


def _announced(request: pb.OpenRequest, silo: str) -> Contribution:
    """Read an announcement; raises ProtocolError (E-WIRE-12) if its id does not match its task."""
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
