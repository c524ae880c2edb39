"""The projected epsilon is the one that a run then spends, hospital by hospital."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from consilium.research.engines.in_process import RoundHistory, simulate
from coordinator.cli.main import program
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from privacy.accounting.accountant import epsilon_of
from privacy.accounting.projection import preview
from privacy.accounting.release_plan import TRAIN
from privacy.compiled_run import CompiledRun
from privacy.release_log import InMemoryReleaseLog
from tests.support.federations import NAMES, manifest, shares

pytestmark = pytest.mark.integration


def run_of(profile: str = "dp_record", **terms: object) -> RunManifest:
    options = {"mu1": 1e-4, "mu2": 0.5, "inter_weighting": "example"}
    made = manifest("fedmr", options, rounds=3, cohort=2, share=0.67)  # type: ignore[arg-type]
    members = tuple(replace(m, units=n) for m, n in zip(made.members, (14, 28, 7), strict=True))
    given = {"rng": "test", "prototype_noise": 3.0, "prototype_every": 1, **terms}
    return replace(made, members=members, privacy=NamedOptions(profile, given))  # type: ignore[arg-type]


def test_what_is_projected_is_what_the_books_then_hold() -> None:
    run = run_of()
    logs = [InMemoryReleaseLog() for _ in NAMES]
    simulate(
        CompiledRun.of(run),
        shares(),
        RoundHistory(),
        [CompiledRun.of(run).profile.data_factory(k, log) for k, log in enumerate(logs)],
    )
    spent = CompiledRun.of(run).profile.report([b.releases for b in logs])
    found = CompiledRun.of(run).profile.project()
    for k, silo in enumerate(found):
        assert sorted(map(repr, CompiledRun.of(run).profile.releases(k))) == sorted(map(repr, logs[k].releases))
        assert silo.epsilon == spent["epsilon_by_silo"][silo.name]  # type: ignore[index]
        assert silo.epsilon == epsilon_of([r.mechanism for r in logs[k].releases if r.collection == TRAIN], 1e-5)
        assert silo.epsilon <= 8
    assert max(s.epsilon for s in found) == preview(CompiledRun.of(run))["epsilon"]
    assert max(s.epsilon_test for s in found) == spent["epsilon_test_data"]
    assert all(s.epsilon_record == s.epsilon for s in found)
    assert sum(s.rounds for s in found) == 6
    rates = [s.rate for s in found]
    assert rates == [5 / 14, 5 / 28, 5 / 7]


def projected(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(
        program().build(["privacy"]), ["privacy", "preview", *words, "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_preview_from_the_command_line() -> None:
    words = ("data=digits", "method=fedavg", "rounds=4", "privacy=dp_record", "privacy.epsilon=3")
    found = projected(*words, "--sizes", "300,1234")
    first, second = found["silos"]  # type: ignore[misc]
    assert (first["units"], second["units"]) == (300, 1234)  # as declared: who types a size means it
    assert 2.2 < first["epsilon"] < first["epsilon_most"] <= 3
    assert found["epsilon_most"] == max(first["epsilon_most"], second["epsilon_most"])
    assert found["reserve_rounds"] == 1
    assert 0 < found["delta_of_sampling"] < 1e-5 / 100  # type: ignore[operator]
    without = projected(*words, "privacy.reserve_rounds=0", "--sizes", "300,1234")["silos"][0]  # type: ignore[index]
    assert first["epsilon"] < without["epsilon"] == without["epsilon_most"] <= 3
    assert first["noise_unreserved"] == without["noise"] == without["noise_unreserved"] < first["noise"]
    assert found["epsilon"] == max(first["epsilon"], second["epsilon"])
    assert projected("data=digits", "--sizes", "10,20")["silos"] == []
    with pytest.raises(ConfigError, match="size"):
        projected(*words, "--sizes", "3,0")
    with pytest.raises(ConfigError, match="leave one out"):
        projected(*words, "--sizes", "3", "--online")


def test_preview_states_three_epsilons_where_noise_is_shared_out() -> None:
    words = ["data=digits", "method=analytic", "model=random_features", "model.width=18", "privacy=dp_record"]
    sizes = ["--sizes", ",".join(["300"] * 6)]
    shared = [*words, "privacy.placement=distributed", "secagg=on"]
    first = projected(*shared, *sizes)["silos"][0]  # type: ignore[index]
    assert first["epsilon_all_honest"] < first["epsilon"] < first["epsilon_alone"]
    local = projected(*words, *sizes)["silos"][0]  # type: ignore[index]
    assert local["epsilon_all_honest"] == local["epsilon"] == local["epsilon_alone"] == first["epsilon"]
    shown = CliRunner().invoke(
        program().build(["privacy"]), ["privacy", "preview", *shared, *sizes], catch_exceptions=False
    )
    assert "masks fail" in shown.stdout
    assert "secagg.collusion" in shown.stdout


def test_preview_of_a_simulated_federation_and_of_silo_level_privacy() -> None:
    words = ("data=digits", "federation=p5c2", "method=fedproto", "privacy=dp_silo_small", "rounds=2")
    found = projected(*words, "privacy.allow_large=true")
    silos = found["silos"]
    assert [s["name"] for s in silos] == [f"hospital{k}" for k in range(5)]  # type: ignore[attr-defined]
    assert all(s["rate"] == 1 and 5 < s["epsilon_tight"] == s["epsilon"] < s["epsilon_most"] <= 8 for s in silos)  # type: ignore[attr-defined]
    assert all(s["epsilon"] < s["epsilon_record"] < 20 for s in silos)  # type: ignore[attr-defined]
