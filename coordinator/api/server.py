"""The coordinator's service: all of its gRPC services on one port."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.api.authorization import Authorizer
from coordinator.api.control import ControlService
from coordinator.api.enrolment import EnrolmentService
from coordinator.api.interceptor import Interceptor
from coordinator.api.lead import BuildManifest, LeadService
from coordinator.api.transfer import TransferService
from coordinator.paths import ADDRESS_FILE, LOCK_FILE
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.pki.server_certificate import ServerCertificate, server_credentials
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.scheduler import PARALLEL_RUNS, RunScheduler
from coordinator.storage.store import Store
from coordinator.storage.uploads import QUOTA_BYTES, UploadRegistry
from fl_core.errors import StateError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.pki.identity import Address
from protos.storage import private_files
from protos.storage.object_store import ObjectStore
from protos.wire.channel_options import SERVER_OPTIONS

log = logging.getLogger(__name__)
_SERVICES = ("Enrolment", "Control", "Transfer", "Lead")
_MIN_THREADS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may set.

    pulse_s, recycle_s: seconds between heartbeats, and until a silo opens a new session; parallel_runs: runs under
    way at once; quota: bytes of unfinished uploads per silo.
    """

    pulse_s: float = 5.0
    recycle_s: float = 300.0
    parallel_runs: int = PARALLEL_RUNS
    quota: int = QUOTA_BYTES
    software: str = "consilium-fl"


class CoordinatorServer:
    """The service over one home folder: database, objects, authority.

    Guarantees: two services never share a home; a stop loses nothing, and neither does a crash.
    """

    def __init__(self, home: Path, bind: str, build_manifest: BuildManifest, settings: Settings | None = None) -> None:
        """Prepare a service; it listens once `start` was called. bind: `host:port`, port 0: chosen by the system."""
        self.home = home
        self.bind = bind
        self.settings = settings or Settings()
        self._build_manifest = build_manifest
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self._maintenance: threading.Thread | None = None

    def start(self) -> int:
        """Start the service, resume its runs and return the port.

        Raises StateError: E-STATE-20 when another service uses this home, E-NET-20 when the address cannot be used.
        """
        consortium = Authority.open(self.home).consortium
        self._lock = _lock(self.home / LOCK_FILE)
        try:
            self.store = Store(self.home)
            self.objects = ObjectStore(self.home / "blobs" / "objects", sharded=True)
            self.uploads = UploadRegistry(self.home / "blobs", self.settings.quota)
            self.dispatcher = Dispatcher(self.store, self.settings.pulse_s)
            self.runs = RunScheduler(
                self.store, self.objects, self.uploads, self.dispatcher, self.settings.parallel_runs
            )
            self.grpc = self._build(consortium)
            port = self._listen()
        except BaseException:
            self._lock.close()
            raise
        self.grpc.start()
        self.runs.resume_all()
        self._maintenance = threading.Thread(target=self._run_maintenance, name="maintenance", daemon=True)
        self._maintenance.start()
        about = {"address": _with_port(self.bind, port), "port": port, "pid": os.getpid(), "started": time.time()}
        private_files.write_public(self.home / ADDRESS_FILE, json.dumps(about).encode())
        log.info("listening on %s", about["address"])
        return port

    def stop(self, grace: float = 5.0) -> None:
        """Leave the runs where they are, end the sessions, and give calls under way `grace` seconds."""
        self._stopping.set()
        (self.home / ADDRESS_FILE).unlink(missing_ok=True)
        self.runs.stop(grace)
        self.dispatcher.close()
        # Calls are cancelled after the grace; gRPC never counts one as ended whose message could not be read.
        self.grpc.stop(grace).wait(2 * grace)
        if self._maintenance is not None:
            self._maintenance.join(grace)
        self.store.close()
        if self._lock is not None:
            self._lock.close()

    def _build(self, consortium: str) -> grpc.Server:
        authorizer = Authorizer(consortium, self.store.members, self.dispatcher.note_refusal)
        membership = Membership(self.home, self.store)
        # A session, a watch or a transfer holds a thread each: 4 per silo, and room for those that will be invited.
        threads = max(_MIN_THREADS, 32 + 4 * len(self.store.members.silos()))
        server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
            interceptors=[Interceptor(authorizer)],
            options=SERVER_OPTIONS,
        )
        certificate = ServerCertificate(self.home)
        rpc.add_EnrolmentServicer_to_server(EnrolmentService(authorizer, membership), server)
        control = ControlService(
            authorizer, self.dispatcher, membership, self.settings.software, self.settings.recycle_s
        )
        rpc.add_ControlServicer_to_server(control, server)
        transfer = TransferService(authorizer, self.store, self.objects, self.uploads, self.dispatcher, certificate)
        rpc.add_TransferServicer_to_server(transfer, server)
        rpc.add_LeadServicer_to_server(
            LeadService(authorizer, self.store, self.dispatcher, self.runs, self._build_manifest), server
        )
        names = [pb.DESCRIPTOR.services_by_name[name].full_name for name in _SERVICES]
        alive = health.HealthServicer()
        for name in ("", *names):
            alive.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(alive, server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        return server

    def _listen(self) -> int:
        try:
            port = self.grpc.add_secure_port(self.bind, server_credentials(self.home))
        except RuntimeError as error:
            port, cause = 0, f" ({error})"
        else:
            cause = ""
        if port == 0:
            raise StateError(
                "E-NET-20",
                f"expected to listen on {self.bind}, found that this cannot be{cause}: another program has the port, "
                "or the address is none of this machine's; choose another with --bind",
            )
        return int(port)

    def _run_maintenance(self) -> None:
        """Fail the tasks of revoked silos, once per heartbeat."""
        while not self._stopping.wait(self.settings.pulse_s):
            try:
                self.dispatcher.fail_revoked_tasks()
            except Exception:  # the next attempt may succeed; if this thread ended, nobody would notice
                log.exception("maintenance met an unexpected error")


def _lock(path: Path) -> IO[str]:
    """Take the lock of a home; the system gives it back when the process ends, however it ends."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StateError(
            "E-STATE-20", f"expected {path.parent} to be free, found another coordinator running on it: stop that one"
        ) from None
    return file


def _with_port(bind: str, port: int) -> str:
    host = bind.rpartition(":")[0]
    return str(Address(host.strip("[]"), port))
