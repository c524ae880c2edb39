"""What a person sees: tables and live progress on a terminal, plain lines when piped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.lead import accuracy
from coordinator.lead.terminal_chart import chart
from fl_core.aggregation import options
from fl_core.types.clinical import BASIC
from fl_core.types.records import NO_BOUND, Judged, fairness, judgements, refused
from privacy.accounting.uncertainty import UNBOUNDED, Estimate
from protos.consilium.v1 import federation_pb2 as pb
from service_core import clinical_report
from service_core.console import counted, local_time, make_table, plain_console, printable, span

OUT = plain_console(width=None if sys.stdout.isatty() else 160)
ERR = plain_console(stderr=True)


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def percent(share: float) -> str:
    """Format a share; a dash when there is none yet (-1)."""
    return accuracy.plain(share).text()


def private_form(manifest: str) -> str:
    """List the options of the method that its private form replaced; empty where none. manifest: JSON."""
    raw = json.loads(manifest)
    was, options = raw.get("private_form") or {}, raw["method"]["options"]
    changes = ", ".join(f"method.{name}={options[name]} (was {was[name]})" for name in sorted(was) if name in options)
    return f"{raw['method']['name']} takes its private form: {changes}" if changes else ""


def aggregator_warning(manifest: str, holds: Mapping[str, Collection[str]]) -> str:
    """Say what the aggregator of a run costs, if anything. manifest: JSON; holds: classes that silos declare."""
    raw = json.loads(manifest)
    chosen = raw.get("aggregator") or {"name": options.DEFAULT, "options": {}}
    declared = [holds.get(member["name"], ()) for member in raw["members"]]
    return options.warning(options.read_written(chosen["name"], chosen["options"]), declared)


_CHART_WIDTH, _CHART_MARGIN = 60, 8
_RUN_FIELDS = (
    "name",
    "state",
    "reason",
    "method",
    "data",
    "rounds",
    "closed",
    "bytes_up",
    "bytes_down",
    "manifest_digest",
)


def run_json(info: pb.RunInfo) -> Mapping[str, object]:
    """Convert a run; numbers that noise hides are null, others have the interval of their noise."""
    return {
        "run": info.run_id,
        **{name: getattr(info, name) for name in _RUN_FIELDS},
        **accuracy.newest(info).facts("global_accuracy"),
        **accuracy.best(info).facts("best_global_accuracy", "best_"),
        "created": info.created_unix,
        "ended": info.ended_unix or None,
        "model_digest": info.model_digest or None,
        "excluded": list(info.excluded),
        "waiting": waiting_json(info.waiting) if info.HasField("waiting") else None,
    }


def waiting_json(waiting: pb.Waiting) -> Mapping[str, object]:
    """Turn an open round into a JSON object."""
    return {
        "round": waiting.round,
        "there": waiting.there,
        "needed": waiting.needed,
        "silos": [
            {"name": s.name, "left": s.left_s, "online": s.online, "offline": s.offline_s, "classes": list(s.classes)}
            for s in waiting.silos
        ],
    }


def waiting_lines(info: pb.RunInfo) -> list[str]:
    """Say whom a run waits for, for how long and why, and who is excluded."""
    lines = [f"excluded by the lead: {', '.join(info.excluded)}"] if info.excluded else []
    if info.waiting.silos:
        now = info.waiting
        there = f"{counted(now.there, 'update')} {'is' if now.there == 1 else 'are'} there"
        lines.append(f"round {now.round + 1}: {there}, {now.needed} close it; waits for")
        lines += [f"  {silo.name} ({awaited(silo)})" for silo in now.silos]
    return lines


def awaited(silo: pb.AwaitedSilo) -> str:
    """Say where an awaited silo is, how much longer it is awaited, and which classes depend on it."""
    where = "connected" if silo.online else f"offline {span(silo.offline_s)}"
    alone = f"; nobody else holds {', '.join(silo.classes)}" if silo.classes else ""
    return f"{where}, for at most {span(silo.left_s)} more{alone}"


def round_json(info: pb.RoundInfo) -> Mapping[str, object]:
    """Convert a round. correct, examples: sums as they were released, with noise of standard deviation noise_std."""
    return {
        "round": info.round,
        "kind": pb.TaskKind.Name(info.kind).lower(),
        "included": list(info.included),
        "missing": dict(info.missing),
        "clipped": info.clipped,
        "refused": refused(info.missing),
        "cut": dict(info.cut),
        "cut_rows": info.cut_rows,
        "unbounded": info.unbounded,
        "norm_medians": dict(info.medians),
        **accuracy.sums_json(info.correct, info.examples, accuracy.noise_of(info)),
        **accuracy.of_round(info).facts(),
        **accuracy.balanced(info).facts("balanced_accuracy", "balanced_"),
        "clinical": clinical_json(info),
        "opened": info.opened_unix,
        "closed": info.closed_unix or None,
        **personal_json(info.personal, info.withheld),
    }


def judged_text(found: Mapping[str, int]) -> str:
    """Say what became of the updates of some rounds. found: as `judgements` counts it."""
    refusals, cuts = found["updates_refused"], found["updates_cut"]
    text = f"{counted(refusals, 'update')} refused, {cuts} cut, {counted(found['cut_rows'], 'row')} of prototypes cut"
    rounds = found["unbounded_rounds"]
    return f"{text}; {counted(rounds, 'round')} without a bound on updates" if rounds else text


def aggregator_text(aggregator: str, found: Mapping[str, int]) -> str:
    """Say by which rule a run's updates become one, and what it did to them."""
    return f"updates become one by aggregator={aggregator or 'unknown to this service'}: {judged_text(found)}"


