"""Uploads updates and fetches objects, resuming at the byte where a transfer broke off.

A transfer may take hours. An attempt ends when nothing moves for `idle_s` seconds or the channel's keepalive fails;
attempts are repeated until the service stops. A damaged transfer is restarted a limited number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc

from fl_core.errors import FederationError, ProtocolError, RefusedError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import receipts
from protos.wire.chunks import Chunk, append_chunk, read_chunks
from protos.wire.size_limits import MANIFEST_BYTES
from service_core.storage import disk
from service_core.storage.object_store import ObjectStore, open_partial, partial_size
from silo.cancellation import CancelToken
from silo.connection.channel import Connection
from silo.connection.retry import Backoff, IdleWatch, retry_until, to_federation_error
from silo.storage.tasks import Attestation, OutboxEntry

Request = TypeVar("Request")
Response = TypeVar("Response")
DAMAGED = "E-WIRE-04"
"""Error code of data damaged in transit; retried a limited number of times."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A silo's waiting times in seconds. Only tests change them."""

    idle_s: float = 60.0
    backoff_s: float = 1.0
    backoff_cap_s: float = 60.0
    tries: int = 4

    def backoff(self) -> Backoff:
        return Backoff(self.backoff_s, self.backoff_cap_s)


@dataclass(frozen=True, slots=True)
class ReceiptVerifier:
    """Checks that a receipt is for this silo: the pinned authority, the consortium and the silo's name."""

    authority_pem: bytes = field(repr=False)
    consortium: str
    silo: str

    def verify(self, receipt: pb.Receipt, entry: OutboxEntry) -> bytes:
        """Return the receipt's bytes after checking its signature and every field.

        Raises RefusedError (E-ID-14) on another signature, ProtocolError (E-WIRE-12) on other content.
        """
        receipts.verify(receipt, self.authority_pem, self.consortium)
        facts = entry.facts()
        expected = facts | {"silo": self.silo, "attestation": entry.attested.signed}
        attested = Attestation.of(receipt.attestation)
        if attested.sealed == entry.attested.sealed:  # a coordinator of 0.1.0 signs it as well
            attested = attested.signed
        received = {n: getattr(receipt, n) for n in facts} | {"silo": receipt.silo, "attestation": attested}
        if received != expected:
            raise ProtocolError("E-WIRE-12", f"the receipt is for {received} instead of {expected}")
        return receipt.SerializeToString(deterministic=True)


ProgressFn = Callable[[int, int], None]
"""Called with the bytes so far and in total (0: unknown)."""


class _RetryBudget:
    """Limits retries after damage: a link that damages every transfer is an error."""

    def __init__(self, tries: int) -> None:
        self._left = tries

    def note(self, error: ProtocolError) -> None:
        """Raise UnavailableError for damage while retries are left; otherwise raise the error itself."""
        if error.code != DAMAGED or self._left <= 0:
            raise error
        self._left -= 1
        raise UnavailableError(error.code, error.message) from error


