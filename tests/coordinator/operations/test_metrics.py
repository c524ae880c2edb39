"""The coordinator's metrics are true: a federation is driven, and the numbers are those of what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from coordinator.api.server import CoordinatorServer
from coordinator.operations import metrics as coordinator_metrics
from coordinator.pki.server_certificate import ServerCertificate
from fl_core.errors import StateError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.loopback import LoopbackAddress
from service_core.operations import metrics_endpoint
from service_core.pki.identity import identity_of
from service_core.storage import disk
from tests.support import until
from tests.support.coordinator import FAST, HELLO, Line, World, channel, running
from tests.support.federation import Federation, manifest
from tests.support.federations import NAMES
from tests.support.pages import Scrape, get, until_scraped

SERVED = replace(FAST, pulse_s=2.0, metrics=LoopbackAddress("127.0.0.1", 0))  # nobody is silent on a slow machine


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the metrics anew for each answer."""
    monkeypatch.setattr(metrics_endpoint, "EVERY_S", 0.0)


def name(end: str) -> str:
    return f"consilium_coordinator_{end}"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", NAMES, SERVED) as found:
        yield found


def at(world: World) -> LoopbackAddress:
    assert world.server is not None
    assert world.server.metrics_at is not None
    return world.server.metrics_at


def test_the_numbers_of_a_run_are_those_of_what_happened(world: World) -> None:
    before = Scrape.of(at(world))
    assert before[name("members")] == 3
    assert before[name("silos_connected")] == 0
    assert before[name("ready")] == 1
    assert [before[name(f"silo_connected{{silo={silo}}}")] for silo in NAMES] == [0, 0, 0]
    run = world.submit(manifest(rounds=2))
    open_run = until_scraped(at(world), lambda found: found[name("runs{state=running}")] == 1)
    assert open_run[name(f"run_rounds_closed{{run={run.id}}}")] == 0
    assert open_run[name(f"run_rounds_planned{{run={run.id}}}")] == 2
    began = time.time()
    people = Federation(world)
    people.come()
    try:
        done = world.finished(run.id)
        took = time.time() - began
        connected = until_scraped(at(world), lambda found: found[name("runs{state=finished}")] == 1)
        assert connected[name("silos_connected")] == 3
        assert connected[name("calls_under_way{call=Control/Session}")] == 3
    finally:
        people.leave()
    found = until_scraped(at(world), lambda found: found[name("silos_connected")] == 0)
    assert found[name("runs{state=running}")] == 0
    assert found.labels(name("run_rounds_closed")) == []
    assert found[name("round_duration_seconds_count{kind=train}")] == 2
    assert found[name("round_duration_seconds_count{kind=evaluate}")] == 1
    rounds = world.server.store.runs.rounds(run.id)
    lasted = sum(r.closed - r.opened for r in rounds)
    told = sum(found[name(f"round_duration_seconds_sum{{kind={kind}}}")] for kind in ("train", "evaluate"))
    assert told == pytest.approx(lasted)
    assert 0 < sum(r.closed - r.opened for r in rounds[1:]) < took + 1
    assert found[name("received_bytes_total")] == done.bytes_up
    assert found[name("sent_bytes_total{role=silo}")] == done.bytes_down
    assert found[name("sent_bytes_total{role=lead}")] == 0
    assert found[name("calls_total{call=Transfer/Commit}")] == 3 * 3
    assert found[name("calls_under_way{call=Transfer/Put}")] == 0
    assert found.labels(name("refusals_total")) == []


def test_refusals_are_counted_by_code_also_those_of_strangers_to_a_call(world: World) -> None:
    with closing(channel(world.port, world.people["north"])) as line:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                rpc.LeadStub(line).Silos(pb.SilosRequest(), timeout=10)
        with pytest.raises(grpc.RpcError):
            rpc.TransferStub(line).Commit(pb.CommitRequest(contribution_id="none"), timeout=10)
        found = until_scraped(at(world), lambda found: name("refusals_total{code=E-WIRE-06}") in found)
    assert found[name("refusals_total{code=E-ID-11}")] == 3
    assert found[name("refusals_total{code=E-WIRE-06}")] == 1
    assert found[name("calls_total{call=Lead/Silos}")] == 3


def test_a_name_without_a_call_makes_no_series(world: World) -> None:
    with closing(channel(world.port, world.people["north"])) as line:
        for k in range(5):
            call = line.unary_unary(f"/consilium.v1.Transfer/Made{k}")
            with pytest.raises(grpc.RpcError):
                call(b"", timeout=10)
    found = Scrape.of(at(world))
    assert not [label for label in found.labels(name("calls_total")) if "Made" in label]


