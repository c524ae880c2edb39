"""Who may see a page: whoever has its opening link, once; then a cookie."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LINK_S = 600.0
"""How long an opening link works."""
SESSION_S = 12 * 3600.0
"""How long a session lasts after its last request."""
MOST = 16
"""Sessions at once; the one that was used least recently makes room."""


@dataclass(slots=True)
class Session:
    """One browser. token: goes into each form   notice: what its last form led to, shown once."""

    token: str
    used: float
    notice: str = ""


@dataclass(slots=True)
class Sessions:
    """The link in force and the open sessions. Used by the server's event loop alone."""

    clock: Callable[[], float] = time.monotonic
    _link: tuple[bytes, float] | None = None
    _open: dict[str, Session] = field(default_factory=dict)

    def new_link(self) -> str:
        """Make a secret of 256 bits that opens one session within `LINK_S`; earlier ones open none from now on."""
        secret = secrets.token_urlsafe(32)
        self._link = (secret.encode(), self.clock())
        return secret

    @property
    def link_age(self) -> float | None:
        """Seconds since the link in force was made; None where it was used."""
        return None if self._link is None else self.clock() - self._link[1]

    def enter(self, secret: str) -> str | None:
        """Use the link up and return a new session's cookie; None for a secret that is not in force."""
        if self._link is None or not hmac.compare_digest(secret.encode("utf-8", "replace"), self._link[0]):
            return None
        age, self._link = self.clock() - self._link[1], None
        if age > LINK_S:
            return None
        while len(self._open) >= MOST:
            del self._open[min(self._open, key=lambda name: self._open[name].used)]
        cookie = secrets.token_urlsafe(32)
        self._open[cookie] = Session(secrets.token_urlsafe(32), self.clock())
        return cookie

    def find(self, cookie: str) -> Session | None:
        """Return an open session, used now."""
        found = self._open.get(cookie)  # 256 random bits: the time of a look-up tells nothing of use
        if found is None:
            return None
        if self.clock() - found.used > SESSION_S:
            del self._open[cookie]
            return None
        found.used = self.clock()
        return found
