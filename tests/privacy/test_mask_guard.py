"""The guard chain carries a mask: with a trivial additive one, every method's sum on the grid is the plain sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from helpers_core import FED, NAMES, manifest, same_bundle, shares
from torch import Tensor

from fl_core import rng
from fl_core.fixed_point import Accumulator, FixedPoint, Grid
from fl_core.methods import METHODS
from fl_core.protocols import Guard
from fl_core.simulate import LocalPort, bench_of, initial_state
from fl_core.types import Bundle, Part, TaskKind

OPTIONS = {
    "fedmr": {"mu1": 1e-4, "mu2": 0.5},
    "fedcd": {"restarts": 2, "steps": 3},
    "fedgen": {"alpha": 1.0, "beta": 1.0, "made": 4, "noise": 3, "hidden": 8, "steps": 2},
    "creff": {"features": 3, "feature_steps": 2, "epochs": 1, "batch": 5},
}


@dataclass(frozen=True)
class Mask:
    """Silo k adds r_k - r_(k+1 mod n): masks cancel in the sum over all silos, and nowhere before."""

    ring: str
    n: int

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:
        def masked(name: str, value: Tensor) -> Tensor:
            mine, next_ = (self._draw(k % self.n, round, name, value) for k in (silo, silo + 1))
            wrapped = value + mine - next_  # int64 wraps modulo 2^64
            return wrapped.remainder(2**32) if self.ring == "ring32" else wrapped

        return {
            name: Part({k: masked(f"{name}.{k}", v) for k, v in part.total.items()}, masked(name, part.weight))
            for name, part in bundle.items()
        }

    def _draw(self, silo: int, round: int, name: str, value: Tensor) -> Tensor:
        top = 2**32 if self.ring == "ring32" else 2**63 - 1
        return torch.randint(0, top, value.shape, generator=rng.stream(1, "mask", silo, round, name))

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:
        return total

    def sensitivity(self) -> Mapping[str, float]:
        return {}


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("ring", ["ring64", "ring32"])
def test_the_masked_sum_on_the_grid_is_the_plain_sum(method: str, ring: str) -> None:
    run = manifest(method, OPTIONS.get(method, {}))  # type: ignore[arg-type]
    msg = bench_of(run).method.broadcast(initial_state(run))

    def bundles(*guards: Guard) -> list[Bundle]:
        bench = replace(bench_of(run), guards=guards)
        ports = [LocalPort(n, k, shares()[k], bench, run.train, 0, True) for k, n in enumerate(NAMES)]
        return [port.round(msg, replace(FED, round=0), TaskKind.TRAIN) for port in ports]

    plain = bundles()
    peak = {n: max((float(v.abs().max()) for b in plain for v in b[n].total.values()), default=1.0) for n in run.layout}
    grid = Grid(ring, 3, {n: 1.01 * p + 1e-3 for n, p in peak.items()} | {f"{n}.weight": 100.0 for n in peak})  # type: ignore[arg-type]
    masked = bundles(FixedPoint(grid), Mask(ring, 3))
    sums = []
    for sent in (plain, masked):
        total = Accumulator(run.layout, grid)
        for bundle in sent:
            total.fold(bundle)
        assert total.clipped == 0
        sums.append(FixedPoint(grid).incoming(total.total(), 3, 0))
    assert same_bundle(sums[0], sums[1])
    coded = FixedPoint(grid).outgoing(plain[0], 0, 0)
    for name, part in masked[0].items():  # alone it shows nothing: hardly any number is what it was
        for key, value in part.total.items():
            assert value.numel() < 8 or float((value == coded[name].total[key]).double().mean()) < 0.1
