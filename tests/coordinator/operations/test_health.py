"""Health answers are true: asked over the wire, while a foreign program takes away what the service needs."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.operations.health import Readiness, ask
from coordinator.storage.store import FILE
from service_core.storage import disk
from tests.support import until
from tests.support.coordinator import channel

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def told(world):
    with closing(channel(world.port, world.people["north"])) as line:
        yield lambda: ask(line)


@pytest.mark.fault(
    "a coordinator's disk", "has less free space than the reserve", "the coordinator is not ready until there is room"
)
def test_a_full_disk_makes_it_not_ready(told, monkeypatch):
    assert told().serving
    with monkeypatch.context() as patch:
        patch.setattr(disk, "available", lambda folder: 0)
        until(lambda: told().problems == ("disk",), seconds=20, every=0.1)
        assert not told().serving
    until(lambda: told().serving, seconds=20, every=0.1)


@pytest.mark.fault(
    "another program", "locks the coordinator's database", "the coordinator is not ready until it can write"
)
def test_a_database_that_cannot_be_written_makes_it_not_ready(world, told):
    assert told().serving  # the first use of a certificate is written down
    with closing(sqlite3.connect(world.home / FILE, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        until(lambda: told().problems == ("database",), seconds=30, every=0.1)
        foreign.execute("ROLLBACK")
        until(lambda: told().serving, seconds=30, every=0.1)


def test_a_stopping_service_is_not_ready_and_says_so_to_who_watches(world):
    with closing(channel(world.port, world.people["lead"])) as line:
        watch = health_pb2_grpc.HealthStub(line).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        world.stop()
        with pytest.raises((grpc.RpcError, StopIteration)):  # noqa: PT012
            assert next(watch).status == NOT_SERVING
            next(watch)


def test_a_service_that_looks_no_longer_is_not_ready(tmp_path):
    now = [0.0]
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        db.execute("CREATE TABLE t (x)")
    lives = [True]
    readiness = Readiness(tmp_path / "db", lambda: lives[0], 5.0, lambda: now[0])
    assert readiness.look() == ()
    now[0] = 14.0
    assert readiness.problems() == ()
    now[0] = 16.0
    assert readiness.problems() == ("maintenance",)
    lives[0] = False
    assert readiness.look() == ("scheduler",)
    (tmp_path / "db").unlink()
    assert readiness.look() == ("database", "scheduler")
    assert not (tmp_path / "db").exists()
    readiness.stop()
    assert readiness.problems() == ("stopping",)
