"""Manifests of a coordinator that lies: each must be refused, by the check that every hospital makes by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import Option
from fl_core.errors import FederationError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import Member, NamedOptions, RunManifest
from fl_core.types.records import Schema, TrainConfig
from privacy.compiled_run import CompiledRun

_SCHEMA = Schema((1, 8, 8), ("a", "b"))
BAD = (math.nan, math.inf, -1.0, 1e38, 1e-40)
NUMBERS = ("clip", "prototype_bound", "prototype_noise", "count_weight", "delta", "metric_noise", "coupled_clip_ratio")


def honest() -> RunManifest:
    method, model = build_method("fedavg", {}), build_model("digits_linear", {}, _SCHEMA, 0)
    return RunManifest(
        name="audit",
        method=NamedOptions("fedavg", {}),
        model=NamedOptions("digits_linear", {}),
        data="digits",
        schema=_SCHEMA,
        train=TrainConfig(batch_size=64),
        rounds=2,
        seed=0,
        members=(Member("a", units=100), Member("b", units=100)),
        layout=derive_layout(method, model, _SCHEMA, False),
        grid=FixedPointFormat("ring64", 2),
        privacy=NamedOptions("dp_record", {"epsilon": 8.0}),
    )


def dishonest() -> Iterator[tuple[str, RunManifest]]:
    made = honest()
    for name in NUMBERS:
        for value in BAD:
            yield (
                f"privacy.{name}={value:g}",
                replace(made, privacy=NamedOptions("dp_record", {"epsilon": 8.0, name: value})),
            )
    for value in BAD:
        yield f"train.lr={value:g}", replace(made, train=replace(made.train, lr=value))
        yield f"method.mu={value:g}", replace(made, method=NamedOptions("fedprox", {"mu": value}))
    yield "privacy.epsilon=nan", replace(made, privacy=NamedOptions("dp_record", {"epsilon": math.nan}))
    lite: dict[str, Option] = {"mu1": 0.0, "mu2": 0.1, "inter_weighting": "example", "lite": 10}
    yield "method=fedmr lite=10", replace(made, method=NamedOptions("fedmr", lite))
    yield "method=fedmr inter_weighting=batch", replace(made, method=NamedOptions("fedmr", {"mu1": 0.0, "mu2": 0.1}))
    yield "privacy=dp_none", replace(made, privacy=NamedOptions("dp_none", {}))


def accepted() -> list[str]:
    found = []
    for name, manifest in dishonest():
        try:
            CompiledRun.of(manifest)
        except FederationError:
            continue
        found.append(name)
    return found
