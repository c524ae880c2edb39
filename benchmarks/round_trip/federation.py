"""A federation of real processes over mutual TLS whose hospitals do not train."""

from __future__ import annotations

import math
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from benchmarks.round_trip.models import Workload
from benchmarks.round_trip.processes import Processes, cpu_seconds, family, forget_peak, peak_mib
from coordinator.config.hydra_config import compose_spec
from coordinator.lead.client import LeadClient
from coordinator.pki.authority import Authority
from coordinator.storage.records import InvitationRow
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import UnavailableError
from fl_core.types.enums import TaskKind
from silo.service.enrolment import join
from silo.storage.home import Home

START_S, ROUND_S = 180.0, 60.0
LOOK_S = 0.1
LOOKS_PER_QUESTION = 10
"""The database is asked once per second: ten questions were 15 ms of processor time in each round."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the coordinator's record says of a run.

    seconds: from each training round's close to the next one's; warm_up: the same, of those before; up, down: bytes per
    silo and training round, all of them equal; coordinator_cpu, silos_cpu: seconds of processor time per round, of the
    one and of all silos together.
    """

    seconds: Sequence[float]
    warm_up: Sequence[float]
    up: int
    down: int
    total_up: int
    total_down: int
    coordinator_cpu: float
    silos_cpu: float


class Peaks(NamedTuple):
    """Peaks of resident memory in MiB (VmHWM).

    opening: of service and worker while a run is opened   service, worker: of each during rounds.
    """

    opening: float = 0.0
    service: float = 0.0
    worker: float = 0.0

    @property
    def total(self) -> float:
        return max(self.opening, self.service + self.worker)


class Federation:
    """One coordinator and its silos, started and online."""

    def __init__(self, started: Processes, folder: Path, silos: int, workload: Workload, delay_ms: float) -> None:
        self._started = started
        self._workload = workload
        self.peaks_mib = Peaks()
        self.home = folder / "coordinator"
        self.silos = [folder / f"hospital{k}" for k in range(silos)]
        port = free_port()
        authority = Authority.create(self.home, "benchmark", [f"127.0.0.1:{started.dialled(port, delay_ms)}"])
        authority.issue_lead("lead")
        words = ["coordinator.cli.main", "serve", "--home", str(self.home), "--bind", f"127.0.0.1:{port}"]
        words += ["--round-trip", str(delay_ms)]
        self._coordinator = started.start(words)
        started.until((self.home / "service.json").exists, "the coordinator", START_S)
        self._enrol(authority)
        self._serving: list[subprocess.Popen[str]] = []
        for k, home in enumerate(self.silos):
            data = workload.data(folder, silos, k)
            self._serving.append(
                started.start(["benchmarks.round_trip.idle_silo", "--home", str(home), "--data", data])
            )
        self._lead = LeadClient.open(self.home)
        started.until(lambda: self._online() == silos, "every silo to be online", START_S + 10 * silos)

    def _enrol(self, authority: Authority) -> None:
        with closing(CoordinatorStore(self.home)) as store:
            for home in self.silos:
                made = authority.invite(home.name)
                now = authority.clock().timestamp()
                store.members.invite(InvitationRow(made.serial, made.name, now, made.expires.timestamp()))
                join(made.token, Home(home))

    def _online(self) -> int:
        return sum(silo.state == "online" for silo in self._lead.silos().silos)

    def run(self, rounds: int, warm_up: int, masks: bool = False) -> Rounds:
        """Run so many training rounds after some to warm up, and the closing evaluation; return the record of them.

        The record is read from the database: asking the service would be work that the round does not have.
        """
        words = [*self._workload.overrides, f"rounds={warm_up + rounds}", "method=fedavg", "threads=1"]
        words.append("secagg=on" if masks else "secagg=off")
        self._forget_peaks()
        run = self._lead.submit(compose_spec(words).to_json(), uuid4().hex).run_id
        self.peaks_mib = self.peaks_mib._replace(opening=max(self.peaks_mib.opening, sum(self._peaks())))
        self._forget_peaks()
        used = list[_Used]()
        with closing(CoordinatorStore(self.home)) as store:

            def over() -> bool:
                used.append(self._used())
                return not len(used) % LOOKS_PER_QUESTION and store.runs.get(run).state.ended

            self._started.until(over, "the run to end", START_S + ROUND_S * (warm_up + rounds), LOOK_S)
            info = self._lead.show(run).info
            rows = [row for row in store.runs.rounds(run) if row.record.kind is TaskKind.TRAIN]
            arrived = [e for e in store.runs.events(run, 0) if e.kind == "arrived" and e.round < len(rows)]
            arrived = [e for e in arrived if e.at >= rows[0].opened]  # not those of a census
        if info.state != "finished":
            raise UnavailableError("E-RUN-99", f"the run ended as {info.state}: {info.reason}")
        ups, downs = {int(e.text.split()[0]) for e in arrived}, {row.base_size for row in rows}
        if len(ups) != 1 or len(downs) != 1 or any(row.record.missing for row in rows):
            raise UnavailableError("E-RUN-99", f"expected equal rounds, found {ups} bytes up and {downs} down")
        closed, early = ([row.closed for row in some] for some in (rows[max(0, warm_up - 1) :], rows[:warm_up]))
        cpu = (_per_round(closed, used, lambda u: u.coordinator), _per_round(closed, used, lambda u: u.silos))
        took, warmed = ([after - before for before, after in pairwise(moments)] for moments in (closed, early))
        return Rounds(took, warmed, ups.pop(), downs.pop(), info.bytes_up, info.bytes_down, *cpu)

    def _used(self) -> _Used:
        silos = sum(cpu_seconds(p.pid) for p in self._serving)
        coordinator = family(self._coordinator.pid)
        with suppress(FileNotFoundError, UnavailableError):  # the worker of the run ends with it
            service, worker = self._peaks()
            peaks = self.peaks_mib
            if service + worker > peaks.service + peaks.worker:
                self.peaks_mib = Peaks(peaks.opening, service, worker)
            return _Used(time.time(), sum(map(cpu_seconds, coordinator)), silos)
        return _Used(time.time(), math.nan, silos)

    def _peaks(self) -> tuple[float, float]:
        """Return the peaks of the service's process and of its workers."""
        service, *workers = map(peak_mib, family(self._coordinator.pid))
        return service, sum(workers)

    def _forget_peaks(self) -> None:
        for pid in family(self._coordinator.pid):
            forget_peak(pid)

    def close(self) -> None:
        """Close the lead's connection."""
        self._lead.close()


class _Used(NamedTuple):
    """Processor time used so far, at a moment of Unix time."""

    at: float
    coordinator: float
    silos: float


def _per_round(closed: Sequence[float], used: Sequence[_Used], which: Callable[[_Used], float]) -> float:
    """Return the seconds per round between the first close and the last; 0 with one round."""
    if len(closed) < 2:
        return 0.0
    first, last = (which(min(used, key=lambda u: abs(u.at - moment))) for moment in (closed[0], closed[-1]))
    return (last - first) / (len(closed) - 1)


def free_port() -> int:
    """Let the system choose a port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
