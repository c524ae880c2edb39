"""A method under test, with the states and updates that its checks look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import nn

from consilium.testing.federation import SCHEMA, copied, copied_bundle, manifest, merged_total, shares
from fl_core.converter import Option
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import RunManifest
from fl_core.simulation.in_process import thread_count
from fl_core.training.evaluation import METRIC_PARTS
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import Method, RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Layout, LocalResult, RoundContext, State

T = TypeVar("T")
TRAIN = TrainConfig(lr=0.05, batch_size=5, epochs=1)
CONTEXT = RoundContext(n_silos=3, n_classes=4, rounds=5, round=2, cohort=3)


@dataclass(frozen=True)
class MethodCase:
    """A method by its name, with options under which all of its parts are at work."""

    name: str
    options: Mapping[str, Option]

    @property
    def method(self) -> Method:
        return build_method(self.name, self.options)

    @cached_property
    def _after_a_round(self) -> tuple[State, tuple[Bundle, ...]]:
        method = self.method
        start = method.init_server(model_of(), CONTEXT)
        server = method.merge(start, merged_total(method, [self.local(start, k).bundle for k in range(3)]), CONTEXT)
        return server, tuple(self.local(copied(server), k).bundle for k in range(3))

    @property
    def server(self) -> State:
        """Give a copy of the state after one round, so that nothing in it is still at its start."""
        return copied(self._after_a_round[0])

    @property
    def answers(self) -> list[Bundle]:
        """Give copies of what the three silos answer to that state."""
        return [copied_bundle(bundle) for bundle in self._after_a_round[1]]

    @property
    def layout(self) -> Layout:
        return derive_layout(self.method, model_of(), SCHEMA)

    @property
    def sent(self) -> Layout:
        """The layout without what is measured."""
        return {part: spec for part, spec in self.layout.items() if part not in METRIC_PARTS}

    def local(self, server: State, k: int, model: nn.Module | None = None, silo: State | None = None) -> LocalResult:
        model = model_of() if model is None else model
        share, context = shares()[k], CONTEXT.for_silo(k, 0)
        silo = self.method.init_silo(model_of(), CONTEXT) if silo is None else silo
        data = PlainLocalData(RoundData(share.train, share.test, TRAIN, context))
        return self.method.local(model, self.method.broadcast(server), silo, data, context)

    def manifest(self, norm: str = "group") -> RunManifest:
        return manifest(self.name, self.options, train=TRAIN, model_options={"norm": norm})


def model_of(seed: int = 0, norm: str = "batch") -> nn.Module:
    return build_model("digits_cnn", {"norm": norm}, SCHEMA, seed)


def poisoned() -> nn.Module:
    model = model_of(1)
    with torch.no_grad():
        for v in model.state_dict().values():
            v.fill_(float("nan") if v.is_floating_point() else -7)
    return model


def run_checks(checks: Sequence[Callable[[T], None]], case: T, name: str) -> None:
    broken = []
    for check in checks:
        try:
            with thread_count(1):  # the examples are few: more threads wait for each other
                check(case)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            broken.append(f"{check.__name__.replace('_', ' ')}: {type(error).__name__}{text and f': {text}'}")
    if broken:
        lines = "".join(f"\n  {line}" for line in broken)
        raise AssertionError(f"{name} breaks {len(broken)} of {len(checks)} promises:{lines}")
