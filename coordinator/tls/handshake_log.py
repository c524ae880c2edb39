"""Say why a connection was refused before any of our code saw it: TLS failures, from the C core's own log lines.

With the trace `handshaker` the core writes, per failed handshake, its TLS library's reason and the peer's address.
Without it (grpc imported before `trace_handshakes`) the reason comes alone, and the peer is None.

What the reasons cannot tell:

- a certificate that is both expired and of another CA counts as E-TLS-09;
- a client that breaks off (E-TLS-13) may have refused our certificate or may be a port scanner or health probe;
- a wrong host name (E-TLS-07) comes without the peer, and not at all when an IP address was dialled, for then the name
  is not sent: the client alone knows;
- E-TLS-12 quotes the library's words where we know no better.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from urllib.parse import unquote

from coordinator.tls.stderr_capture import CoreLog
from fl_core.errors import StateError
from protos.pki.certificates import Clock, utc_now

log = logging.getLogger(__name__)

_HEADER = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +(\d+) ([\w./]+):\d+\] (.*)")
_TAIL = re.compile(r"=== Source Location Trace: ===\s*|src/core/[\w./]+:\d+\s*|  ?shutdown=.*|\s*")
_NAME = "No match found for server name: "
_PEER = re.compile(r"endpoint_peer_address=([^,}]+)")
_REASONS: tuple[tuple[str, str, str], ...] = (
    ("certificate has expired", "E-TLS-08", "its certificate has expired: it must renew, or be invited anew"),
    ("certificate is not yet valid", "E-TLS-08", "its certificate is not valid yet: the clock here or there is wrong"),
    ("unable to get local issuer", "E-TLS-09", "its certificate is another authority's: it belongs to no silo of ours"),
    ("certificate signature failure", "E-TLS-09", "its certificate is another authority's that has our CA's name"),
    ("self-signed certificate", "E-TLS-09", "it made its certificate itself: it belongs to no silo of ours"),
    ("self signed certificate", "E-TLS-09", "it made its certificate itself: it belongs to no silo of ours"),
    ("unsupported certificate purpose", "E-TLS-14", "its certificate is for a service, not for a client"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "E-TLS-10", "it showed no certificate: it must enrol with `silo join TOKEN`"),
    ("HTTP_REQUEST", "E-TLS-04", "it speaks plain HTTP to a TLS port: a browser, a health probe or a proxy"),
    ("HTTPS_PROXY_REQUEST", "E-TLS-04", "it takes this port for an HTTP proxy"),
    ("WRONG_VERSION_NUMBER", "E-TLS-04", "it speaks no TLS: gRPC without credentials, or another protocol"),
    ("NO_SHARED_CIPHER", "E-TLS-11", "it offers no TLS 1.3: upgrade it, or the proxy before it"),
    ("UNSUPPORTED_PROTOCOL", "E-TLS-11", "it offers no TLS 1.3: upgrade it, or the proxy before it"),
    ("ALERT", "E-TLS-13", "it broke off the handshake: it does not accept this coordinator's certificate"),
    ("BAD_PACKET_LENGTH", "E-TLS-13", "it broke off the handshake: it does not accept this coordinator's certificate"),
    (
        "Handshake read failed",
        "E-TLS-13",
        "it hung up in the handshake: it refuses our certificate, or is a port probe",
    ),
    ("timed out", "E-TLS-13", "it did not finish the handshake in time"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A connection that was refused before any call. peer: address and port, None where the core does not say."""

    code: str
    reason: str
    peer: str | None
    at: datetime


def trace_handshakes() -> None:
    """Have the C core write handshake failures with the peer's address; call it before anything imports grpc.

    For the process that serves, inside `watch_refusals` (elsewhere the lines would reach the terminal). Raises
    StateError (E-TLS-17) when grpc is there already.
    """
    traces = [trace for trace in os.environ.get("GRPC_TRACE", "").split(",") if trace]
    if _tracing() and _verbosity() in ("", "INFO", "DEBUG"):
        return
    if "grpc" in sys.modules:
        raise StateError(
            "E-TLS-17",
            "expected coordinator.tls.handshake_log.trace_handshakes() to run before grpc is imported, found it "
            "imported: refusals would come without the peer's address. Call it first in the entry point",
        )
    os.environ["GRPC_TRACE"] = ",".join(dict.fromkeys([*traces, "handshaker"]))
    if _verbosity() not in ("INFO", "DEBUG"):  # the core's own default writes what we need; a higher level does not
        os.environ.pop("GRPC_VERBOSITY", None)


def _tracing() -> bool:
    return bool({"handshaker", "all"} & set(os.environ.get("GRPC_TRACE", "").split(",")))


