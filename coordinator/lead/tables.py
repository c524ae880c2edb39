"""Runs, rounds and hospitals for people: tables, and sentences about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from coordinator.lead import accuracy, hospital_results
from coordinator.lead.as_json import activity, start_json
from fl_core.aggregation import options
from fl_core.training import clinical_report
from fl_core.types import secagg
from fl_core.types.clinical import BASIC
from fl_core.types.records import NO_BOUND, HasUpdateOutcomes, update_outcomes
from privacy.accounting.measures import (
    BALANCED,
    MACRO_AUC,
    EvaluationResult,
    Measure,
    measured,
    of_model,
    personal_json,
    plain,
)
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import kind_word
from service_core.console import format_duration, local_time, make_table, pluralize


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def private_form(manifest: str) -> str:
    """List the options of the method that its private form replaced; empty if none. manifest: JSON."""
    raw = json.loads(manifest)
    was, options = raw.get("private_form") or {}, raw["method"]["options"]
    changes = ", ".join(f"method.{name}={options[name]} (was {was[name]})" for name in sorted(was) if name in options)
    return f"{raw['method']['name']} uses the options of its private form: {changes}" if changes else ""


def unmasked(manifest: str) -> str:
    """Describe who reads the updates of a run without masks; empty for one with masks. manifest: JSON."""
    raw = json.loads(manifest)
    members = raw.get("members", ())
    return "" if raw.get("secagg") or not members else secagg.read_alone(len(members))


def aggregator_warning(manifest: str, holds: Mapping[str, Collection[str]]) -> str:
    """Describe a disadvantage of the run's aggregator, if any. manifest: JSON   holds: declared classes by silo."""
    raw = json.loads(manifest)
    chosen = raw.get("aggregator") or {"name": options.DEFAULT, "options": {}}
    declared = [holds.get(member["name"], ()) for member in raw["members"]]
    return options.warning(options.read_written(chosen["name"], chosen["options"]), declared)


def feature_hint(manifest: str) -> str:
    """Suggest that hospitals store the features of a network that the run does not train; empty if this is no gain.

    manifest: JSON of a run. `analytic` gives the same model either way.
    """
    raw = json.loads(manifest)
    recomputed = raw["method"]["name"] == "analytic" and raw["train"].get("freeze", "none") == "none"
    if not recomputed or raw["model"]["name"] == "random_features":  # its features cost less than reading them
        return ""
    return (
        "hint: with train.freeze=features hospitals keep the features of this network, for later rounds and for later "
        "runs on the same images; the model is the same"
    )


def waiting_lines(info: pb.RunInfo) -> list[str]:
    """Describe the silos that a run waits for, how long and why, and the excluded ones."""
    lines = [f"excluded by the lead: {', '.join(info.excluded)}"] if info.excluded else []
    if info.waiting.silos:
        now = info.waiting
        lines.append(f"round {now.round + 1}: {received_text(now)}; waits for")
        lines += [f"  {silo.name} ({awaited(silo)})" for silo in now.silos]
    return lines


def received_text(now: pb.Waiting) -> str:
    """Describe how many updates (or, if the set is fixed, answers) an open round has and needs."""
    if now.sealed:
        return f"all updates received; {now.there} of {now.needed} confirmations"
    if now.there > now.needed:
        return f"{pluralize(now.there, 'update')} received, {now.needed} needed"
    return f"{now.there} of {pluralize(now.needed, 'update')} received"


def awaited(silo: pb.AwaitedSilo) -> str:
    """Describe an awaited silo: its connection, the remaining time, and the classes that depend on it."""
    where = "connected" if silo.online else f"offline {format_duration(silo.offline_s)}"
    alone = f"; no other hospital has {', '.join(silo.classes)}" if silo.classes else ""
    return f"{where}, at most {format_duration(silo.left_s)} left{alone}"


