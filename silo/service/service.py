"""`silo serve`: the threads of one hospital's service, how they start and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fl_core.datasets import Source
from fl_core.errors import ConfigError
from fl_core.rounds.silo_round import run_silo_round
from privacy.profiles import PROFILES
from protos.consilium.v1 import federation_pb2 as pb
from protos.pki.identity import Address
from protos.storage.object_store import ObjectStore
from protos.storage.private_files import private_folder
from protos.tls.diagnosis import Diagnosis
from protos.version import PROTOCOL, software
from silo.connection.channel import ConnectionManager, Dial, dial_with, explainer
from silo.connection.control_client import ControlClient
from silo.connection.retry import CancelToken
from silo.connection.transfer import ReceiptVerifier, RetryPolicy, Transfer
from silo.events import EmitEvent, error_event, event
from silo.identity.identity import SiloIdentity
from silo.service.enrolment import MembershipMaintainer, pinned_version
from silo.service.pace import PULSE_FLOOR_S, Pace
from silo.service.task_queue import TaskQueue
from silo.service.task_runner import TaskRunner
from silo.storage.home import Home
from silo.storage.outbox import Outbox
from silo.storage.store import Store
from silo.storage.tasks import Attestation
from silo.training.hospital_controls import HospitalControls
from silo.training.trainer import DataSource, RunRound, Trainer, choose_device

LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a hospital decides about its service; answer_after, pulse_floor: see `silo.service.pace`."""

    home: Home
    data: str
    data_root: Path | None = None
    device: str = "auto"
    nominal_size: float | None = None
    prototypes: bool = True
    answer_after: float = 0.0
    pulse_floor: float = PULSE_FLOOR_S

    def source(self) -> DataSource:
        """Make the data source; raises ConfigError (E-CFG-02) on a nominal size that is none."""
        if self.nominal_size is not None and not 1 <= self.nominal_size < 2**53:
            raise ConfigError("E-CFG-02", f"expected a nominal size >= 1, found {self.nominal_size:g}: change it")
        return DataSource(self.data, self.data_root, self.nominal_size)


def data_offer(source: DataSource) -> pb.DataOffer:
    """Say about the data what is public by declaration; the shape of images depends on the run.

    Of a folder or a table no class is named: which there are follows from the records, and a run brings its own names.
    """
    kind, schema = source.reference.source, source.load().schema
    shape = schema.shape if kind is Source.DIGITS else ()
    classes = () if kind in (Source.FOLDER, Source.MANIFEST) else schema.classes
    return pb.DataOffer(name=kind.value, shape=shape, classes=classes, nominal_size=source.nominal_size)


