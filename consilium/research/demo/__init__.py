"""`coordinator demo`: a whole federation on this machine; each hospital is a process with a home and a certificate."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp

import torch

from consilium.research.demo.budgets import open_budget, spending
from consilium.research.demo.processes import Processes, Signals, free_port
from consilium.research.demo.report import CLOSED, PLAIN, PRIVATE, REPAIRED, report
from coordinator.config.hydra_config import compose_spec
from coordinator.lead.client import LeadClient
from coordinator.lead.watcher import Watcher
from fl_core import datasets
from fl_core.errors import UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import ERR
from service_core.storage.private_files import write_private, write_public

HOSPITALS = 6
RUNS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ("experiment=class_disjoint_digits", "method=fedavg", "train.lr=0.2", "secagg=on"),
    REPAIRED: ("experiment=class_disjoint_digits", "secagg=on"),
    CLOSED: (
        "method=analytic",
        "model=random_features",
        "model.width=512",
        "data=digits",
        "federation=hospitals6",
        "rounds=1",
        "threads=1",
        "secagg=on",
    ),
    PRIVATE: ("experiment=private_demo", "rounds=2"),
}
"""What is trained, one after the other, on the same images: each run at the rate that suits it, or in closed form."""


@contextmanager
def _consortium(folder: Path, processes: Processes) -> Iterator[LeadClient]:
    """Create the consortium, enrol the hospitals, start everything and wait until all are there."""
    home, address = folder / "coordinator", f"127.0.0.1:{free_port()}"
    processes.call("coordinator", "init", "demo", "--address", address, "--home", str(home))
    processes.start("coordinator", "serve", "--home", str(home), "--bind", address)
    processes.until((home / "service.json").exists, "the coordinator")
    for k in range(HOSPITALS):
        hospital, data = folder / f"hospital{k}", f"digits/hospital{k}"
        token = folder / f"hospital{k}.token"
        invitation = processes.call("coordinator", "invite", f"hospital{k}", "--home", str(home))
        write_private(token, str(invitation["token"]).encode())
        processes.call("silo", "join", "--token-file", str(token), "--home", str(hospital))
        open_budget(hospital, data)
        processes.start("silo", "serve", "--data", data, "--home", str(hospital))
    with closing(LeadClient.open(home)) as client:
        processes.until(lambda: all(s.state == "online" for s in client.silos().silos), "six hospitals")
        yield client


def _train(client: LeadClient, processes: Processes, name: str, rounds: int, quiet: bool) -> pb.RunDetail:
    spec = compose_spec([f"rounds={rounds}", *RUNS[name]])
    run = client.submit(spec.to_json(), f"demo-{name}").run_id
    with nullcontext() if quiet else Watcher() as watcher:
        for event in client.watch(run):
            if watcher is not None:
                watcher.show(event)
            processes.check()
    detail = client.show(run)
    if detail.info.state != "finished":
        raise UnavailableError("E-RUN-99", f"{run} ended as {detail.info.state}: {detail.info.reason}")
    return detail


def _local_scores(folder: Path, processes: Processes, runs: Mapping[str, str]) -> dict[str, dict[str, float | None]]:
    """Return the accuracy of each run's final model at each hospital, which no message carries. runs: ids by name."""
    scores: dict[str, dict[str, float | None]] = {name: {} for name in runs}
    for k in range(HOSPITALS):
        status = processes.call("silo", "status", "--home", str(folder / f"hospital{k}"))
        by_run = {r["run"]: r for r in status["runs"]}
        for name, run in runs.items():
            scores[name][f"hospital{k}"] = by_run[run]["evaluations"][-1]["accuracy"]
    return scores


def _training_images() -> dict[str, list[int]]:
    """Return how many training images of each digit each hospital has, read from its own data."""
    data = {f"hospital{k}": datasets.load(f"digits/hospital{k}") for k in range(HOSPITALS)}
    return {name: torch.bincount(d.train.labels, minlength=len(d.schema.classes)).tolist() for name, d in data.items()}


def run_demo(out: Path, rounds: int, quiet: bool) -> int:
    """Run the demo and write `summary.json`, `accuracy.png` and `index.html` to `out`; return the exit status.

    Guarantees: no process and no temporary folder is left behind, also after Ctrl-C, SIGTERM or a closed terminal.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with Signals() as signals:
        folder = Path(mkdtemp(prefix="consilium-demo-"))
        processes = Processes(out / "demo.log", signals)
        write_public(processes.log, b"")
        try:
            with signals.raising(), _consortium(folder, processes) as client:
                details = {name: _train(client, processes, name, rounds, quiet) for name in RUNS}
                silos = list(client.silos().silos)
                scores = _local_scores(folder, processes, {name: d.info.run_id for name, d in details.items()})
                spent = spending(folder, RunManifest.from_json(details[PRIVATE].manifest_json))
        except KeyboardInterrupt:
            ERR.print("interrupted: the processes of the demo are being ended")
        finally:
            processes.stop()
            shutil.rmtree(folder)
        if signals.received is not None:
            return 128 + signals.received
    report(out, details, scores, spent, silos, _training_images(), time.monotonic() - started, quiet)
    return 0
