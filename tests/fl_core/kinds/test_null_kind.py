"""A kind of run that is new touches no source file: it is registered, and everything asks its object.

What it takes: two classes of some ten lines each (`tests/support/headcount.py`), and one registration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from consilium.pages.lead.run_facts import headline
from consilium.research.simulate import runner
from consilium.research.simulate.answer import _shown
from coordinator.api.messages import run_info
from coordinator.cli.runs import detail_lines
from coordinator.config.hydra_config import compose_simulation, compose_spec
from coordinator.config.run_spec import RunSpec
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError
from fl_core.kinds import RunKind, kind_of, kinds
from fl_core.kinds.one_answer import OneAnswer
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from silo.reports.disclosure import disclosures_of
from tests.support.federation import hospitals
from tests.support.headcount import headcounts

WORDS = ("data=digits", "model=digits_linear", "threads=1", "aggregator=mean")
TRAINED = 1438
"""Training images of digits, at six hospitals or three."""
HOSPITALS = ("north", "east", "south")


@pytest.fixture(autouse=True)
def kind() -> Iterator[RunKind]:
    with headcounts() as kind:
        yield kind


def counting(spec: RunSpec) -> RunSpec:
    return replace(spec, method={"name": "headcount"}, rounds=1)


def test_a_new_kind_is_recognised_by_what_a_manifest_names(kind: RunKind) -> None:
    assert kind_of("headcount", 1) is kind
    assert {kind_of("fedavg", 1).name, kind_of("fedavg", 0).name, kind_of("survey", 1).name} == {
        "training",
        "evaluation",
        "survey",
    }


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_every_kind_says_its_rounds_in_order_and_ends_with_the_evaluation(rounds: int) -> None:
    for kind in kinds():
        tasks = kind.tasks(rounds)
        assert [number for number, _ in tasks] == list(range(rounds + 1))
        assert [task for _, task in tasks] == [TaskKind.TRAIN] * rounds + [TaskKind.EVALUATE]


@pytest.mark.parametrize("masks", ["off", "on"])
def test_a_new_kind_runs_in_a_simulation_and_its_answer_is_read(masks: str) -> None:
    result = runner.run(counting(compose_simulation([*WORDS, "federation=hospitals6", f"secagg={masks}"])))
    assert list(_shown(result)) == [f"records: {float(TRAINED)}", "hospitals: 6.0"]
    assert not result.manifest.kind.trains
    with pytest.raises(ConfigError, match="headcount, which returns answers"):
        result.method.exported(result.server)


@pytest.mark.integration
def test_a_new_kind_runs_through_real_services_and_both_sides_say_what_it_is(tmp_path: Path) -> None:
    with hospitals(tmp_path, *HOSPITALS, data="digits/iid-3", policy="") as people:
        world, sums = people.world, {}
        for masks in ("off", "on"):
            spec = counting(compose_spec([*WORDS, f"secagg={masks}", f"name={masks}"]))
            client = LeadClient.open(world.home)
            try:
                run = world.finished(client.submit(spec.to_json(), masks).run_id, 120)
                detail = client.show(run.id)
            finally:
                client.close()
            assert run.kind.name == RunManifest.from_json(run.manifest).kind.name == "headcount"
            sums[masks] = {name: value.item() for name, value in world.model(run.id)["headcount"].items()}
            assert any(f"coordinator show {run.id}" in str(line) for line in detail_lines(detail))
            assert headline(run_info(run, world.server.store), None)[0] == "Hospitals have counted"
            assert json.loads(run.manifest)["method"] == {"name": "headcount", "options": {}}
        assert sums["off"] == sums["on"] == {"records": float(TRAINED), "hospitals": 3.0}
        service = people["north"].service
        assert service is not None
        for left in disclosures_of(service.store).runs:
            assert left.contents is not None
            assert left.contents.descriptions()[-1] == "2 numbers: how many training images are here"
            assert not left.contents.measures


def test_a_kind_in_which_everybody_answers_once_says_what_an_answer_is() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(OneAnswer):
        name = "silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent()  # type: ignore[abstract]
