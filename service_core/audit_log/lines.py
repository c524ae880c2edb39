"""One line of an audit log: a JSON object that names the SHA-256 of the line before it."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from service_core.audit_log.heads import SignedHead

ALLOWED, REFUSED = "allowed", "refused"
MAX_TEXT = 300
"""Maximum characters of a field; longer texts of a peer are cut."""
MAX_LINE = 1 << 16
"""Maximum bytes of a line."""
_TEXTS = ("who", "what", "about", "outcome", "code", "serial", "address")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event.

    Attributes:
        who: an identity, or the user of a command
        serial: of the certificate
        what: the call, event or command
        about: its object
        bytes: transferred
        times: how often it happened within a minute
        head: the signed head of another side's log
    """

    who: str
    what: str
    about: str = ""
    outcome: str = ALLOWED
    code: str = ""
    serial: str = ""
    address: str = ""
    bytes: int = 0
    times: int = 1
    head: SignedHead | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """An entry in its position. number: from 1   at: Unix time   before: hash of the previous line, empty in line 1.

    salt: 128 random bits, so that the other side, which gets the hash, cannot guess the line.
    """

    number: int
    at: float
    before: str
    entry: LogEntry
    salt: str = field(default_factory=lambda: secrets.token_hex(16))

    def encode(self) -> str:
        """Encode the line in ASCII: control characters escaped, empty fields omitted."""
        entry = self.entry
        fields: dict[str, Any] = {"number": self.number, "at": _time_text(self.at)}
        fields |= {name: getattr(entry, name)[:MAX_TEXT] for name in _TEXTS if getattr(entry, name)}
        fields |= {"bytes": entry.bytes} if entry.bytes else {}
        fields |= {"times": entry.times} if entry.times != 1 else {}
        fields |= {"head": entry.head.to_json()} if entry.head is not None else {}
        return json.dumps(fields | {"salt": self.salt, "before": self.before}, separators=(",", ":"))

    @classmethod
    def decode(cls, raw: str | bytes) -> LogLine:
        """Decode a line; raises ValueError on anything else. Fields of later versions are ignored."""
        try:
            fields = json.loads(raw.decode("ascii") if isinstance(raw, bytes) else raw)
            texts = {name: _typed(fields, name, str, "") for name in _TEXTS}
            counts = {"bytes": _typed(fields, "bytes", int, 0), "times": _typed(fields, "times", int, 1)}
            head = None if "head" not in fields else SignedHead.from_json(fields["head"])
            number, before = _typed(fields, "number", int, 0), _typed(fields, "before", str, None)
            salt = _typed(fields, "salt", str, "")
            at = datetime.fromisoformat(_typed(fields, "at", str, None)).timestamp()
        except (RecursionError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a line of an audit log: {error!r}") from None
        if not 0 < number < 2**63:
            raise ValueError("a line without a number")
        return cls(number, at, before, LogEntry(**texts, **counts, head=head), salt)


def line_hash(text: str) -> str:
    """Return the SHA-256 of a line, as `sha256sum` of what `log show --json` prints, without the newline."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _typed(fields: dict[str, Any], name: str, kind: type, default: object) -> Any:  # noqa: ANN401
    value = fields.get(name, default)
    if type(value) is not kind:
        raise TypeError(f"{name}: expected {kind.__name__}, found {type(value).__name__}")
    return value
