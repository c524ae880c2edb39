"""The guard chain carries a mask: with a trivial additive one, every method's sum on the grid is the plain sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_core import datasets, rng
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPoint, FixedPointFormat
from fl_core.methods import METHODS
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import Guards, RunSetup
from fl_core.simulation.in_process import InProcessSilo, RoundHistory, SiloShare, local_ports, simulate
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Guard
from fl_core.types.values import Bundle, Part, RoundContext
from privacy import profiles
from privacy.compiled_run import CompiledRun
from privacy.profiles.plain import PlainProfile
from protos.wire import codec
from protos.wire.tasks import TaskKey
from tests.support.coordinator import running
from tests.support.fake_coordinator import Hospital
from tests.support.fake_coordinator import manifest as hospital_manifest
from tests.support.federations import FED, NAMES, manifest, same, same_bundle, shares
from tests.support.hospital import Alter, ScriptedSilo

OPTIONS = {
    "fedmr": {"mu1": 1e-4, "mu2": 0.5},
    "fedcd": {"restarts": 2, "steps": 3},
    "fedgen": {"alpha": 1.0, "beta": 1.0, "made": 4, "noise": 3, "hidden": 8, "steps": 2},
    "creff": {"features": 3, "feature_steps": 2, "epochs": 1, "batch": 5},
}


@dataclass(frozen=True)
class Mask(Guard):
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


def grid_for(ring: str, run: RunManifest, bundles: Sequence[Bundle], room: float = 1.01) -> FixedPointFormat:
    """Make a grid whose bounds hold what these bundles have in them, times `room`."""
    peak = {
        n: max((float(v.abs().max()) for b in bundles for v in b[n].total.values()), default=1.0) for n in run.layout
    }
    return FixedPointFormat(
        ring, 3, {n: room * p + 1e-3 for n, p in peak.items()} | {f"{n}.weight": 100.0 for n in peak}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_masked_sum_on_the_grid_is_the_plain_sum(method: str) -> None:
    run = manifest(method, OPTIONS.get(method, {}))  # type: ignore[arg-type]
    msg = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())

    def bundles(*guards: Guard) -> list[Bundle]:
        runtime = replace(RunSetup.of(run).silo_runtime(), guards=guards)
        ports = [InProcessSilo(run, k, shares()[k], runtime) for k in range(len(NAMES))]
        return [port.round(msg, replace(FED, round=0), TaskKind.TRAIN) for port in ports]

    plain = bundles()
    for ring in ("ring64", "ring32"):
        grid = grid_for(ring, run, plain)
        masked = bundles(FixedPoint(grid), Mask(ring, 3))
        sums = []
        for sent in (plain, masked):
            total = Aggregator(run.layout, grid)
            for bundle in sent:
                total.add(bundle)
            assert total.clipped == 0
            sums.append(FixedPoint(grid).incoming(total.total(), 3, 0))
        assert same_bundle(sums[0], sums[1])
        coded = FixedPoint(grid).outgoing(plain[0], 0, 0)
        for name, part in masked[0].items():  # alone it shows nothing: hardly any number is what it was
            for key, value in part.total.items():
                assert value.numel() < 8 or float((value == coded[name].total[key]).double().mean()) < 0.1


def masked_run(method: str, ring: str, monkeypatch: pytest.MonkeyPatch) -> RunManifest:
    """Freeze a run whose profile masks: the profile is registered like any other, the run knows only its name."""
    monkeypatch.setitem(profiles.PROFILES, "masked", Masked)
    run = manifest(method, OPTIONS.get(method, {}), rounds=2, aggregator="mean")  # type: ignore[arg-type]
    msg = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())
    ports = local_ports(RunSetup.of(run), shares())
    sent = [port.round(msg, replace(FED, round=0, rounds=2), TaskKind.TRAIN) for port in ports]
    return replace(run, privacy=NamedOptions("masked"), grid=grid_for(ring, run, sent, 8.0))


class Masked(PlainProfile):
    """A profile that masks: one class, and a line in the registry."""

    def guards(self) -> Guards:
        grid = self.run.manifest.grid
        chain = (FixedPoint(grid), Mask(grid.ring, 3))
        return Guards(chain, chain)


@pytest.mark.parametrize("ring", ["ring64", "ring32"])
@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_a_masked_run_over_the_wire_is_the_plain_run_bit_for_bit(
    method: str, ring: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real coordinator, its ports and its round loop; what it is sent is masked, what it sums is the plain sum."""
    run = masked_run(method, ring, monkeypatch)
    seen: list[Bundle] = []

    def guarded(k: int) -> Alter:
        def alter(key: TaskKey, bundle: Bundle) -> Bundle:
            for guard in CompiledRun.of(run).guards.silo:
                bundle = guard.outgoing(bundle, k, key.round)
            seen.append(bundle)
            return bundle

        return alter

    with running(tmp_path / "home", NAMES) as world:
        silos = [ScriptedSilo(world, n, shares()[k], alter=guarded(k)) for k, n in enumerate(NAMES)]
        made = world.submit(run)
        world.finished(made.id)
        model, rounds = world.model(made.id), world.server.store.runs.rounds(made.id)  # type: ignore[union-attr]
        for silo in silos:
            silo.stop()
    history = RoundHistory()
    plain = simulate(RunSetup.of(replace(run, privacy=NamedOptions("none"))), shares(), history)
    assert all(same(model[group], plain[group]) for group in plain)
    assert [r.record.correct for r in rounds] == [r.correct for r in history.records]
    assert all(not v.is_floating_point() for b in seen for p in b.values() for v in (*p.total.values(), p.weight))
    again = simulate(CompiledRun.of(run), shares(), RoundHistory())
    assert all(same(again[group], plain[group]) for group in plain)


def test_a_hospital_sends_what_its_profiles_guards_made_of_its_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The silo's own service masks: its bytes are those of the same guards in one process, and say nothing alone."""
    run = hospital_manifest()
    monkeypatch.setitem(profiles.PROFILES, "masked", Masked)
    run = replace(run, privacy=NamedOptions("masked"), grid=FixedPointFormat("ring64", 3))
    hospital = Hospital(tmp_path / "home", run)
    try:
        hospital.start()
        hospital.offer()
        hospital.sent()
        (raw,) = hospital.transfer.uploads.values()
    finally:
        hospital.stop()
        hospital.host.stop()
    data = [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]
    port = local_ports(CompiledRun.of(run), data)[1]
    msg = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())
    assert bytes(raw) == codec.pack_bundle(port.round(msg, RoundContext(3, 10, 2, 0, 3), TaskKind.TRAIN))


def test_a_mask_goes_over_silo_level_noise() -> None:
    """Clip and noise on the grid, fixed point, mask: the chain that secure aggregation takes; the sum is as without."""
    run = replace(manifest("fedproto"), privacy=NamedOptions("dp_silo_small", {"rng": "test", "weights": "uniform"}))
    compiled = CompiledRun.of(run)
    msg = RunSetup.of(run).method.broadcast(RunSetup.of(run).initial_state())
    sums = []
    for more in ((), (FixedPoint(run.grid), Mask("ring64", 3))):
        runtime = replace(compiled.silo_runtime(), guards=(*compiled.guards.silo, *more))
        ports = [InProcessSilo(run, k, shares()[k], runtime) for k in range(len(NAMES))]
        total = Aggregator(run.layout, run.grid)
        for k, port in enumerate(ports):
            total.add(port.round(msg, replace(FED, round=0), TaskKind.TRAIN), k)
        sums.append(FixedPoint(run.grid).incoming(total.total(), 3, 0))
    assert same_bundle(*sums)
