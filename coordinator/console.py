"""What a person sees: tables and live progress on a terminal, plain lines when piped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coordinator.api import measured
from fl_core.types.records import fairness
from privacy.reports.uncertainty import UNBOUNDED, Estimate
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import local_time, make_table, plain_console

OUT = plain_console(width=None if sys.stdout.isatty() else 160)
ERR = plain_console(stderr=True)


def size(count: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def span(seconds: float) -> str:
    """Write a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def percent(share: float) -> str:
    """Write a share, or a dash when there is none yet (-1); what is no share is withheld."""
    return measured.plain(share).text()


def private_form(manifest: str) -> str:
    """Say which options of the method its private form replaced, from a manifest's JSON; empty where none."""
    raw = json.loads(manifest)
    was, options = raw.get("private_form") or {}, raw["method"]["options"]
    changes = ", ".join(f"method.{name}={options[name]} (was {was[name]})" for name in sorted(was) if name in options)
    return f"{raw['method']['name']} takes its private form: {changes}" if changes else ""


def run_json(info: pb.RunInfo) -> Mapping[str, object]:
    """Turn a run into a JSON object; numbers that noise hides are null, others have the interval of their noise."""
    return {
        "run": info.run_id,
        "name": info.name,
        "state": info.state,
        "reason": info.reason,
        "method": info.method,
        "data": info.data,
        "rounds": info.rounds,
        "closed": info.closed,
        **measured.of_run(info).facts("global_accuracy"),
        **measured.best_of_run(info).facts("best_global_accuracy", "best_"),
        "created": info.created_unix,
        "ended": info.ended_unix or None,
        "bytes_up": info.bytes_up,
        "bytes_down": info.bytes_down,
        "manifest_digest": info.manifest_digest,
        "model_digest": info.model_digest or None,
    }


def round_json(info: pb.RoundInfo) -> Mapping[str, object]:
    """Turn a round into a JSON object; the accuracy is that of the model before the round's training.

    correct, examples: the sums as they were released, on each of which noise of standard deviation noise_std lies.
    """
    return {
        "round": info.round,
        "kind": pb.TaskKind.Name(info.kind).lower(),
        "included": list(info.included),
        "missing": dict(info.missing),
        "clipped": info.clipped,
        **measured.sums_json(info.correct, info.examples, measured.noise_of(info)),
        **measured.of_round(info).facts(),
        "opened": info.opened_unix,
        "closed": info.closed_unix or None,
        **personal_json(info.personal, info.withheld),
    }


def personal_json(scores: Mapping[str, float], withheld: Collection[str] = ()) -> Mapping[str, object]:
    """Pick what is shown of personal models: pa, pm_l, pm_v and the fairness; nothing where none was measured.

    withheld: those that were measured with too much noise, which are null and named; so is what is no share at all.
    """
    named = [name for name in ("pa", "pm_l", "pm_v") if name in scores or name in withheld]
    if not named:
        return {}
    shown = {name: None if name in withheld else measured.plain(scores[name]).point for name in named}
    hidden = sorted({*withheld, *(name for name, v in shown.items() if v is None)})
    spread = None if "pm_l" in hidden else fairness(scores)
    about: dict[str, object] = {"fairness": None if spread is None else measured.plain(spread).point}
    return {**shown, **about, **({"withheld_scores": hidden} if hidden else {})}


def personal_text(scores: Mapping[str, float], withheld: Collection[str] = ()) -> str:
    """Write the scores of personal models after two spaces, or nothing."""
    shown = {name: v for name, v in personal_json(scores, withheld).items() if name != "withheld_scores"}
    noisy = Estimate(withheld=UNBOUNDED)
    texts = {name: percent(v) if isinstance(v, float) else "-" for name, v in shown.items()}
    texts |= {name: percent(scores[name]) for name in shown if shown[name] is None and name in scores}
    texts |= dict.fromkeys(sorted(withheld), noisy.text())
    return "".join(f"  {name} {text}" for name, text in texts.items())


def silo_json(info: pb.SiloInfo) -> Mapping[str, object]:
    """Turn a silo into a JSON object."""
    return {
        "name": info.name,
        "state": info.state,
        "fingerprint": info.fingerprint,
        "certificate_until": info.certificate_until_unix,
        "last_seen": info.last_seen_unix or None,
        "data": info.data.name or None,
        "classes": list(info.data.classes),
        "nominal_size": info.data.nominal_size,
        "activity": pb.Activity.Name(info.activity).lower(),
        "run": info.run_id or None,
        "round": info.round,
        "software": info.software,
        "policy_digest": info.policy_digest or None,
    }