class Transfer:
    """Uploads and downloads over the current channel, which may be replaced during a transfer."""

    def __init__(
        self,
        connection: Callable[[], Connection],
        objects: ObjectStore,
        retry_policy: RetryPolicy,
        report: Callable[[FederationError], None],
        log_head: Callable[[], pb.LogHead | None] = lambda: None,
        on_sent: Callable[[int], None] = lambda _: None,
        on_received: Callable[[int], None] = lambda _: None,
    ) -> None:
        """log_head: returns the end of this hospital's audit log, which is sent before each upload.

        on_sent, on_received: called with the number of bytes in each chunk.
        """
        self._on_sent = on_sent
        self._on_received = on_received
        self._log_head = log_head
        self._connection = connection
        self._objects = objects
        self._retry_policy = retry_policy
        self._report = report

    # ---- up ----------------------------------------------------------------------------------------------------

    def upload(
        self,
        entry: OutboxEntry,
        file: Path,
        verifier: ReceiptVerifier,
        stop: CancelToken,
        progress: ProgressFn,
        ready: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Send an update until the coordinator's receipt for it is verified; return the receipt's bytes.

        ready: called before each commit. Raises CancelledError, and the coordinator's refusals.
        Guarantees: after an interruption, only missing bytes are sent; an update that was accepted before is not sent
        at all.
        """
        backoff, damage, best = self._retry_policy.backoff(), _RetryBudget(self._retry_policy.tries), -1

        def attempt() -> bytes:
            nonlocal best
            try:
                have, receipt = self._open(entry)
                if have > best:
                    best = have
                    backoff.reset()
                if receipt is None:
                    if have < entry.size:
                        self._put(entry, file, have, stop, progress)
                    ready()
                    receipt = self._unary(
                        lambda stub: stub.Commit, pb.CommitRequest(contribution_id=entry.contribution_id)
                    )
            except ProtocolError as error:
                damage.note(error)
                raise
            progress(entry.size, entry.size)
            return verifier.verify(receipt, entry)

        return retry_until(attempt, backoff, stop, self._report)

    def fetch_receipt(self, entry: OutboxEntry, verifier: ReceiptVerifier) -> bytes | None:
        """Ask once for the receipt of an accepted update; None if the coordinator has none.

        Raises the coordinator's refusals, and as `ReceiptVerifier.verify`.
        """
        _, receipt = self._open(entry)
        return None if receipt is None else verifier.verify(receipt, entry)

    def receipt_for(self, entry: OutboxEntry, verifier: ReceiptVerifier, stop: CancelToken) -> bytes | None:
        """Ask, with retries, whether an update was accepted; return its receipt, or None if the coordinator has none.

        Raises CancelledError; ProtocolError (E-WIRE-07) if it accepted another update for this task; as
        `fetch_receipt`.
        """
        backoff = self._retry_policy.backoff()
        return retry_until(lambda: self.fetch_receipt(entry, verifier), backoff, stop, self._report)

    def _open(self, entry: OutboxEntry) -> tuple[int, pb.Receipt | None]:
        request = pb.OpenRequest(
            **entry.facts(),
            base_digest=entry.base_digest,
            attestation=entry.attested.signed.message() if any(entry.attested) else None,
            ledger_sealed=bytes.fromhex(entry.attested.sealed),
            log_head=self._log_head(),
        )
        reply = self._unary(lambda stub: stub.Open, request)
        if reply.have > entry.size:
            raise ProtocolError("E-WIRE-06", f"expected at most {entry.size} bytes to have arrived, found {reply.have}")
        return reply.have, reply.receipt if reply.HasField("receipt") else None

    def _put(self, entry: OutboxEntry, file: Path, have: int, stop: CancelToken, progress: ProgressFn) -> None:
        armed = threading.Event()
        idle_watch: list[IdleWatch] = []
        broken: list[OSError] = []

        def chunks() -> Iterator[Chunk]:
            armed.wait()
            try:
                for chunk in read_chunks(file, entry.contribution_id, have):
                    idle_watch[0].touch()
                    progress(chunk.offset, entry.size)
                    self._on_sent(len(chunk.data))
                    yield chunk
            except OSError as error:  # gRPC, whose thread runs this, would report only a cancelled call
                broken.append(error)
                raise

        connection = self._connection()
        call = self._begun(lambda: connection.put.future(chunks()))
        with IdleWatch(call, self._retry_policy.idle_s) as idle, stop.on_cancel(call.cancel):
            idle_watch.append(idle)
            armed.set()
            try:
                received = call.result().have
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if broken:
                    raise broken[0] from error
                if isinstance(error, grpc.RpcError):
                    raise connection.explained(to_federation_error(error, idle)) from error
                raise UnavailableError("E-NET-12", f"no byte moved for {self._retry_policy.idle_s:g} s") from error
        if received < entry.size:
            raise ProtocolError("E-WIRE-04", f"expected {entry.size} bytes to have arrived, found {received}")

    # ---- down --------------------------------------------------------------------------------------------------

    def fetch(
        self, digest: str, size: int, stop: CancelToken, progress: ProgressFn, most: int = MANIFEST_BYTES
    ) -> Path:
        """Return an object's file, from disk or from the coordinator. size: 0 if unknown; most: the largest allowed.

        Raises ProtocolError: E-WIRE-04 when the received bytes never have this digest, E-WIRE-06 above `most`;
        RefusedError (E-RUN-38) when the disk's reserve would be used; and the coordinator's refusals.
        Guarantees: after an interruption, only missing bytes are fetched; a file gets its name only once its digest is
        right.
        """
        if self._objects.holds(digest):
            return self._objects.path(digest)
        if size > most:
            raise ProtocolError("E-WIRE-06", f"an object of {size} bytes is larger than the limit of {most} bytes")
        backoff, damage = self._retry_policy.backoff(), _RetryBudget(self._retry_policy.tries)

        def attempt() -> Path:
            partial = self._objects.partial(digest)
            before = partial_size(partial)
            try:
                content_digest = self._get(digest, partial, size, most, stop, progress)
                # No fsync: `holds` detects a file that a power cut damaged, and it is fetched again.
                return self._objects.commit(partial, digest, content_digest, sync=False)
            except ProtocolError as error:
                damage.note(error)
                raise
            finally:
                if partial_size(partial) > before:
                    backoff.reset()

        return retry_until(attempt, backoff, stop, self._report)

    def _get(
        self, digest: str, partial: Path, size: int, most: int, stop: CancelToken, progress: ProgressFn
    ) -> str | None:
        _require_room(partial, size - partial_size(partial))
        connection = self._connection()
        call = self._begun(lambda: connection.get(pb.GetRequest(digest=digest, offset=partial_size(partial))))
        with (
            IdleWatch(call, self._retry_policy.idle_s) as idle,
            stop.on_cancel(call.cancel),
            open_partial(partial) as file,
        ):
            try:
                for chunk in call:
                    idle.touch()
                    self._on_received(len(chunk.data))
                    if (end := chunk.offset + len(chunk.data)) > most or (size and end > size):
                        partial.unlink()
                        code, limit = ("E-WIRE-04", size) if size else ("E-WIRE-06", most)
                        raise ProtocolError(code, f"the object is larger than the limit of {limit} bytes")
                    _require_room(partial, len(chunk.data))
                    append_chunk(chunk, file, file.size)
                    progress(file.size, size)
                    del chunk  # before the next one comes
            except grpc.RpcError as error:
                raise connection.explained(to_federation_error(error, idle)) from error
            finally:
                call.cancel()
        if size and file.size < size:
            raise UnavailableError("E-NET-12", f"the stream ended after {file.size} of {size} bytes")
        return file.digest()

    def _unary(
        self,
        method: Callable[[rpc.TransferStub], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
    ) -> Response:
        connection = self._connection()
        try:
            return self._begun(lambda: method(connection.transfer)(request, timeout=self._retry_policy.idle_s))
        except grpc.RpcError as error:
            raise connection.explained(to_federation_error(error)) from error

    @staticmethod
    def _begun(begin: Callable[[], Response]) -> Response:
        """Begin a call; raises UnavailableError (E-NET-01) if its channel was closed for a newer one."""
        try:
            return begin()
        except ValueError as error:  # gRPC's error for a closed channel
            raise UnavailableError("E-NET-01", f"the connection was replaced: {error}") from error


def _require_room(file: Path, size: int) -> None:
    """Raise RefusedError (E-RUN-38) if writing `size` bytes would use the disk's reserve."""
    if size > (room := disk.available(file.parent)):
        raise RefusedError(
            "E-RUN-38",
            f"the disk of {file.parent} has {room} bytes above its reserve, and {max(size, 0)} are needed: free some",
        )
