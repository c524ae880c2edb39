"""`coordinator demo`: a whole federation on this machine; each hospital is a process with a home and a certificate."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coordinator import display
from coordinator.client import LeadClient
from coordinator.config import compose_spec
from fl_core.errors import UnavailableError
from protos.consilium.v1 import federation_pb2 as pb

HOSPITALS = 6
METHODS = ("fedmr", "fedavg")
BIN = Path(sys.executable).parent


@dataclass(slots=True)
class Processes:
    """The processes of the demo; all of them end with it, however it ends."""

    log: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of ours in a session of its own, so that a Ctrl-C reaches the demo alone."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_env(),
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def check(self) -> None:
        """Raise UnavailableError (E-RUN-09) when one of them has ended by itself."""
        for process in self.running:
            if process.poll() is not None:
                tail = b"\n".join(self.log.read_bytes().splitlines()[-15:]).decode(errors="replace")
                name = " ".join(str(word) for word in process.args) if isinstance(process.args, list) else ""
                raise UnavailableError("E-RUN-09", f"a process of the demo ended: {name}\n{tail}")

    def stop(self) -> None:
        """Ask every process to end, silos first, and end those that do not within 10 seconds."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self.running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def _env() -> dict[str, str]:
    """Give each process one thread: seven of them share the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _call(*words: str) -> Mapping[str, Any]:
    """Run a command with --json to its end and read its answer."""
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:], "--json"], capture_output=True, text=True, env=_env(), check=False
    )
    if done.returncode:
        raise UnavailableError("E-RUN-09", f"{' '.join(words[:2])} failed: {done.stderr.strip()}")
    answer: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _until(condition: Callable[[], bool], what: str, processes: Processes, seconds: float = 60) -> None:
    """Wait for a condition with a deadline; a process that ends meanwhile ends the wait."""
    deadline = time.monotonic() + seconds
    while not condition():
        processes.check()
        if time.monotonic() > deadline:
            raise UnavailableError("E-RUN-09", f"the demo waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


@contextmanager
def _consortium(folder: Path, processes: Processes) -> Iterator[LeadClient]:
    """Create the consortium, enrol the hospitals, start everything and wait until all are there."""
    home, address = folder / "coordinator", f"127.0.0.1:{_free_port()}"
    _call("coordinator", "init", "demo", "--address", address, "--home", str(home))
    processes.start("coordinator", "serve", "--home", str(home), "--bind", address)
    _until((home / "service.json").exists, "the coordinator", processes)
    for k in range(HOSPITALS):
        token = folder / f"hospital{k}.token"
        token.touch(mode=0o600)
        token.write_text(str(_call("coordinator", "invite", f"hospital{k}", "--home", str(home))["token"]))
        _call("silo", "join", "--token-file", str(token), "--home", str(folder / f"hospital{k}"))
        processes.start("silo", "serve", "--data", f"digits/hospital{k}", "--home", str(folder / f"hospital{k}"))
    client = LeadClient.open(home)
    try:
        _until(lambda: sum(s.state == "online" for s in client.silos().silos) == HOSPITALS, "six hospitals", processes)
        yield client
    finally:
        client.close()


def _train(client: LeadClient, method: str, rounds: int, quiet: bool) -> pb.RunDetail:
    spec = compose_spec([f"method={method}", "data=digits", "federation=hospitals6", f"rounds={rounds}"])
    run = client.submit(spec.to_json(), f"demo-{method}").run_id
    if quiet:
        for _ in client.watch(run):
            pass
    else:
        with display.Watcher() as watcher:
            for event in client.watch(run):
                watcher.show(event)
    detail = client.show(run)
    if detail.info.state != "finished":
        raise UnavailableError("E-RUN-09", f"{run} ended as {detail.info.state}: {detail.info.reason}")
    return detail


def _local_scores(folder: Path, run: str) -> dict[str, float | None]:
    """Ask each hospital what the final model scored there: the number is in no message."""
    scores: dict[str, float | None] = {}
    for k in range(HOSPITALS):
        status = _call("silo", "status", "--home", str(folder / f"hospital{k}"))
        runs = {r["run"]: r for r in status["runs"]}
        last = runs[run]["evaluations"][-1]
        total = sum(last["examples"])
        scores[f"hospital{k}"] = sum(last["correct"]) / total if total else None
    return scores


def run_demo(out: Path, rounds: int, quiet: bool) -> int:
    """Run the demo and write `summary.json` and `accuracy.png` to `out`; return the exit status.

    Guarantees: no process is left behind, also after Ctrl-C or SIGTERM.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    previous = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with TemporaryDirectory(prefix="consilium-demo-") as scratch:
        folder = Path(scratch)
        processes = Processes(out / "demo.log")
        processes.log.write_bytes(b"")
        try:
            with _consortium(folder, processes) as client:
                details = {method: _train(client, method, rounds, quiet) for method in METHODS}
                silos = list(client.silos().silos)
                scores = {method: _local_scores(folder, d.info.run_id) for method, d in details.items()}
        except KeyboardInterrupt:
            display.ERR.print("interrupted; every process of the demo has been ended")
            return 130
        finally:
            processes.stop()
            signal.signal(signal.SIGTERM, previous)
    report(out, details, scores, silos, time.monotonic() - started, quiet)
    return 0


