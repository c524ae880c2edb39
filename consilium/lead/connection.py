"""The connection of a lead, shared with all runs of this lead."""

from __future__ import annotations

from pathlib import Path

from coordinator.lead.client import LeadClient, credentials_of
from fl_core.errors import UnavailableError


class LeadConnection:
    """A client of the service that runs on a home, with the lead's certificate. Open until closed."""

    def __init__(self, home: Path, lead: str | None = None) -> None:
        """Open it; raises as `LeadClient.open`, and FederationError if the service does not answer this lead."""
        self.home, self.credentials = home, credentials_of(home, lead)
        client = LeadClient.open(home, lead)
        try:
            client.health()  # fail now, not at the first call
        except BaseException:
            client.close()
            raise
        self._client: LeadClient | None = client

    @property
    def client(self) -> LeadClient:
        """The client; raises UnavailableError (E-NET-01) after `close`."""
        if self._client is None:
            raise UnavailableError("E-NET-01", "the connection is closed: connect again with consilium.connect")
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def __str__(self) -> str:
        return "closed" if self._client is None else f"at {self._client.address}"
