"""`coordinator log`: the coordinator's audit log."""

from __future__ import annotations

from pathlib import Path

from coordinator.cli.options import home_of
from coordinator.pki.authority import Authority
from coordinator.pki.server_certificate import ServerCertificate
from service_core.audit_log.commands import Side, make_app
from service_core.pki.identity import Identity, Kind


def _side(home: Path | None) -> Side:
    place = home_of(home)
    return Side(
        place,
        lambda: Identity(Kind.COORDINATOR, Authority.open(place).consortium).uri,
        lambda: ServerCertificate(place).current().ca_pem,
    )


log = make_app(_side, help="The audit log: who called or ordered what, when, and with which outcome.")