def _series(detail: pb.RunDetail) -> list[float]:
    return [sum(r.correct) / max(sum(r.examples), 1) for r in detail.rounds]


def report(
    out: Path,
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
    seconds: float,
    quiet: bool,
) -> None:
    """Write the summary and the picture, and print the tables."""
    ours, plain = details["fedmr"], details["fedavg"]
    summary = {
        "method": "fedmr",
        "global_accuracy": ours.info.accuracy,
        "best_global_accuracy": ours.info.best_accuracy,
        "fedavg_global_accuracy": plain.info.accuracy,
        "fedavg_best_global_accuracy": plain.info.best_accuracy,
        "rounds": ours.info.rounds,
        "silos": [{"name": s.name, "identity": f"silo://demo/{s.name}", "fingerprint": s.fingerprint} for s in silos],
        "mtls": True,
        "bytes_up": ours.info.bytes_up,
        "bytes_down": ours.info.bytes_down,
        "seconds": round(seconds, 1),
        "model_digest": {method: d.info.model_digest for method, d in details.items()},
        "accuracy_by_round": {method: _series(d) for method, d in details.items()},
        "hospital_accuracy": {method: dict(s) for method, s in scores.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _picture(out / "accuracy.png", {method: _series(d) for method, d in details.items()})
    if quiet:
        display.print_json(summary)
        return
    _tables(details, scores, silos)
    display.OUT.print(f"{seconds:.0f} s; wrote {out / 'summary.json'} and {out / 'accuracy.png'}", soft_wrap=True)


def _tables(
    details: Mapping[str, pb.RunDetail],
    scores: Mapping[str, Mapping[str, float | None]],
    silos: Sequence[pb.SiloInfo],
) -> None:
    rows = [
        (m, display.percent(d.info.accuracy), display.percent(d.info.best_accuracy), str(d.info.rounds),
         display.size(d.info.bytes_up), display.size(d.info.bytes_down),
         display.span(d.info.ended_unix - d.info.created_unix))
        for m, d in details.items()
    ]  # fmt: skip
    head = ("method", "global accuracy", "best", "rounds", "bytes up", "bytes down", "time")
    display.OUT.print(display.table("One model for six hospitals, no image moved", head, rows))
    last = {m: d.rounds[-1] for m, d in details.items()}
    names = json.loads(details["fedmr"].manifest_json)["schema"]["classes"]
    by_class = [
        (name, *(display.percent(r.correct[c] / r.examples[c] if r.examples[c] else -1) for r in last.values()))
        for c, name in enumerate(names)
    ]
    display.OUT.print(display.table("Accuracy by class", ("class", *last), by_class))
    by_silo = [
        (s.name, f"silo://demo/{s.name}", s.fingerprint[:23],
         *(display.percent(-1 if scores[m][s.name] is None else float(scores[m][s.name] or 0)) for m in details))
        for s in silos
    ]  # fmt: skip
    columns = ("hospital", "certificate identity", "key fingerprint", *details)
    display.OUT.print(display.table("Accuracy by hospital, on its own test images", columns, by_silo))


def _picture(path: Path, series: Mapping[str, Sequence[float]]) -> None:
    """Draw accuracy by round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (method, values), colour in zip(series.items(), ("#0b6e4f", "#8a8a8a"), strict=True):
        label = f"{method}, {100 * values[-1]:.1f} % at the end"
        axes.plot(range(len(values)), [100 * v for v in values], color=colour, linewidth=2, label=label)
    axes.set(xlabel="round", ylabel="global accuracy (%)", ylim=(0, 100), title="Six hospitals, class-disjoint digits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
