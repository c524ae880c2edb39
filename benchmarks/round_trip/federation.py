"""A federation of real processes over mutual TLS whose hospitals do not train."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.round_trip.models import Workload
from benchmarks.round_trip.processes import Processes, peak_mib
from coordinator.client import LeadClient
from coordinator.config import compose_spec
from coordinator.pki import Authority
from coordinator.records import InvitationRow
from coordinator.store import Store
from fl_core.errors import UnavailableError
from fl_core.kinds import TaskKind
from silo.enrol import join
from silo.home import Home

START_S, ROUND_S = 180.0, 60.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the coordinator's record says of a run.

    closed: Unix time of each training round's close; up, down: bytes per silo and training round, all of them equal.
    """

    closed: Sequence[float]
    up: int
    down: int
    total_up: int
    total_down: int


class Federation:
    """One coordinator and its silos, started and online."""

    def __init__(self, started: Processes, folder: Path, silos: int, workload: Workload) -> None:
        self._started = started
        self._workload = workload
        self.home = folder / "coordinator"
        self.silos = [folder / f"hospital{k}" for k in range(silos)]
        address = f"127.0.0.1:{_free_port()}"
        authority = Authority.create(self.home, "benchmark", [address])
        authority.issue_lead("lead")
        words = ["coordinator.main", "serve", "--home", str(self.home), "--bind", address]
        self._coordinator = started.start(words)
        started.until((self.home / "service.json").exists, "the coordinator", START_S)
        self._enrol(authority)
        for k, home in enumerate(self.silos):
            data = workload.data(folder, silos, k)
            started.start(["benchmarks.round_trip.idle_silo", "--home", str(home), "--data", data])
        self._lead = LeadClient.open(self.home)
        started.until(lambda: self._online() == silos, "every silo to be online", START_S + 10 * silos)

    def _enrol(self, authority: Authority) -> None:
        with closing(Store(self.home)) as store:
            for home in self.silos:
                made = authority.invite(home.name)
                now = authority.clock().timestamp()
                store.members.invite(InvitationRow(made.serial, made.name, now, made.expires.timestamp()))
                join(made.token, Home(home))

    def _online(self) -> int:
        return sum(silo.state == "online" for silo in self._lead.silos().silos)

    def run(self, rounds: int) -> Rounds:
        """Run so many training rounds and the closing evaluation; return the coordinator's record of them."""
        words = [*self._workload.overrides, f"rounds={rounds}", "method=fedavg", "threads=1"]
        run = self._lead.submit(compose_spec(words).to_json(), f"rounds-{rounds}").run_id
        self._started.until(
            lambda: self._lead.show(run).info.state not in ("waiting", "running"),
            "the run to end", START_S + ROUND_S * rounds,
        )  # fmt: skip
        info = self._lead.show(run).info
        if info.state != "finished":
            raise UnavailableError("E-RUN-09", f"the run ended as {info.state}: {info.reason}")
        with closing(Store(self.home)) as store:
            rows = [row for row in store.runs.rounds(run) if row.kind is TaskKind.TRAIN]
            arrived = [e for e in store.runs.events(run, 0) if e.kind == "arrived" and e.round < rounds]
        ups, downs = {int(e.text.split()[0]) for e in arrived}, {row.base_size for row in rows}
        if len(ups) != 1 or len(downs) != 1 or any(row.missing for row in rows):
            raise UnavailableError("E-RUN-09", f"expected equal rounds, found {ups} bytes up and {downs} down")
        return Rounds([row.closed for row in rows], ups.pop(), downs.pop(), info.bytes_up, info.bytes_down)

    def peak_mib(self) -> float:
        """Return the coordinator's peak of resident memory so far."""
        return peak_mib(self._coordinator.pid)

    def close(self) -> None:
        """Close the lead's connection."""
        self._lead.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
