"""A round of any method over three silos with two of four classes each, and copies of what it leaves."""

from __future__ import annotations

from functools import cache

import torch
from helpers_core import METHOD_OPTIONS, SCHEMA, same, shares
from helpers_drift import total_of
from torch import nn

from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import Method
from fl_core.types.values import Bundle, LocalResult, Part, RoundContext, State, TrainConfig

TRAIN = TrainConfig(lr=0.05, batch_size=5, epochs=1)
FED = RoundContext(n_silos=3, n_classes=4, rounds=5, round=2, cohort=3)


def made(name: str) -> Method:
    return build_method(name, METHOD_OPTIONS.get(name, {}))


def model_of(seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {"norm": "batch"}, SCHEMA, seed)


def server_of(method: Method) -> State:
    """Make the state after one round, so that nothing in it is still at its start."""
    start = method.init_server(model_of(), FED)
    bundles = [local(method, start, k).bundle for k in range(3)]
    return method.merge(start, merged_total(method, bundles), FED)


@cache
def _kept(name: str) -> tuple[State, tuple[Bundle, ...]]:
    server = server_of(made(name))
    return server, tuple(local(made(name), copied(server), k).bundle for k in range(3))


def server_after_a_round(name: str) -> State:
    """Give a copy of `server_of` the method, made once: what a test does to it no other test sees."""
    return copied(_kept(name)[0])


def answers(name: str) -> list[Bundle]:
    """Give copies of what three silos answer to that state."""
    return [copied_bundle(bundle) for bundle in _kept(name)[1]]


def merged_total(method: Method, bundles: list[Bundle]) -> Bundle:
    """Sum over silos, except for the parts that `merge` sees one by one."""
    return {
        name: stacked([b[name] for b in bundles]) if name in method.unsummed_parts else part
        for name, part in total_of(bundles).items()
    }


def stacked(parts: list[Part]) -> Part:
    return Part(
        {key: torch.stack([p.total[key] for p in parts]) for key in parts[0].total},
        torch.stack([p.weight for p in parts]),
    )


def local(
    method: Method, server: State, k: int, model: nn.Module | None = None, silo: State | None = None
) -> LocalResult:
    model = model_of() if model is None else model
    share, context = shares()[k], FED.for_silo(k, 0)
    silo = method.init_silo(model_of(), FED) if silo is None else silo
    return method.local(
        model, method.broadcast(server), silo, PlainLocalData(share.train, share.test, TRAIN, context), context
    )


def copied(state: State) -> State:
    return {group: {name: v.clone() for name, v in values.items()} for group, values in state.items()}


def copied_bundle(bundle: Bundle) -> Bundle:
    return {n: Part({key: v.clone() for key, v in p.total.items()}, p.weight.clone()) for n, p in bundle.items()}


def same_state(a: State, b: State) -> bool:
    return set(a) == set(b) and all(same(values, b[group]) for group, values in a.items())
