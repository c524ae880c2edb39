"""The store's transactions: membership, runs, objects; from threads, processes and after damage."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.messages import round_info
from coordinator.lead.accuracy import result_of
from coordinator.lead.as_json import round_json
from coordinator.lead.tables import measured_parts
from coordinator.storage.records import Contribution, EventRow, InvitationRow, IssuedCertificate, RunState, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError, ProtocolError, RefusedError, StateError
from fl_core.types.clinical import BinnedRange, ClinicalMetrics, ReliabilityBin
from fl_core.types.enums import TaskKind
from fl_core.types.records import NO_BOUND, RoundRecord, update_outcomes
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage import digests


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path):
    found = CoordinatorStore(tmp_path, Clock())
    yield found
    found.close()


def certificate(serial: str, key: str = "k", name: str = "north", issued: float = 1000.0, enrolled: bool = True):
    return IssuedCertificate(serial, name, key, "PEM", issued, 9e9, enrolled)


def enrol(
    store: CoordinatorStore, invitation: str = "i1", key: str = "k", serial: str = "c1", name: str = "north"
) -> IssuedCertificate:
    return store.members.enrol(invitation, name, key, lambda: certificate(serial, key, name))


def run_of(run_id: str = "run-0001", request: str = "r", spec: str = "{}") -> StoredRun:
    return StoredRun(run_id, "run", request, spec, "{}", "m" * 64, "fedavg", "digits", 2, ("north", "south"))


def opened(store: CoordinatorStore, run_id: str = "run-0001") -> None:
    store.runs.add(run_of(run_id), 2)
    store.runs.begin(run_id, "0" * 64, 5)
    store.runs.open_round(run_id, 0, TaskKind.TRAIN, ["north", "south"])
    store.runs.set_base(run_id, 0, "b" * 64, 7)


def update(name: str = "c", digest: str = "d" * 64, run_id: str = "run-0001", silo: str = "north") -> Contribution:
    return Contribution(name, run_id, 0, TaskKind.TRAIN, silo, "m" * 64, "b" * 64, digest, 10)


def record(round: int = 0, kind: TaskKind = TaskKind.TRAIN) -> RoundRecord:
    return RoundRecord(round, kind, (1.0, 2.0), (2.0, 4.0), ("north",), {"south": "late"}, 3)


def test_an_invitation_gives_one_key_one_certificate(store: CoordinatorStore) -> None:
    store.members.invite(InvitationRow("i1", "north", 0, 2000))
    first = enrol(store)
    assert enrol(store, serial="other") == first
    with pytest.raises(RefusedError, match="E-ID-24"):
        enrol(store, key="thief", serial="c9")
    assert store.members.membership_status("north", "c1").member
    with pytest.raises(RefusedError, match="E-ID-24"):
        enrol(store)


def test_of_two_keys_that_race_for_an_invitation_one_wins(store: CoordinatorStore) -> None:
    store.members.invite(InvitationRow("i1", "north", 0, 2000))
    won, lost = list[str](), list[str]()

    def race(key: str) -> None:
        try:
            won.append(enrol(store, key=key, serial=f"c-{key}").serial)
        except RefusedError as error:
            lost.append(error.code)

    threads = [threading.Thread(target=race, args=(str(k),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), lost) == (1, ["E-ID-24"] * 7)
    assert store.members.version() == 1


@pytest.mark.parametrize("how", ["unknown", "expired", "withdrawn", "other name"])
def test_an_invitation_that_is_not_in_force_is_refused(store: CoordinatorStore, how: str) -> None:
    if how != "unknown":
        store.members.invite(
            InvitationRow("i1", "north" if how != "other name" else "south", 0, 2000 if how != "expired" else 999)
        )
    if how == "withdrawn":
        store.members.invite(InvitationRow("i2", "north", 0, 2000))
    with pytest.raises(RefusedError, match="E-ID-13"):
        enrol(store)
    assert not store.members.is_member("north")


def test_a_revocation_takes_every_certificate_and_open_invitation_of_a_name(store: CoordinatorStore) -> None:
    store.members.invite(InvitationRow("i1", "north", 0, 2000))
    enrol(store)
    store.members.renew(certificate("c2", "k2", enrolled=False), (("old", "proof"),))
    assert store.members.membership_status("north", "c1").member
    assert store.members.membership_status("north", "c2").member
    store.members.invite(InvitationRow("i2", "north", 0, 2000))
    assert store.members.revoke("north", "left")
    assert store.members.membership_status("north", "c1")[:2] == ("left", False)
    assert store.members.membership_status("north", "c2")[:2] == ("left", False)
    assert store.members.membership_status("north", "c3")[:2] == (None, False)
    assert store.members.why_revoked("c1") is not None
    assert not store.members.is_invited("i2")
    version, members, revoked = store.members.membership()
    assert (version, members, {r.serial for r in revoked}) == (3, [], {"c1", "c2"})
    assert not store.members.revoke("nobody", "")


def test_the_first_use_of_a_new_enrolment_ends_the_older_certificates(store: CoordinatorStore) -> None:
    for k in (1, 2):
        store.members.invite(InvitationRow(f"i{k}", "north", 0, 2000))
        enrol(store, f"i{k}", f"k{k}", f"c{k}")
        if k == 1:
            assert store.members.membership_status("north", "c1").member
    assert store.members.why_revoked("c1") is None
    assert store.members.membership_status("north", "c2").member
    assert store.members.why_revoked("c1") is not None
    assert store.members.why_revoked("c2") is None


def test_a_second_process_writes_the_same_file(store: CoordinatorStore, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom coordinator.storage.store import CoordinatorStore\n"
        "from coordinator.storage.records import InvitationRow\n"
        "s = CoordinatorStore(pathlib.Path(sys.argv[1]))\n"
        "for k in range(20): s.members.invite(InvitationRow(f'p{k}', f'other{k}', 0, 9e9))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    for k in range(20):
        store.members.invite(InvitationRow(f"i{k}", f"mine{k}", 0, 9e9))
    assert process.wait(30) == 0
    assert len(store.members.invitations()) == 40


def test_one_request_id_is_one_run(store: CoordinatorStore) -> None:
    first = store.runs.add(run_of(), 2)
    assert store.runs.add(run_of("run-0002"), 2) == first
    with pytest.raises(ConfigError, match="E-CFG-02"):
        store.runs.add(run_of("run-0003", spec="other"), 2)
    taken = store.runs.add(run_of(request="r2"), 2)
    assert taken.id != first.id
    assert store.runs.find(first.id) == first
    assert {store.runs.find("latest").id, store.runs.find("run").id} <= {first.id, taken.id}
    with pytest.raises(ConfigError, match="E-RUN-10"):
        store.runs.find("nothing")


def test_a_round_closes_with_the_state_and_the_progress_or_not_at_all(store: CoordinatorStore) -> None:
    opened(store)
    run = store.runs.close_round("run-0001", record(), ("1" * 64, 5), "model")
    assert (run.closed, run.state_object, run.model_digest, run.accuracy) == (1, "1" * 64, "model", 0.5)
    row = store.runs.rounds("run-0001")[0]
    assert (row.record, row.is_open, row.cohort) == (record(), False, ("north", "south"))
    store.runs.end("run-0001", RunState.ABORTED, "by me")
    with pytest.raises(StateError, match="E-RUN-11"):
        store.runs.close_round("run-0001", record(1), ("2" * 64, 5), "other")
    assert store.runs.get("run-0001").state_object == "1" * 64
    assert [e.number for e in store.runs.events("run-0001", 0)] == [1, 2, 3, 4]
    assert [e.kind for e in store.runs.events("run-0001", 2)] == ["closed", "ended"]


CLINICAL = ClinicalMetrics(
    ((1, 0), (2, 3)), (BinnedRange(0.1, 0.2), None), (ReliabilityBin(1, 1, 0.1 + 0.2), ReliabilityBin(2, 0, 0.5))
)
JUDGED = {"cut": {"north": "2 rows cut"}, "cut_rows": 2, "unbounded": True, "missing": {"south": "E-RUN-44: long"}}


@pytest.mark.parametrize(
    "measured",
    [
        {},
        JUDGED,
        {"personal": {"pa": 0.1 + 0.2, "pa_std": 0.1}, "medians": {"delta": float("inf")}},
        {"clinical": CLINICAL},
    ],
)
def test_the_record_of_a_round_comes_back_as_it_was_to_the_last_bit(
    store: CoordinatorStore, measured: dict[str, Any]
) -> None:
    opened(store)
    made = replace(record(), **measured)
    store.runs.close_round("run-0001", made, ("1" * 64, 5), "model")
    assert [row.record for row in store.runs.rounds("run-0001")] == [made]
    assert {f.name for f in fields(RoundRecord)} == set(made.to_dict())


def test_a_refusal_and_a_round_without_a_bound_are_events_and_counted(store: CoordinatorStore) -> None:
    opened(store)
    judged = replace(record(), **JUDGED)
    store.runs.close_round("run-0001", judged, ("1" * 64, 5), "model")
    assert update_outcomes([judged]) == {"updates_refused": 1, "updates_cut": 1, "cut_rows": 2, "unbounded_rounds": 1}
    assert set(update_outcomes([record()]).values()) == {0}  # "late" is no refusal
    said = {e.kind: e.text for e in store.runs.events("run-0001", 0)}
    assert said["warning"] == f"round 1: {NO_BOUND}"
    assert said["refused"] == "E-RUN-44: long"


def test_scores_of_personal_models_are_shown_with_their_round(store: CoordinatorStore) -> None:
    opened(store)
    store.runs.close_round("run-0001", replace(record(), personal={"pa": 0.5, "pa_std": 0.1}), ("1" * 64, 5), "model")
    found = store.runs.round("run-0001", 0)
    assert found is not None
    assert round_info(found).personal == {"pa": 0.5, "pa_std": 0.1}
    assert round_json(round_info(found))["fairness"] == 0.1
    assert measured_parts(result_of(round_info(found)))[-2:] == ["personal 50.00 %", "fairness 10.00 %"]


def test_the_closing_evaluation_finishes_the_run(store: CoordinatorStore) -> None:
    opened(store)
    store.runs.open_round("run-0001", 2, TaskKind.EVALUATE, ["north"])
    run = store.runs.close_round("run-0001", record(2, TaskKind.EVALUATE), None, "model")
    assert (run.state, run.state_object) == (RunState.FINISHED, "0" * 64)


ALLOWED = {
    ("waiting", "running"), ("waiting", "paused"), ("waiting", "failed"), ("waiting", "aborted"),
    ("running", "running"), ("running", "paused"), ("running", "failed"), ("running", "aborted"),
    ("running", "finished"),
    ("paused", "waiting"), ("paused", "aborted"),
    ("failed", "waiting"), ("failed", "aborted"),
}  # fmt: skip
"""A run that is running begins again after a restart."""


@pytest.mark.parametrize("after", RunState)
@pytest.mark.parametrize("before", RunState)
def test_a_run_moves_between_its_states_as_the_decision_says_and_no_otherwise(
    store: CoordinatorStore, before: RunState, after: RunState
) -> None:
    opened(store)
    with store.database.write() as db:
        db.exec_driver_sql("UPDATE runs SET state = ?", (before.value,))
    moves = {
        RunState.WAITING: lambda: store.runs.resume("run-0001"),
        RunState.RUNNING: lambda: store.runs.begin("run-0001", "0" * 64, 5),
        RunState.FINISHED: lambda: store.runs.close_round("run-0001", record(kind=TaskKind.EVALUATE), None, "model"),
    }
    move = moves.get(after, lambda: store.runs.end("run-0001", after, "why"))
    if (before.value, after.value) in ALLOWED:
        move()
        assert store.runs.get("run-0001").state is after
        return
    with pytest.raises(StateError, match="E-RUN-11"):
        move()
    assert store.runs.get("run-0001").state is before


def test_an_announced_object_is_fixed_once_it_is_taken(store: CoordinatorStore) -> None:
    opened(store)
    assert store.contributions.announce(update()) == (update(), True)
    assert store.contributions.announce(update()) == (update(), False)
    changed = update(digest="e" * 64)
    assert store.contributions.announce(changed) == (changed, True)
    store.contributions.commit(changed, 1.0)
    assert store.contributions.announce(changed)[0].received == 1.0
    with pytest.raises(ProtocolError, match="E-WIRE-07"):
        store.contributions.announce(update())
    assert store.runs.get("run-0001").bytes_up == 10


def test_what_is_stated_with_an_announcement_replaces_what_was_stated_before(store: CoordinatorStore) -> None:
    opened(store)
    stated = [pb.Attestation(policy_digest="p", ledger_seq=n, ledger_head="h") for n in range(2)]
    for word in (stated[0], stated[1], None, stated[0]):
        store.contributions.announce(update(), word)
        assert store.attestations.of("c") == word
    with pytest.raises(StateError, match="E-RUN-06"):
        store.contributions.announce(update(silo="west"), stated[1])
    store.contributions.commit(update(), 1.0)
    store.contributions.announce(update(), stated[1])  # it was taken: what was signed for stays
    assert store.attestations.of("c") == store.attestations.newest("north") == stated[0]


def test_only_the_newest_sealed_figures_of_a_silo_are_kept(store: CoordinatorStore) -> None:
    opened(store)
    for number, silo in enumerate(("north", "south", "north", "north")):
        stated = pb.Attestation(policy_digest="p", ledger_seq=number, ledger_head="h")
        store.contributions.announce(update(f"c{number}", silo=silo), stated, b"figures %d" % number)
        if number < 3:
            store.contributions.commit(update(f"c{number}", silo=silo), float(number))
    kept = {name: store.attestations.newest(name) for name in ("north", "south")}
    assert {name: (a.ledger_seq, a.ledger_sealed) for name, a in kept.items() if a} == {
        "north": (2, b"figures 2"),
        "south": (1, b"figures 1"),
    }
    with store.database.read() as db:
        rows = db.exec_driver_sql("SELECT id FROM contributions WHERE sealed IS NOT NULL ORDER BY id").scalars()
        assert list(rows) == ["c1", "c2", "c3"], "c3 is on its way"


def test_an_update_costs_less_than_half_a_kilobyte_for_ever(store: CoordinatorStore) -> None:
    """Whatever a hospital's ledger has to say, in whatever column. It was 2 kB."""
    opened(store)
    hospitals, sizes = [f"hospital{k}" for k in range(10)], []
    for round in range(1, 40):
        store.runs.open_round("run-0001", round, TaskKind.TRAIN, hospitals)
        store.runs.set_base("run-0001", round, "b" * 64, 7)
        for silo in hospitals:
            new = replace(update(digests.digest(f"{round}{silo}".encode()), silo=silo), round=round)
            stated = pb.Attestation(policy_digest="p" * 64, ledger_seq=round, ledger_head="h" * 64)
            store.contributions.announce(new, stated, bytes(1052))
            store.contributions.commit(new, 10.0 * round)
        store.runs.close_round("run-0001", record(round), None, "model")
        store.contributions.delete_unreferenced("run-0001", lambda digest: None)
        if round in (9, 39):
            with store.database.read() as db:
                size = "sum(length(CAST({} AS BLOB)))"
                columns = [row[1] for row in db.exec_driver_sql("PRAGMA table_info(contributions)")]
                of_updates = " + ".join(f"coalesce({size.format(column)}, 0)" for column in columns)
                sizes.append(db.exec_driver_sql(f"SELECT {of_updates} FROM contributions").scalar_one())
    assert (sizes[1] - sizes[0]) / 300 < 500


