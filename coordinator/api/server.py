"""The coordinator's service: all of its gRPC services on one port."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.api.admission import LeadsFirst
from coordinator.api.authorization import Authorizer, Context
from coordinator.api.control import ControlService
from coordinator.api.event_loop import EventLoop, Workers
from coordinator.api.interceptor import Interceptor
from coordinator.api.lead import BuildManifest, LeadService
from coordinator.api.limits import Gate, Limits
from coordinator.api.open_streams import OpenStreams
from coordinator.api.transfer import TransferService
from coordinator.lead.client import ADDRESS_FILE
from coordinator.operations.audit_trail import CallAuditTrail
from coordinator.operations.health import HealthService, Readiness
from coordinator.operations.metrics import CoordinatorMetrics
from coordinator.pki.authority import Authority
from coordinator.pki.leads import Leads
from coordinator.pki.membership import Membership
from coordinator.pki.server_certificate import ServerCertificate, server_credentials
from coordinator.runs import run_facts
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.scheduler import PARALLEL_RUNS, RunScheduler
from coordinator.runs.services import Services
from coordinator.runs.workers import ProcessWorker, RunWorkers, Start
from coordinator.storage.store import OBJECTS, WEIGHTS, CoordinatorStore, lock_home
from coordinator.storage.uploads import QUOTA_BYTES, UploadRegistry
from coordinator.storage.weights import WeightsUploads
from fl_core.errors import FederationError, StateError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.channel_options import server_options
from service_core.loopback import LoopbackAddress
from service_core.operations import checks
from service_core.pki.identity import Address
from service_core.storage import private_files
from service_core.storage.object_store import ObjectStore
from service_core.version import PROTOCOL, software

if TYPE_CHECKING:  # the web server is loaded only for metrics
    from service_core.operations.metrics_endpoint import MetricsEndpoint

log = logging.getLogger(__name__)
_SERVICES = ("Enrolment", "Control", "Transfer", "Lead")
_MEMBER_THREADS, _LEAD_THREADS, _SESSION_THREADS = 8, 4, 4
_MAINTENANCE_S = 5.0
_LEAST_DESCRIPTORS, _FEW_DESCRIPTORS = 256, 4096
_MAX_CONNECTIONS = 1 << 20
_OWN_DESCRIPTORS = 1024
"""File descriptors reserved for the service's own files: databases, objects, logs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """An operator's settings.

    Attributes:
        pulse_s, recycle_s: seconds between pulses, and until a silo opens a new session
        parallel_runs: concurrent runs
        quota: bytes of unfinished uploads per silo
        limits: per certificate
        metrics: where they are served, if anywhere
        start_worker: starts the worker of a run
        extensions: installed distributions whose methods and models runs may use
    """

    pulse_s: float = 5.0
    recycle_s: float = 300.0
    parallel_runs: int = PARALLEL_RUNS
    quota: int = QUOTA_BYTES
    limits: Limits = field(default_factory=Limits)
    software: str = field(default_factory=software)
    metrics: LoopbackAddress | None = None
    start_worker: Start = ProcessWorker
    extensions: Sequence[str] = ()


class CoordinatorServer:
    """The service over one home folder: database, objects, authority.

    Guarantees: two services never share a home; neither a stop nor a crash loses anything.
    """

    def __init__(
        self, home: Path, bind: str, build_manifest: BuildManifest | None = None, settings: Settings | None = None
    ) -> None:
        """Prepare a service; it listens after `start`.

        bind: `host:port`, port 0: chosen by the system   build_manifest: by default a worker builds manifests.
        """
        self.home = home
        self.bind = bind
        self.settings = settings or Settings()
        self._build_manifest = build_manifest
        self._lock: private_files.FolderLock | None = None
        self._stopping = threading.Event()
        self._maintenance: threading.Thread | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._loop = EventLoop()
        self.metrics = CoordinatorMetrics()
        self._members, self._leads = Workers(_MEMBER_THREADS, "member"), Workers(_LEAD_THREADS, "lead")
        self._sessions = Workers(_SESSION_THREADS, "session")

    def start(self) -> int:
        """Start the service, resume its runs and return the port.

        Raises StateError: E-STATE-20 if another service uses this home, E-NET-20 if the address cannot be used,
        E-STATE-63 if too few files may be open; ConfigError (E-CFG-01) if an extension cannot be loaded.
        """
        consortium = Authority.open(self.home).consortium
        self._connections = _connections_of(_raise_descriptor_limit())
        self._lock = lock_home(self.home)
        self._loop.start()
        try:
            self.store = CoordinatorStore(self.home)
            self.objects = ObjectStore(self.home / OBJECTS, sharded=True)
            self.uploads = UploadRegistry(self.home / "blobs", self.settings.quota)
            self.dispatcher = Dispatcher(self.store, self.settings.pulse_s, self.metrics.round_closed)
            self._trail = CallAuditTrail.of(self.home, consortium)
            signer, record = ServerCertificate(self.home).current, self._trail.recorder.record
            roster = Membership(self.home, self.store).roster
            services = Services(self.store, self.objects, self.dispatcher, signer, record, roster)
            workers = RunWorkers(self.store, self.objects, self.settings.start_worker, self.settings.extensions)
            self.runs = RunScheduler(services, self.uploads, workers, self.settings.parallel_runs)
            Leads(self.home, self.store).adopt()
            run_facts.complete(self.store.runs)
            self._load_extensions()
            self._readiness = Readiness(self.store.database.path, self.runs.lives, self.settings.pulse_s)
            self.metrics_at = self._serve_metrics()
            port = self._loop.run(self._serve(consortium))
        except BaseException:
            self._close_metrics()
            self._loop.close()
            self._lock.close()
            raise
        self._trail.recorder.start()
        self.runs.resume_all()
        self._maintenance = threading.Thread(target=self._run_maintenance, name="maintenance", daemon=True)
        self._maintenance.start()
        about = {"address": _with_port(self.bind, port), "port": port, "pid": os.getpid(), "started": time.time()}
        private_files.write_public(self.home / ADDRESS_FILE, json.dumps(about).encode())
        log.info("listening on %s", about["address"])
        return port

    def _load_extensions(self) -> None:
        """Log the extensions that runs may use; raises ConfigError (E-CFG-01) if one cannot be loaded."""
        if self.settings.extensions:
            with self.runs.workers.opening() as worker:
                for extension in worker.extensions:
                    log.info("runs may use the %s", extension)

    def stop(self, grace: float = 5.0) -> None:
        """Interrupt the runs, end the sessions, and give running calls `grace` seconds."""
        self._stopping.set()
        self._readiness.stop()
        self._close_metrics()
        (self.home / ADDRESS_FILE).unlink(missing_ok=True)
        self.runs.stop(grace)
        self.dispatcher.close()
        self.end_calls(grace)
        if self._maintenance is not None:
            self._maintenance.join(grace)
        try:
            self.dispatcher.store_last_seen()
        except FederationError as error:
            log.error("cannot store when hospitals were last connected: %s", error)
        finally:
            self.store.close()
            if self._lock is not None:
                self._lock.close()

    def end_calls(self, grace: float) -> None:
        """Accept no more calls, cancel those that last longer than `grace` seconds, and end the event loop."""
        # gRPC never ends a call whose message could not be read.
        with suppress(TimeoutError):
            self._loop.run(self._grpc.stop(grace), 2 * grace + 1)
        self._loop.close()
        for workers in (self._members, self._leads, self._sessions, self._streams):
            workers.close()
        self._trail.recorder.close()

    def _serve_metrics(self) -> LoopbackAddress | None:
        """Serve metrics if configured; return their address."""
        if self.settings.metrics is None:
            return None
        certificate, about = ServerCertificate(self.home).current, self.settings.software
        self.metrics.watch(self.home, self.store, self.dispatcher, self._readiness, certificate, about)
        from service_core.operations.metrics_endpoint import MetricsEndpoint

        self._endpoint = MetricsEndpoint(self.metrics.registry, self._readiness.lives, self._readiness.problems)
        address = self._endpoint.open(self.settings.metrics)
        log.info("metrics on http://%s/metrics", address)
        return address

    def _close_metrics(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    async def _serve(self, consortium: str) -> int:
        authorizer = Authorizer(consortium, self.store.members, self.dispatcher.note_refusal)
        gate = Gate(self.settings.limits)
        self._leads_first = LeadsFirst()
        self._streams = OpenStreams(authorizer, min(self.settings.pulse_s, self.settings.limits.check_s))
        calls = Interceptor(
            authorizer, gate, self._members, self._leads, self._trail, self.metrics, self._streams, self._leads_first
        )
        self._grpc = grpc.aio.server(
            interceptors=[calls],
            # Further connections are closed at once: the service's own files need descriptors.
            options=(
                *server_options(self.settings.limits.window),
                ("grpc.max_allowed_incoming_connections", self._connections),
            ),
        )
        self._add_services(authorizer)
        self._add_standard_services()
        port = self._listen()
        await self._grpc.start()
        return port

    def _add_services(self, authorizer: Authorizer) -> None:
        server, limits = self._grpc, self.settings.limits
        membership = Membership(self.home, self.store)
        rpc.add_EnrolmentServicer_to_server(EnrolmentService(authorizer, membership), server)
        welcome = pb.Welcome(
            protocol=PROTOCOL,
            software=self.settings.software,
            pulse_seconds=self.settings.pulse_s,
            recycle_seconds=self.settings.recycle_s,
        )
        control = ControlService(
            authorizer, self.dispatcher, membership, self._sessions, limits, welcome, self._streams
        )
        rpc.add_ControlServicer_to_server(control, server)
        transfer = TransferService(
            authorizer,
            self.store,
            self.objects,
            self.uploads,
            self.dispatcher,
            ServerCertificate(self.home),
            self._members,
            self._leads,
            limits,
            self._leads_first,
            self.runs.workers.check,
        )
        rpc.add_TransferServicer_to_server(transfer, server)
        lead = LeadService(
            authorizer,
            self.store,
            self.dispatcher,
            self.runs,
            self._build_manifest or self.runs.workers.build,
            self._leads,
            WeightsUploads(self.home / WEIGHTS, self.objects, self.store.contributions.referenced_digests),
            limits.put_idle_s,
            ServerCertificate(self.home).current,
        )
        rpc.add_LeadServicer_to_server(lead, server)

    def _add_standard_services(self) -> None:
        names = [pb.DESCRIPTOR.services_by_name[name].full_name for name in _SERVICES]
        health_service = HealthService(names, self._readiness, self.settings.software)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, self._grpc)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._grpc)

    def _listen(self) -> int:
        try:
            checks.try_to_bind(self.bind)  # reports the system's reason; gRPC would not
            port = self._grpc.add_secure_port(self.bind, server_credentials(self.home))
        except (OSError, RuntimeError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise StateError(
                "E-NET-20",
                f"cannot listen on {self.bind} ({why}): another program uses the port, or this machine does not "
                "have the address. Choose another with --bind",
            ) from error
        return int(port)

    def _run_maintenance(self) -> None:
        """Fail the tasks of revoked silos, store who left, check the service's health, and trim the log."""
        while not self._stopping.wait(min(self.settings.pulse_s, _MAINTENANCE_S)):
            try:
                self.dispatcher.fail_revoked_tasks()
                self.dispatcher.store_last_seen()
                self._readiness.look()
                self.runs.workers.rest()
                self.store.database.shorten_log()
                _give_memory_back()
            except Exception:  # the next attempt may succeed; this thread must not end unnoticed
                log.exception("unexpected error during maintenance")


