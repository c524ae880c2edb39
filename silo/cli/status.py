"""`silo status`: identity, connection, outbox, and this hospital's measurements of the models that it received."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from fl_core.rounds.torch_need import abilities
from fl_core.training import clinical_report
from fl_core.types.class_coverage import ClassCoverage
from service_core.command_line import command
from service_core.console import CommandResult, KeyValues, TextTable, local_time, pluralize
from service_core.pki.identity import PeerCertificate, format_fingerprint
from silo.admission import policy_in_force
from silo.cli.options import SiloHome, open_store
from silo.identity.identity import SiloIdentity
from silo.operations.liveness import Health
from silo.reports.disclosure import UpdateContents, disclosures_of
from silo.storage.store import JoinedRun, SiloStore, TaskRecord
from silo.training import evaluation_summary

SHOWN = 3
"""Names of broken records shown per run; the JSON has all."""
Json = Mapping[str, object]


@command
def status(home: SiloHome) -> CommandResult:
    """Show identity, connection, unsent updates, and how well received models perform on this hospital's images.

    Others see these measurements only if the policy allows it ([evaluation] by_hospital).
    """
    identity = SiloIdentity(home.path)
    certificate, addresses = identity.load(), [str(address) for address in home.addresses()]
    with open_store(home.database) as store:
        about = certificate, addresses, identity.renewal_due(), PeerStatus.of(identity, store), store
        trains = policy_in_force.trains(home)
        part = KeyValues([("takes part", "in evaluations only: nothing is trained here")])
        health = Health.of(home)
        text, missing = abilities()
        more = "".join(f"; not {what}: {remedy}" for what, remedy in missing.items())
        worker = KeyValues([("worker", "; ".join(health.worker()) or "none has run"), ("computes", text + more)])
        facts = {"where": health.where, "queue": health.queue, **(health.walls._asdict() if health.walls else {})}
        worked, computes = health.worker(), {"runs": text, "missing": missing}
        reply = {**status_json(*about), "trains": trains, "worker": facts if worked else None, "computes": computes}
        return CommandResult(reply, [*([] if trains else [part]), worker, *_shown(*about)])


class PeerStatus(NamedTuple):
    """Other members, and whose key this hospital confirmed. runs: the other members of each masked run, by run id."""

    others: frozenset[str]
    confirmed: frozenset[str]
    runs: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, identity: SiloIdentity, store: SiloStore) -> PeerStatus:
        pins, this_silo = identity.pins(), {identity.load().identity.name}
        runs = {run_id: frozenset(run.members) - this_silo for run_id, run in store.secagg.runs().items()}
        return cls(frozenset(pins.members()) - this_silo, pins.confirmed() - this_silo, runs)

    def sentence(self, others: frozenset[str]) -> str:
        return f"{len(others & self.confirmed)} of {pluralize(len(others), 'other member')} confirmed by this hospital"


def status_json(
    certificate: PeerCertificate, addresses: Sequence[str], due: bool, peers: PeerStatus, store: SiloStore
) -> Json:
    contact, left, broken = store.contact(), disclosures_of(store), store.run_data.broken()
    classes = store.secagg.coverages()
    return {
        "silo": certificate.identity.name,
        "consortium": certificate.identity.consortium,
        "identity": certificate.identity.uri,
        "fingerprint": certificate.fingerprint,
        "certificate_until": certificate.not_after.timestamp(),
        "renewal_due": due,
        "coordinator": list(addresses),
        "session": contact and asdict(contact),
        "peers": {"others": sorted(peers.others), "confirmed": sorted(peers.confirmed)},
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
        "runs": [_run_json(run, peers, broken.get(run.run_id, ()), classes.get(run.run_id)) for run in store.history()],
        "receipts": len(store.receipts()),
    }


def _run_json(run: JoinedRun, peers: PeerStatus, broken: Sequence[str], classes: ClassCoverage | None) -> Json:
    others = peers.runs.get(run.run_id)
    return {
        "run": run.run_id,
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "state_round": run.state_round,
        "privacy": run.privacy,
        "left_out": list(broken),
        "masked": None if others is None else {"others": sorted(others), "confirmed": sorted(others & peers.confirmed)},
        "classes": classes and classes.as_json(),
        "evaluations": [task_json(task) for task in run.tasks if task.evaluation is not None],
    }


def task_json(task: TaskRecord) -> Json:
    assert task.evaluation is not None
    return {
        "round": task.key.round,
        "kind": task.key.kind.value,
        **evaluation_summary.class_facts(task.evaluation),
        "included": task.included,
        "receipt": task.receipt,
    }


def _shown(
    certificate: PeerCertificate, addresses: Sequence[str], due: bool, peers: PeerStatus, store: SiloStore
) -> Iterator[KeyValues | TextTable | str]:
    contact, left = store.contact(), disclosures_of(store)
    classes = {run.run_id: run.classes for run in left.runs}
    session = "never"
    if contact is not None:
        state = "open since" if contact.until is None else f"until {local_time(contact.until)} ({contact.why}), since"
        session = f"{state} {local_time(contact.since)} with {contact.address or '-'}"
    yield KeyValues(
        [
            ("silo", str(certificate.identity)),
            ("fingerprint", format_fingerprint(certificate.fingerprint)),
            ("certificate", f"until {certificate.not_after:%Y-%m-%d %H:%M} UTC" + (", renewal is due" if due else "")),
            ("coordinator", ", ".join(addresses)),
            ("session", session),
            ("peers", peers.sentence(peers.others)),
            ("receipts", str(len(store.receipts()))),
            ("left", f"{left.verdict}: {left.updates} updates, {left.bytes} bytes"),
            *([("privacy", unprotected)] if (unprotected := left.unprotected.sentence()) else []),
        ]
    )
    entries = [
        (str(e.key), str(e.size), e.refused or ("waits for the close" if e.receipt else "not sent yet"))
        for e in store.outbox()
    ]
    if entries:
        yield TextTable("Outbox", ("task", "bytes", "state"), entries)
    broken = store.run_data.broken()
    for run in store.history():
        title = f"{run.name or '?'} ({run.run_id}): {_fate(run)}" + (f", {run.privacy}" if run.privacy else "")
        if (others := peers.runs.get(run.run_id)) is not None:
            title += f"; {peers.sentence(others)}"
        if lost := broken.get(run.run_id):
            names = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
            title += f"; without {pluralize(len(lost), 'record')} that could not be read ({names})"
        if run.privacy and any(task.evaluation and task.evaluation.noise is None for task in run.tasks):
            title += "; counted here without noise, and stays here"
        contents = UpdateContents.from_json(run.leaves)
        yield evaluations(title, run.tasks, measures=contents is None or contents.measures)
        yield from (f"{run.run_id}: {line}" for line in classes.get(run.run_id, ()))
        newest = next((t.evaluation for t in reversed(run.tasks) if t.evaluation and t.evaluation.clinical), None)
        if newest is not None and newest.clinical is not None:
            by_class = clinical_report.class_rows(newest.clinical, newest.classes)
            title = "The newest model on this hospital's test images"
            yield TextTable(title, clinical_report.class_head(newest.clinical), by_class, titled=True)


def evaluations(title: str, tasks: Sequence[TaskRecord], *, measures: bool = True) -> TextTable:
    """List the local evaluations of a run's models; only the fate of the updates if nothing was measured."""
    rows = [_evaluation_row(task) for task in tasks if task.evaluation is not None]
    head = ("task", "own test images", "by class", "other measures", "update")
    if not measures:
        return TextTable(title, (head[0], head[-1]), [(row[0], row[-1]) for row in rows], titled=True)
    return TextTable(title, head, rows, titled=True)


_FATES = {
    "running": "under way",
    "finished": "finished",
    "failed": "could not be finished",
    "aborted": "was ended by the lead",
}


def _fate(run: JoinedRun) -> str:
    """Describe how a run ended, with the reason if it did not finish."""
    outcome = _FATES.get(run.state, f"ended as {run.state!r}")
    return f"{outcome}: {run.reason}" if run.reason else outcome


def _evaluation_row(task: TaskRecord) -> tuple[str, ...]:
    evaluation = task.evaluation
    assert evaluation is not None
    fate = {True: "included", False: "not included", None: task.refused or "round is open"}[task.included]
    name = str(task.key).removeprefix(task.key.run_id).strip()
    return (
        name,
        evaluation_summary.overall(evaluation),
        evaluation_summary.classes(evaluation),
        evaluation_summary.others(evaluation),
        fate,
    )
