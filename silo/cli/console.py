"""What a person reads of a silo: tables on a terminal, plain lines when piped, one JSON object for machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fl_core.types.enums import Split
from fl_core.types.records import Schema
from service_core import clinical_report
from service_core.console import local_time, make_table, plain_console, print_json, printable
from service_core.pki.identity import PeerCertificate, colons
from silo.reports.leaving import leaving
from silo.storage.store import RunRecord, Store, TaskRecord
from silo.training import evaluation_summary

if TYPE_CHECKING:
    from fl_core.datasets import CheckReport

OUT = plain_console(soft_wrap=True)
Json = Mapping[str, object]


def show_rows(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], headings: bool = False) -> None:
    """Show a table; lines with tabs where no terminal is, headings: with the head as their first."""
    if not OUT.is_terminal:
        if headings:
            OUT.print("\t".join(head))
        for row in rows:
            OUT.print("\t".join(map(printable, row)))
        return
    OUT.print(make_table(title, head, rows))


def answer(as_json: bool, value: object, facts: Iterable[tuple[str, str]]) -> None:
    """Print a command's result: `value` for machines, or facts for people."""
    if as_json:
        print_json(value)
    else:
        show_facts(facts)


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    for name, value in ((printable(name), printable(value)) for name, value in facts):
        OUT.print(f"{name + ':':<14} {value}" if OUT.is_terminal else f"{name}\t{value}")


# ---- status --------------------------------------------------------------------------------------------------------


def status_json(own: PeerCertificate, addresses: Sequence[str], due: bool, store: Store) -> Json:
    contact, left = store.contact(), leaving(store)
    return {
        "silo": own.identity.name,
        "consortium": own.identity.consortium,
        "identity": own.identity.uri,
        "fingerprint": own.fingerprint,
        "certificate_until": own.not_after.timestamp(),
        "renewal_due": due,
        "coordinator": list(addresses),
        "session": contact and asdict(contact),
        "left": {
            "verdict": left.verdict,
            "updates": left.updates,
            "bytes": left.bytes,
            "unprotected": left.unprotected._asdict(),
        },
        "outbox": [
            {
                "run": e.key.run_id,
                "round": e.key.round,
                "kind": e.key.kind.value,
                "bytes": e.size,
                "receipt": e.receipt is not None,
                "refused": e.refused,
            }
            for e in store.outbox()
        ],
        "runs": [_run_json(run) for run in store.history()],
        "receipts": len(store.receipts()),
    }


def _run_json(run: RunRecord) -> Json:
    return {
        "run": run.run_id,
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "state_round": run.state_round,
        "privacy": run.privacy,
        "evaluations": [_task_json(task) for task in run.tasks if task.evaluation is not None],
    }


def _task_json(task: TaskRecord) -> Json:
    assert task.evaluation is not None
    return {
        "round": task.key.round,
        "kind": task.key.kind.value,
        **evaluation_summary.class_facts(task.evaluation),
        "included": task.included,
        "receipt": task.receipt,
    }


