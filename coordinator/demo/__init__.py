"""`coordinator demo`: a whole federation on this machine; each hospital is a process with a home and a certificate."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from coordinator import display
from coordinator.client import LeadClient
from coordinator.config import compose_spec
from coordinator.demo.processes import Processes, Signals, call, free_port
from coordinator.demo.report import report
from fl_core.errors import UnavailableError
from protos.consilium.v1 import federation_pb2 as pb

HOSPITALS = 6
METHODS = ("fedmr", "fedavg")


@contextmanager
def _consortium(folder: Path, processes: Processes) -> Iterator[LeadClient]:
    """Create the consortium, enrol the hospitals, start everything and wait until all are there."""
    home, address = folder / "coordinator", f"127.0.0.1:{free_port()}"
    call("coordinator", "init", "demo", "--address", address, "--home", str(home))
    processes.start("coordinator", "serve", "--home", str(home), "--bind", address)
    processes.until((home / "service.json").exists, "the coordinator")
    for k in range(HOSPITALS):
        token = folder / f"hospital{k}.token"
        token.touch(mode=0o600)
        token.write_text(str(call("coordinator", "invite", f"hospital{k}", "--home", str(home))["token"]))
        call("silo", "join", "--token-file", str(token), "--home", str(folder / f"hospital{k}"))
        processes.start("silo", "serve", "--data", f"digits/hospital{k}", "--home", str(folder / f"hospital{k}"))
    client = LeadClient.open(home)
    try:
        processes.until(lambda: _online(client) == HOSPITALS, "six hospitals")
        yield client
    finally:
        client.close()


def _online(client: LeadClient) -> int:
    return sum(silo.state == "online" for silo in client.silos().silos)


def _train(client: LeadClient, processes: Processes, method: str, rounds: int, quiet: bool) -> pb.RunDetail:
    spec = compose_spec([f"method={method}", "data=digits", "federation=hospitals6", f"rounds={rounds}"])
    run = client.submit(spec.to_json(), f"demo-{method}").run_id
    if quiet:
        for _ in client.watch(run):
            processes.check()
    else:
        with display.Watcher() as watcher:
            for event in client.watch(run):
                watcher.show(event)
                processes.check()
    detail = client.show(run)
    if detail.info.state != "finished":
        raise UnavailableError("E-RUN-09", f"{run} ended as {detail.info.state}: {detail.info.reason}")
    return detail


def _local_scores(folder: Path, run: str) -> dict[str, float | None]:
    """Ask each hospital what the final model scored there: the number is in no message."""
    scores: dict[str, float | None] = {}
    for k in range(HOSPITALS):
        status = call("silo", "status", "--home", str(folder / f"hospital{k}"))
        runs = {r["run"]: r for r in status["runs"]}
        last = runs[run]["evaluations"][-1]
        total = sum(last["examples"])
        scores[f"hospital{k}"] = sum(last["correct"]) / total if total else None
    return scores


def run_demo(out: Path, rounds: int, quiet: bool) -> int:
    """Run the demo and write `summary.json` and `accuracy.png` to `out`; return the exit status.

    Guarantees: no process and no temporary folder is left behind, also after Ctrl-C, SIGTERM or a closed terminal, at
    any moment and any number of times.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with Signals() as signals:
        folder = Path(mkdtemp(prefix="consilium-demo-"))
        processes = Processes(out / "demo.log", signals)
        processes.log.write_bytes(b"")
        try:
            with signals.raising(), _consortium(folder, processes) as client:
                details = {method: _train(client, processes, method, rounds, quiet) for method in METHODS}
                silos = list(client.silos().silos)
                scores = {method: _local_scores(folder, d.info.run_id) for method, d in details.items()}
        except KeyboardInterrupt:
            display.ERR.print("interrupted: the processes of the demo are being ended")
        finally:
            processes.stop()
            shutil.rmtree(folder)
        if signals.received is not None:
            return 128 + signals.received
    report(out, details, scores, silos, time.monotonic() - started, quiet)
    return 0