def judged_updates(info: pb.RoundInfo) -> list[tuple[str, str]]:
    """List what there is to say of a round's updates: (hospital, why) of those missing and cut; "all" is of all."""
    of_all = [("all", NO_BOUND)] if info.unbounded else []
    return [*of_all, *sorted(info.missing.items()), *sorted(info.cut.items())]


def clinical_json(info: pb.RoundInfo) -> Mapping[str, object] | None:
    found = accuracy.clinical_of(info)
    return None if found is None else found.facts()


def personal_json(scores: Mapping[str, float], withheld: Collection[str] = ()) -> Mapping[str, object]:
    """Return the scores of personal models and their fairness; empty where none was measured.

    withheld: scores with too much noise. They are null and named in `withheld_scores`, as is a score outside [0, 1].
    """
    named = [name for name in ("pa", "pm_l", "pm_v") if name in scores or name in withheld]
    if not named:
        return {}
    shown = {name: None if name in withheld else accuracy.plain(scores[name]).point for name in named}
    hidden = sorted({*withheld, *(name for name, v in shown.items() if v is None)})
    spread = None if "pm_l" in hidden else fairness(scores)
    shown["fairness"] = None if spread is None else accuracy.plain(spread).point
    return {**shown, **({"withheld_scores": hidden} if hidden else {})}


def personal_text(scores: Mapping[str, float], withheld: Collection[str] = ()) -> str:
    shown = {name: v for name, v in personal_json(scores, withheld).items() if name != "withheld_scores"}
    noisy = Estimate(withheld=UNBOUNDED)
    texts = {name: percent(v) if isinstance(v, float) else "-" for name, v in shown.items()}
    texts |= {name: percent(scores[name]) for name in shown if shown[name] is None and name in scores}
    texts |= dict.fromkeys(sorted(withheld), noisy.text())
    return "".join(f"  {name} {text}" for name, text in texts.items())


def silo_json(info: pb.SiloInfo) -> Mapping[str, object]:
    return {
        **{name: getattr(info, name) for name in ("name", "state", "fingerprint", "round", "software")},
        "certificate_until": info.certificate_until_unix,
        "last_seen": info.last_seen_unix or None,
        "data": info.data.name or None,
        "classes": list(info.data.classes),
        "nominal_size": info.data.nominal_size,
        "activity": _activity(info),
        "run": info.run_id or None,
        "policy_digest": info.policy_digest or None,
        "alarm": info.alarm or None,
    }


def software_json(found: Mapping[str, str]) -> Mapping[str, object]:
    """Convert what sides a run had, by software. found: as in `RunDetail`."""
    return {"coordinator": found.get(""), "silos": {name: text for name, text in sorted(found.items()) if name}}