def show_status(own: PeerCertificate, addresses: Sequence[str], due: bool, store: Store) -> None:
    contact, left = store.contact(), leaving(store)
    session = "never"
    if contact is not None:
        state = "open since" if contact.until is None else f"until {local_time(contact.until)} ({contact.why}), since"
        session = f"{state} {local_time(contact.since)} with {contact.address or '-'}"
    show_facts(
        [
            ("silo", str(own.identity)),
            ("fingerprint", colons(own.fingerprint)),
            ("certificate", f"until {own.not_after:%Y-%m-%d %H:%M} UTC" + (", renewal is due" if due else "")),
            ("coordinator", ", ".join(addresses)),
            ("session", session),
            ("receipts", str(len(store.receipts()))),
            ("left", f"{left.verdict}: {left.updates} updates, {left.bytes} bytes"),
            *([("privacy", said)] if (said := left.unprotected.sentence()) else []),
        ]
    )
    entries = [
        (str(e.key), str(e.size), e.refused or ("waits for the close" if e.receipt else "not sent yet"))
        for e in store.outbox()
    ]
    if entries:
        show_rows("Outbox", ("task", "bytes", "state"), entries)
    for run in store.history():
        title = f"{run.name or '?'} ({run.run_id}): {_fate(run)}" + (f", {run.privacy}" if run.privacy else "")
        if not OUT.is_terminal:
            OUT.print(title)
        rows = [_evaluation_row(task) for task in run.tasks if task.evaluation is not None]
        show_rows(title, ("task", "own test images", "by class", "balanced accuracy, AUC", "update"), rows)
        newest = next((t.evaluation for t in reversed(run.tasks) if t.evaluation and t.evaluation.clinical), None)
        if newest is not None and newest.clinical is not None:
            head, by_class = clinical_report.CLASS_HEAD, clinical_report.class_rows(newest.clinical, newest.classes)
            newest_title = "The newest model on the own test images"
            if not OUT.is_terminal:
                OUT.print(newest_title)
            show_rows(newest_title, head, by_class)


_FATES = {
    "running": "under way",
    "finished": "finished",
    "failed": "could not be finished",
    "aborted": "was ended by the lead",
}


def _fate(run: RunRecord) -> str:
    """Say in words what became of a run; of one that could not be finished, why."""
    said = _FATES.get(run.state, f"ended as {run.state!r}")
    return f"{said}: {run.reason}" if run.reason else said


def _evaluation_row(task: TaskRecord) -> tuple[str, ...]:
    found = task.evaluation
    assert found is not None
    fate = {True: "included", False: "not included", None: task.refused or "round is open"}[task.included]
    name = str(task.key).removeprefix(task.key.run_id).strip()
    return (
        name,
        evaluation_summary.overall(found),
        evaluation_summary.classes(found),
        evaluation_summary.clinical(found),
        fate,
    )


# ---- data ----------------------------------------------------------------------------------------------------------


def report_json(report: CheckReport, schema: Schema | None = None) -> Json:
    return {
        "origin": report.origin,
        "classes": list(report.classes),
        "shape": None if schema is None else list(schema.shape),
        "counts": {split.value: list(counts) for split, counts in report.counts.items()},
        "groups": report.groups,
        "fingerprint": report.fingerprint,
        "notes": list(report.notes),
        "problems": [
            {"code": p.code, "what": p.what, "count": p.count, "first": list(p.first), "remedy": p.remedy}
            for p in report.problems
        ],
        "unread": dict(report.unread),
        "sizes": [{"width": w, "height": h, "images": n} for (w, h), n in report.sizes.items()],
    }


def show_report(report: CheckReport, schema: Schema | None = None) -> None:
    facts = [("data", report.origin)]
    if schema is not None:
        facts.append(("shape", " x ".join(map(str, schema.shape))))
    if report.groups is not None:
        facts.append(("groups", str(report.groups)))
    facts.append(("fingerprint", report.fingerprint))
    facts += [("note", note) for note in report.notes]
    if report.unread:
        kinds = ", ".join(f"{kind}: {n}" for kind, n in report.unread.items())
        facts.append(("not read", f"{sum(report.unread.values())} files ({kinds})"))
    show_facts(facts)
    for found in report.problems:
        more = [f"and {found.count - len(found.first)} more"] if found.count > len(found.first) > 1 else []
        where = [(found.code, name) for name in (*found.first, *more)]
        show_rows(f"{found.what}: {found.count}. {found.remedy}", ("code", "where"), where)
    train, test = (report.counts.get(split, (0,) * len(report.classes)) for split in (Split.TRAIN, Split.TEST))
    rows = [(c, str(a), str(b)) for c, a, b in zip(report.classes, train, test, strict=True)]
    show_rows("Examples", ("class", "train", "test"), [*rows, ("all", str(sum(train)), str(sum(test)))])
