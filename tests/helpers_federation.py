"""A whole federation in one process: the coordinator's service and hospitals' services, over mutual TLS on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers_grpc import World, channel, until

from coordinator.pki.membership import Membership
from coordinator.storage.store import Store
from fl_core import datasets
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.pki.identity import identity_of
from protos.pki.invitation import InvitationToken
from protos.tls.diagnosis import Diagnosis
from silo.connection.transfer import RetryPolicy
from silo.events import Event
from silo.identity.identity import SiloIdentity
from silo.service.service import Service, Settings
from silo.storage.home import Home

PATIENCE = RetryPolicy(idle_s=5.0, backoff_s=0.01, backoff_cap_s=0.1, tries=3)
COLLECTION = "records"
DELTA = 1e-5


@dataclass
class Site:
    """One hospital: its home, its data, and the service while it runs."""

    world: World
    home: Home
    data: str
    notices: list[Event] = field(default_factory=list)
    service: Service | None = None

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.home.ledger)

    def policy(self, text: str) -> None:
        self.home.policy.write_text(text)

    def budget(self, epsilon: float, split: str = "train") -> None:
        self.ledger.set_budget(f"{COLLECTION}/{split}", epsilon, DELTA, "dpo", "test")

    def entries(self) -> list[tuple[str, str]]:
        """List (entry, state) of every collection."""
        ledger = self.ledger
        return [(entry, state) for c in ledger.collections() for entry, state, _ in ledger.entries(c)]

    def start(self) -> None:
        own = SiloIdentity(self.home.path).current_credentials()
        well = Diagnosis(None, "works", "all is well")
        self.service = Service(
            Settings(self.home, self.data, device="cpu"),
            self.notices.append,
            PATIENCE,
            lambda _: channel(self.world.port, own),
            lambda _: well,
        )
        self.service.start()

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def told(self, event: str) -> list[str]:
        return [n.text for n in self.notices if n.event == event]


def enrolled(world: World, name: str, folder: Path) -> Home:
    """Enrol a hospital without a connection, its home ready to serve."""
    home = Home(folder).make()
    identity = SiloIdentity(home.path)
    store = Store(world.home)
    try:
        membership = Membership(world.home, store)
        token = InvitationToken.decode(membership.invite(name).token)
        material = identity.join_material(token)
        made = membership.join(identity_of(token.cert_pem), material.csr_pem)
    finally:
        store.close()
    identity.install(made.certificate_pem, made.authority_pem)
    home.write_addresses(material.addresses)
    return home


@contextmanager
def federation(folder: Path, data: dict[str, str], epsilon: float = 100.0) -> Iterator[tuple[World, dict[str, Site]]]:
    """A coordinator that runs, and hospitals (name: data) with registered records and a budget that do not yet."""
    world = World.create(folder / "coordinator", ())
    sites = {}
    for name, reference in data.items():
        site = Site(world, enrolled(world, name, folder / name), reference)
        site.policy('[privacy]\nrng = "test"\n')
        register(site.ledger, datasets.load(reference), COLLECTION)
        site.budget(epsilon)
        site.budget(epsilon, "test")
        sites[name] = site
    world.start()
    try:
        yield world, sites
    finally:
        for site in sites.values():
            site.stop()
        world.stop()


def events(world: World, run_id: str, kind: str) -> list[tuple[str, str]]:
    """List (silo, text) of a run's events of one kind."""
    assert world.server is not None
    return [(e.silo, e.text) for e in world.server.store.runs.events(run_id, 0) if e.kind == kind]


def heard(world: World, run_id: str, kind: str, times: int = 1) -> list[tuple[str, str]]:
    """Wait for so many events of a kind."""
    until(lambda: len(events(world, run_id, kind)) >= times, f"{times} events {kind!r}", 60)
    return events(world, run_id, kind)