def software_text(found: Mapping[str, str]) -> str:
    """Say with which software a run was done: the coordinator's, and who had another; empty where nobody knows."""
    if "" not in found:
        return ""
    ours, silos = found[""], sorted(name for name in found if name)
    others = [f"{name} {found[name] or 'no version given'}" for name in silos if found[name] != ours]
    same = f"{ours} (coordinator and {counted(len(silos) - len(others), 'silo')})"
    return ", ".join([same, *others])


def runs_table(runs: Iterable[pb.RunInfo]) -> Table:
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
                accuracy.newest(r).short(),
                accuracy.best(r).short(),
                f"{size(r.bytes_up)} / {size(r.bytes_down)}",
                _minute(r.created_unix),
            )
            for r in runs
        ),
    )


def _minute(unix: float) -> str:
    """Format a time to the minute, as columns of a table have it."""
    return local_time(unix)[:16]


def show_alarms(silos: Iterable[pb.SiloInfo]) -> None:
    """Print what the lead must look into."""
    for silo in silos:
        if silo.alarm:
            OUT.print(f"{silo.name}: {silo.alarm}", soft_wrap=True)


def silos_table(silos: Iterable[pb.SiloInfo]) -> Table:
    return make_table(
        "Silos",
        (
            "silo",
            "state",
            "data",
            "size, rounded up",
            "classes",
            "doing",
            "policy",
            "software",
            "last seen",
            "certificate until",
            "fingerprint",
        ),
        (
            (
                s.name,
                s.state,
                s.data.name or "-",
                f"{s.data.nominal_size:.0f}" if s.data.nominal_size else "-",
                ", ".join(s.data.holds) or "-",
                doing(s),
                s.policy_digest[:8] or "-",
                s.software.removeprefix("consilium-fl ") or "-",
                _minute(s.last_seen_unix),
                _minute(s.certificate_until_unix)[:10],
                s.fingerprint[:8],
            )
            for s in silos
        ),
    )


def doing(silo: pb.SiloInfo) -> str:
    if silo.state != "online":
        return silo.state
    word = _activity(silo)
    if word in ("idle", "activity_unspecified"):
        return "present"
    share = f" {100 * min(silo.done, silo.total) // silo.total} %" if silo.total else ""
    return f"{word.replace('_', ' ')} (round {silo.round + 1}){share}"


def _activity(silo: pb.SiloInfo) -> str:
    """Return the word for what a silo does; one that a later version knows counts as not said."""
    known = silo.activity if silo.activity in pb.Activity.values() else pb.ACTIVITY_UNSPECIFIED
    return pb.Activity.Name(known).lower()


def round_text(number: int, kind: pb.TaskKind.ValueType) -> str:
    """Return the number of a round, from 1; the closing evaluation has none."""
    return "evaluation" if kind == pb.EVALUATE else str(number + 1)


def event_json(event: pb.Event) -> dict[str, object]:
    optional = {"silo": event.silo, "text": event.text}
    return {
        **{"event": event.kind, "number": event.number, "at": event.at_unix, "run": event.run_id, "round": event.round},
        **{name: value for name, value in optional.items() if value},
        **({"closed": round_json(event.closed)} if event.HasField("closed") else {}),
    }


def place(event: pb.Event, rounds: int) -> str:
    """Name the round of an event, from 1; empty where it is of the whole run."""
    if event.kind not in ("cut", "opened", "accepted", "refused", "arrived", "closed"):
        return ""
    return f"round {event.round + 1}/{rounds}" if event.round < rounds else "evaluation"


def clinical_text(info: pb.RoundInfo) -> str:
    """Say balanced accuracy and AUC, which may cover fewer hospitals; empty where accuracies alone were measured."""
    found, tested = accuracy.clinical_of(info), sum(info.examples)
    if found is None:
        return ""
    part = f" on {found.examples} of {tested:.0f} test images" if found.examples < tested else ""
    return f"  balanced {accuracy.balanced(info).text()}  AUC {clinical_report.auc(found.macro_auc)}{part}"


def clinical_tables(info: pb.RoundInfo, classes: Sequence[str], metrics: str = BASIC) -> list[Table | str]:
    """Say what a round's evaluation measured, by class and over all, or why it did not; empty in a run of accuracies.

    metrics: of the run's manifest.
    """
    found = accuracy.clinical_of(info)
    if found is None:
        return [said] if (said := accuracy.no_clinical(info, metrics)) else []
    by_class = make_table("By class", clinical_report.CLASS_HEAD, clinical_report.class_rows(found, classes))
    return [by_class, clinical_report.sentence(found, sum(info.examples))]


