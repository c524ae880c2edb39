"""Limits per certificate: concurrent calls, calls per second, and idle time.

A call beyond a limit is refused with E-NET-12 before anything is read or looked up for it, and may be retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.message import Message

from fl_core.errors import ProtocolError, UnavailableError
from protos.wire.channel_options import WINDOWS, window_bytes
from protos.wire.chunks import CHUNK_BYTES
from service_core.pki.identity import CertificateRole, PeerCertificate

audit = logging.getLogger("consilium.audit")
_UPLOADS = 16
_TABLE = 4096
"""Number of callers to remember; beyond it, idle ones are forgotten."""
_NOTE_S = 60.0
_UNKNOWN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Rate:
    """A long-term rate per second, and a burst."""

    per_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits; times are in seconds.

    Attributes:
        streams: concurrent calls of one certificate, by its role
        calls: rate of its calls, by its role
        joins, joins_per_address: attempts to enrol, of one invitation and of one address
        renewals: of one silo
        hello_s: until a session's Hello
        put_idle_s: without a byte in a Put
        get_idle_s: without reading a chunk in a Get
        watch_s: total time of a stream of health or reflection
        check_s: between checks whether the callers of open streams are still allowed
        messages: in one session
        window: bytes that an upload may be ahead of its reader
        upload_bytes: memory for the windows and chunks of all current uploads
        downloads: at once, hospitals' and leads' separately
        downloads_each: at once, of one caller
    """

    streams: Mapping[CertificateRole, int] = field(
        default_factory=lambda: {CertificateRole.SILO: 8, CertificateRole.INVITE: 2, CertificateRole.LEAD: 64}
    )
    calls: Mapping[CertificateRole, Rate] = field(
        default_factory=lambda: {
            CertificateRole.SILO: Rate(20, 200),
            CertificateRole.INVITE: Rate(1, 30),
            CertificateRole.LEAD: Rate(50, 500),
        }
    )
    joins: Rate = Rate(1 / 60, 10)
    joins_per_address: Rate = Rate(1, 60)
    renewals: Rate = Rate(5 / 3600, 5)
    messages: Rate = Rate(100, 1000)
    hello_s: float = 15.0
    put_idle_s: float = 60.0
    get_idle_s: float = 60.0
    watch_s: float = 600.0
    check_s: float = 2.0
    window: int = WINDOWS[0]
    upload_bytes: int = 64 << 20
    downloads: int = 32
    downloads_each: int = 2

    @classmethod
    def over(cls, round_trip_ms: float) -> Limits:
        """Return limits for a round-trip time in ms, with memory for at least `_UPLOADS` uploads at once."""
        window = window_bytes(round_trip_ms)
        return cls(window=window, upload_bytes=max(cls().upload_bytes, _UPLOADS * (window + CHUNK_BYTES)))


@dataclass(slots=True)
class Bucket:
    """A token bucket: `take` returns the time to wait, 0 if there is a token."""

    rate: Rate
    clock: Callable[[], float] = time.monotonic
    _tokens: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._at = float(self.rate.burst), self.clock()

    def take(self) -> float:
        now = self.clock()
        self._tokens = min(float(self.rate.burst), self._tokens + max(0.0, now - self._at) * self.rate.per_s)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self.rate.per_s

    @property
    def full(self) -> bool:
        """Whether it can be forgotten without effect."""
        return self._tokens + (self.clock() - self._at) * self.rate.per_s >= self.rate.burst


class Gate:
    """Counts the calls of every certificate. Used on the event loop only."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._under_way: dict[str, int] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._noted: dict[str, float] = {}

    @contextmanager
    def call(self, peer: PeerCertificate, method: str, address: str) -> Iterator[None]:
        """Count a call inside the block; raises UnavailableError (E-NET-12) on too many."""
        try:
            self._check(peer, method.rpartition("/")[2], address)
        except UnavailableError as error:
            self._note(peer, method, address, error)
            raise
        self._under_way[peer.serial] = self._under_way.get(peer.serial, 0) + 1
        try:
            yield
        finally:
            self._under_way[peer.serial] -= 1
            if not self._under_way[peer.serial]:
                del self._under_way[peer.serial]

    def _check(self, peer: PeerCertificate, method: str, address: str) -> None:
        kind, limits = peer.identity.kind, self.limits
        most = limits.streams.get(kind, 0)
        if self._under_way.get(peer.serial, 0) >= most:
            raise UnavailableError("E-NET-12", f"more than {most} calls at once with one certificate: try again")
        self._take("calls", peer.serial, limits.calls.get(kind, Rate(1, 1)), "calls")
        if method == "Join":
            self._take("join", peer.serial, limits.joins, "attempts to enrol with one invitation")
            host = address.rpartition(":")[0]
            self._take("address", host, limits.joins_per_address, "attempts to enrol from one address")
        elif method == "Renew":
            self._take("renew", str(peer.identity), limits.renewals, "renewals of one hospital")

    def _take(self, what: str, who: str, rate: Rate, words: str) -> None:
        if len(self._buckets) >= _TABLE and (what, who) not in self._buckets:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.full}
        if wait := self._buckets.setdefault((what, who), Bucket(rate, self._clock)).take():
            raise UnavailableError("E-NET-12", f"found too many {words}: try again in {max(1, round(wait))} s")

    def _note(self, peer: PeerCertificate, method: str, address: str, error: UnavailableError) -> None:
        """Log a refusal; at most one per certificate and minute, so that a flood does not fill the disk."""
        now = self._clock()
        if now - self._noted.get(peer.serial, -_NOTE_S) < _NOTE_S:
            return
        if len(self._noted) >= _TABLE:
            self._noted.clear()
        self._noted[peer.serial] = now
        audit.warning("refused %s to %s (certificate %s) %s: %s", method, peer.identity, peer.serial, address, error)


def require_known_fields(message: object) -> None:
    """Raise ProtocolError (E-WIRE-06) on more than 64 KiB of fields that this version does not know."""
    if not isinstance(message, Message) or (size := message.ByteSize()) <= _UNKNOWN_BYTES:
        return
    parsed = type(message)()
    parsed.CopyFrom(message)
    parsed.DiscardUnknownFields()
    if (unknown := size - parsed.ByteSize()) > _UNKNOWN_BYTES:
        raise ProtocolError(
            "E-WIRE-06",
            (f"expected only fields of this version, found {unknown} bytes of unknown fields: upgrade the older side"),
        )
