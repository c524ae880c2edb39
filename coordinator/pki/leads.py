"""The leads, who may start and end runs. Their certificates are made and kept on the authority's machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.pki.authority import Authority
from coordinator.storage.records import Lead
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError, FederationError
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import CertificateRole, check_name, identity_of
from service_core.storage import private_files


@dataclass(frozen=True, slots=True)
class Leads:
    """The leads of a consortium, over its authority and its store."""

    home: Path
    store: CoordinatorStore
    clock: Clock = utc_now

    def adopt(self) -> None:
        """Add the leads in the authority's folder to the list: another machine may have certified them."""
        folder = self._authority().folder
        for path in sorted(folder.glob("lead-*.pem")):
            try:
                peer = identity_of(private_files.read_private(path))
            except FederationError:
                continue  # it is not usable, and the command that uses it reports it
            if peer.identity.kind is CertificateRole.LEAD:
                self.store.members.leads.add(Lead.of(peer))

    def all(self) -> list[Lead]:
        """Return every lead's newest certificate, by name; including revoked ones."""
        self.adopt()
        return list({lead.name: lead for lead in self.store.members.leads.all()}.values())

    def add(self, name: str) -> Lead:
        """Certify a new lead; raises ConfigError (E-ID-30) if a lead or a hospital has the name."""
        self.adopt()
        if self.store.members.leads.is_lead(check_name(name)):
            raise ConfigError(
                "E-ID-30", f"the lead {name!r} exists already. To renew its certificate: coordinator leads renew {name}"
            )
        invited = any(invitation.name == name for invitation in self.store.members.invitations())
        if invited or self.store.members.is_member(name):
            raise ConfigError("E-ID-30", f"{name!r} is the name of a hospital: choose another")
        return self._certify(name)

    def renew(self, name: str) -> Lead:
        """Give a lead a new key and certificate; the previous one ends when this one is first used.

        Raises ConfigError (E-RUN-10) if no lead in force has the name.
        """
        self.adopt()
        self._require(name)
        return self._certify(name)

    def revoke(self, name: str, reason: str) -> None:
        """Revoke a lead's certificates at once, and delete its key here; raises ConfigError (E-RUN-10) as `renew`."""
        self.adopt()
        self._require(name)
        self.store.members.leads.revoke(name, reason)
        private_files.remove(self._authority().lead_file(name))

    def _require(self, name: str) -> None:
        leads = self.store.members.leads
        if not leads.is_lead(check_name(name)):
            names = ", ".join(sorted({lead.name for lead in leads.all() if lead.revoked is None})) or "none"
            raise ConfigError("E-RUN-10", f"there is no lead {name!r}. Leads: {names}")

    def _certify(self, name: str) -> Lead:
        """Certify a lead. The new certificate is listed before it is written: an unlisted one is not accepted."""
        authority = self._authority()
        made = authority.make_lead(name)
        lead = Lead.of(identity_of(made.cert_pem))
        self.store.members.leads.add(lead)
        authority.keep_lead(name, made)
        return lead

    def _authority(self) -> Authority:
        return Authority.open(self.home, self.clock)
