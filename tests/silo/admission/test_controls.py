"""The one door: whatever kind of run asks, a question is held to the policy, the decision, the day and the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.cli.survey import survey_words
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core import datasets
from fl_core.datasets import DataRequest
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import RunManifest, StartPoint
from fl_core.types.enums import TaskKind
from fl_core.types.metric_parts import METRICS
from fl_core.types.values import State
from protos.wire.tasks import TaskKey
from silo.admission.controls import (
    AdmissionRequest,
    AwaitingDecisionError,
    DataQuestion,
    HospitalControls,
    TaskQuestion,
)
from silo.storage.store import SiloStore
from tests.support.fake_coordinator import MEMBERS, enrolled, manifest
from tests.support.headcount import headcounts

Ask = Callable[..., AdmissionRequest]
MODEL: State = {"w": {"v": torch.ones(2)}}


def evaluation() -> RunManifest:
    trained = manifest()
    layout = {METRICS: trained.layout[METRICS]}
    return replace(trained, rounds=0, layout=layout, start=StartPoint("run-0", 1))


def counting(*words: str) -> RunManifest:
    return manifest_from(compose_spec([*words, "data=digits", "model=digits_linear", "secagg=off"]), MEMBERS)


def of_kind(kind: str) -> RunManifest:
    if kind == "training":
        return manifest()
    if kind == "evaluation":
        return evaluation()
    if kind == "survey":
        return counting(*survey_words(["classes"]))
    spec = compose_spec(["data=digits", "model=digits_linear", "secagg=off", "aggregator=mean"])
    return manifest_from(replace(spec, method={"name": "headcount"}, rounds=1), MEMBERS)


KINDS = ("training", "evaluation", "survey", "headcount")


@pytest.fixture
def controls(tmp_path) -> Iterator[HospitalControls]:
    home = enrolled(tmp_path / "home")
    store = SiloStore(home.database)
    with headcounts():
        yield HospitalControls(home, store)
    store.close_database()


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    """Ask about a task of a run whose data were admitted by an open policy."""

    def ask(run: RunManifest, base: str = "a") -> AdmissionRequest:
        home = enrolled(tmp_path / "open")
        store = SiloStore(home.database)
        request = DataRequest(run.schema.classes, run.image_size, run.schema.window)
        data = DataQuestion(1, datasets.load("digits/p3c4/1", request), "v1")
        access = HospitalControls(home, store).admit(AdmissionRequest("run-1", run, data=data)).access
        store.close_database()
        assert access is not None
        key = TaskKey("run-1", 0, TaskKind.TRAIN if run.rounds else TaskKind.EVALUATE)
        return AdmissionRequest(
            "run-1", run, task=TaskQuestion(access, key, len(MEMBERS), base * 64, lambda: MODEL, "c1")
        )

    return ask


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_any_kind_is_about_one_model(controls: HospitalControls, asked: Ask, kind: str) -> None:
    run = of_kind(kind)
    assert run.kind.name == kind
    for _ in range(2):
        assert controls.admit(asked(run))
    with pytest.raises(RefusedError, match="E-RUN-33"):
        controls.admit(asked(run, "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_any_kind_is_held_to_the_policy_as_it_is_when_it_comes(
    controls: HospitalControls, asked: Ask, kind: str
) -> None:
    run = of_kind(kind)
    assert controls.admit(AdmissionRequest("run-1", run))
    controls.home.policy.write_text('[runs]\nmethods = ["moon"]\n')
    with pytest.raises(RefusedError, match="E-POLICY-02"):
        controls.admit(asked(run))
    controls.home.policy.write_text("")
    assert controls.admit(asked(run, "b"))  # nothing was noted of the refused one


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_any_kind_waits_for_the_decision_and_is_not_noted_before(
    controls: HospitalControls, asked: Ask, kind: str
) -> None:
    run = of_kind(kind)
    controls.home.policy.write_text('[runs]\napprove = "by hand"\n')
    with pytest.raises(AwaitingDecisionError):
        controls.admit(asked(run))
    controls.store.approvals.decide("run-1", approved=True)
    assert controls.admit(asked(run, "b"))


@pytest.mark.parametrize(("kind", "measures"), [(kind, kind in ("training", "evaluation")) for kind in KINDS])
def test_a_day_is_full_for_runs_that_measure_models_and_for_no_others(
    controls: HospitalControls, asked: Ask, kind: str, measures: bool
) -> None:
    controls.home.policy.write_text("[evaluation]\nruns_a_day = 1\n")
    assert controls.admit(replace_id(asked(manifest()), "earlier"))
    run = of_kind(kind)
    for request in (AdmissionRequest("run-1", run), asked(run)):
        if measures:
            with pytest.raises(RefusedError, match="E-POLICY-19"):
                controls.admit(request)
        else:
            assert controls.admit(request)


def replace_id(request: AdmissionRequest, run_id: str) -> AdmissionRequest:
    assert request.task is not None
    return request._replace(run_id=run_id, task=request.task._replace(key=request.task.key._replace(run_id=run_id)))