def outcomes_text(counts: Mapping[str, int]) -> str:
    """Describe refused and clipped updates, counted by `update_outcomes`; empty if there are none."""
    parts = [
        (counts["updates_refused"], "update", " refused"),
        (counts["updates_cut"], "update", " clipped"),
        (counts["cut_rows"], "row", " of prototypes clipped"),
        (counts["unbounded_rounds"], "round", " without a limit on updates"),
    ]
    return ", ".join(f"{pluralize(number, word)}{what}" for number, word, what in parts if number)


def aggregator_text(aggregator: str, counts: Mapping[str, int]) -> str:
    """Describe the updates of a run that its aggregator refused or clipped; empty if there are none."""
    outcomes = outcomes_text(counts)
    return outcomes and f"aggregator={aggregator or 'unknown to this service'}: {outcomes}"


def outcome_rows(info: pb.RoundInfo) -> list[tuple[str, str]]:
    """List missing and clipped updates of a round as (hospital, why); "all" concerns every hospital."""
    of_all = [("all", NO_BOUND)] if info.unbounded else []
    return [*of_all, *sorted(info.missing.items()), *sorted(info.cut.items())]


def measured_parts(result: EvaluationResult) -> list[str]:
    """Describe an evaluation: each measure by its label."""
    parts = []
    for measure, value in measured(result):
        text = measure.text(value) if measure.percent else measure.with_interval(result)
        parts.append(f"{measure.label} {text}{_over(measure, result)}")
    spread = personal_json(result.personal, result.withheld).get("fairness")
    return [*parts, f"fairness {plain(spread).text()}"] if isinstance(spread, float) else parts


def _over(measure: Measure, result: EvaluationResult) -> str:
    """Describe the classes and test images of a mean, if these are not all."""
    if measure is BALANCED and result.noise is None and not result.several_labels:
        present = sum(of > 0 for of in result.examples)
        return f" over {present} of {len(result.examples)} classes" if present < len(result.examples) else ""
    tested, clinical = sum(result.examples), result.clinical
    if measure is MACRO_AUC and clinical is not None and clinical.examples < tested:
        return f" on {clinical.examples} of {tested:.0f} test images"
    return ""


def software_text(builds: Mapping[str, str]) -> str:
    """Describe the software of a run: the coordinator's, and silos with other software; empty if unknown."""
    if "" not in builds:
        return ""
    ours, silos = builds[""], sorted(name for name in builds if name)
    others = [f"{name} {builds[name] or 'no version given'}" for name in silos if builds[name] != ours]
    same = f"{ours} (coordinator and {pluralize(len(silos) - len(others), 'silo')})"
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
    """Format a time to the minute, for columns."""
    return local_time(unix)[:16]


def alarms(silos: Iterable[pb.SiloInfo]) -> list[str]:
    """List the silos' alarms, which the lead must investigate."""
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
                (s.data.name or "-") + (f", labels {s.data.label_source[:14]}" if s.data.label_source else ""),
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
        return "idle"
    share = f" {100 * min(silo.done, silo.total) // silo.total} %" if silo.total else ""
    return f"{word.replace('_', ' ')} (round {silo.round + 1}){share}"


def round_text(number: int, kind: int) -> str:
    """Return the number of a round, from 1; the closing evaluation has none."""
    return "evaluation" if kind == pb.EVALUATE else str(number + 1)


def place(event: pb.Event, rounds: int) -> str:
    """Return the round of an event, from 1; empty if it concerns the whole run."""
    if event.kind not in ("cut", "opened", "accepted", "refused", "arrived", "sealed", "closed"):
        return ""
    return f"round {event.round + 1}/{rounds}" if event.round < rounds else "evaluation"


def clinical_tables(info: pb.RoundInfo, classes: Sequence[str], metrics: str = BASIC) -> list[Table | str]:
    """Show a round's evaluation by class and in total, or why it is missing; empty in a run with accuracies only.

    metrics: of the run's manifest.
    """
    clinical = accuracy.clinical_of(info)
    if clinical is None:
        return [reason] if (reason := accuracy.no_clinical(info, metrics)) else []
    head, rows = clinical_report.class_head(clinical), clinical_report.class_rows(clinical, classes)
    by_class = make_table("By class", head, rows)
    return [by_class, clinical_report.sentence(clinical, sum(info.examples))]


