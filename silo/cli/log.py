"""`silo log`: the hospital's audit log."""

from __future__ import annotations

from pathlib import Path

from protos.audit_log.commands import Side, make_app
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home


def _side(home: Path | None) -> Side:
    place = Home.at(home).path
    identity = SiloIdentity(place)
    return Side(place, lambda: identity.load().identity.uri, identity.authority_pem)


app = make_app(_side)
