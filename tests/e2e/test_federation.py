"""Whole federations of real processes over mutual TLS."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.world import World, until, world

P5C2 = [f"digits/p5c2/{k}" for k in range(5)]
SHORT = ("data=digits", "federation=p5c2", "rounds=3", "train.epochs=1", "seed=3")


@pytest.fixture
def earth(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


def _simulated(earth: World, *overrides: str) -> dict[str, object]:
    found: dict[str, object] = earth.json("coordinator", "simulate", *overrides)
    return found


def test_a_run_over_real_processes_ends_in_the_model_of_the_simulation(earth: World) -> None:
    earth.federation(P5C2)
    for method in ("fedmr", "fedavg"):
        done = earth.wait(earth.submit(f"method={method}", *SHORT))
        simulated = _simulated(earth, f"method={method}", *SHORT)
        assert done["model_digest"] == simulated["model_digest"]
        assert done["global_accuracy"] == simulated["global_accuracy"]
        assert done["best_global_accuracy"] == simulated["best_global_accuracy"]
        assert [r["accuracy"] for r in done["round"]] == simulated["accuracy_by_round"]
        assert all(r["missing"] == {} and r["clipped"] == 0 for r in done["round"])
    assert done["bytes_up"] > 0
    assert done["bytes_down"] > 0


def test_killing_and_restarting_either_side_between_rounds_continues_the_run(earth: World) -> None:
    names = earth.federation(P5C2)
    overrides = ("method=fedmr", *SHORT[:2], "rounds=8", "train.epochs=1", "seed=3")
    run = earth.submit(*overrides)
    until(lambda: earth.info(run)["closed"] >= 2, "two rounds")
    earth.kill("coordinator")
    earth.serve()
    earth.online(names)
    until(lambda: earth.info(run)["closed"] >= 4, "four rounds")
    earth.kill("hospital2")
    earth.silo("hospital2", P5C2[2])
    done = earth.wait(run)
    assert done["model_digest"] == _simulated(earth, *overrides)["model_digest"]


def test_a_revoked_silo_is_dropped_and_says_why_and_the_others_go_on(earth: World) -> None:
    names = earth.federation(P5C2[:3])
    earth.call("coordinator", "revoke", "hospital1", "--reason", "left the study", "--home", str(earth.home))
    until(lambda: "left the study" in earth.log("hospital1"), "the silo to say why")
    assert earth.running["hospital1"].wait(30) == 1
    del earth.running["hospital1"]
    assert "hospital1" in earth.log("coordinator")
    assert "revoked" in earth.log("coordinator")
    states = {s["name"]: s["state"] for s in earth.lead("silos")["silos"]}
    assert states == {names[0]: "online", names[1]: "revoked", names[2]: "online"}
    done = earth.wait(earth.submit("method=fedavg", "data=digits", "rounds=1", "train.epochs=1"))
    assert done["round"][0]["included"] == ["hospital0", "hospital2"]


def test_a_silo_ends_cleanly_on_sigterm_and_serves_one_run_after_another(earth: World) -> None:
    earth.federation(P5C2[:2])
    runs = [earth.submit("method=fedavg", "data=digits", "rounds=1", "train.epochs=1", f"seed={k}") for k in range(2)]
    for run in runs:
        earth.wait(run)
    status = earth.json("silo", "status", "--home", str(earth.folder / "hospital0"))
    assert {r["run"] for r in status["runs"]} == set(runs)
    assert earth.kill("hospital0", signal.SIGTERM) == 0
    until(
        lambda: {s["name"]: s["state"] for s in earth.lead("silos")["silos"]}["hospital0"] == "offline", "its absence"
    )
    assert earth.kill("coordinator", signal.SIGTERM) == 0


def test_a_run_is_followed_interrupted_reattached_exported_and_listed(earth: World) -> None:
    earth.federation(P5C2[:2])
    lead = ["--home", str(earth.home)]
    words = ["run", "method=fedavg", "data=digits", "rounds=6", "train.epochs=2", *lead]
    follower = earth.start("run", "coordinator", *words)
    until(lambda: "closed" in earth.log("run"), "the first closed round")
    follower.send_signal(signal.SIGINT)
    assert follower.wait(20) == 130
    del earth.running["run"]
    assert "coordinator watch" in earth.log("run")
    watched = earth.call("coordinator", "watch", "latest", *lead).stdout
    assert "finished" in watched
    done = earth.info("latest")
    assert done["closed"] == 6
    assert [r["run"] for r in earth.lead("runs")] == [done["run"]]
    assert earth.lead("status")["runs"] == []
    out = earth.folder / "models"
    made = earth.lead("export", "latest", "--out", str(out))
    assert made["model_digest"] == done["model_digest"]
    card = Path(made["card"]).read_text()
    for words_ in (done["manifest_digest"], "hospital0", "hospital1", "privacy | none", "6 of 6 rounds"):
        assert words_ in card


def test_an_aborted_run_ends_for_both_sides(earth: World) -> None:
    earth.federation(P5C2[:2])
    run = earth.submit("method=fedavg", "data=digits", "rounds=500", "train.epochs=1")
    until(lambda: earth.info(run)["closed"] >= 1, "a round")
    assert earth.lead("abort", run)["state"] == "aborted"
    second = earth.submit("method=fedavg", "data=digits", "rounds=1", "train.epochs=1")
    earth.wait(second)


def test_wrong_requests_are_refused_with_a_code_and_a_remedy(earth: World) -> None:
    earth.federation(P5C2[:2])
    lead = ["--home", str(earth.home)]
    for words, code, says in (
        (["run", "method=fedmrr", *lead], "E-CFG-42", "did you mean method=fedmr"),
        (["run", "data=isic2019", *lead], "E-RUN-07", "silo serve"),
        (["run", "data=digits", "silos=[hospital0,nobody]", *lead], "E-RUN-05", "nobody"),
        (["run", "data=digits", "cohort=9", *lead], "E-CFG-43", "at most 2"),
        (["show", "nothing", *lead], "E-RUN", "nothing"),
        (["invite", "hospital0", *lead], "E-ID-30", "coordinator revoke"),
        (["init", "again", "--address", "127.0.0.1:1", *lead], "E-STATE", "authority"),
        (["serve", "--bind", "127.0.0.1:0", *lead], "E-STATE", "serv"),
    ):
        done = earth.call("coordinator", *words, ok=False)
        assert done.returncode in (1, 2), words
        assert done.stderr.startswith(code), (words, done.stderr)
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_json_output_is_one_object_per_command(earth: World) -> None:
    earth.federation(P5C2[:2])
    for words in (["methods"], ["models"], ["silos"], ["status"], ["runs"]):
        more = ["--home", str(earth.home)] if words[0] in ("silos", "status", "runs") else []
        lines = earth.call("coordinator", *words, *more, "--json").stdout.strip().splitlines()
        assert len(lines) == 1
        json.loads(lines[0])


def test_second_silo_process_on_one_home_is_refused(earth: World) -> None:
    earth.federation(P5C2[:1])
    second = earth.call("silo", "serve", "--data", P5C2[0], "--home", str(earth.folder / "hospital0"), ok=False)
    assert second.returncode != 0
    assert "E-STATE" in second.stderr


@pytest.mark.slow
def test_isic_centres_train_efficientnet_for_a_round(earth: World, isic_root: Path) -> None:
    centres = [f"isic2019/center{k}" for k in (1, 2, 5)]
    earth.federation(centres, "--data-root", str(isic_root))
    run = earth.submit(
        "method=fedmr", "data=isic2019", "data.image_size=64", "rounds=1", "train.max_steps=3", "train.batch_size=16"
    )
    done = earth.wait(run, seconds=400)
    assert done["round"][0]["included"] == ["hospital0", "hospital1", "hospital2"]
    rows = (isic_root / "train_test_split").read_text().splitlines()
    cells = [row.split(",") for row in rows[1:]]
    tested = sum(row[11] in ("1", "2", "5") and row[12] == "test" for row in cells)
    assert rows[0].split(",")[11:13] == ["center", "fold"]
    assert sum(done["round"][-1]["examples"]) == tested


def test_no_process_is_left_behind(earth: World) -> None:
    earth.federation(P5C2[:1])
    processes = list(earth.running.values())
    earth.stop()
    assert all(isinstance(p, subprocess.Popen) and p.poll() is not None for p in processes)
