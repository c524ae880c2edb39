"""All that a private run still lacks at a hospital is said at once."""

from __future__ import annotations

from fl_core import datasets
from fl_core.errors import RefusedError
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from privacy.policy import Policy
from protos.consilium.v1 import federation_pb2 as pb
from silo.admission.private_readiness import missing_requirements, with_all
from silo.storage.home import Home
from tests.support import until
from tests.support.privacy import DATA, SEEDED_POLICY, TEST, TRAIN, private

NOTHING = Policy()


def test_each_step_takes_one_thing_off_the_list(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def left(policy: Policy = NOTHING, declared: tuple[str, ...] = ()) -> list[str]:
        return [what for what, _ in missing_requirements(policy, ledger, declared)]

    ledger: Ledger | None = None
    assert left() == ["classes declared", "data registered", "a budget"]
    assert left(declared=("a", "b")) == left(Policy.parse(b'[privacy]\nlabels = ["a"]')) == left()[1:]
    ledger = Ledger(tmp_path / "ledger.db")
    assert left() == ["classes declared", "data registered", "a budget"]
    register(ledger, datasets.load(DATA), "center1")
    assert left(declared=("a",)) == [f"a budget for {TEST}, {TRAIN}"]
    ledger.set_budget(TRAIN, 8.0, 1e-5, "dpo", "test")
    assert left(declared=("a",)) == [f"a budget for {TEST}"]
    ledger.set_budget(TEST, 8.0, 1e-5, "dpo", "test")
    assert left(declared=("a",)) == []


def test_a_refusal_names_all_where_there_is_more_and_stays_as_it_is_else() -> None:
    found = missing_requirements(NOTHING, None, ("a",))
    said = with_all(RefusedError("E-BUDGET-04", "expected data"), found)
    assert said.code == "E-BUDGET-04"
    assert all(word in said.message for word in ("silo ledger register", "silo ledger budget set"))
    assert len(f"{said}") < 200  # a line
    for error in (RefusedError("E-BUDGET-01", "spent"), RefusedError("E-BUDGET-02", "none")):
        assert with_all(error, found[:1]) is error


def test_the_question_before_a_private_run_is_answered_with_all_that_lacks(make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    Home(tmp_path / "home0").make().policy.write_text(SEEDED_POLICY)
    hospital = make(private())
    hospital.start()
    hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
    until(lambda: hospital.control.last.got("preflight"), str([n.text for n in hospital.notices]))
    (answer,) = hospital.control.last.got("preflight")
    assert not answer.ready
    assert answer.code == "E-BUDGET-04"
    (said,) = [notice.text for notice in hospital.notices if notice.event == "refused"]
    assert "silo ledger register" in said
    assert "silo ledger budget set" in said
    assert "silo ledger budget" not in answer.reason  # of a private run the code alone leaves, with what it means