def test_events_are_numbered_from_one_for_each_run(store: CoordinatorStore) -> None:
    opened(store)
    store.runs.add(run_of("run-0002", "r2"), 2)
    store.runs.event("run-0002", "accepted", 3, "north", "text")
    assert [(e.number, e.kind) for e in store.runs.events("run-0001", 0)] == [(1, "submitted"), (2, "opened")]
    assert store.runs.events("run-0002", 1) == [EventRow("run-0002", 2, 1000.0, "accepted", 3, "north", "text")]


def test_an_update_of_a_closed_round_or_of_another_base_is_refused(store: CoordinatorStore) -> None:
    opened(store)
    with pytest.raises(ProtocolError, match="E-WIRE-12"):
        store.contributions.announce(
            Contribution("x", "run-0001", 0, TaskKind.TRAIN, "north", "m" * 64, "f" * 64, "d" * 64, 1)
        )
    with pytest.raises(StateError, match="did not ask"):
        store.contributions.announce(update(silo="west"))
    store.contributions.announce(update())
    store.runs.close_round("run-0001", record(), ("1" * 64, 5), "model")
    for attempt in (
        lambda: store.contributions.announce(update()),
        lambda: store.contributions.commit(update(), 1.0),
    ):
        with pytest.raises(StateError, match="E-RUN-06"):
            attempt()
    assert not store.contributions.is_open("c")


