"""Whole federations of real processes over mutual TLS."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation, compose_spec
from coordinator.storage.store import CoordinatorStore
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.processes import World, here, world

pytestmark = pytest.mark.integration

SITES = [f"digits/p3c4/{k}" for k in range(3)]
SHORT = ("data=digits", "federation=p3c4", "rounds=2", "train.epochs=1", "seed=3")


@pytest.fixture(scope="module")
def earth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A federation of three that no test harms."""
    with world(tmp_path_factory.mktemp("earth")) as made:
        made.federation(SITES)
        yield made


@pytest.fixture
def mars(tmp_path: Path) -> Iterator[World]:
    """A world of its own, for tests that break something."""
    with world(tmp_path) as made:
        yield made


def _simulated(*overrides: str) -> dict[str, object]:
    return runner.run(compose_spec(overrides)).summary()


def test_a_run_over_real_processes_ends_in_the_model_of_the_simulation(earth: World) -> None:
    # FedBABU's personal models are those of the closing evaluation.
    runs = (("fedmr", "personal=false", 0), ("fedavg", "personal=true", 2), ("fedbabu", "personal=true", 1))
    for method, personal, scored in runs:
        done = earth.wait(earth.submit(f"method={method}", personal, *SHORT))
        simulated = _simulated(f"method={method}", personal, *SHORT)
        assert done["model_digest"] == simulated["model_digest"]
        assert done["global_accuracy"] == simulated["global_accuracy"]
        assert done["best_global_accuracy"] == simulated["best_global_accuracy"]
        assert [r["accuracy"] for r in done["round"]] == simulated["accuracy_by_round"]
        by_round = simulated.get("personal_by_round", [])
        assert [r["pa"] for r in done["round"] if "pa" in r] == [s["pa"] for s in by_round]
        assert [r["fairness"] for r in done["round"] if "pa" in r] == [s["pa_std"] for s in by_round]
        assert len(by_round) == scored
        assert all(r["missing"] == {} and r["clipped"] == 0 for r in done["round"])
        assert done["bytes_up"] > 0
        assert done["bytes_down"] > 0


def test_the_simulate_command_prints_one_object_that_names_the_same_model() -> None:
    printed = json.loads(here("simulate", "method=fedavg", *SHORT, "--json").stdout)
    assert printed == json.loads(json.dumps(runner.run(compose_simulation(["method=fedavg", *SHORT])).summary()))
    assert {"global_accuracy", "best_global_accuracy", "model_digest"} <= set(printed)


@pytest.mark.slow
def test_a_run_is_followed_interrupted_reattached_exported_and_listed(earth: World) -> None:
    lead = ["--home", str(earth.home)]
    follower = earth.start("run", "coordinator", "run", "method=fedavg", "data=digits", "rounds=60", *lead)
    until(lambda: "closed" in earth.log("run"), "the first closed round")
    follower.send_signal(signal.SIGINT)
    assert follower.wait(20) == 130
    del earth.running["run"]
    assert "coordinator watch" in earth.log("run")
    assert "finished" in earth.call("coordinator", "watch", "latest", *lead).stdout
    done = earth.info("latest")
    assert done["closed"] == 60
    assert done["run"] in [r["run"] for r in earth.lead("runs")]
    assert earth.lead("status")["runs"] == []
    assert len(earth.lead("show", "latest")["round"]) == 61
    made = earth.lead("export", "latest", "--out", str(earth.folder / "models"))
    assert made["model_digest"] == done["model_digest"]
    card = Path(made["card"]).read_text()
    for words in (
        done["manifest_digest"],
        "hospital0",
        "hospital1",
        "no differential privacy",
        "60 of 60 planned rounds",
    ):
        assert words in card


def test_an_aborted_run_ends_and_the_silos_serve_the_next_one(earth: World) -> None:
    run = earth.submit("method=fedavg", "data=digits", "rounds=500", "train.epochs=1")
    until(lambda: earth.info(run)["closed"] >= 1, "a round")
    assert earth.lead("abort", run)["state"] == "aborted"
    second = earth.submit("method=fedavg", "data=digits", "rounds=1", "train.epochs=1")
    earth.wait(second)
    status = earth.json("silo", "status", "--home", str(earth.folder / "hospital0"))
    assert {run, second} <= {r["run"] for r in status["runs"]}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run", "method=fedmrr"], "E-CFG-01", "did you mean method=fedmr"),
        (["run", "data=isic2019"], "E-RUN-05", "silo serve"),
        (["run", "data=digits", "silos=[hospital0,nobody]"], "E-RUN-05", "nobody"),
        (["run", "data=digits", "cohort=9"], "E-CFG-02", "at most 3"),
        (["show", "nothing"], "E-RUN", "nothing"),
        (["invite", "hospital0"], "E-ID-30", "coordinator revoke"),
        (["revoke", "nobody"], "E-RUN-10", "nobody"),
        (["init", "again", "--address", "127.0.0.1:1"], "E-STATE", "authority"),
        (["serve", "--bind", "127.0.0.1:0"], "E-STATE", "another coordinator"),
    ],
)
def test_a_wrong_request_is_refused_with_a_code_and_a_remedy(
    earth: World, words: list[str], code: str, says: str
) -> None:
    done = here(*words, "--home", str(earth.home))
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].startswith(code), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["methods", "models", "silos", "status", "runs"])
def test_json_output_is_one_value_on_one_line(earth: World, command: str) -> None:
    more = ["--home", str(earth.home)] if command in ("silos", "status", "runs") else []
    done = here(command, *more, "--json")
    lines = done.stdout.strip().splitlines()
    assert (done.returncode, len(lines)) == (0, 1)
    json.loads(lines[0])


