"""`silo doctor`: before joining, beside a service, and on a home that has something wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import StateError
from fl_core.rounds import torch_need
from privacy.ledger.ledger import Ledger
from service_core.pki.identity import Address
from silo.cli.main import run
from silo.storage.feature_cache import Block, FeatureCache, FeatureKey
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support.coordinator import World, enrolled
from tests.support.older_homes import AGES, older_file, older_ledger

STRICT = '[privacy]\nrequire = "dp_record"\n'


@pytest.fixture(autouse=True)
def _private(no_proxy, tmp_path):
    tmp_path.chmod(0o700)
    before = os.umask(0o077)
    yield
    os.umask(before)


def examine(capsys, home: Path, *words: str):
    capsys.readouterr()
    status = run(["doctor", "--home", str(home), "--json", *words])
    found: dict[str, list[dict]] = {}
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return status, found


def level(found, check):
    return [finding["level"] for finding in found[check]]


@pytest.fixture
def home(world: World, tmp_path) -> Home:
    made = enrolled(world, "southern", tmp_path / "silo")
    made.write_addresses((Address("127.0.0.1", world.port),))
    made.policy.write_text(STRICT)
    return made


@pytest.fixture
def world(tmp_path):
    found = World.create(tmp_path / "coordinator", ["north"])
    found.start()
    yield found
    found.stop()


def test_before_joining_nothing_is_made_and_an_invitation_is_tried_and_not_used_up(capsys, world, tmp_path):
    status, found = examine(capsys, tmp_path / "new")
    assert status == 0
    assert level(found, "network") == ["warning"]
    store = CoordinatorStore(world.home)
    made = Membership(world.home, store).invite("west")
    store.close()
    token = tmp_path / "token"
    token.write_text(made.token)
    status, found = examine(capsys, tmp_path / "new", "--token-file", str(token))
    # The invitation names the port of the consortium's founding: the one that listens here is another.
    assert level(found, "reachability") == ["problem"]
    assert made.token not in str(found)
    assert not (tmp_path / "new").exists()
    assert world.server.store.members.is_invited(made.serial)


def test_a_sound_silo_is_told_so_with_clock_and_version_of_both_sides(capsys, home):
    before = {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()}
    status, found = examine(capsys, home.path)
    assert status == 0, found
    for check in ("clock", "certificate", "reachability", "coordinator", "offset", "versions", "policy", "modes"):
        assert level(found, check) == ["ok"], found[check]
    assert {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()} == before


@pytest.mark.fault("a revoked hospital", "runs its doctor", "the doctor says that it is revoked")
def test_a_revoked_silo_hears_that_it_is(capsys, home, world):
    Membership(world.home, world.server.store).revoke("southern", "over")
    status, found = examine(capsys, home.path)
    assert status == 1
    assert "E-ID-12" in found["coordinator"][0]["found"]


def test_a_coordinator_that_is_away_is_a_problem_with_its_cause(capsys, home, world):
    world.stop()
    status, found = examine(capsys, home.path)
    assert status == 1
    assert "E-TLS-01" in found["reachability"][0]["found"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", "warning"),
        ("nonsense = 1\n", "problem"),
        ('[privacy]\nrng = "test"\n', "problem"),
        ('[runs]\napprove = "by hand"\n', "warning"),
    ],
)
def test_a_policy_that_lets_much_through_is_told(capsys, home, policy, expected):
    home.policy.write_text(policy)
    assert level(examine(capsys, home.path)[1], "policy") == [expected]


@pytest.mark.fault("an operator", "restores an older ledger", "the doctor reports it and changes nothing")
def test_a_ledger_that_was_put_back_is_a_problem(capsys, home):
    ledger = Ledger(home.ledger, home.ledger_key)
    ledger.register("records/train", "record", "f", 1, ["a"])
    assert level(examine(capsys, home.path)[1], "ledger") == ["ok"]
    home.attested.write_text(json.dumps(["", 99, "0" * 64, "", 0]))
    status, found = examine(capsys, home.path)
    assert status == 1
    assert "E-BUDGET-08" in found["ledger"][0]["found"]
    home.ledger_key.unlink()
    assert level(examine(capsys, home.path)[1], "ledger") == ["problem"]
    assert not home.ledger_key.exists()


def test_data_and_device_are_looked_at_when_asked(capsys, home, tmp_path):
    status, found = examine(capsys, home.path, "--data", "digits/hospital0", "--device", "cpu")
    assert (status, level(found, "data"), level(found, "device")) == (0, ["ok"], ["ok"])
    status, found = examine(capsys, home.path, "--data", "folder:/nowhere", "--classes", "a,b", "--device", "cuda:99")
    assert (status, level(found, "data"), level(found, "device")) == (1, ["problem"], ["problem"])


def test_it_says_which_runs_can_be_computed_here_and_what_brings_the_others(capsys, home, monkeypatch):
    assert [finding["found"] for finding in examine(capsys, home.path)[1]["runs"]] == ["every kind of run"]
    monkeypatch.setattr(torch_need, "installed", lambda module: module != "torch")
    able, unable = examine(capsys, home.path)[1]["runs"]
    assert able["found"].startswith("without torch: surveys, runs of method=analytic")
    assert (unable["found"], unable["remedy"]) == ("not training", "pip install 'consilium-fl[torch]'")
    assert run(["status", "--home", str(home.path), "--json"]) == 0
    computes = json.loads(capsys.readouterr().out)["computes"]
    assert computes == {"runs": able["found"], "missing": {"training": "pip install 'consilium-fl[torch]'"}}


def test_features_that_are_kept_are_counted_and_damaged_ones_named(capsys, home):
    cache = FeatureCache(home.features, 1 << 24)
    for k, lost in enumerate((0, 2)):
        rows = np.ones((300 - lost, 1024), dtype=np.float32)
        cache.get(FeatureKey("o", "d", "r", str(k), "m"), 300, lambda: iter([Block(list(range(len(rows))), rows)]))  # noqa: B023
    _, found = examine(capsys, home.path)
    assert found["features"][0]["level"] == "warning"
    assert found["features"][0]["found"] == "2 sets of features kept, 2 MiB; 2 examples left out that cannot be read"
    path = cache.files()[0].path
    path.write_bytes(path.read_bytes()[:-1])
    _, found = examine(capsys, home.path)
    assert path.name in found["features"][0]["found"]
    assert len(found["features"]) == 2


@pytest.mark.parametrize("age", AGES)
def test_a_home_of_0_1_0_is_sound_and_is_left_as_it_is(capsys, home, age):
    for file in home.path.glob("silo.db*"):
        file.unlink()
    older_file(age, "silo", home.database)
    older_ledger(age, home.path)
    before = {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()}
    _, found = examine(capsys, home.path)
    assert level(found, "database") == ["ok"], found["database"]
    assert level(found, "ledger") == ["ok"], found["ledger"]
    assert "21 events" in found["ledger"][0]["found"] or "22 events" in found["ledger"][0]["found"]
    assert {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "change",
    ["PRAGMA user_version = 99", "DROP TABLE tasks", "DROP TABLE runs", "UPDATE tasks SET evaluation = '{'"],
)
@pytest.mark.parametrize("age", AGES)
def test_it_never_calls_a_database_sound_that_the_service_refuses(capsys, home, age, change):
    for file in home.path.glob("silo.db*"):
        file.unlink()
    older_file(age, "silo", home.database, f"{change};")
    _, found = examine(capsys, home.path)
    assert level(found, "database") == ["problem"], found["database"]
    with pytest.raises(StateError):
        SiloStore(home.database).history()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE meta SET value='99' WHERE key='schema_version'",
        "DROP TABLE unit_digest",
        "DELETE FROM meta",
        "DROP TRIGGER event_noupd; UPDATE event SET detail='x' WHERE seq=9",
    ],
)
@pytest.mark.parametrize("age", AGES)
def test_it_never_calls_a_ledger_sound_that_the_service_refuses(capsys, home, age, change):
    older_ledger(age, home.path, f"{change};")
    _, found = examine(capsys, home.path)
    assert level(found, "ledger") == ["problem"], found["ledger"]
    with pytest.raises(StateError):
        Ledger(home.ledger, home.ledger_key).verify()


def test_no_message_about_an_older_or_foreign_ledger_advises_a_new_one(capsys, home):
    """An empty ledger would forget what was spent."""
    for change in ("UPDATE meta SET value='99' WHERE key='schema_version'", "DROP TABLE meta"):
        home.ledger.unlink(missing_ok=True)
        older_ledger("last", home.path, f"{change};")
        with pytest.raises(StateError) as refused:
            Ledger(home.ledger, home.ledger_key)
        for word in ("new folder", "new ledger", "another place", "begin"):
            assert word not in str(refused.value)
