"""What somebody without the key can do to a ledger that is open, or by what stands beside its events."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest

from coordinator.api.control import data_offer
from coordinator.lead.accuracy import result_of
from coordinator.lead.as_json import round_json
from coordinator.lead.tables import doing, measured_parts
from fl_core.errors import ProtocolError, StateError
from privacy.accounting.accountant import Mechanism
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from protos.consilium.v1 import federation_pb2 as pb
from silo.cli.main import run

SKIN = "skin/train"


def ledger_at(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.db")
    ledger.register(SKIN, "record", "version", 2, ["one", "two"])
    ledger.set_budget(SKIN, 8.0, 1e-5, "operator", "reason")
    return ledger


def edit(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / "ledger.db")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def test_a_trigger_that_takes_charges_away_is_found_by_a_service_that_has_the_ledger_open(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    assert ledger.history(SKIN) == []
    edit(
        tmp_path,
        "DROP TRIGGER event_nodel",
        "DROP TRIGGER event_transition",
        "CREATE TRIGGER forget AFTER INSERT ON event BEGIN DELETE FROM event WHERE seq=NEW.seq; END",
    )
    with pytest.raises(StateError, match=r"E-BUDGET-07.*trigger forget was added"):
        ledger.reserve(
            SKIN, LedgerTask("run", "manifest", 0, "train", "version"), [PlannedRelease("t", Mechanism(4.0))]
        )


def test_units_that_were_forgotten_get_no_second_budget_and_no_new_registration(tmp_path: Path) -> None:
    """What is new follows from rows beside the events; emptied, they must not be made good by registering again."""
    ledger = ledger_at(tmp_path)
    edit(tmp_path, "DELETE FROM unit_digest")
    for again in (ledger, Ledger(tmp_path / "ledger.db")):
        with pytest.raises(StateError, match=r"E-BUDGET-07.*units of 'skin/train'"):
            again.register("other/train", "record", "same records", 2, ["one", "two"])
        with pytest.raises(StateError, match="E-BUDGET-07"):
            again.register(SKIN, "record", "one more", 1, ["three"])
        with pytest.raises(StateError, match="E-BUDGET-07"):
            again.verify()


def test_an_event_before_the_first_is_found(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    edit(
        tmp_path,
        "INSERT INTO event(seq,subject,state,detail,prev_hash,hash,created_at) VALUES(-1,'s','REFUSED','','','','')",
    )
    with pytest.raises(StateError, match=r"E-BUDGET-07.*found 1 before"):
        ledger.verify()


def test_an_epsilon_is_of_a_patient_only_while_every_version_has_groups(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.register(SKIN, "group", "grouped", 2, ["group a"], ["one", "two"])
    assert ledger.status(SKIN, prv=False).unit == "group"
    ledger.register(SKIN, "record", "single", 2, ["one", "two"])
    assert ledger.status(SKIN, prv=False).unit == "record"
    ledger.register(SKIN, "group", "grouped anew", 2, ["group b"], ["one", "two"])
    assert Ledger(tmp_path / "ledger.db").status(SKIN, prv=False).unit == "record"


@pytest.mark.parametrize("value", [6.42, -0.04, math.nan, math.inf, -1.0, 1e38])
def test_a_personal_score_that_is_no_share_is_shown_nowhere(value: float) -> None:
    """One hospital's sum decides a mean over hospitals: whatever it is, no number outside of 0 to 1 leaves."""
    found = pb.RoundInfo(personal={"pa": value, "pm_l": 0.5, "pm_l_std": value})
    facts = dict(round_json(found))
    json.dumps(facts, allow_nan=False)
    assert (facts["pa"], facts["pm_l"], facts["fairness"], facts["withheld_scores"]) == (None, 0.5, None, ["pa"])
    assert f"{100 * value:.0f}" not in " ".join(measured_parts(result_of(found)))


def test_a_silo_is_never_further_than_done() -> None:
    info = pb.SiloInfo(state="online", activity=pb.TRAINING, done=70, total=39)
    assert doing(info) == "training (round 1) 100 %"


@pytest.mark.parametrize("size", [math.nan, math.inf, -1.0])
def test_a_declared_size_is_a_number(size: float) -> None:
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        data_offer(pb.DataOffer(name="folder", nominal_size=size))


def test_a_ledger_that_cannot_be_opened_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "ledger.db").mkdir()
    assert run(["ledger", "show", "--home", str(tmp_path)]) == 1
    assert "E-STATE-63" in capsys.readouterr().err


def test_an_emptied_ledger_is_not_called_unbroken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    ledger_at(tmp_path)
    (tmp_path / "ledger.db").write_bytes(b"")
    assert run(["ledger", "verify", "--home", str(tmp_path)]) == 0
    assert "unbroken" not in capsys.readouterr().out
