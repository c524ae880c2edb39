"""A consortium of many members, made without a call: their keys in one file that the benchmark's processes read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import grpc

from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from protos.wire.channel_options import CLIENT_OPTIONS
from service_core.pki import certificates
from service_core.storage import private_files
from service_core.storage.private_files import Credentials

CONSORTIUM = "load"
KEYS = "members.json"


def make(home: Path, members: int) -> int:
    """Make a consortium with so many members and a lead; return the version of its roster."""
    private_files.private_folder(home)
    authority = Authority.create(home, CONSORTIUM, ["127.0.0.1:8443"])
    authority.issue_lead("lead")
    keys = {}
    with closing(CoordinatorStore(home)) as store:
        membership = Membership(home, store)
        for name in names(members):
            key = certificates.new_key()
            made = membership.certify(name, certificates.make_request(key), b"")
            keys[name] = [key.decode(), made.pem]
        membership.roster()  # signed now, as it is in a consortium that has run before
        version = store.members.version()
    about = {"ca": authority.ca_pem.decode(), "members": keys}
    private_files.write_private(home / KEYS, json.dumps(about).encode())
    return version


def names(members: int) -> list[str]:
    return [f"hospital{k:04}" for k in range(members)]


def members_of(home: Path) -> dict[str, Credentials]:
    """Read what every member connects with, by name."""
    about = json.loads((home / KEYS).read_text())
    ca = about["ca"].encode()
    return {name: Credentials(key.encode(), pem.encode(), ca) for name, (key, pem) in about["members"].items()}


def channel(port: int, own: Credentials, options: Sequence[tuple[str, int]] = CLIENT_OPTIONS) -> grpc.aio.Channel:
    """Connect as a member or a lead, as the real programs do."""
    secure = grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.cert_pem)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", secure, options)
