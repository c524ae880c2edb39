"""One coordinator for the transfers of a module, and for each test a round that waits for updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.api.limits import Limits, Rate
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import CertificateRole
from tests.support.coordinator import FAST, World, open_round, running
from tests.support.federations import NAMES

FREE = Rate(1e6, 10**6)
SETTINGS = replace(FAST, pulse_s=0.2, parallel_runs=100, limits=Limits(calls=dict.fromkeys(CertificateRole, FREE)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("transfer") / "home", NAMES, SETTINGS) as w:
        yield w


@pytest.fixture
def offer(world: World, request: pytest.FixtureRequest) -> Iterator[pb.Offer]:
    run, found = open_round(world, request_id=request.node.name)
    yield found
    if not world.run(run.id).state.ended:
        world.server.runs.abort(run.id)