def _verbosity() -> str:
    return os.environ.get("GRPC_VERBOSITY", "").upper()


@dataclass(slots=True)
class CoreLineReader:
    """Recognise failed server handshakes among the core's lines.

    tracing: whether the core writes peers; then the TLS library's line only waits for the one that names the peer.
    """

    report: Callable[[Refusal], None]
    tracing: bool = True
    keep_all: bool = False
    clock: Clock = utc_now
    _waiting: dict[str, str] = field(default_factory=dict)
    _failure: str | None = None
    _in_trace: bool = False

    def line(self, text: str) -> bool:
        """Take one line; tell whether it is to be passed on."""
        return self._recognise(text) or self.keep_all

    def idle(self) -> None:
        """Report the failures whose peer was never named."""
        for text in self._waiting.values():
            self._refuse(text, None)
        self._waiting.clear()

    def _recognise(self, text: str) -> bool:
        header = _HEADER.fullmatch(text)
        if header is None:
            if not (self._in_trace and _TAIL.fullmatch(text)):
                self._in_trace = False
                return True
            if self._failure is not None and "args={" in text:
                self._traced(self._failure, text)
            return False
        thread, file, message = header.groups()
        self._in_trace = file.endswith("handshaker.cc") or message.startswith("handshake manager")
        if self._in_trace:
            if message.startswith("CallNextHandshakerLocked: error=") and "error=OK" not in message:
                self._waiting.pop(thread, None)
                self._failure = message
                if "args={" in message:
                    self._traced(message, message)
            return False
        if message.startswith(_NAME):
            self._asked_for(message.removeprefix(_NAME))
            return False
        if "Handshake failed with error" not in message:
            return not message.startswith("gRPC Tracers: ")  # the core's echo of our own setting
        if self.tracing:
            self._waiting[thread] = message
        else:
            self._refuse(message, None)
        return False

    def _traced(self, failure: str, args: str) -> None:
        self._failure = None
        peer = _PEER.search(args)
        if "grpc.internal.server_credentials=" in args:  # else this process dialled
            self._refuse(failure, peer and unquote(peer[1]).removeprefix("ipv4:").removeprefix("ipv6:"))

    def _asked_for(self, name: str) -> None:
        # The handshake goes on, and it is the client that will hang up; which connection it was, the core does not say.
        reason = (
            f"it asked for {name[:100]!r}, which this service's certificate does not hold: let it dial another name, "
            "or add this one to the coordinator's addresses"
        )
        self.report(Refusal("E-TLS-07", reason, None, self.clock()))

    def _refuse(self, text: str, peer: str | None) -> None:
        if "erver shutdown" in text:
            return
        code, reason = next(
            ((code, reason) for sign, code, reason in _REASONS if sign in text),
            ("E-TLS-12", f"the TLS library says {text[-200:]!r}"),
        )
        self.report(Refusal(code, reason, peer, self.clock()))


@dataclass(slots=True)
class RefusalLog:
    """Write refusals for a person: one line per cause and machine and minute, with the number of those left out."""

    quiet: timedelta = timedelta(minutes=1)
    _last: dict[tuple[str, str], datetime] = field(default_factory=dict)
    _left_out: dict[tuple[str, str], int] = field(default_factory=dict)

    def __call__(self, refusal: Refusal) -> None:
        """Log one refusal, or count it."""
        host = (refusal.peer or "an unknown address").rpartition(":")[0] or "an unknown address"
        key = (refusal.code, host)
        if key in self._last and refusal.at - self._last[key] < self.quiet:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        if len(self._last) >= 1000:  # a scan from everywhere must not fill the memory
            self._last.clear()
            self._left_out.clear()
        self._last[key] = refusal.at
        before = self._left_out.pop(key, 0)
        more = f" ({before} more like it since the last line)" if before else ""
        level = logging.INFO if refusal.code == "E-TLS-13" else logging.WARNING
        log.log(
            level, "%s: refused a connection from %s: %s%s", refusal.code, refusal.peer or host, refusal.reason, more
        )


def watch_refusals(callback: Callable[[Refusal], None] | None = None, clock: Clock = utc_now) -> CoreLog:
    """Report every refused handshake while the context lasts: to the log (few) and to `callback` (all of them).

    `callback` runs on the reader's thread and must not block; what it raises is logged.
    """
    write = RefusalLog()

    def report(refusal: Refusal) -> None:
        write(refusal)
        try:
            if callback is not None:
                callback(refusal)
        except Exception:
            log.exception("%s: a refusal could not be recorded", refusal.code)

    reader = CoreLineReader(report, _tracing(), _verbosity() == "DEBUG", clock)
    return CoreLog(reader.line, reader.idle)
