"""`coordinator demo`: a real federation on this machine. Each hospital is a process with a home and a certificate."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import mkdtemp

import torch

from consilium.research.demo.budgets import open_budget, spending
from consilium.research.demo.processes import Processes, Signals, free_port
from consilium.research.demo.report import CLOSED, PLAIN, PRIVATE, REPAIRED, SHORT, report
from coordinator.config.hydra_config import compose_spec
from coordinator.lead import accuracy
from coordinator.lead.client import LeadClient
from coordinator.lead.watcher import Watcher
from fl_core import datasets
from fl_core.errors import UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import open_file, show_reply
from service_core.progress import Steps
from service_core.storage.private_files import write_private, write_public
from silo.cli.options import open_store
from silo.storage.home import Home
from silo.training.evaluation_summary import class_facts

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
"""The runs, trained one after the other on the same images: each with a suitable learning rate, or in closed form."""


@contextmanager
def _consortium(folder: Path, processes: Processes, steps: Steps) -> Iterator[LeadClient]:
    """Create the consortium, enrol the hospitals, start all services and wait until all hospitals are online."""
    home, address = folder / "coordinator", f"127.0.0.1:{free_port()}"
    steps.show("Set-up", 0, 2 * HOSPITALS + 1, "creates the consortium")
    processes.call("coordinator", "init", "demo", "--address", address, "--home", str(home))
    started = processes.start("coordinator", "serve", "--home", str(home), "--bind", address)
    processes.until((home / "service.json").exists, "the coordinator")
    steps.say(f"coordinator  process {started}  serves at {address}")
    for k in range(HOSPITALS):
        hospital, data = folder / f"hospital{k}", f"digits/hospital{k}"
        token = folder / f"hospital{k}.token"
        steps.show("Set-up", k + 1, 2 * HOSPITALS + 1, f"hospital{k} joins")
        invitation = processes.call("coordinator", "invite", f"hospital{k}", "--home", str(home))
        write_private(token, str(invitation["token"]).encode())
        processes.call("silo", "join", "--token-file", str(token), "--home", str(hospital))
        open_budget(hospital, data)
        started = processes.start("silo", "serve", "--data", data, "--home", str(hospital))
        steps.say(f"hospital{k}    process {started}  joined, and serves {data}")
    with closing(LeadClient.open(home)) as client:

        def all_online() -> bool:
            online = sum(silo.state == "online" for silo in client.silos().silos)
            steps.show("Set-up", HOSPITALS + 1 + online, 2 * HOSPITALS + 1, f"{online} of {HOSPITALS} hospitals online")
            return online == HOSPITALS

        processes.until(all_online, "six hospitals")
        yield client


def _train(
    client: LeadClient, processes: Processes, name: str, rounds: int, steps: Steps, verbose: Watcher | None
) -> pb.RunDetail:
    """Train one model. verbose: prints each event; None prints none. Raises UnavailableError (E-RUN-99) if it fails."""
    spec = compose_spec([f"rounds={rounds}", *RUNS[name]])
    steps.show(SHORT[name], 0, spec.rounds, "submitted")
    run = client.submit(spec.to_json(), f"demo-{name}").run_id
    for event in client.watch(run):
        if verbose is not None:
            verbose.show(event)
        if event.HasField("info"):
            steps.show(SHORT[name], min(event.info.closed, spec.rounds), spec.rounds, _reached(event.info))
        processes.check()
    detail = client.show(run)
    steps.show(SHORT[name], spec.rounds, spec.rounds, f"{accuracy.newest(detail.info).text()} correct")
    if detail.info.state != "finished":
        raise UnavailableError("E-RUN-99", f"{run} did not finish, but is {detail.info.state}: {detail.info.reason}")
    return detail


def _reached(info: pb.RunInfo) -> str:
    if info.closed >= info.rounds:
        return "evaluating the model"
    newest = accuracy.newest(info)
    return info.state if newest.point is None else f"{newest.text()} correct"


def _local_scores(folder: Path, runs: Mapping[str, str]) -> dict[str, dict[str, float | None]]:
    """Return the accuracy of each run's final model at each hospital. runs: ids by name.

    No message contains these, so they are read from the hospitals' databases, as in `silo status`.
    """
    scores: dict[str, dict[str, float | None]] = {name: {} for name in runs}
    for k in range(HOSPITALS):
        with open_store(Home(folder / f"hospital{k}").database) as store:
            tasks = {run.run_id: run.tasks for run in store.history()}
        for name, run in runs.items():
            measured = [task.evaluation for task in tasks[run] if task.evaluation is not None]
            reached = class_facts(measured[-1])["accuracy"]
            scores[name][f"hospital{k}"] = reached if isinstance(reached, float) else None
    return scores


def _training_images() -> dict[str, list[int]]:
    """Return the number of training images by hospital and digit, read from the hospitals' data."""
    data = {f"hospital{k}": datasets.load(f"digits/hospital{k}") for k in range(HOSPITALS)}
    return {name: torch.bincount(d.train.labels, minlength=len(d.schema.classes)).tolist() for name, d in data.items()}


def run_demo(out: Path, rounds: int, steps: Steps, quiet: bool, verbose: bool) -> int:
    """Run the demo and write `summary.json`, `accuracy.png` and `index.html` to `out`; return the exit status.

    quiet: print the summary as JSON   verbose: print each event of the runs

    Guarantees: no process and no temporary folder is left, even after Ctrl-C, SIGTERM or a closed terminal.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with Signals() as signals:
        folder = Path(mkdtemp(prefix="consilium-demo-"))
        processes = Processes(out / "demo.log", signals)
        write_public(processes.log, b"")
        try:
            with signals.raising(), _consortium(folder, processes, steps) as client:
                events = Watcher(live=False) if verbose else None
                details = {name: _train(client, processes, name, rounds, steps, events) for name in RUNS}
                steps.show("Results", 0, 3, "reads the ledgers")
                silos = list(client.silos().silos)
                scores = _local_scores(folder, {name: d.info.run_id for name, d in details.items()})
                spent = spending(folder, RunManifest.from_json(details[PRIVATE].manifest_json))
                steps.show("Results", 1, 3, "ends the processes")
        except KeyboardInterrupt:
            steps.say("interrupted: stopping the processes of the demo")
        finally:
            processes.stop()
            shutil.rmtree(folder)
        if signals.received is not None:
            return 128 + signals.received
    steps.show("Results", 2, 3, "writes the page")
    results = report(out, details, scores, spent, silos, _training_images(), time.monotonic() - started)
    steps.end()
    show_reply(results, as_json=quiet)
    if not quiet:
        open_file(out / "index.html")
    return 0