class Service:
    """One silo at work. `start`, then `wait`; `stop` ends it in good order; `error` says what ended it otherwise.

    dial, explain: replaced in tests that need no TLS. do: a task's arithmetic, replaced in benchmarks.
    """

    def __init__(
        self,
        settings: Settings,
        say: EmitEvent,
        patience: RetryPolicy | None = None,
        dial: Dial | None = None,
        explain: Callable[[Address], Diagnosis] | None = None,
        do: RunRound = run_silo_round,
    ) -> None:
        self._say = say
        self._patience = patience or RetryPolicy()
        self._identity = SiloIdentity(settings.home.path)
        own = self._identity.load().identity
        self.name, self._consortium = own.name, own.consortium
        source, self._pace = settings.source(), Pace(settings.answer_after, settings.pulse_floor)
        self._device = choose_device(settings.device)
        self._offer, self._typed = data_offer(source), settings.nominal_size is not None
        self.store = Store(settings.home.database)
        self._instance = settings.home.begin_instance()
        credentials = self._identity.current_credentials
        lines = ConnectionManager(settings.home.addresses(), dial or dial_with(credentials))
        greeted = threading.Event()
        self._client = ControlClient(
            lines,
            self.store,
            self._hello,
            self._welcomed,
            explain or explainer(credentials),
            say,
            self._patience,
            greeted,
            pulse_floor=self._pace.pulse_floor,
        )
        self._keeper = MembershipMaintainer(self._identity, lines, say, self._client.renewed)
        objects = ObjectStore(private_folder(settings.home.objects))
        transfer = Transfer(lambda: lines.current().transfer, objects, self._patience, lambda e: say(error_event(e)))
        self._desk = TaskQueue(self.store, self._client.send, say)
        self._custody = HospitalControls(settings.home, self.store)
        trainer = Trainer(self.name, source, self._custody, self._device, settings.prototypes, do)
        outbox = Outbox(self.store, objects, self.name)
        self._worker = TaskRunner(
            self._desk,
            outbox,
            transfer,
            trainer,
            self._custody,
            self._receipt_verifier,
            say,
            self._client.recycle,
            greeted,
            self._pace,
        )
        self._stop, self._over, self._ended = CancelToken(), threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work; raises StateError (E-BUDGET-07, E-BUDGET-08) on a privacy ledger that lacks what it had."""
        for entry in self._custody.recover():
            self._say(event("recovered", f"{entry}: open after a restart, counted as spent", facts={"entry": entry}))
        says = f"{self.name} of {self._consortium} serves {self._offer.name} data on {self._device}"
        self._say(event("serving", says, facts={"silo": self.name, "device": str(self._device)}))
        self._say(
            event(
                "privacy",
                "privacy: each run's manifest decides, within this hospital's policy (silo policy show): under the "
                "profile 'none' updates leave as exact float32 numbers, without noise and without mask, readable by "
                "the coordinator; under 'dp_record' and 'dp_silo_small' with noise, charged to the ledger (silo ledger "
                "show)",
                facts={"profiles": ", ".join(PROFILES), "policy": self._custody.policy_digest()},
            )
        )
        bodies: dict[str, Callable[[], None]] = {
            "worker": lambda: self._worker.run(self._over),
            "client": lambda: self._client.run(self._desk, self._stop),
            "keeper": self._keep,
        }
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in bodies.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the service to end by itself; True when it has."""
        return self._ended.wait(seconds)

    def pulse(self) -> pb.Pulse:
        """Say what is being done now, as the coordinator is told."""
        return self._desk.pulse()

    def doing(self) -> pb.Pulse:
        """Say what is being done now, for the hospital's own screen."""
        return self._desk.doing()

    def leave(self, reason: str) -> None:
        """Begin to end: take no more tasks, give training up, let an upload under way finish."""
        self._desk.close(reason)
        self._over.set()

    def settled(self, seconds: float) -> bool:
        """Wait for the work under way after `leave`; True when nothing is left."""
        self._threads[0].join(seconds)
        return not self._threads[0].is_alive()

    def stop(self, reason: str = "the service is stopped") -> None:
        """End everything in good order; what is staged stays on disk."""
        self.leave(reason)
        for thread in self._threads[:1]:
            thread.join()
        self._stop.set(reason)
        for thread in self._threads[1:]:
            thread.join()
        self.store.close_database()

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a thread; what ends it unasked ends the service."""
        try:
            body()
        except BaseException as error:
            self.error = self.error or error
        finally:
            if not self._over.is_set():
                self._ended.set()

    def _keep(self) -> None:
        while not self._stop.is_set:
            self._keeper.renew_if_due()
            self._stop.wait(LOOK_S)

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            software=software(),
            data=self._declared(),
            staged=[e.key.ref for e in self.store.outbox() if not self._pace.holds((e.key, e.base_digest))],
            policy_digest=self._custody.policy_digest(),
            roster_version=pinned_version(self._identity),
            instance=self._instance.id,
            previous_instance=self._instance.previous,
        )

    def _declared(self) -> pb.DataOffer:
        """Say what is public by declaration: where the policy hides the size, one that was counted is not."""
        offer = pb.DataOffer()
        offer.CopyFrom(self._offer)
        if not self._typed and self._custody.hides_size():
            offer.nominal_size = 0.0
        return offer

    def _welcomed(self, welcome: pb.Welcome) -> None:
        self._custody.record_attestation(Attestation.of(welcome.attested))
        self._desk.retry_now()
        self._keeper.apply_roster(welcome.signed_roster)

    def _receipt_verifier(self) -> ReceiptVerifier:
        return ReceiptVerifier(self._identity.authority_pem(), self._consortium, self.name)