def _give_memory_back() -> None:
    """Have glibc return freed memory to the system: by itself it would keep the most that a round ever needed."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _raise_descriptor_limit() -> int:
    """Raise the descriptor limit as far as the system allows, and return it: every connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < _LEAST_DESCRIPTORS:
        raise StateError(
            "E-STATE-63",
            f"this process may open only {soft} files and connections, and needs at least {_LEAST_DESCRIPTORS}: "
            f"raise the limit (LimitNOFILE in its unit, or ulimit -n {_LEAST_DESCRIPTORS}), then start the service "
            "again",
        )
    if soft != resource.RLIM_INFINITY and soft < _FEW_DESCRIPTORS:
        log.warning("this process may open only %d files and connections: raise its LimitNOFILE", soft)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft


def _connections_of(descriptors: int) -> int:
    """Return a connection limit that leaves descriptors for the service's own files."""
    reserved = min(_OWN_DESCRIPTORS, descriptors // 2)
    return max(1, min(descriptors - reserved, _MAX_CONNECTIONS))


def _with_port(bind: str, port: int) -> str:
    host = bind.rpartition(":")[0]
    return str(Address(host.strip("[]"), port))


# ---- enrolment -------------------------------------------------------------------------------------------------------

audit = logging.getLogger("consilium.audit")


class EnrolmentService(rpc.EnrolmentServicer):
    """Join and Renew."""

    def __init__(self, authorizer: Authorizer, membership: Membership) -> None:
        self._authorizer = authorizer
        self._membership = membership

    def Join(self, request: pb.JoinRequest, context: Context) -> pb.Membership:  # noqa: N802
        """Sign the request of an invited silo; the same request gets the same certificate until its first use."""
        peer = self._authorizer.caller(context)
        made = self._membership.join(peer, request.csr_pem, request.renewal_proof)
        audit.info("%s enrolled from %s", peer.identity.name, context.peer())
        return made

    def Renew(self, request: pb.RenewRequest, context: Context) -> pb.Membership:  # noqa: N802
        peer = self._authorizer.caller(context)
        made = self._membership.renew(peer, request.csr_pem, request.renewal_proof)
        audit.info("%s renewed its certificate", peer.identity.name)
        return made
