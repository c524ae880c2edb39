"""Runs, rounds and hospitals for people: tables, and sentences about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from coordinator.lead import accuracy, hospital_results
from coordinator.lead.as_json import activity, personal_json, start_json
from fl_core.aggregation import options
from fl_core.training import clinical_report
from fl_core.types import secagg
from fl_core.types.clinical import BASIC
from fl_core.types.records import NO_BOUND, Judged, judgements
from privacy.accounting.uncertainty import UNBOUNDED, Estimate
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import kind_word
from service_core.console import counted, local_time, make_table, span


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


def unmasked(manifest: str) -> str:
    """Say who reads the updates of a run without masks; empty for one with. manifest: JSON."""
    raw = json.loads(manifest)
    members = raw.get("members", ())
    return "" if raw.get("secagg") or not members else secagg.read_alone(len(members))


def aggregator_warning(manifest: str, holds: Mapping[str, Collection[str]]) -> str:
    """Say what the aggregator of a run costs, if anything. manifest: JSON; holds: classes that silos declare."""
    raw = json.loads(manifest)
    chosen = raw.get("aggregator") or {"name": options.DEFAULT, "options": {}}
    declared = [holds.get(member["name"], ()) for member in raw["members"]]
    return options.warning(options.read_written(chosen["name"], chosen["options"]), declared)


def waiting_lines(info: pb.RunInfo) -> list[str]:
    """Say whom a run waits for, for how long and why, and who is excluded."""
    lines = [f"excluded by the lead: {', '.join(info.excluded)}"] if info.excluded else []
    if info.waiting.silos:
        now = info.waiting
        lines.append(f"round {now.round + 1}: {there_text(now)}; waits for")
        lines += [f"  {silo.name} ({awaited(silo)})" for silo in now.silos]
    return lines


def there_text(now: pb.Waiting) -> str:
    """Say how many updates an open round has and needs or, where its set is fixed, answers."""
    if now.sealed:
        return f"its set is sealed, and {now.there} of {now.needed} answers that open it are there"
    return f"{counted(now.there, 'update')} {'is' if now.there == 1 else 'are'} there, {now.needed} close it"


def awaited(silo: pb.AwaitedSilo) -> str:
    """Say where an awaited silo is, how much longer it is awaited, and which classes depend on it."""
    where = "connected" if silo.online else f"offline {span(silo.offline_s)}"
    alone = f"; nobody else holds {', '.join(silo.classes)}" if silo.classes else ""
    return f"{where}, for at most {span(silo.left_s)} more{alone}"


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


def personal_parts(scores: Mapping[str, float], withheld: Collection[str] = ()) -> list[str]:
    shown = {name: v for name, v in personal_json(scores, withheld).items() if name != "withheld_scores"}
    noisy = Estimate(withheld=UNBOUNDED)
    texts = {name: percent(v) if isinstance(v, float) else "-" for name, v in shown.items()}
    texts |= {name: percent(scores[name]) for name in shown if shown[name] is None and name in scores}
    texts |= dict.fromkeys(sorted(withheld), noisy.text())
    return [f"{name} {text}" for name, text in texts.items()]


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
        (
            "run",
            "state",
            "method",
            "data",
            "round",
            "balanced accuracy",
            "classes",
            "guessing",
            "accuracy",
            "up / down",
            "started",
        ),
        (
            (
                r.run_id,
                r.state,
                r.method,
                r.data,
                f"{r.closed}/{r.rounds}",
                accuracy.newest_balanced(r).short(),
                accuracy.coverage(r).headline() or "-",
                clinical_report.percent(accuracy.chance(r)),
                accuracy.newest(r).short(),
                f"{size(r.bytes_up)} / {size(r.bytes_down)}",
                _minute(r.created_unix),
            )
            for r in runs
        ),
    )


def _minute(unix: float) -> str:
    """Format a time to the minute, as columns of a table have it."""
    return local_time(unix)[:16]


def alarms(silos: Iterable[pb.SiloInfo]) -> list[str]:
    """Say what the lead must look into."""
    return [f"{silo.name}: {silo.alarm}" for silo in silos if silo.alarm]


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
                s.state + (", evaluates only" if s.data.validation_only else ""),
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
    word = activity(silo)
    if word in ("idle", "activity_unspecified"):
        return "present"
    share = f" {100 * min(silo.done, silo.total) // silo.total} %" if silo.total else ""
    return f"{word.replace('_', ' ')} (round {silo.round + 1}){share}"


def round_text(number: int, kind: int) -> str:
    """Return the number of a round, from 1; the closing evaluation has none."""
    return "evaluation" if kind == pb.EVALUATE else str(number + 1)


def place(event: pb.Event, rounds: int) -> str:
    """Name the round of an event, from 1; empty where it is of the whole run."""
    if event.kind not in ("cut", "opened", "accepted", "refused", "arrived", "sealed", "closed"):
        return ""
    return f"round {event.round + 1}/{rounds}" if event.round < rounds else "evaluation"


def clinical_parts(info: pb.RoundInfo) -> list[str]:
    """Say the AUC, which may cover fewer hospitals; empty where accuracies alone were measured."""
    found, tested = accuracy.clinical_of(info), sum(info.examples)
    if found is None:
        return []
    part = f" on {found.examples} of {tested:.0f} test images" if found.examples < tested else ""
    return [f"AUC {clinical_report.macro_auc(found)}{part}"]


def clinical_tables(info: pb.RoundInfo, classes: Sequence[str], metrics: str = BASIC) -> list[Table | str]:
    """Say what a round's evaluation measured, by class and over all, or why it did not; empty in a run of accuracies.

    metrics: of the run's manifest.
    """
    found = accuracy.clinical_of(info)
    if found is None:
        return [said] if (said := accuracy.no_clinical(info, metrics)) else []
    by_class = make_table("By class", clinical_report.class_head(found), clinical_report.class_rows(found, classes))
    return [by_class, clinical_report.sentence(found, sum(info.examples))]


def other_run(manifest: str) -> str:
    """Name the run whose model is measured beside; empty where it is none, or hospitals' own. manifest: JSON."""
    raw = json.loads(manifest)
    return str(raw["own"]) if raw.get("other") else ""


