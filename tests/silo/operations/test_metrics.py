"""A hospital's metrics are true, and say of its budgets nothing unless it asks for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.errors import ConfigError
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.consilium.v1 import federation_pb2 as pb
from service_core.loopback import LoopbackAddress
from service_core.operations import metrics_endpoint
from silo.cli.main import run
from silo.identity.identity import SiloIdentity
from silo.operations import metrics as silo_metrics
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import enrolled
from tests.support.hospital import first, upload
from tests.support.pages import Scrape, get, until_scraped

HERE = LoopbackAddress("127.0.0.1", 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the metrics anew for each answer."""
    monkeypatch.setattr(metrics_endpoint, "EVERY_S", 0.0)


def name(end: str) -> str:
    return f"consilium_silo_{end}"


def at(hospital) -> LoopbackAddress:
    assert hospital.service.metrics_at is not None
    return hospital.service.metrics_at


def test_the_numbers_of_a_round_are_those_of_what_happened(started) -> None:
    hospital = started(metrics=HERE)
    before = until_scraped(at(hospital), lambda found: found[name("connected")] == 1)
    assert before[name("ready")] == 1
    assert before[name("round_training_seconds_count{kind=train}")] == 0
    assert before[name("sent_bytes_total")] == 0
    first(hospital)
    found = until_scraped(at(hospital), lambda found: found[name("updates_sent_total")] == 1)
    assert found[name("round_training_seconds_count{kind=train}")] == 1
    assert found[name("round_training_seconds_count{kind=evaluate}")] == 0
    assert 0 < found[name("round_training_seconds_sum{kind=train}")] < 60
    assert found[name("sent_bytes_total")] == len(upload(hospital))
    assert found[name("received_bytes_total")] > len(hospital.manifest.to_json())
    assert found.labels(name("refusals_total")) == []
    own = SiloIdentity(hospital.folder).load()
    assert found[name("certificate_expiry_timestamp_seconds{certificate=own}")] == own.not_after.timestamp()
    assert (get(at(hospital), "/healthz")[0], get(at(hospital), "/readyz")[0]) == (200, 200)


def test_a_task_that_is_refused_and_a_session_that_is_lost_are_counted(started) -> None:
    hospital = started(metrics=HERE)
    hospital.offer(manifest_digest=hospital.transfer.offer(b"no manifest"))
    refused = hospital.refused()
    found = until_scraped(at(hospital), lambda found: found.labels(name("refusals_total")))
    assert found[name(f"refusals_total{{code={refused.code}}}")] == 1
    hospital.host.stop()
    lost = until_scraped(at(hospital), lambda found: found[name("connected")] == 0)
    assert lost[name("ready")] == 0
    counted = until_scraped(at(hospital), lambda found: found.labels(name("errors_total")))
    assert set(counted.labels(name("errors_total"))) <= {"code=E-NET-01", "code=E-NET-12"}
    assert get(at(hospital), "/readyz") == (503, "disconnected\n")
    assert get(at(hospital), "/healthz")[0] == 200


def test_a_code_that_the_coordinator_makes_up_is_no_series_of_its_own(started) -> None:
    hospital = started(metrics=HERE)
    for k in range(3):
        hospital.control.last.send(refusal=pb.Refusal(code=f"E-NET-{70 + k}", reason="made up"))
    hospital.control.last.end()
    until(lambda: "disconnected" in hospital.events(), seconds=20)
    found = until_scraped(at(hospital), lambda found: found.labels(name("errors_total")))
    assert set(found.labels(name("errors_total"))) <= {"code=other", "code=E-NET-12", "code=E-NET-01"}


def spent(folder: Path) -> Ledger:
    """Give a hospital's ledger a budget, of which some is spent."""
    home = Home(enrolled(folder).path)
    ledger = Ledger(home.ledger, home.ledger_key)
    register(ledger, datasets.load("digits/p3c4/1"), "ward-7")
    ledger.set_budget("ward-7/train", 8.0, 1e-5, "dpo", "test")
    return ledger


def test_budgets_are_told_only_to_a_hospital_that_asks_for_them(make, tmp_path: Path) -> None:
    ledger = spent(tmp_path / "quiet")
    quiet = make(folder=tmp_path / "quiet", metrics=HERE)
    quiet.start()
    assert "ward-7" not in get(at(quiet), "/metrics")[1]
    assert "epsilon" not in get(at(quiet), "/metrics")[1]
    quiet.stop()
    open_one = make(folder=tmp_path / "quiet", metrics=HERE, metrics_budgets=True)
    open_one.start()
    found = Scrape.of(at(open_one))
    assert found[name("privacy_budget_epsilon{collection=ward-7/train}")] == 8
    assert found[name("privacy_spent_epsilon{collection=ward-7/train}")] == ledger.status("ward-7/train").spent_rdp
    assert found[name("privacy_budget_used_ratio{collection=ward-7/train}")] == 0
    assert name("privacy_budget_epsilon{collection=ward-7/test}") not in found
    shown = {key.partition("{")[0] for key in found if key.startswith(name(""))}
    listed = {f.shown_name for f in silo_metrics.FAMILIES if f.kind != "histogram"}
    quiet_ones = {f.shown_name for f in silo_metrics.FAMILIES if f.kind == "counter" and f.labels}
    parts = {name(f"round_training_seconds_{end}") for end in ("bucket", "count", "sum")}
    assert shown == (listed | parts) - quiet_ones


def test_no_ledger_is_made_by_looking_for_one(started) -> None:
    hospital = started(metrics=HERE, metrics_budgets=True)
    found = Scrape.of(at(hospital))
    assert found[name("lookup_success{part=ledger}")] == 1
    assert not found.labels(name("privacy_spent_epsilon"))
    assert not Home(hospital.folder).ledger.exists()


def test_the_command_line_refuses_an_address_that_others_reach(tmp_path: Path, capsys) -> None:
    words = ["serve", "--data", "digits/p3c4/1", "--home", str(enrolled(tmp_path / "home").path)]
    assert run([*words, "--metrics", "0.0.0.0:9465"]) == 2
    assert "loopback" in capsys.readouterr().err
    assert run([*words, "--metrics-budgets"]) == 2
    assert "--metrics " in capsys.readouterr().err
    with pytest.raises(ConfigError):
        LoopbackAddress.parse("9465,")