def test_certificates_disk_and_versions_are_what_they_are(world: World) -> None:
    found = Scrape.of(at(world))
    own = ServerCertificate(world.home).current()
    expiry = name("certificate_expiry_timestamp_seconds{certificate=%s}")
    assert found[expiry % "own"] == identity_of(own.cert_pem).not_after.timestamp()
    assert found[expiry % "authority"] > found[expiry % "own"]
    silo = identity_of(world.people["north"].cert_pem)
    told = found[name("silo_certificate_expiry_timestamp_seconds{silo=north}")]
    assert told == pytest.approx(silo.not_after.timestamp(), abs=1)
    assert found[name("disk_available_bytes")] == pytest.approx(disk.available(world.home), abs=1 << 30)
    assert len(found.labels(name("build_info"))) == 1
    assert found["process_resident_memory_bytes"] > 1 << 20


@pytest.mark.integration
def test_what_makes_it_not_ready_is_named_and_a_revoked_hospital_is_no_member(world: World, monkeypatch) -> None:
    line = Line(world, "north", HELLO)
    try:
        until_scraped(at(world), lambda found: found[name("silo_connected{silo=north}")] == 1)
        world.server.store.members.revoke("north", "the study is over")
        gone = until_scraped(at(world), lambda found: found[name("members")] == 2)
        assert name("silo_connected{silo=north}") not in gone
        with monkeypatch.context() as patch:
            patch.setattr(disk, "available", lambda folder: -7)
            ill = until_scraped(at(world), lambda found: found[name("ready")] == 0)
            assert ill[name("problem{problem=disk}")] == 1
            assert ill[name("problem{problem=database}")] == 0
            assert ill[name("disk_available_bytes")] == -7
            assert get(at(world), "/readyz") == (503, "disk\n")
            assert get(at(world), "/healthz")[0] == 200
        until(lambda: get(at(world), "/readyz")[0] == 200, seconds=20, every=0.1)
    finally:
        line.close()


def test_a_database_that_cannot_be_read_takes_away_its_own_numbers_alone(world: World, monkeypatch) -> None:
    def broken():
        raise OSError("the disk is gone")

    monkeypatch.setattr(world.server.store.runs, "counts", broken)
    found = Scrape.of(at(world))
    assert found[name("lookup_success{part=runs}")] == 0
    assert found[name("lookup_success{part=certificates}")] == 1
    assert found[name("ready")] == 1
    assert not found.labels(name("runs"))


def test_nothing_listens_without_the_option_and_a_taken_port_stops_the_start(tmp_path: Path, world: World) -> None:
    other = World.create(tmp_path / "other", ())
    other.start()
    assert other.server.metrics_at is None
    other.stop()
    taken = CoordinatorServer(other.home, "127.0.0.1:0", other.compose, replace(FAST, metrics=at(world)))
    with pytest.raises(StateError, match="--metrics") as found:
        taken.start()
    assert found.value.code == "E-NET-20"
    other.start()  # what was begun was given back
    other.stop()


def test_more_hospitals_than_are_shown_are_counted(world: World, monkeypatch) -> None:
    monkeypatch.setattr(coordinator_metrics.metrics, "MAX_VALUES", 2)
    found = Scrape.of(at(world))
    assert found[name("members")] == 3
    assert len(found.labels(name("silo_connected"))) == 2
    assert found[name("label_values_left_out{label=silo}")] == 1


def test_every_metric_is_on_the_page_that_is_generated(world: World) -> None:
    run = world.submit(manifest(rounds=2))
    until_scraped(at(world), lambda found: name(f"run_rounds_closed{{run={run.id}}}") in found)
    with pytest.raises(grpc.RpcError), closing(channel(world.port, world.people["north"])) as line:
        rpc.LeadStub(line).Silos(pb.SilosRequest(), timeout=10)
    found = until_scraped(at(world), lambda found: found.labels(name("refusals_total")))
    ends = ("_bucket", "_count", "_sum")
    shown = {key.partition("{")[0] for key in found if key.startswith(name(""))}
    histograms = {f.shown_name for f in coordinator_metrics.FAMILIES if f.kind == "histogram"}
    listed = {f.shown_name for f in coordinator_metrics.FAMILIES} - histograms
    assert shown == listed | {f"{each}{end}" for each in histograms for end in ends}
