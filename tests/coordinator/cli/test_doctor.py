"""`coordinator doctor` and `coordinator health`, before, while and after a service runs."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import program
from coordinator.storage.store import OBJECTS, CoordinatorStore
from fl_core.errors import StateError
from service_core.storage.digests import file_digest
from tests.support.coordinator import World
from tests.support.older_homes import AGES, older_file


def call(*words):
    return CliRunner().invoke(program().build(list(words)), list(words))


def findings(home: Path, *words: str) -> tuple[int, dict[str, list[dict]]]:
    done = call("doctor", "--home", str(home), "--bind", "127.0.0.1:0", "--json", *words)
    found: dict[str, list[dict]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.exit_code, found


def level(found, check):
    return [finding["level"] for finding in found[check]]


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.endswith(("-shm", "-wal"))]
    return {str(p.relative_to(folder)): (file_digest(p), p.stat().st_mode) for p in files}


@pytest.fixture(autouse=True)
def _umask(tmp_path):
    tmp_path.chmod(0o700)
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_before_there_is_a_consortium_the_machine_is_looked_at_and_nothing_is_made(tmp_path):
    status, found = findings(tmp_path / "home")
    assert status == 0
    assert level(found, "consortium") == ["warning"]
    assert not (tmp_path / "home").exists()


def test_a_port_that_another_program_has_is_status_1(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = call("doctor", "--home", str(tmp_path), "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.exit_code == 1
    assert "problem  port" in done.stdout


@pytest.mark.usefixtures("no_proxy")
def test_it_changes_nothing_while_the_service_runs_and_while_it_does_not(tmp_path):
    world = World.create(tmp_path / "home", ["north"])
    before = tree(world.home)
    status, found = findings(world.home)
    assert (status, tree(world.home)) == (0, before)
    assert level(found, "service") == ["warning"]
    assert level(found, "certificate") == ["ok", "ok", "ok"]
    world.start()
    try:
        before = set(tree(world.home))
        status, found = findings(world.home)
        assert status == 0, found
        assert set(tree(world.home)) == before
        for check in ("service", "reachability", "coordinator", "offset", "versions", "database"):
            assert level(found, check) == ["ok"], found[check]
        assert call("health", "--home", str(world.home)).stdout == "serving\n"
    finally:
        world.stop()


@pytest.mark.fault(
    "a disk or an operator", "loses the coordinator's database", "the doctor reports it and creates no new one"
)
def test_a_lost_database_is_a_problem(tmp_path):
    world = World.create(tmp_path / "home", ["north"])
    (world.home / "coordinator.sqlite").unlink()
    status, found = findings(world.home)
    assert status == 1
    assert "E-STATE-23" in found["database"][0]["found"]
    assert not (world.home / "coordinator.sqlite").exists()


def test_a_key_that_others_may_read_is_a_problem(tmp_path):
    world = World.create(tmp_path / "home", [])
    (world.home / "pki" / "ca.key").chmod(0o640)
    status, found = findings(world.home)
    assert status == 1
    assert level(found, "modes") == ["problem"]


def opened_and_read(home: Path) -> None:
    with closing(CoordinatorStore(home)) as store:
        store.members.silos()
        for made in store.runs.all():
            store.runs.rounds(made.id)


@pytest.mark.parametrize(
    ("change", "ages"),
    [
        ("PRAGMA user_version = 99", AGES),
        ("DROP TABLE silos", AGES),
        ("DROP TABLE counters", AGES),
        ("UPDATE silos SET data = '{'", AGES),
        ("UPDATE incarnation SET generation = 7", ("last",)),
        ("UPDATE rounds SET record = '{}'", ("last",)),
    ],
)
def test_it_never_calls_sound_what_the_service_refuses(tmp_path, change, ages):
    world = World.create(tmp_path / "home", ["north"])
    for age in ages:
        for file in world.home.glob("coordinator.sqlite*"):
            file.unlink()
        file = older_file(age, "coordinator", world.home / "coordinator.sqlite", f"{change};")
        before = file_digest(file)
        _, found = findings(world.home)
        assert level(found, "database") == ["problem"], found
        assert file_digest(file) == before
        with pytest.raises(StateError):
            opened_and_read(world.home)


@pytest.mark.parametrize("age", AGES)
def test_it_calls_a_home_of_0_1_0_sound_which_the_service_opens_and_leaves_the_migration_to_it(tmp_path, age):
    world = World.create(tmp_path / "home", ["north"])
    for file in world.home.glob("coordinator.sqlite*"):
        file.unlink()
    file = older_file(age, "coordinator", world.home / "coordinator.sqlite")
    before = tree(world.home)
    _, found = findings(world.home)
    assert level(found, "database") == ["ok"], found
    assert tree(world.home) == before
    CoordinatorStore(world.home).close()
    assert file_digest(file) != before["coordinator.sqlite"][0]


def test_a_missing_database_beside_stored_files_is_a_problem(tmp_path):
    world = World.create(tmp_path / "home", ["north"])
    for file in world.home.glob("coordinator.sqlite*"):
        file.unlink()
    (world.home / OBJECTS / "00").mkdir(parents=True)
    (world.home / OBJECTS / "00" / ("0" * 64)).write_bytes(b"x")
    assert level(findings(world.home)[1], "database") == ["problem"]
    with pytest.raises(StateError, match="E-STATE-23"):
        CoordinatorStore(world.home)
