"""Tasks reach a hospital's records through `HospitalControls.admit` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

import silo
from fl_core import datasets
from fl_core.aggregation.contributor_floor import CENSUS
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.training.local_data import PlainLocalData
from fl_core.types.metric_parts import METRICS
from fl_core.types.secagg import Secagg
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.record.private_data import DpSgdLocalData
from protos.consilium.v1 import federation_pb2 as pb
from silo.admission.controls import AdmissionDecision, AdmissionRequest, HospitalControls
from silo.storage.schema import answers, survey_people, surveys
from tests.silo.admission.test_controls import of_kind
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.headcount import headcounts
from tests.support.masked import MaskedHospital, masked_manifest
from tests.support.privacy import TEST, TRAIN, budgeted, private

KINDS = ("training", "evaluation", "survey", "headcount", "private training", "private evaluation", "masked", "census")


MADE_UP = 64
"""Examples that are nobody's, to measure memory and to learn shapes; the hospital has more."""


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note whoever opens a round's records, or reads a batch of them."""
    noted = list[str]()
    batch = datasets.TensorExamples.batch

    def read(*args, **more):
        noted.append("batch")
        return batch(*args, **more)

    monkeypatch.setattr(datasets.TensorExamples, "batch", read)
    for opened in (PlainLocalData, DpSgdLocalData):
        plain = opened.__init__

        def note(self, data, *args, _plain=plain, _name=opened.__name__, **more) -> None:
            if len(data.train) > MADE_UP:
                noted.append(_name)
            _plain(self, data, *args, **more)

        monkeypatch.setattr(opened, "__init__", note)
    return noted


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the door to every task; runs and their data are admitted."""
    admit = HospitalControls.admit

    def refuse(self: HospitalControls, request: AdmissionRequest) -> AdmissionDecision:
        if request.task is not None:
            raise RefusedError("E-POLICY-07", "the door is closed")
        return admit(self, request)

    monkeypatch.setattr(HospitalControls, "admit", refuse)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with headcounts():
        yield


def run_of(kind: str) -> RunManifest:
    if kind.startswith("private"):
        return private()
    if kind == "masked":
        return masked_manifest()
    if kind == "census":
        grid = FixedPointFormat("ring64", 3, {CENSUS: 2.0**61})
        return masked_manifest(method=NamedOptions("fednh", {}), secagg=Secagg(2), grid=grid)
    if kind == "evaluation":
        trained = manifest(rounds=0)
        return replace(trained, layout={METRICS: trained.layout[METRICS]})
    return of_kind(kind)


def ask(kind: str, folder: Path, make, reached: list[str]) -> tuple[object, object]:
    """Offer one task of a kind; return the hospital and its ledger."""
    run = run_of(kind)
    ledger = budgeted(folder) if run.privacy.name != "none" else None
    reached.clear()  # of registering the data, which is no task
    if kind in ("masked", "census"):
        hospital = MaskedHospital(folder, run)
        hospital.start()
        hospital.exchange()
        what = {"secagg_keys_digest": hospital.keys_object}
        if kind == "census":
            hospital.ask(0, pb.CENSUS, base_digest=hospital.keys_digest.hex(), base_size=0)
            return hospital, ledger
    else:
        hospital, what = make(run, folder=folder), {}
        hospital.start()
    compiled, ends = CompiledRun.of(run), kind.endswith("evaluation")
    state = compiled.method.broadcast(compiled.initial_state())
    hospital.offer(run.rounds if ends else 0, pb.EVALUATE if ends else pb.TRAIN, state, **what)
    return hospital, ledger


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_the_door_refuses_reads_nothing_spends_nothing_and_keeps_nothing(
    tmp_path: Path, make, kind: str, reached: list[str], closed: None
) -> None:
    hospital, ledger = ask(kind, tmp_path / "home0", make, reached)
    try:
        assert hospital.refused().code == "E-POLICY-07"
        assert reached == []
        store = hospital.service.store
        with store.database.read() as db:
            for table in (answers, surveys, survey_people):
                assert db.scalar(select(func.count()).select_from(table)) == 0
        assert store.run_data.find(hospital.run_id) is None
        assert [task.staged for run in store.history() for task in run.tasks] == []
        if ledger is not None:
            assert [*ledger.entries(TRAIN), *ledger.entries(TEST)] == []
    finally:
        hospital.end()


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_task_reaches_records_where_the_door_is_open(
    tmp_path: Path, make, kind: str, reached: list[str]
) -> None:
    hospital, ledger = ask(kind, tmp_path / "home0", make, reached)
    try:
        hospital.sent()
        assert reached
        if ledger is not None:
            assert [*ledger.entries(TRAIN), *ledger.entries(TEST)]
    finally:
        hospital.end()


@pytest.mark.integration
def test_classes_are_not_counted_before_round_1_where_the_door_refuses(
    started, reached: list[str], closed: None
) -> None:
    hospital = started(manifest())
    session = hospital.control.last
    session.send(preflight=pb.Preflight(run_id=hospital.run_id, manifest_digest=hospital.digest))
    until(lambda: session.got("preflight"))
    assert session.got("preflight")[-1].code == "E-POLICY-07"
    assert reached == []


def test_records_are_opened_in_the_one_module_of_the_door() -> None:
    """What opens records is named nowhere else in the hospital's program."""
    opens = {"data_factory", "PlainLocalData", "DpSgdLocalData", "InMemoryReleaseLog", "RunLedger"}
    naming = set[str]()
    for path in Path(silo.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))) in opens:
                naming.add(path.relative_to(silo.__path__[0]).as_posix())
    assert naming == {"admission/controls.py"}