def other_run(manifest: str) -> str:
    """Return the run whose model is measured as well; empty without one, or for local models. manifest: JSON."""
    raw = json.loads(manifest)
    return str(raw["own"]) if raw.get("other") else ""


def hospital_facts(detail: pb.RunDetail) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the results at the hospitals that show them: a table with its head, and sentences.

    The sentences compare the hospitals, and the models that were measured as well, if any.
    """
    if not detail.rounds:
        return [], []
    info = detail.rounds[-1]
    results, local = accuracy.results_of(info), accuracy.own_of(info)
    sentences = []
    if results:
        hidden = len(info.included) - len(results)
        rest = f"; {pluralize(hidden, 'hospital')} in the sums alone" if hidden else ""
        sentences.append(f"{hospital_results.standing(results, several_labels=info.several_labels).sentence()}{rest}")
    if local is not None:
        other, tested = other_run(detail.manifest_json), sum(info.examples)
        sentences.append(hospital_results.own_sentence(local, tested, other, several_labels=info.several_labels))
    return list(hospital_results.rows(results, several_labels=info.several_labels)), sentences


def hospital_tables(detail: pb.RunDetail) -> list[Table | str]:
    rows, sentences = hospital_facts(detail)
    title = "Results of the hospitals that allow it"
    return [*([make_table(title, hospital_results.head(), rows)] if rows else []), *sentences]


def rounds_table(rounds: Iterable[pb.RoundInfo], *, measures: bool = True) -> Table:
    """List rounds; measures: the run measures a model."""
    listed = list(rounds)
    results = list(map(accuracy.result_of, listed)) if measures else []
    columns = [(m, [m.estimate(result) for result in results]) for m in (of_model() if measures else ())]
    columns = [(m, values) for m, values in columns if m.json or any(value != NOTHING for value in values)]
    rows = (
        (
            round_text(r.round, r.kind),
            kind_word(r.kind),
            *(measure.short(values[k]) for measure, values in columns),
            ", ".join(r.included),
            "; ".join(f"{name}: {why}" for name, why in outcome_rows(r)) or "-",
            str(r.clipped),
        )
        for k, r in enumerate(listed)
    )
    before = " before the round"
    head = ["round", "kind", *(f"{m.label}{before * (k == 0)}" for k, (m, _) in enumerate(columns))]
    return make_table("Rounds", (*head, "took part", "missing or cut", "clipped"), rows)


def changed_parts(rounds: Iterable[HasUpdateOutcomes]) -> list[str]:
    """Describe refused, clipped or unbounded updates of rounds, if there are any."""
    outcomes = outcomes_text(update_outcomes(rounds))
    return [f"({outcomes})"] if outcomes else []


# ---- the start of a run ----------------------------------------------------------------------------------------------

_FRESH = 5
"""Modules without pretrained weights that a line names at most."""


def started_from(manifest: str, parent: str = "") -> str:
    """Describe `start_json` in words; empty for None. parent: that run's manifest, for added and removed hospitals."""
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
        text += f"; new: {', '.join(new) or 'none'}; not in it: {', '.join(gone) or 'none'}"
    return text


def _weights_text(weights: Mapping[str, Any], begins: bool) -> str:
    source = f", by the lead from {weights['source']!r}" if weights["source"] else ""
    text = "starts from" if begins else "the first run of the lineage began with"
    text += f" pretrained weights {weights['object']} (SHA-256 of the file: {weights['file']}{source})"
    fresh = [str(name) for name in weights["fresh"]]
    if fresh:
        more = f" and {len(fresh) - _FRESH} more" if len(fresh) > _FRESH else ""
        text += f"; initialised from the seed: {', '.join(fresh[:_FRESH])}{more}"
    return text