def test_what_is_closed_is_collected_and_shared_objects_stay(store: CoordinatorStore) -> None:
    opened(store)
    opened_two = run_of("run-0002", "r2")
    store.runs.add(opened_two, 2)
    store.runs.begin("run-0002", "0" * 64, 5)  # the same initial state
    store.contributions.announce(update())
    store.contributions.commit(update(), 1.0)
    gone: list[str] = []
    store.contributions.delete_unreferenced("run-0001", gone.append)
    assert gone == []
    for t in range(3):
        if t:
            store.runs.open_round("run-0001", t, TaskKind.TRAIN, ["north"])
        store.runs.close_round("run-0001", record(t), (str(t + 1) * 64, 5), "model")
    store.contributions.delete_unreferenced("run-0001", gone.append)
    assert gone == ["1" * 64, "b" * 64, "d" * 64]  # round 0's state is still run-0002's
    assert {"2" * 64, "3" * 64, "0" * 64, "m" * 64} == store.contributions.referenced_digests()
    assert store.contributions.contribution("c").received == 1.0
    store.runs.end("run-0001", RunState.ABORTED, "")
    store.contributions.delete_unreferenced("run-0001", gone.append)
    assert gone[-1] == "2" * 64


def test_who_may_read_an_object(store: CoordinatorStore) -> None:
    opened(store)
    assert store.contributions.readable("b" * 64, "north") == "run-0001"
    assert store.contributions.readable("m" * 64, "south") == "run-0001"
    assert store.contributions.readable("b" * 64, "west") is None
    assert store.contributions.readable("0" * 64, "north") is None  # a server state is no silo's business
    assert store.contributions.readable("0" * 64, None) == "run-0001"