def changed_text(rounds: Iterable[Judged]) -> str:
    """Say what became of the updates of rounds, where any was refused or cut, or nothing bounded them."""
    found = judgements(rounds)
    return f"  ({judged_text(found)})" if any(found.values()) else ""


_SAID_ABOVE = ("warning", "refused")
"""Kinds of events that stay above the repainted view: nothing in it says the same later."""


class Watcher:
    """Live progress of one run: a table and a chart on a terminal, repainted; one line per change when piped."""

    def __init__(self, console: Console = OUT) -> None:
        self._console = console
        self._info = pb.RunInfo(accuracy=-1, best_accuracy=-1)
        self._silos: dict[str, str] = {}
        self._accuracies: dict[int, float | None] = {}
        self._judged: dict[int, pb.RoundInfo] = {}
        self._personal = self._clinical = ""
        self._heard = time.monotonic()
        repainted = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._display)
        self._live = repainted if console.is_terminal else None

    def __enter__(self) -> Watcher:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: pb.Event) -> None:
        if event.HasField("info"):
            self._info, self._heard = event.info, time.monotonic()
        if event.HasField("closed"):
            self._personal = personal_text(event.closed.personal, event.closed.withheld)
            self._accuracies[event.closed.round] = accuracy.of_round(event.closed).point
            self._clinical = clinical_text(event.closed)
            self._judged[event.closed.round] = event.closed
        for silo in event.silos:
            self._silos[silo.name] = doing(silo)
        if event.silo and event.kind != "software":
            self._silos[event.silo] = event.kind if not event.text else f"{event.kind}: {event.text}"
        if self._live:
            if event.kind in _SAID_ABOVE:
                self._live.console.print(self._line(event), soft_wrap=True)
            self._live.refresh()
        elif event.kind not in ("silo", "software"):
            self._console.print(self._line(event), soft_wrap=True)

    def _left(self) -> str:
        info = self._info
        if not info.closed or info.state != "running":
            return "-"
        return span((time.time() - info.created_unix) / info.closed * (info.rounds - info.closed))

    def _line(self, event: pb.Event) -> str:
        info = self._info
        text = f"{local_time(event.at_unix)}  {event.kind:<9} {place(event, info.rounds)}".rstrip()
        if event.silo:
            text += f"  {event.silo}"
        if event.kind == "closed":
            before = "" if event.round >= info.rounds else " before it"
            text += f"  accuracy{before} {accuracy.newest(info).text()}{self._clinical}{self._personal}"
            text += changed_text([event.closed])
            text += f"  up {size(info.bytes_up)}  down {size(info.bytes_down)}"
            text += f"  left {self._left()}"
        return f"{text}  {event.text}" if event.text else text

    def _display(self) -> Group:
        values = [self._accuracies.get(number) for number in range(max(self._accuracies, default=-1) + 1)]
        width = min(_CHART_WIDTH, self._console.width - _CHART_MARGIN)
        lines = chart(values, width, ascii_only=self._console.options.ascii_only)
        caption = [f"        accuracy over {counted(len(values) - 1, 'round')} of training"] if lines else []
        return Group(Text(self._title()), self._table(), *(Text(line, no_wrap=True) for line in (*lines, *caption)))

    def _title(self) -> str:
        info = self._info
        measured = f"{self._clinical}{self._personal}{changed_text(self._judged.values())}"
        return printable(
            f"{info.run_id}  {info.state}  round {info.closed}/{info.rounds}  "
            f"accuracy {accuracy.newest(info).text()}  best {accuracy.best(info).text()}{measured}  "
            f"up {size(info.bytes_up)}  down {size(info.bytes_down)}  left {self._left()}"
        )

    def _table(self) -> Table:
        info = self._info
        passed, rows = time.monotonic() - self._heard, dict(self._silos)
        for silo in info.waiting.silos:
            left = pb.AwaitedSilo()
            left.CopyFrom(silo)
            left.left_s = max(0.0, silo.left_s - passed)
            rows[silo.name] = f"{rows.get(silo.name, '-')}; awaited ({awaited(left)})"
        return make_table("", ("silo", "doing"), sorted(rows.items()))