def test_a_second_silo_process_on_one_home_is_refused(earth: World) -> None:
    second = earth.call("silo", "serve", "--data", SITES[0], "--home", str(earth.folder / "hospital0"), ok=False)
    assert second.returncode != 0
    assert "E-STATE" in second.stderr


@pytest.mark.slow
def test_a_copy_of_a_home_is_refused_and_the_original_goes_on(earth: World) -> None:
    copy = earth.folder / "copy"
    shutil.copytree(earth.folder / "hospital0", copy)
    second = earth.call("silo", "serve", "--data", SITES[0], "--home", str(copy), ok=False)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1].startswith("E-ID-26"), second.stderr
    assert "E-ID-26" in earth.log("coordinator")
    assert earth.running["hospital0"].poll() is None
    assert earth.states()["hospital0"] == "online"
    assert "disconnected" not in earth.log("hospital0")


@pytest.mark.slow
def test_killing_and_restarting_either_side_between_rounds_continues_the_run(mars: World) -> None:
    names = mars.federation(SITES)
    overrides = ("method=fedmr", "data=digits", "rounds=40", "train.epochs=1", "seed=3")
    run = mars.submit(*overrides)
    until(lambda: mars.info(run)["closed"] >= 2, "two rounds")
    mars.kill("coordinator")
    mars.serve()
    mars.online(names)
    until(lambda: mars.info(run)["closed"] >= 10, "ten rounds")
    mars.kill("hospital2")
    mars.silo("hospital2", SITES[2])
    interrupted = mars.wait(run)
    undisturbed = mars.wait(mars.submit(*overrides))
    assert interrupted["model_digest"] == undisturbed["model_digest"]


def _training(world: World, name: str) -> bool:
    with closing(sqlite3.connect(world.folder / name / "silo.db")) as db:
        return db.execute("SELECT count(*) FROM trainings WHERE under_way").fetchone() == (1,)


def _told(world: World, run: str, kind: str) -> list[str]:
    with closing(CoordinatorStore(world.home)) as store:
        return [e.text for e in store.runs.events(run, 0) if e.kind == kind]


@pytest.mark.slow
@pytest.mark.fault(
    "a hospital",
    "is killed by its system during training",
    "after two kills the hospital gives the run up, and both sides say so",
)
def test_a_hospital_that_is_killed_twice_in_the_middle_of_training_gives_the_run_up_and_says_why(mars: World) -> None:
    (name,) = mars.federation(SITES[:1])
    run = mars.submit("method=fedavg", "data=digits", "federation=p3c4", "rounds=1", "train.epochs=1000000")
    for kills in (1, 2):
        until(lambda: _training(mars, name), "training", 60)
        until(lambda: any(s.activity == pb.TRAINING for s in mars.client.silos().silos), "a pulse", 60)
        mars.kill(name)
        until(lambda: mars.states()[name] == "offline", "the end of the session", 60)
        (gone,) = mars.client.silos().silos
        assert "during training" in gone.alarm
        assert any("during training" in text for text in _told(mars, run, "silo"))
        mars.silo(name, SITES[0])
        until(lambda kills=kills: f"({kills} time" in mars.log(name), "what the hospital says", 60)
    until(lambda: mars.info(run)["state"] == "paused", "the run to be given up", 60)
    assert any(text.startswith("E-RUN-46") for text in _told(mars, run, "restarted"))
    (reason,) = _told(mars, run, "refused")
    assert reason.startswith("E-RUN-46")
    assert "killed 2 times" in reason
    mars.client.resume(run)
    until(lambda: _training(mars, name), "training, since the lead resumed the run", 60)
    mars.client.abort(run)


@pytest.mark.slow
def test_a_revoked_silo_is_dropped_and_says_why_and_the_other_goes_on_and_ends_cleanly(mars: World) -> None:
    names = mars.federation(SITES[:2])
    mars.call("coordinator", "revoke", "hospital0", "--reason", "left the study", "--home", str(mars.home))
    until(lambda: "left the study" in mars.log("hospital0"), "the silo to say why")
    assert mars.running.pop("hospital0").wait(30) == 1
    assert "hospital0" in mars.log("coordinator")
    assert "left the study" in mars.log("coordinator")
    assert mars.states() == {names[0]: "revoked", names[1]: "online"}
    done = mars.wait(mars.submit("method=fedavg", "data=digits", "rounds=1", "train.epochs=1"))
    assert done["round"][0]["included"] == ["hospital1"]
    assert mars.kill("hospital1", signal.SIGTERM) == 0
    until(lambda: mars.states()["hospital1"] == "offline", "its absence")
    assert mars.kill("coordinator", signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_isic_centres_train_efficientnet_for_a_round(mars: World, isic_root: Path) -> None:
    centres = [f"isic2019/center{k}" for k in (1, 2, 3, 5)]
    mars.federation(centres, "--data-root", str(isic_root))
    run = mars.submit(
        "method=fedmr", "data=isic2019", "data.image_size=64", "rounds=1", "train.max_steps=3", "train.batch_size=16"
    )
    done = mars.wait(run, seconds=700)
    assert done["round"][0]["included"] == ["hospital0", "hospital1", "hospital2", "hospital3"]
    rows = (isic_root / "train_test_split").read_text().splitlines()
    cells = [row.split(",") for row in rows[1:]]
    tested = sum(row[11] in ("1", "2", "3", "5") and row[12] == "test" for row in cells)
    assert rows[0].split(",")[11:13] == ["center", "fold"]
    assert sum(done["round"][-1]["examples"]) == tested
