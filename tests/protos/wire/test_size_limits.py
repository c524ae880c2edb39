"""What an object may be is enough for what every method really sends."""

from __future__ import annotations

import pytest

from consilium.testing.methods import MethodCase
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from protos.wire import codec
from protos.wire.size_limits import max_object_bytes
from tests.support.federations import METHOD_OPTIONS

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", METHODS)
def test_every_broadcast_and_update_is_within_its_bound(name: str) -> None:
    case = MethodCase(name, METHOD_OPTIONS.get(name, {}))
    run = case.manifest()
    bound = max_object_bytes(run)
    sent = [case.method.broadcast(state) for state in (case.server, RunSetup.of(run).initial_state())]
    assert max(len(codec.pack_state(msg)) for msg in sent) <= bound
    assert max(len(codec.pack_bundle(bundle)) for bundle in case.answers) <= bound
    # Without the room for headers too, so that the bound is one also of a large model.
    numbers = [sum(v.numel() for group in msg.values() for v in group.values()) for msg in sent]
    shapes = [s for spec in run.layout.values() for s in (*spec.shapes.values(), spec.weight_shape)]
    assert 4 * max(numbers) <= bound - (1 << 20) - 512 * len(shapes)