def runs_table(runs: Iterable[pb.RunInfo]) -> Table:
    """List runs, one a row."""
    return make_table(
        "Runs",
        ("run", "state", "method", "data", "round", "accuracy", "best", "up / down", "started"),
        (
            (
                r.run_id,
                r.state,
                r.method,
                r.data,
                f"{r.closed}/{r.rounds}",
                measured.of_run(r).text(),
                measured.best_of_run(r).text(),
                f"{size(r.bytes_up)} / {size(r.bytes_down)}",
                local_time(r.created_unix),
            )
            for r in runs
        ),
    )


def silos_table(silos: Iterable[pb.SiloInfo]) -> Table:
    """List silos, one a row."""
    return make_table(
        "Silos",
        ("silo", "state", "data", "size", "doing", "policy", "last seen", "certificate until", "fingerprint"),
        (
            (
                s.name,
                s.state,
                s.data.name or "-",
                f"{s.data.nominal_size:.0f}" if s.data.nominal_size else "-",
                doing(s),
                s.policy_digest[:12] or "-",
                local_time(s.last_seen_unix),
                local_time(s.certificate_until_unix),
                s.fingerprint[:23],
            )
            for s in silos
        ),
    )


def doing(silo: pb.SiloInfo) -> str:
    """Say what a silo is doing, with its progress."""
    if silo.state != "online":
        return silo.state
    word = pb.Activity.Name(silo.activity).lower()
    if word in ("idle", "activity_unspecified"):
        return "present"
    share = f" {100 * min(silo.done, silo.total) // silo.total} %" if silo.total else ""
    return f"{word} (round {silo.round + 1}){share}"


def round_text(number: int, kind: pb.TaskKind.ValueType) -> str:
    """Name a round as people count, from 1; the evaluation after the last round has a name and no number."""
    return "evaluation" if kind == pb.EVALUATE else str(number + 1)


def _place(event: pb.Event, rounds: int) -> str:
    if event.kind not in ("opened", "accepted", "refused", "arrived", "closed"):
        return ""  # of the whole run
    return f"round {event.round + 1}/{rounds}" if event.round < rounds else "evaluation"


class Watcher:
    """Live progress of one run: a table that repaints itself on a terminal, one line per change when piped."""

    def __init__(self, console: Console = OUT) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._info = pb.RunInfo(accuracy=-1, best_accuracy=-1)
        self._silos: dict[str, str] = {}
        self._personal = ""
        self._started = time.time()

    def __enter__(self) -> Watcher:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: pb.Event) -> None:
        """Take one event and show what it changes."""
        if event.HasField("info"):
            self._info = event.info
        if event.HasField("closed"):
            self._personal = personal_text(event.closed.personal, event.closed.withheld)
        for silo in event.silos:
            self._silos[silo.name] = doing(silo)
        if event.silo:
            self._silos[event.silo] = event.kind if not event.text else f"{event.kind}: {event.text}"
        if self._live:
            self._live.update(self._table())
        elif event.kind != "silo":
            self._console.print(self._line(event), soft_wrap=True)

    def _left(self) -> str:
        info = self._info
        if not info.closed or info.state != "running":
            return "-"
        return span((time.time() - info.created_unix) / info.closed * (info.rounds - info.closed))

    def _line(self, event: pb.Event) -> str:
        info = self._info
        text = f"{local_time(event.at_unix)}  {event.kind:<9} {_place(event, info.rounds)}".rstrip()
        if event.silo:
            text += f"  {event.silo}"
        if event.kind == "closed":
            text += f"  accuracy {measured.of_run(info).text()}{self._personal}"
            text += f"  up {size(info.bytes_up)}  down {size(info.bytes_down)}"
            text += f"  left {self._left()}"
        return f"{text}  {event.text}" if event.text else text

    def _table(self) -> Table:
        info = self._info
        title = (
            f"{info.run_id}  {info.state}  round {info.closed}/{info.rounds}  "
            f"accuracy {measured.of_run(info).text()}  best {measured.best_of_run(info).text()}{self._personal}  "
            f"up {size(info.bytes_up)}  down {size(info.bytes_down)}  left {self._left()}"
        )
        return make_table(title, ("silo", "doing"), sorted(self._silos.items()))