def hospital_facts(detail: pb.RunDetail) -> tuple[list[tuple[str, ...]], list[str]]:
    """Say how the model does at the hospitals that let it be shown: rows under `hospital_results.HEAD`, and sentences.

    The sentences say how these hospitals stand, and how the models do that were measured beside, where that was asked.
    """
    if not detail.rounds:
        return [], []
    info = detail.rounds[-1]
    found, own = accuracy.results_of(info), accuracy.own_of(info)
    said = []
    if found:
        hidden = len(info.included) - len(found)
        rest = f"; {counted(hidden, 'hospital')} in the sums alone" if hidden else ""
        said.append(f"{hospital_results.standing(found, several_labels=info.several_labels).sentence()}{rest}")
    if own is not None:
        other, tested = other_run(detail.manifest_json), sum(info.examples)
        said.append(hospital_results.own_sentence(own, tested, other, several_labels=info.several_labels))
    return list(hospital_results.rows(found, several_labels=info.several_labels)), said


def hospital_tables(detail: pb.RunDetail) -> list[Table | str]:
    rows, said = hospital_facts(detail)
    title = "By hospital, of those that let it be shown"
    return [*([make_table(title, hospital_results.HEAD, rows)] if rows else []), *said]


def rounds_table(rounds: Iterable[pb.RoundInfo], *, measures: bool = True) -> Table:
    """List rounds; measures: of a run that measures a model."""
    rows = [
        (
            round_text(r.round, r.kind),
            kind_word(r.kind),
            accuracy.balanced(r).short(),
            accuracy.of_round(r).text(),
            ", ".join(r.included),
            "; ".join(f"{k}: {v}" for k, v in judged_updates(r)) or "-",
            str(r.clipped),
        )
        for r in rounds
    ]
    head = ("round", "kind", "balanced accuracy before it", "accuracy", "took part", "missing or cut", "clipped")
    shown = [k for k in range(len(head)) if measures or k not in (2, 3)]
    return make_table("Rounds", [head[k] for k in shown], ([row[k] for k in shown] for row in rows))


def changed_parts(rounds: Iterable[Judged]) -> list[str]:
    """Say what became of the updates of rounds, where any was refused or cut, or nothing bounded them."""
    found = judgements(rounds)
    return [f"({judged_text(found)})"] if any(found.values()) else []


# ---- where a run began -----------------------------------------------------------------------------------------------

_FRESH = 5
"""Modules without pretrained weights that a line names."""


def started_from(manifest: str, parent: str = "") -> str:
    """Say the same in words; empty where it is None. parent: that run's manifest, to name who is new or gone."""
    start: Any = start_json(manifest)
    if start is None:
        return ""
    parts = []
    if start["run"]:
        parts.append(f"starts from {start['run']} after round {start['rounds']}, model {start['model']}")
        if not start["private"]:
            parts.append("that model was trained without differential privacy")
    if weights := start.get("weights"):
        parts.append(_weights_text(weights, begins=not start["run"]))
    text = "; ".join(parts)
    if json.loads(manifest)["privacy"]["name"] != "none":
        text += "; epsilon counts this run's own rounds, and each hospital's ledger adds them to those before"
    if parent:
        now, then = ([member["name"] for member in json.loads(text)["members"]] for text in (manifest, parent))
        new, gone = [name for name in now if name not in then], [name for name in then if name not in now]
        text += f"; new: {', '.join(new) or 'nobody'}; not in it: {', '.join(gone) or 'nobody'}"
    return text


def _weights_text(weights: Mapping[str, Any], begins: bool) -> str:
    source = f", by the lead from {weights['source']!r}" if weights["source"] else ""
    text = "starts from" if begins else "the first run of the chain began with"
    text += f" pretrained weights {weights['object']} (SHA-256 of the file: {weights['file']}{source})"
    fresh = [str(name) for name in weights["fresh"]]
    if fresh:
        more = f" and {len(fresh) - _FRESH} more" if len(fresh) > _FRESH else ""
        text += f"; anew from the seed: {', '.join(fresh[:_FRESH])}{more}"
    return text
