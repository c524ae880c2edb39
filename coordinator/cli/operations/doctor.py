"""`coordinator doctor` and `coordinator health`: what keeps the service from its work, and whether it is at work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Home, Json, home_of
from coordinator.lead.client import ADDRESS_FILE, LeadClient
from coordinator.pki.authority import Authority
from coordinator.storage.store import FILE, LOCK_FILE
from fl_core.errors import UnavailableError
from service_core.console import print_json, printable
from service_core.operations import checks
from service_core.operations.checks import Check, Finding
from service_core.pki import certificates
from service_core.pki.identity import identity_of
from service_core.storage.private_files import Credentials, FolderLock

Bind = Annotated[str, typer.Option(help="The address that `coordinator serve` is to listen on.")]


def doctor(bind: Bind = "0.0.0.0:8443", home: Home = None, as_json: Json = False) -> None:
    """Look for what keeps the service from its work; changes nothing, and needs no running service. Status 1: found.

    Looks at versions, clock, disk, modes of files, database, certificates, the port, the proxy, and the way to the
    service where it runs.
    """
    patient = _Coordinator(home_of(home), bind)
    raise typer.Exit(checks.report(checks.run_checks(patient.checks()), as_json))


def health(home: Home = None, as_json: Json = False) -> None:
    """Ask the service on this machine whether it can do its work: status 0 if so, else 1."""
    with closing(LeadClient.open(home_of(home))) as client:
        answer = client.health()
    if as_json:
        print_json({"serving": answer.serving, "problems": list(answer.problems), "software": answer.software})
    else:
        typer.echo("serving" if answer.serving else f"not ready: {printable(', '.join(answer.problems))}")
    raise typer.Exit(int(not answer.serving))


@dataclass(frozen=True, slots=True)
class _Coordinator:
    """A coordinator's home under examination, before `coordinator init` too."""

    home: Path
    bind: str

    def checks(self) -> dict[str, Check]:
        found: dict[str, Check] = {
            "version": checks.versions,
            "clock": self._clock,
            "disk": lambda: checks.disk(self.home),
        }
        if not (self.home / "pki").exists():
            none = checks.warning("consortium", f"there is none in {self.home}", "coordinator init NAME --address ...")
            return found | {"consortium": lambda: [none], "port": lambda: checks.port(self.bind)}
        database, pki = self.home / FILE, self.home / "pki"
        beside = [database, *(database.with_name(f"{database.name}-{end}") for end in ("wal", "shm"))]
        return found | {
            "modes": lambda: checks.closed_to_others(self.home, beside, [pki, pki / "ca.key", *self._pems()]),
            "database": lambda: checks.database(database),
            "certificate": self._certificates,
            "service": self._service,
        }

    def _clock(self) -> Iterator[Finding]:
        made = {}
        for path in (self.home / "pki" / "ca.crt", self.home / FILE, self.home / ADDRESS_FILE):
            if path.exists():
                made[str(path)] = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        for path in self._pems():
            pem = path.read_bytes()
            made[f"the certificate in {path.name}"] = identity_of(_certificate_part(pem)).not_before
        return checks.clock(made)

    def _certificates(self) -> Iterator[Finding]:
        authority = Authority.open(self.home)
        ca = certificates.load_certificate(authority.ca_pem, "ca.crt")
        left = ca.not_valid_after_utc - certificates.utc_now()
        remedy = "plan a new consortium: all members join it anew"
        make = checks.problem if left.days < 0 else checks.warning
        found = f"authority: {authority.consortium}, {left.days} days left"
        yield make("certificate", found, remedy) if left.days < 180 else checks.ok("certificate", found)
        for path in self._pems():
            own = certificates.read_bundle(path, authority.ca_pem)
            by_itself = "a running service renews it by itself: coordinator serve"
            renewed = by_itself if path.stem == "server" else "have a new one made before it ends"
            yield from checks.certificate(path.stem, own, renewed)

    def _service(self) -> Iterator[Finding]:
        if not FolderLock.is_held(self.home, LOCK_FILE):
            yield checks.warning("service", "it does not run", "coordinator serve")
            yield from checks.port(self.bind)
            return
        try:
            with closing(LeadClient.open(self.home)) as client:
                about = json.loads((self.home / ADDRESS_FILE).read_text())
                yield checks.ok("service", f"it runs (process {about.get('pid', '?')}) at {client.address}")
                yield from checks.proxy([client.address])
                yield from checks.reachable(client.address, self._lead())
                yield from checks.other_side(client.health(), str(client.address))
        except UnavailableError as error:
            yield checks.problem("service", f"it runs and does not answer ({error})", "look at its log, restart it")

    def _lead(self) -> Credentials:
        path = min((self.home / "pki").glob("lead-*.pem"))
        return certificates.read_bundle(path, Authority.open(self.home).ca_pem)

    def _pems(self) -> list[Path]:
        return sorted((self.home / "pki").glob("*.pem"))


def _certificate_part(pem: bytes) -> bytes:
    return pem[max(0, pem.find(b"-----BEGIN CERTIFICATE-----")) :]
