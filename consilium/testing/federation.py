"""Three silos with random images of two of four classes each, a run over them, and arithmetic on their bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consilium.research.engines.in_process import SiloShare
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import Option
from fl_core.extensions.registry import identity
from fl_core.methods import all_options, build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions, RunManifest, make_members
from fl_core.training.frozen_features import trained_part
from fl_core.types.interfaces import Method
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Bundle, Examples, Part, State, Tensors

__all__ = ["NAMES", "SCHEMA", "MadeUp", "manifest", "same", "same_bundle", "same_state", "shares"]

SCHEMA = Schema((1, 8, 8), ("a", "b", "c", "d"))
NAMES = ("north", "east", "south")


class MadeUp(Examples):
    """Examples in memory. Augmentation adds a little noise."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.labels = x, y

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return (x if augment is None else x + 0.01 * torch.rand(x.shape, generator=augment)), self.labels[index]


def shares(seed: int = 0, n: int = 14) -> list[SiloShare]:
    """Create three silos with two of four classes each; class c is bright in row 2c."""
    draw = torch.Generator().manual_seed(seed)
    result = []
    for k in range(3):
        y = torch.tensor([k, k + 1]).repeat(n // 2)
        x = torch.rand(n, 1, 8, 8, generator=draw)
        x[torch.arange(n), 0, 2 * y] += 1.0
        result.append(SiloShare(MadeUp(x, y), MadeUp(x[: n // 2].clone(), y[: n // 2].clone())))
    return result


def manifest(
    method: str = "fedavg",
    options: Mapping[str, Option] | None = None,
    *,
    model: str = "digits_cnn",
    train: TrainConfig | None = None,
    rounds: int = 3,
    seed: int = 0,
    cohort: int = 0,
    quorum: int = 0,
    share: float = 1.0,
    names: Sequence[str] = NAMES,
    model_options: Mapping[str, Option] | None = None,
    personal: bool = False,
    aggregator: str = "norm_clipped",
    metrics: str = "basic",
) -> RunManifest:
    """Return the manifest of a run over the three silos."""
    network, chosen = build_model(model, model_options or {}, SCHEMA, seed), all_options(method, options or {})
    train = train or TrainConfig(batch_size=5, epochs=1)
    trained = trained_part(network, SCHEMA, train, model)
    return RunManifest(
        name="test",
        method=NamedOptions(method, chosen),
        model=NamedOptions(model, model_options or {}),
        data="made-up",
        schema=SCHEMA,
        train=train,
        rounds=rounds,
        seed=seed,
        members=make_members(names, seed, share),
        layout=derive_layout(build_method(method, chosen), *trained, personal, metrics),
        grid=FixedPointFormat("ring64", len(names)),
        privacy=NamedOptions("none"),
        cohort=cohort,
        quorum=quorum,
        threads=1,
        personal=personal,
        aggregator=NamedOptions(aggregator),
        evaluation=EvaluationTerms(metrics),
        extensions=tuple(e for e in (identity("method", method), identity("model", model)) if e),
    )


def same(a: Tensors, b: Tensors) -> bool:
    """Return whether two sets of tensors are equal bit for bit."""
    return set(a) == set(b) and all(torch.equal(v, b[name]) for name, v in a.items())


def same_bundle(a: Bundle, b: Bundle) -> bool:
    """Return whether two bundles are equal bit for bit."""
    return set(a) == set(b) and all(
        same(p.total, b[name].total) and torch.equal(p.weight, b[name].weight) for name, p in a.items()
    )


def same_state(a: State, b: State) -> bool:
    """Return whether two states are equal bit for bit."""
    return set(a) == set(b) and all(same(values, b[group]) for group, values in a.items())


def copied(state: State) -> State:
    return {group: {name: v.clone() for name, v in values.items()} for group, values in state.items()}


def copied_bundle(bundle: Bundle) -> Bundle:
    return {n: Part({key: v.clone() for key, v in p.total.items()}, p.weight.clone()) for n, p in bundle.items()}


def total_of(bundles: Sequence[Bundle]) -> Bundle:
    """Add bundles part by part."""
    total = dict(bundles[0])
    for bundle in bundles[1:]:
        total = {name: part + bundle[name] for name, part in total.items()}
    return total


def merged_total(method: Method, bundles: Sequence[Bundle]) -> Bundle:
    """Sum over silos, except for the parts that `merge` gets one by one, which are stacked."""
    return {
        name: stacked([b[name] for b in bundles]) if name in method.unsummed_parts else part
        for name, part in total_of(bundles).items()
    }


def stacked(parts: Sequence[Part]) -> Part:
    return Part(
        {key: torch.stack([p.total[key] for p in parts]) for key in parts[0].total},
        torch.stack([p.weight for p in parts]),
    )
