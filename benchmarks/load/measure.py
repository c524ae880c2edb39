"""The service and everybody around it, and what was measured while they ran."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from benchmarks.load import home as consortium
from benchmarks.load.talk import Child, Message
from benchmarks.round_trip.idle_silo import constant_update
from benchmarks.round_trip.models import workload
from benchmarks.round_trip.processes import Processes, cpu_seconds, peak_mib, processes
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import schema_of
from coordinator.lead.client import ADDRESS_FILE, LeadClient
from fl_core.errors import UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.wire import codec

_START_S = 300.0
_ROUNDS = 10_000
"""More than anybody waits for: the run goes on for as long as the benchmark does."""
_FIRST_S, _WINDOW_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is put on the service. seconds: of each part, without strangers and with."""

    sessions: int
    uploads: int
    params: int
    strangers: int
    seconds: float


def measure(load: Load, folder: Path) -> Mapping[str, Any]:
    """Measure a part without strangers and, if there are any, one with them, of one service that lives through both.

    folder: for the service's home (`coordinator`), the updates and what the processes say (`log`).
    """
    with processes(folder / "log") as started:
        return _Scene(started, folder, load).play()


class _Scene:
    """The service, its run, and a process for each kind of caller."""

    def __init__(self, started: Processes, folder: Path, load: Load) -> None:
        self._started, self._folder, self._load = started, folder, load
        self._home = folder / "coordinator"
        self._memory: list[tuple[float, float]] = []

    def play(self) -> Mapping[str, Any]:
        load, idle_load = self._load, os.getloadavg()[0]
        began = time.monotonic()
        version = consortium.make(self._home, load.sessions)
        enrolled_s = time.monotonic() - began
        words = ["coordinator.cli.main", "serve", "--home", str(self._home), "--bind", "127.0.0.1:0"]
        self._service = self._started.start(words)
        self._started.until((self._home / ADDRESS_FILE).exists, "the coordinator", _START_S)
        where = {"home": str(self._home), "port": json.loads((self._home / ADDRESS_FILE).read_text())["port"]}
        chosen = workload(load.params)
        self._spec = compose_spec([*chosen.overrides, f"rounds={_ROUNDS}", "method=fedavg", "threads=1", "secagg=off"])
        schema = schema_of(self._spec)
        data = {"name": str(self._spec.data["name"]), "shape": schema.shape, "classes": schema.classes}
        people = {"names": consortium.names(load.sessions), "roster_version": version, "data": data}
        began = time.monotonic()
        self._sessions = Child(self._started, "sessions", {**where, **people}, self._relay)
        self._senders: Child | None = None
        self._offers: list[Message] = []
        self._started.until(lambda: self._all_there("online"), "every session", _START_S)
        online_s = time.monotonic() - began
        size = self._submit(where)
        self._started.until(lambda: self._all_there("offers"), "an offer to every member", _START_S)
        self._lead = Child(self._started, "lead", where)
        strangers = Child(self._started, "strangers", {**where, "strangers": load.strangers})
        assert self._senders is not None
        self._started.until(self._first_taken, "the first update to be taken", _START_S)
        parts = {"without_strangers": self._part()}
        if load.strangers:
            strangers.ask("start")
            self._started.until(lambda: strangers.ask("state")["open"] >= 0.9 * load.strangers, "strangers", _START_S)
            parts["with_strangers"] = {**self._part(), "strangers": strangers.ask("state")}
        return {
            **asdict(load),
            "update_bytes": size,
            "cpus": os.cpu_count(),
            "load_average_before": round(idle_load, 2),
            "enrolment_seconds": round(enrolled_s, 1),
            "all_online_seconds": round(online_s, 1),
            **parts,
            "memory": self._memory_report(),
        }

    def _relay(self, message: Message) -> None:
        """Pass an offer on to those who send; called by the thread that reads the sessions' process."""
        self._offers.append(message)
        if self._senders is not None:
            self._senders.tell(message)

    def _all_there(self, what: str) -> bool:
        found = self._sessions.ask("online")
        return bool(found[what] >= self._load.sessions)

    def _first_taken(self) -> bool:
        assert self._senders is not None
        found = self._senders.ask("taken")
        if found["given_up"]:
            raise UnavailableError("E-RUN-99", f"the service takes no update: {found['given_up']}")
        return bool(found["taken"])

    def _submit(self, where: Message) -> int:
        """Submit a run of all members and start those who send its updates; return the size of one."""
        lead = LeadClient.open(self._home)
        run = lead.submit(self._spec.to_json(), uuid4().hex).run_id
        layout = RunManifest.from_json(lead.show(run).manifest_json).layout
        lead.close()
        files = [self._folder / f"update{k}" for k in range(self._load.uploads)]
        for k, file in enumerate(files):
            file.write_bytes(codec.pack_bundle(constant_update(layout, set(layout), k)))
        senders = Child(self._started, "uploads", {**where, "files": [str(file) for file in files]})
        if self._offers:
            senders.tell(self._offers[-1])
        self._senders = senders
        return files[0].stat().st_size

    def _part(self) -> Mapping[str, Any]:
        """Measure for as long as a part lasts, from now on."""
        assert self._senders is not None
        children = {"lead": self._lead, "sessions": self._sessions, "uploads": self._senders}
        for child in children.values():
            child.ask("report")
        began, used = time.monotonic(), cpu_seconds(self._service.pid)
        end = began + self._load.seconds
        while (now := time.monotonic()) < end:
            if self._service.poll() is not None:
                raise self._started.failure(f"the coordinator ended with {self._service.returncode}")
            self._memory.append((now, resident_mib(self._service.pid)))
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        took, cpu = time.monotonic() - began, cpu_seconds(self._service.pid) - used
        found = {name: child.ask("report") for name, child in children.items()}
        return {
            "seconds": round(took, 1),
            "load_average": [round(one, 2) for one in os.getloadavg()],
            "coordinator_cores": round(cpu / took, 2),
            "lead": lead_report(found["lead"]),
            "sessions": found["sessions"],
            "uploads": upload_report(found["uploads"]),
        }

    def _memory_report(self) -> Mapping[str, Any]:
        first, last = self._memory[0][0], self._memory[-1][0]
        begin, window = first + min(_FIRST_S, (last - first) / 3), min(_WINDOW_S, (last - first) / 6)
        after = [(at, mib) for at, mib in self._memory if at >= begin]
        early = median(mib for at, mib in after if at <= after[0][0] + window)
        late = median(mib for at, mib in after if at >= last - window)
        minutes: dict[int, list[float]] = defaultdict(list)
        for at, mib in self._memory:
            minutes[int((at - first) // _FIRST_S)].append(mib)
        return {
            "minutes_mib": [round(median(some)) for some in minutes.values()],
            "after_first_minute_mib": round(early, 1),
            "end_mib": round(late, 1),
            "ratio": round(late / early, 3),
            "peak_mib": round(peak_mib(self._service.pid), 1),
        }


def lead_report(found: Message) -> Mapping[str, Any]:
    """Sum up the answers to a lead; calls that were refused are no times of answers."""
    times = {name: [s for n, s, code in found["answered"] if not code and name in (n, "all")] for name in _ASKED}
    return {
        "calls": len(found["answered"]),
        "left_out": found["left_out"],
        "without_answer_yet": found["under_way"],
        "refused": dict(Counter(code for _, _, code in found["answered"] if code)),
        **{f"{name}_s": percentiles(some) for name, some in times.items()},
    }


_ASKED = ("all", "runs", "silos", "show")


def upload_report(found: Message) -> Mapping[str, Any]:
    return {**{k: v for k, v in found.items() if k != "seconds_each"}, "seconds": percentiles(found["seconds_each"])}


def percentiles(seconds: Sequence[float]) -> Mapping[str, float]:
    """Return the median, the 99th percentile (the smallest value that 99 % do not exceed) and the largest."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    ranks = {"p50": -(-len(ordered) // 2), "p99": -(-99 * len(ordered) // 100), "max": len(ordered)}
    return {name: round(ordered[rank - 1], 3) for name, rank in ranks.items()}


def resident_mib(pid: int) -> float:
    """Return the memory that a process has resident (VmRSS), in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise UnavailableError("E-RUN-99", "expected VmRSS in /proc: the benchmark needs Linux")
    return int(found[1]) / 1024
