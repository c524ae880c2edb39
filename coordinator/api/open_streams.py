"""Whether the callers of open streams are still let in: a certificate may be revoked, renewed or expire meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.api.authorization import Authorizer
from coordinator.api.event_loop import Workers
from fl_core.errors import FederationError
from protos.pki.identity import PeerCertificate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    peer: PeerCertificate
    method: str
    address: str
    on_refused: Callable[[FederationError], None]


class OpenStreams:
    """Asks every `check_s` seconds for all open streams, on a thread that no call can take. Used on the event loop.

    Guarantees: whoever revoked, this process or another, and whatever the other threads do, a stream is told within
    `check_s` seconds and the time of one round of questions.
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
        """Call a function, once and on the event loop, when inside the block the caller is no longer let in."""
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
        found, is_in_force = [], self._silos_in_force()
        for stream in streams:
            if is_in_force(stream.peer):
                continue
            try:
                self._authorizer.authorize_peer(stream.peer, stream.method, stream.address)
            except FederationError as error:
                found.append((stream, error))
            except Exception:  # the next attempt may succeed; if this task ended, nobody would be asked for again
                log.exception("whether %s is still let in could not be looked up", stream.peer.identity)
        return found

    def _silos_in_force(self) -> Callable[[PeerCertificate], bool]:
        try:
            return self._authorizer.silos_in_force()
        except Exception:  # asked one by one, each stream gets an error of its own
            log.exception("the members could not be looked up")
            return lambda _: False
