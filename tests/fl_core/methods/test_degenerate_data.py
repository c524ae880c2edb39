"""Data at the edge: classes alone in a batch, equal records, a single one. What a hospital sends stays finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from consilium.testing.federation import merged_total
from fl_core.converter import Option
from fl_core.errors import FederationError
from fl_core.methods import METHODS, build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.silo_round import SiloRuntime, run_silo_round
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.records import TrainConfig
from fl_core.types.values import RoundContext
from tests.support.federations import METHOD_OPTIONS, SCHEMA, Given

CLASSES = len(SCHEMA.classes)


def noise(n: int) -> torch.Tensor:
    return torch.rand(n, *SCHEMA.shape, generator=torch.Generator().manual_seed(0))


DATA: Mapping[str, Callable[[], Given]] = {
    "each class alone": lambda: Given(noise(4), torch.arange(4) % CLASSES),
    "black images": lambda: Given(torch.zeros(8, *SCHEMA.shape), torch.arange(8) // 2 % CLASSES),
    "equal images": lambda: Given(torch.full((8, *SCHEMA.shape), 0.5), torch.arange(8) // 4 % CLASSES),
    "one class": lambda: Given(noise(8), torch.zeros(8, dtype=torch.long)),
    "one record": lambda: Given(noise(1), torch.zeros(1, dtype=torch.long)),
}
ZEROS: Mapping[str, list[dict[str, Option]]] = {
    "fedmr": [{"eps": 0.0, "intra": form} for form in ("mean", "paper", "code")],
    "analytic": [{"ridge": 0.0}],
}
"""Options at their least, where something is divided by what they are added to, or chosen by data."""
CASES = [(name, dict(METHOD_OPTIONS.get(name, {}))) for name in sorted(METHODS)]
CASES += [(name, options) for name, choices in ZEROS.items() for options in choices]


@pytest.mark.integration
@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{k}" for k, (name, _) in enumerate(CASES)])
def test_every_method_stays_finite_or_refuses_on_degenerate_data(
    name: str, options: dict[str, Option], data: str
) -> None:
    method, examples = build_method(name, options), DATA[data]()
    model = build_model("digits_cnn", {"norm": "none"}, SCHEMA, 0)
    layout = derive_layout(method, build_model("digits_cnn", {"norm": "none"}, SCHEMA, 0), SCHEMA, True, "basic")
    runtime, config = SiloRuntime(method, model, layout), TrainConfig(batch_size=4, epochs=1, lr=0.1)
    context, state = RoundContext(1, CLASSES, 2, 0, 1), None
    server = method.init_server(build_model("digits_cnn", {"norm": "none"}, SCHEMA, 0), context)
    for number in range(2):
        now = replace(context, round=number)
        mine = now.for_silo(0, 0)
        local = PlainLocalData(RoundData(examples, examples, config, mine))
        try:
            done = run_silo_round(runtime, method.broadcast(server), state, local, mine, TaskKind.TRAIN)
        except FederationError:
            return  # with a reason, as of MOON's or FedLC's data of one class
        state, total = done.state, merged_total(method, [done.bundle])
        sent = [part.total for part in done.bundle.values()]
        assert all(tensor_maps.all_finite(dict(values)) for values in (*sent, *state.values()))
        server = method.merge(server, {k: part for k, part in total.items() if k not in METRIC_PARTS}, now)
        assert all(tensor_maps.all_finite(dict(values)) for values in server.values())
