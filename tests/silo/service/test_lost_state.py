"""What a hospital keeps between rounds is lost, damaged or older: said to both sides, and never replaced by zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.methods import build_method
from fl_core.rounds.manifest import NamedOptions
from protos.consilium.v1 import federation_pb2 as pb
from silo.cli import operations
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.fake_coordinator import manifest

SCAFFOLD = manifest(method=NamedOptions("scaffold", {}))


def trained(make, run):
    """Do round 1, lose the state, and be asked for round 2."""
    hospital = make(run)
    hospital.start()
    asked(hospital, 0)
    hospital.sent()
    hospital.settle()
    hospital.stop()
    return hospital


def asked(hospital, round, included_before=0, incarnation="one"):
    method = build_method(hospital.manifest.method.name, {})
    hospital.offer(
        round, state=method.broadcast(hospital.server), incarnation=incarnation, included_before=included_before
    )


def forget_all(hospital):
    (hospital.folder / "silo.db").unlink()
    operations.restore(accept_loss=True, home=hospital.folder, as_json=True)


def damage(hospital):
    store = SiloStore(hospital.folder / "silo.db")
    digest, _ = store.committed("run-1")
    store.close_database()
    file = hospital.folder / "objects" / digest
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def delete(hospital):
    for file in (hospital.folder / "objects").iterdir():
        file.unlink()


@pytest.mark.fault(
    "a disk or an operator",
    "loses or damages a control variate or a personal model",
    "the hospital refuses its rounds with E-STATE-24 and does not restart from zero",
)
@pytest.mark.parametrize("lose", [forget_all, damage, delete])
def test_a_lost_state_refuses_the_round(make, lose):
    hospital = trained(make, SCAFFOLD)
    lose(hospital)
    hospital.start()
    asked(hospital, 1, included_before=1)
    answer = hospital.refused()
    assert answer.code == "E-STATE-24"
    assert str(hospital.folder) not in answer.reason
    assert hospital.events().count("sent") == 1


@pytest.mark.fault(
    "a disk or an operator",
    "loses a state in a run with `lost_state=restart`",
    "the hospital starts with a new state, and both sides report it",
)
@pytest.mark.parametrize("lose", [forget_all, damage])
def test_a_run_may_choose_to_begin_anew(make, lose):
    hospital = trained(make, replace(SCAFFOLD, lost_state="restart"))
    lose(hospital)
    hospital.start()
    asked(hospital, 1, included_before=1)
    hospital.sent(2)
    assert "restarted" in hospital.events()
    assert [a.code for a in hospital.answers() if a.code] == ["E-STATE-24"]
    assert all(a.accepted for a in hospital.answers())


def test_a_method_that_keeps_nothing_goes_on(make):
    hospital = trained(make, manifest())
    forget_all(hospital)
    hospital.start()
    asked(hospital, 1, included_before=1)
    hospital.sent(2)


@pytest.mark.fault(
    "a coordinator", "asks again for a round that it closed", "refused, unless its database is a restored one"
)
@pytest.mark.parametrize(("incarnation", "again"), [("one", False), ("", False), ("two", True)])
def test_a_closed_round_is_asked_for_again_by_a_restored_coordinator_alone(make, incarnation, again):
    hospital = trained(make, SCAFFOLD)
    hospital.start()
    hospital.transfer.forget()
    asked(hospital, 0, incarnation=incarnation)
    if again:
        hospital.sent(2)
        assert "restored" in hospital.events()
        assert hospital.service.store.committed("run-1") is not None
        asked(hospital, 0, incarnation=incarnation)  # while it is open
        hospital.close()
        until(lambda: hospital.service.store.outbox() == [])
        asked(hospital, 0, incarnation=incarnation)
        assert hospital.refused().code == "E-RUN-33"
    else:
        assert hospital.refused().code == "E-RUN-33"
    assert hospital.events().count("training") == (2 if again else 1)


@pytest.mark.parametrize("said", [2**32 - 1, 7])
def test_a_coordinator_that_claims_rounds_that_never_were_gets_a_refusal(started, said):
    hospital = started(SCAFFOLD)
    asked(hospital, 0, included_before=said)
    assert hospital.refused().code == "E-STATE-24"
    assert isinstance(hospital.answers()[0], pb.Answer)
