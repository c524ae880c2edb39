"""Checks on open streams: their callers' permission, and whether chunks of an upload still arrive.

A certificate may be revoked, renewed or expire while a stream is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.authorization import Authorizer, Context
from coordinator.api.event_loop import Workers
from fl_core.errors import FederationError, ProtocolError, UnavailableError
from protos.wire.chunks import Chunk
from service_core.pki.identity import PeerCertificate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    peer: PeerCertificate
    method: str
    address: str
    on_refused: Callable[[FederationError], None]


class OpenStreams:
    """Checks all open streams every `check_s` seconds, on a thread of its own. Used on the event loop.

    Guarantees: once a certificate is revoked, by this process or another, its streams are ended within `check_s`
    seconds and the time of one check, even if all other threads are busy.
    """

    def __init__(self, authorizer: Authorizer, check_s: float) -> None:
        self._authorizer = authorizer
        self._check_s = check_s
        self._thread = Workers(1, "open-streams")
        self._open: dict[_Stream, None] = {}
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def watching(
        self, peer: PeerCertificate, method: str, address: str, on_refused: Callable[[FederationError], None]
    ) -> Iterator[None]:
        """Call `on_refused`, once and on the event loop, if the caller loses its permission inside the block."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_again_and_again())
        stream = _Stream(peer, method, address, on_refused)
        self._open[stream] = None
        try:
            yield
        finally:
            self._open.pop(stream, None)

    def close(self) -> None:
        self._thread.close()

    async def _ask_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            for stream, error in await self._thread.run(self._refused, list(self._open)):
                if stream in self._open:
                    del self._open[stream]
                    stream.on_refused(error)

    def _refused(self, streams: Iterable[_Stream]) -> list[tuple[_Stream, FederationError]]:
        refused, is_in_force = [], self._silos_in_force()
        for stream in streams:
            if is_in_force(stream.peer):
                continue
            try:
                self._authorizer.authorize_peer(stream.peer, stream.method, stream.address)
            except FederationError as error:
                refused.append((stream, error))
            except Exception:  # the next attempt may succeed; this task must not end, since it makes all checks
                log.exception("cannot check whether %s is still admitted", stream.peer.identity)
        return refused

    def _silos_in_force(self) -> Callable[[PeerCertificate], bool]:
        try:
            return self._authorizer.silos_in_force()
        except Exception:  # checked one by one, so that each stream gets its own error
            log.exception("cannot look up the members")
            return lambda _: False


class PutStream:
    """The chunks of a Put, in order. idle_s: seconds without a message after which the stream ends."""

    def __init__(self, context: Context, idle_s: float) -> None:
        self._context = context
        self._idle_s = idle_s
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End the stream: another one has replaced it."""
        self._ended.set()

    async def next(self) -> Chunk | None:
        """Return the next chunk, None at the end.

        Raises UnavailableError (E-NET-12) if it does not arrive, ProtocolError (E-WIRE-06) if it is no chunk.
        """
        reading = asyncio.ensure_future(self._context.read())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((reading, ended), timeout=self._idle_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.is_set():
                raise UnavailableError("E-NET-12", "this update is being sent over another stream: open it again")
            if not reading.done():
                raise UnavailableError("E-NET-12", f"no chunk came for {self._idle_s:g} s: open the update again")
            return None if (chunk := reading.result()) is grpc.aio.EOF else chunk
        except DecodeError as error:
            raise ProtocolError("E-WIRE-06", "expected a chunk, found bytes that are no message") from error
        finally:
            ended.cancel()
            reading.cancel()
