"""The checks of `silo doctor`. They find problems that keep a hospital's service from taking part in runs."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_core.errors import FederationError
from protos.wire.status import from_status
from service_core.console import pluralize
from service_core.operations import checks
from service_core.operations.checks import Check, Finding
from service_core.operations.health import HealthAnswer
from service_core.pki import certificates
from service_core.pki.identity import Address, identity_of
from service_core.pki.invitation import InvitationToken
from service_core.storage.chain import ChainHead
from service_core.storage.generation import open_untouched
from service_core.storage.private_files import Credentials
from silo.connection.channel import connect_with
from silo.identity.identity import SiloIdentity
from silo.operations.liveness import Health
from silo.service.launchers import LOCAL, SLURM, Launcher
from silo.storage.home import Home
from silo.storage.tasks import Attestation, ledger_position
from silo.worker import cage

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Examination:
    """All checks of one home. data, device: None skips their checks, and so the import of torch.

    invitation: used to test the connection before joining; it stays valid   network: False opens no connection.
    """

    home: Home
    data: str | None = None
    data_root: Path | None = None
    classes: list[str] | None = None
    device: str | None = None
    invitation: InvitationToken | None = None
    network: bool = True

    def checks(self) -> dict[str, Check]:
        checks_by_name: dict[str, Check] = {
            "version": checks.versions,
            "clock": self._clock,
            "disk": lambda: checks.disk(self.home.path),
            "home": lambda: checks.interrupted_command(self.home.path),
            "identity": self._identity,
        }
        if SiloIdentity(self.home.path).joined:
            checks_by_name |= {
                "modes": self._modes,
                "database": lambda: checks.database(self.home.database, self._rehearse),
            }
        checks_by_name |= {"network": self._network} if self.network else {}
        checks_by_name |= {
            "policy": self._policy,
            "ledger": self._ledger,
            "private runs": self._private_runs,
            "features": self._features,
            "worker": self._worker,
            "runs": self._runs,
        }
        checks_by_name |= {"PACS": self._pacs} if self.home.pacs.exists() else {}
        if self.data is not None:
            checks_by_name["data"] = self._data
        if self.device is not None:
            checks_by_name["device"] = self._device
        return checks_by_name

    # ---- this home ---------------------------------------------------------------------------------------------

    def _clock(self) -> Iterator[Finding]:
        made, identity = {}, SiloIdentity(self.home.path)
        for path in (self.home.database, self.home.ledger):
            if path.exists():
                made[str(path)] = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        if identity.joined:
            credentials = identity.current_credentials()
            made["this silo's certificate"] = identity_of(credentials.cert_pem).not_before
            authority = certificates.load_certificate(credentials.ca_pem, "the pinned authority")
            made["the consortium's authority"] = authority.not_valid_before_utc
        return checks.clock(made)

    def _identity(self) -> Iterator[Finding]:
        identity = SiloIdentity(self.home.path)
        if not identity.joined:
            yield checks.warning(
                "identity", f"{self.home.path} has not joined a consortium", "silo join --token-file FILE"
            )
            return
        remedy = "a running service renews it by itself (silo serve); once expired: coordinator invite NAME --again"
        yield from checks.certificate("certificate", identity.current_credentials(), remedy)
        running = self.home.is_locked()
        stopped = checks.warning("service", "it is not running", "silo serve --data REF")
        yield checks.ok("service", f"it runs on {self.home.path}") if running else stopped

    def _rehearse(self) -> None:
        """Open a copy of the database, and read the same tables as the service."""
        from silo.storage.store import SiloStore

        store = SiloStore(self.home.database, rehearsal=True)
        try:
            for read in (store.history, store.outbox, store.approvals.all):
                read()
        finally:
            store.close_database()

    def _modes(self) -> Iterator[Finding]:
        database, ledger = self.home.database, self.home.ledger
        beside = [path.with_name(f"{path.name}{end}") for path in (database, ledger) for end in ("", "-wal", "-shm")]
        identity = self.home.path / "identity"
        keys = [self.home.ledger_key, identity, identity / "silo.pem", identity / "key.next"]
        return checks.file_modes(self.home.path, beside, keys)

    def _policy(self) -> Iterator[Finding]:
        from privacy.policy import Policy

        policy = Policy.read(self.home.policy)
        if not policy.digest and self.home.had_policy.exists():
            yield checks.problem("policy", f"{self.home.policy} was removed", "put it back")
            return
        if not policy.digest:
            yield checks.warning(
                "policy",
                "there is no policy file: any run without privacy is accepted, and private ones up to epsilon 8",
                "write policy.toml; docs/privacy says what it can refuse",
            )
            return
        facts = f"epsilon up to {policy.privacy.epsilon:g}, approval {policy.runs.approve}"
        if policy.privacy.rng == "test":
            yield checks.problem(
                "policy", "it accepts reproducible noise, which does not protect", 'set rng = "secure"'
            )
        elif not policy.privacy.require:
            yield checks.warning(
                "policy", f"it also accepts runs without privacy ({facts})", "set require to a profile"
            )
        else:
            yield checks.ok("policy", f"only {policy.privacy.require}, {facts}")

    @contextmanager
    def _ledger_copy(self) -> Iterator[Ledger]:
        """Open a copy of the ledger as the service would: opening may migrate it to a new version."""
        from privacy.ledger.event_chain import schema_version
        from privacy.ledger.ledger import Ledger

        file, key = self.home.ledger, self.home.ledger_key
        with TemporaryDirectory(prefix=".rehearsal-", suffix=".tmp", dir=self.home.path) as folder:
            copy = Path(folder, file.name)
            with closing(open_untouched(file)) as live, closing(sqlite3.connect(copy)) as target:
                live.backup(target)
                first_key = schema_version(live) == 1 and not key.exists()
            yield Ledger(copy, None if first_key else key)

    def _ledger(self) -> Iterator[Finding]:
        file = self.home.ledger
        seen = self._attested()
        if not file.exists():
            missing = f"there is none in {file}"
            if seen.seq:
                yield checks.problem("ledger", f"{missing}, and others have seen {seen.seq} events", "put it back")
            else:
                yield checks.ok("ledger", f"{missing}; private runs need one: silo ledger register")
            return
        with self._ledger_copy() as ledger:
            count = ledger.verify(ChainHead(seen.seq, seen.head))
        yield checks.ok("ledger", f"{count} events, unbroken; others saw event {seen.seq}")

    def _private_runs(self) -> Iterator[Finding]:
        """List everything that a private run would still need here, each with its command."""
        from privacy.policy import Policy
        from silo.admission.private_readiness import missing_requirements

        with self._ledger_copy() if self.home.ledger.exists() else nullcontext() as ledger:
            missing = missing_requirements(Policy.read(self.home.policy), ledger, self.classes or ())
        for what, remedy in missing:
            if what == "classes declared":
                remedy += ", or silo serve --holds A,B,..."
            yield checks.warning("private runs", f"lacks {what}", remedy)
        if not missing:
            yield checks.ok("private runs", "data registered, budgets set, classes declared")

    def _features(self) -> Iterator[Finding]:
        from silo.storage.feature_cache import FeatureCache

        files = FeatureCache(self.home.features, 0).files()
        if damaged := [file.path.name for file in files if not file.sound]:
            remedy = "no action needed: they are computed again when a run needs them"
            yield checks.warning("features", f"{damaged[0]} is damaged", remedy)
        sound = [file for file in files if file.sound]
        size, lost = sum(file.size for file in files), sum(file.left_out for file in sound)
        text = f"{pluralize(len(sound), 'set')} of features kept, {size / 2**20:.0f} MiB"
        if lost:
            yield checks.warning(
                "features", f"{text}; {pluralize(lost, 'example')} left out that cannot be read", "silo data check REF"
            )
        else:
            yield checks.ok("features", text)

    def _pacs(self) -> Iterator[Finding]:
        """Count the images that were fetched, and those left out according to left-out.csv."""
        images = [image for image in self.home.pacs.glob("*/*.dcm") if image.is_file()]
        size = sum(image.stat().st_size for image in images)
        lists = [file for file in self.home.pacs.glob("*/left-out.csv") if file.is_file()]
        left = sum(max(0, len(file.read_bytes().splitlines()) - 1) for file in lists)
        text = f"{pluralize(len(images), 'image')} fetched, {size / 2**20:.0f} MiB"
        if left:
            yield checks.warning("PACS", f"{text}; {left} left out", f"{self.home.pacs}/*/left-out.csv says why")
        else:
            yield checks.ok("PACS", text)

    def _worker(self) -> Iterator[Finding]:
        """Report the isolation of the process that reads images, or test it as this user if no worker has run."""
        health, served = Health.of(self.home), self.home.served()
        launcher = Launcher.of(served.launcher if served is not None else LOCAL, self.home)
        if health.queue or (health.walls is None and not launcher.local):
            text = "; ".join(health.worker()) or f"it is started by {launcher.words[0] if launcher.words else SLURM}"
            remedy = "its isolation is tested when a worker starts, on the machine where it runs: run this again then"
            yield checks.warning("worker", text, remedy)
            return
        walls = health.walls or cage.rehearse([self.home.path] if self.home.path.exists() else [])
        text = "; ".join(health.worker() or walls.sentences())
        if not any(walls):
            yield checks.ok("worker", text)
        else:
            yield checks.warning("worker", text, "docs/operations/install.md says what each mechanism needs")

    def _runs(self) -> Iterator[Finding]:
        """Report the kinds of run that can be computed here, and the missing software for the others."""
        from fl_core.rounds.torch_need import abilities

        text, missing = abilities()
        yield checks.ok("runs", text)
        for what, command in missing.items():
            yield Finding("runs", checks.FindingLevel.OK, f"not {what}", command)

    def _attested(self) -> Attestation:
        """Return the newest attestation of the ledger that this home sent, or received back from the coordinator."""
        attestations = [Attestation()]
        with suppress(OSError, ValueError, TypeError):  # the coordinator has sent no attestation to this home
            attestations.append(Attestation(*json.loads(self.home.attested.read_text())))
        if self.home.database.exists():
            with (
                suppress(sqlite3.Error, ValueError, TypeError),  # the check of the database reports it
                closing(open_untouched(self.home.database)) as db,
            ):
                rows = db.execute("SELECT attested FROM tasks WHERE attested <> ''").fetchall()
                attestations += [Attestation(*json.loads(row[0])) for row in rows]
        return max(attestations, key=ledger_position)

    # ---- the way to the coordinator ----------------------------------------------------------------------------

    def _network(self) -> Iterator[Finding]:
        identity = SiloIdentity(self.home.path)
        if identity.joined:
            credentials, addresses = identity.current_credentials(), self.home.addresses()
        elif self.invitation is not None:
            credentials, addresses = self.invitation.credentials, self.invitation.addresses
        else:
            remedy = "silo doctor --token-file FILE tests the connection before you join"
            yield checks.warning("network", "not checked: the coordinator's address is not known yet", remedy)
            return
        yield from checks.proxy(addresses)
        for address in addresses:
            way = list(checks.reachable(address, credentials))
            yield from way
            if identity.joined and way[0].level is checks.FindingLevel.OK:
                yield from self._coordinator(address, credentials)

    def _coordinator(self, address: Address, credentials: Credentials) -> Iterator[Finding]:

        try:
            yield from checks.other_side(ask(address, credentials), str(address))
        except FederationError as error:
            yield checks.problem("coordinator", f"{address} refuses this silo: {error}", "ask the lead")

    # ---- what computes -------------------------------------------------------------------------------------------

    def _data(self) -> Iterator[Finding]:
        from fl_core import datasets
        from silo.pacs.mirror import resolved

        assert self.data is not None
        examined = datasets.check(
            resolved(self.home, self.data),
            datasets.DataRequest(self.classes),
            data_root=self.data_root,
            deep=True,
        )
        counts = ", ".join(f"{sum(n)} {split.value}" for split, n in examined.counts.items())
        for wrong in examined.problems:
            yield checks.problem("data", f"{wrong.code}: {wrong.count} times: {wrong.what}", wrong.remedy)
        if not examined.problems:
            yield checks.ok("data", f"{examined.origin}: {counts}; every image was decoded")

    def _device(self) -> Iterator[Finding]:
        from fl_core.tensors import torch
        from fl_core.training.devices import choose_device

        assert self.device is not None
        device = choose_device(self.device)
        if device.type != "cuda":
            if torch.version.cuda is not None and not torch.cuda.is_available():
                yield checks.ok("device", f"{device}; this torch supports GPUs and finds none")
            else:
                yield checks.ok("device", str(device))
            return
        free, total = torch.cuda.mem_get_info(device)
        text = f"{device}: {torch.cuda.get_device_name(device)}, {free >> 20} of {total >> 20} MiB free"
        if free < total // 4:
            yield checks.warning("device", text, "end the other programs on this GPU, or choose another with --device")
        else:
            yield checks.ok("device", text)


# ---- what the coordinator says of itself -----------------------------------------------------------------------------

_ASK_S = 10.0


def ask(address: Address, credentials: Credentials) -> HealthAnswer:
    """Query a coordinator's health; raises FederationError if it refuses or does not answer."""
    with closing(connect_with(lambda: credentials)(address)) as channel:
        stub, start = health_pb2_grpc.HealthStub(channel), time.time()
        check = stub.Check  # type: ignore[attr-defined]  # set in __init__, which the stub does not show
        try:
            answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=_ASK_S)
        except grpc.RpcError as error:
            raise _explained(error) from None
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return HealthAnswer.of(serving, call.trailing_metadata() or (), start, time.time())


def _explained(error: grpc.RpcError) -> FederationError:
    assert isinstance(error, grpc.Call)
    return from_status(error.code().name, error.details())
