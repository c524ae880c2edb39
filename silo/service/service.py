"""`silo serve`: the threads of one hospital's service, how they start and how they end.

The audit log records the requests to the service, its actions, and the ends of both sides' logs, which are exchanged
with an update. Its lines are made of facts, never of an event's text: they contain no measurement, path or reason of
the hospital.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fl_core.errors import FederationError, StateError
from privacy.policy_terms import PRIVATE_PROFILES, REQUIRED
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import log_heads
from service_core.audit_log.lines import ALLOWED, REFUSED, LogEntry
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.audit_log.recorder import Recorder
from service_core.loopback import LoopbackAddress
from service_core.pki.identity import Address, CertificateRole, Identity
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import private_folder
from service_core.tls.causes import Diagnosis
from service_core.version import PROTOCOL, software
from silo.admission.policy_in_force import accepts_new_peers
from silo.admission.rules import HospitalRules
from silo.cancellation import CancelledError, CancelToken
from silo.connection.channel import Connect, ConnectionManager, connect_with, diagnose_with
from silo.connection.control_client import ControlClient
from silo.connection.transfer import ReceiptVerifier, RetryPolicy, Transfer
from silo.events import EmitEvent, SiloEvent, error_event, event
from silo.identity.identity import SiloIdentity
from silo.operations.metrics import SiloMetrics
from silo.pacs import mirror
from silo.pacs.mirror import Mirror
from silo.service.enrolment import MembershipMaintainer, pinned_version
from silo.service.launchers import Launcher
from silo.service.secagg import SecaggMember, SessionHandler
from silo.service.task_queue import TaskQueue
from silo.service.task_runner import ResponseTiming, TaskRunner
from silo.service.workers import CagedWorkers, ThreadWorker, Worker
from silo.settings import SiloSettings
from silo.storage.outbox import Outbox
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation
from silo.worker.exchange import Description

if TYPE_CHECKING:  # the web server is loaded only for metrics, and only a worker loads torch
    from service_core.operations.metrics_endpoint import MetricsEndpoint
    from silo.training.trainer import RunRound

RENEWAL_CHECK_S = 60.0
POLL_S = 0.2


class Service:
    """One running silo. `start`, then `wait`; `stop` ends it in good order; `error` is set if it ended otherwise.

    connect, diagnose: replaced in tests without TLS   run_round: replaces the arithmetic of a round in tests
    and benchmarks, which then runs in a thread of the service instead of a worker in a cage
    clock: for the rate of preflights and the times of answers.
    """

    metrics_at: LoopbackAddress | None = None
    """Where metrics are served, after the start."""
    _endpoint: MetricsEndpoint | None = None
    _pinned: int = 0
    _about: Description | None = None

    def __init__(
        self,
        settings: SiloSettings,
        emit: EmitEvent,
        retry_policy: RetryPolicy | None = None,
        connect: Connect | None = None,
        diagnose: Callable[[Address], Diagnosis] | None = None,
        run_round: RunRound | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retry_policy = retry_policy or RetryPolicy()
        self._settings, self._launcher = settings, Launcher.of(settings.launcher, settings.home)
        self._launcher.take_over()
        self._identity = SiloIdentity(settings.home.path)
        this_silo = self._identity.load().identity
        self._trail = SiloAuditTrail.of(settings.home.path, self._identity)
        self.metrics = SiloMetrics()
        self._emit = emit = self.metrics.counting(self._trail.recording(emit))
        self.name, self._consortium = this_silo.name, this_silo.consortium
        self._timing = ResponseTiming(settings.answer_after, settings.pulse_floor, clock)
        self.store = SiloStore(settings.home.database, wal=self._launcher.local)
        self._pacs = Mirror.of(settings.home, settings.data, emit=emit, caged=self._must_be_caged)
        mirror.forget(settings.home, but=self._pacs)
        self._controls, worker = self._make_worker(run_round)
        self._instance = settings.home.begin_instance()
        credentials = self._identity.current_credentials
        serial = lambda: self._identity.load().serial  # noqa: E731
        connections = ConnectionManager(settings.home.addresses(), connect or connect_with(credentials), serial)
        session_opened = threading.Event()
        self._client = ControlClient(
            connections,
            self.store,
            self._hello,
            self._on_welcome,
            diagnose or diagnose_with(credentials),
            emit,
            self._retry_policy,
            session_opened,
            pulse_floor=self._timing.pulse_floor,
        )
        self._membership = MembershipMaintainer(
            self._identity,
            connections,
            emit,
            self._client.renewed,
            accepts_new=lambda: accepts_new_peers(settings.home),
        )
        objects = ObjectStore(private_folder(settings.home.objects))
        self._queue = TaskQueue(self.store, self._client.send, emit, clock)
        min_sum = lambda: self._controls.policy().secagg.min_sum  # noqa: E731 - as the policy is when a set comes
        # It is unknown when the roster of a question was read: an older one is ignored, and the newer one stays.
        overtaken = partial(self._membership.apply_roster, pinned=0)
        self._secagg = SecaggMember(self.store, self._identity, min_sum, self._client.send, emit, overtaken)
        self._runner = TaskRunner(
            self._queue,
            Outbox(self.store, objects, self.name),
            self._transfer(connections, objects),
            worker,
            self._controls,
            self._secagg,
            self._receipt_verifier,
            emit,
            self._client.recycle,
            session_opened,
            self._timing,
            lambda receipt: self._trail.keep(receipt, emit),
            self._prepare_data,
        )
        self._stop, self._leaving, self._ended = CancelToken(), threading.Event(), threading.Event()
        self._described, self._describing = threading.Event(), CancelToken()
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start, after a worker has described the data. Waits for that, but not for a job queue or a PACS.

        interrupted: polled; True stops the wait. Raises as `Worker.describe` unless workers queue,
        and StateError: E-NET-20 if metrics cannot be served; E-BUDGET-07, E-BUDGET-08 on a privacy ledger that lacks
        events.
        """
        self._trail.recorder.start()
        self._serve_metrics()
        for entry in self._controls.recover():
            self._emit(
                event(
                    "recovered",
                    f"ledger entry {entry} was unfinished at the restart: its budget counts as spent",
                    facts={"entry": entry},
                )
            )
        self._runner.count_kills("the service")
        self._emit(
            event(
                "privacy",
                "privacy: each run's manifest decides, within this hospital's policy (silo policy show). With "
                "secure aggregation, updates leave under masks and the coordinator reads only sums of at least "
                "three hospitals. Without it, the coordinator reads each update; under the profile 'none' these are "
                "exact float32 numbers without noise. The profiles 'dp_record' and 'dp_silo_small' add noise and "
                "charge the ledger (silo ledger show)",
                facts={"profiles": ", ".join(("none", *PRIVATE_PROFILES)), "policy": self._controls.policy_digest()},
            )
        )
        bodies: dict[str, Callable[[], None]] = {
            "worker": self._do_tasks,
            "client": self._keep_session,
            "membership": self._maintain_membership,
        }
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in bodies.items()
        ]
        for thread in self._threads:
            thread.start()
        if not self._launcher.queues and (self._pacs is None or self._pacs.listed):
            while not self._described.wait(POLL_S) and not interrupted():
                pass
            if self._about is None and self.error is not None:
                self.stop()
                raise self.error

    def _do_tasks(self) -> None:
        try:
            self._prepare_data("", self._describing, lambda *_: None)
            about = self._runner.worker.describe(self._describing)
        except CancelledError:
            return
        except BaseException as error:
            self.error = error
            raise
        else:
            text = f"{self.name} of {self._consortium} serves {about.data.name} data on {about.device}"
            self._emit(event("serving", text, facts={"silo": self.name, "device": about.device}))
            self._runner.worker.announce()
            if about.cache:
                self._emit(event("cache", about.cache))
            self._about = about
        finally:
            self._described.set()
        self._runner.run(self._leaving)

    def _keep_session(self) -> None:
        with self._stop.on_cancel(self._described.set):
            self._described.wait()
        if self._about is not None:
            self._client.run(SessionHandler(self._queue, self._secagg), self._stop)

    def _make_worker(self, run_round: RunRound | None) -> tuple[HospitalRules, Worker]:
        settings, of_home = self._settings, (self._settings.home, self.store, self._identity.ca_fingerprint())
        if run_round is None:
            data_of = (lambda _: settings.data) if self._pacs is None else self._pacs.data
            workers = CagedWorkers(settings, self._launcher, self.name, self._emit, self.metrics.computed, data_of)
            return HospitalRules(*of_home), workers
        from silo.admission.controls import HospitalControls
        from silo.worker.tasks import TaskWork

        controls = HospitalControls(*of_home)
        return controls, ThreadWorker(TaskWork.of(settings, self.store, controls, self.metrics.computed, run_round))

    def _prepare_data(self, run_id: str, stop: CancelToken, progress: Callable[[int, int], None]) -> None:
        if self._pacs is not None:
            under_way = lambda run: self.store.state_of(run) not in ("", "finished", "aborted")  # noqa: E731
            self._pacs.prepare(run_id, stop, progress, under_way)

    def _must_be_caged(self) -> bool:
        return self._controls.policy().worker.isolation == REQUIRED

    def _transfer(self, connections: ConnectionManager, objects: ObjectStore) -> Transfer:
        return Transfer(
            connections.current,
            objects,
            self._retry_policy,
            lambda error: self._emit(error_event(error)),
            self._trail.head,
            *self.metrics.traffic,
        )

    def _serve_metrics(self) -> None:
        settings = self._settings
        if settings.metrics is not None:
            ledger = self._controls.existing_ledger if settings.metrics_budgets else None
            self.metrics.watch(settings.home.path, self.problems, self._identity.current_credentials, ledger)
            from service_core.operations.metrics_endpoint import MetricsEndpoint

            self._endpoint = MetricsEndpoint(self.metrics.registry, self.lives, self.problems)
            self.metrics_at = self._endpoint.open(settings.metrics)
            self._emit(event("metrics", f"metrics on http://{self.metrics_at}/metrics"))

    def lives(self) -> bool:
        """Tell whether all threads are running."""
        return not self._ended.is_set() and bool(self._threads) and all(t.is_alive() for t in self._threads)

    def problems(self) -> tuple[str, ...]:
        """List what keeps this hospital from taking part now."""
        problems = {
            "stopped": not self.lives(),
            "leaving": self._leaving.is_set(),
            "disconnected": not self._client.connected,
        }
        return tuple(word for word, holds in problems.items() if holds)

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def pulse(self) -> pb.Pulse:
        """Return the current activity, as the coordinator may see it."""
        return self._queue.pulse()

    def doing(self) -> pb.Pulse:
        """Return the current activity for the hospital's own screen."""
        return self._queue.local_pulse()

    def leave(self, reason: str) -> None:
        self._queue.close(reason)
        self._leaving.set()
        self._describing.cancel(reason)
        self.store.end_trainings()

    def settled(self, seconds: float) -> bool:
        self._threads[0].join(seconds)
        return not self._threads[0].is_alive()

    def stop(self, reason: str = "the service is stopped") -> None:
        self.leave(reason)
        for thread in self._threads[:1]:
            thread.join()
        if self._endpoint is not None:
            self._endpoint.close()
        self._stop.cancel(reason)
        for thread in self._threads[1:]:
            thread.join()
        self.store.close_database()
        self._trail.recorder.close()

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a thread; if it ends unexpectedly, the service ends."""
        try:
            body()
        except BaseException as error:
            self.error = self.error or error
        finally:
            if not self._leaving.is_set():
                self._ended.set()

    def _maintain_membership(self) -> None:
        while not self._stop.is_cancelled:
            self._membership.renew_if_due()
            self._stop.wait(RENEWAL_CHECK_S)

    def _hello(self) -> pb.Hello:
        self._pinned = pinned_version(self._identity)
        return pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            software=software(),
            data=self._declared_data(),
            staged=[e.key.ref for e in self.store.outbox() if not self._timing.holds((e.key, e.base_digest))],
            policy_digest=self._controls.policy_digest(),
            roster_version=self._pinned,
            instance=self._instance.id,
            previous_instance=self._instance.previous,
            masked_answers=self.store.answers.masked_answers(),
        )

    def _declared_data(self) -> pb.DataOffer:
        """Return the public declarations: no counted size if the policy hides it or requires masks.

        A policy that requires masks also hides the classes with examples, since each is a count of one hospital, and
        digests of the label dictionary and of the source of labels, which would confirm a guess of the whole.
        """
        assert self._about is not None
        offer = pb.DataOffer()
        offer.CopyFrom(self._about.data)
        offer.holds.extend(self._settings.holds)
        offer.validation_only = not self._controls.trains()
        offer.label_source = "" if self._pacs is None else self._pacs.label_source
        public = self._controls.tells_data()
        counts = self._settings.nominal_size is None and not self._controls.hides_size()
        if offer.label_source.startswith("table:") and not counts:
            offer.label_source = ""  # it follows from records, as counts do; a query does not
        if self._settings.nominal_size is None and (self._controls.hides_size() or not public):
            offer.nominal_size = offer.train_examples = offer.test_examples = 0.0
        if not public:
            for field in ("holds", "labels_digest", "coarse_labels", "label_source"):
                offer.ClearField(field)
        return offer

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        self._controls.record_attestation(Attestation.of(welcome.attested))
        self._secagg.compare_answers(welcome.masked_answers)
        self._queue.retry_now()
        self._membership.apply_roster(welcome.signed_roster, self._pinned)

    def _receipt_verifier(self) -> ReceiptVerifier:
        return ReceiptVerifier(self._identity.authority_pem(), self._consortium, self.name)


# ---- the audit log ---------------------------------------------------------------------------------------------------

_ASKED = frozenset(
    {"training", "refused", "ready", "approval", "closed", "ended", "stopped", "roster", "held", "sealed", "opened"}
)
"""Events that the coordinator caused; all others come from the silo itself."""
_UNRECORDED = frozenset({"serving", "privacy", "metrics", "queue"})
"""Repeated at each start."""
_SHOWN = ("run", "round", "kind", "entry", "silo", "address", "state", "included", "walls", "launcher", "host")


@dataclass(frozen=True, slots=True)
class SiloAuditTrail:
    """The audit log of one hospital's service."""

    recorder: Recorder
    identity: SiloIdentity
    coordinator: str

    @classmethod
    def of(cls, home: Path, identity: SiloIdentity) -> SiloAuditTrail:
        this_silo = identity.load().identity
        coordinator = Identity(CertificateRole.COORDINATOR, this_silo.consortium).uri
        return cls(Recorder(AuditLog(home / FOLDER), this_silo.uri), identity, coordinator)

    def recording(self, emit: EmitEvent) -> EmitEvent:
        """Return a function that records an event and passes it on."""

        def both(event: SiloEvent) -> None:
            if event.event not in _UNRECORDED:
                self.recorder.record(self._entry(event))
            emit(event)

        return both

    def head(self) -> pb.LogHead | None:
        """Return the signed end of this log, for the coordinator to keep."""
        head = self.recorder.signed_head(self.identity.current_credentials())
        return None if head is None else log_heads.to_message(head)

    def keep(self, receipt: bytes, emit: EmitEvent) -> None:
        """Keep the end of the coordinator's log that came with a receipt; report one that is wrong."""
        message = pb.Receipt.FromString(receipt)
        if not message.HasField("log_head"):
            return  # the coordinator has no log yet
        try:
            head = log_heads.of_message(message.log_head, self.coordinator, self.identity.authority_pem())
            if wrong := self.recorder.keep(head):
                raise StateError("E-STATE-80", wrong)
        except FederationError as error:
            emit(error_event(error))

    def _entry(self, event: SiloEvent) -> LogEntry:
        facts = event.facts
        shown = {name: facts[name] for name in _SHOWN if facts.get(name) is not None}
        if isinstance(number := shown.get("round"), int):
            shown["round"] = number + 1
        code, size = str(facts.get("code") or ""), facts.get("bytes")
        return LogEntry(
            self.coordinator if event.event in _ASKED else self.recorder.identity,
            event.event,
            " ".join(f"{name}={value}" for name, value in shown.items()),
            REFUSED if code else ALLOWED,
            code,
            bytes=size if isinstance(size, int) else 0,
        )
