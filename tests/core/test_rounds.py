"""The round loop: who takes part, who is missing, and what a resumed run computes."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers_core import NAMES, SCHEMA, manifest, same, shares
from torch import nn

from fl_core import accumulator, cohort, sums
from fl_core.errors import ConfigError, ProtocolError, UnavailableError
from fl_core.manifest import RunManifest
from fl_core.methods.fedavg import FedAvg
from fl_core.protocols import SiloData, SiloPort
from fl_core.rounds import RoundRecord, Silent
from fl_core.simulate import History, LocalPort, bench_of, engine_of, initial_state, local_ports
from fl_core.spec import derive_layout
from fl_core.types import Bundle, Federation, Outcome, Part, State, TaskKind, Turn
from fl_core.worker import Bench
from protos import codec
from protos.bundles import FileBundle


class Kept(History):
    """Keeps the state after every round, and what was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[State] = []
        self.seen: list[tuple[int, TaskKind, tuple[str, ...]]] = []
        self.came: list[str] = []

    def opened(self, fed: Federation, kind: TaskKind, names: Sequence[str]) -> None:
        self.seen.append((fed.round, kind, tuple(names)))

    def arrived(self, name: str) -> None:
        self.came.append(name)

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        self.states.append(server)


class Failing:
    """A port that raises, or spoils what it sends, in some rounds."""

    def __init__(self, inner: SiloPort, rounds: Sequence[int], spoil: bool = False) -> None:
        self.name, self._inner, self._rounds, self._spoil = inner.name, inner, rounds, spoil

    def settle(self, fed: Federation, kind: TaskKind, included: bool) -> None:
        self._inner.settle(fed, kind, included)

    def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
        if fed.round not in self._rounds:
            return self._inner.round(msg, fed, kind)
        if not self._spoil:
            raise UnavailableError("E-NET-01", f"{self.name} is away")
        bundle = dict(self._inner.round(msg, fed, kind))
        delta = bundle["delta"]
        bundle["delta"] = Part({k: v * float("nan") for k, v in delta.total.items()}, delta.weight)
        return bundle


def go(
    run: RunManifest,
    ports: Sequence[SiloPort] | None = None,
    start: int = 0,
    state: State | None = None,
    parallel: int = 1,
) -> tuple[State, Kept]:
    kept = Kept()
    ports = local_ports(run, shares()) if ports is None else ports
    final = engine_of(run, ports, parallel).run(initial_state(run) if state is None else state, kept, start)
    return final, kept


def failing(run: RunManifest, which: int, rounds: Sequence[int], *, spoil: bool = False) -> list[SiloPort]:
    ports: list[SiloPort] = list(local_ports(run, shares()))
    ports[which] = Failing(ports[which], rounds, spoil)
    return ports


def test_rounds_evaluate_what_they_broadcast_and_end_with_an_evaluation() -> None:
    final, kept = go(manifest(rounds=3))
    assert [(r.round, r.kind) for r in kept.records] == [
        (0, TaskKind.TRAIN), (1, TaskKind.TRAIN), (2, TaskKind.TRAIN), (3, TaskKind.EVALUATE)
    ]  # fmt: skip
    assert same(kept.states[2]["w"], final["w"])
    assert sum(kept.records[0].examples) == sum(len(s.test) for s in shares())
    assert len(kept.accuracies) == 4
    assert kept.seen[0] == (0, TaskKind.TRAIN, NAMES)
    assert kept.came.count("north") == 4


def test_accuracy_is_over_the_union_of_the_test_sets() -> None:
    record = RoundRecord(0, TaskKind.TRAIN, (3.0, 0.0, 1.0), (4.0, 0.0, 6.0), ("a",))
    assert record.accuracy == 0.4
    assert record.class_accuracy() == [0.75, None, 1 / 6]
    assert RoundRecord(0, TaskKind.TRAIN, (0.0,), (0.0,), ()).accuracy == -1


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_a_failing_silo_is_recorded_as_missing_and_the_round_survives(method: str, spoil: bool) -> None:
    run = manifest(method, quorum=2)
    final, kept = go(run, failing(run, 1, [1], spoil=spoil))
    assert [r.included for r in kept.records] == [tuple(sorted(NAMES)), ("north", "south"), *[tuple(sorted(NAMES))] * 2]
    assert list(kept.records[1].missing) == ["east"]
    assert ("E-WIRE-05" if spoil else "E-NET-01") in kept.records[1].missing["east"]
    absent, _ = go(run, failing(run, 1, [1], spoil=not spoil))
    assert same(final["w"], absent["w"])  # a refused bundle leaves no trace, as if it had never been sent
    assert not same(final["w"], go(run)[0]["w"])


def test_a_refusal_repeats_only_so_much_of_what_was_sent() -> None:
    class Long:
        name = "east"

        def __init__(self, inner: SiloPort) -> None:
            self._inner = inner
            self.settle = inner.settle

        def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
            return {**self._inner.round(msg, fed, kind), "long" * 100_000: Part.of({}, 1.0)}

    run = manifest(quorum=2, rounds=1)
    north, east, south = local_ports(run, shares())
    _, kept = go(run, [north, Long(east), south])
    assert kept.records[0].missing["east"].startswith("E-WIRE-02: expected the parts ['delta', 'metrics'], found [")
    assert len(kept.records[0].missing["east"]) == 500


def test_a_round_below_its_quorum_stops_the_run_after_the_last_closed_round() -> None:
    run = manifest(quorum=3)
    kept = Kept()
    with pytest.raises(UnavailableError) as caught:
        engine_of(run, failing(run, 1, [1]), 1).run(initial_state(run), kept)
    assert caught.value.code == "E-RUN-03"
    assert "east" in str(caught.value)
    assert len(kept.states) == 1
    assert same(engine_of(run, local_ports(run, shares()), 1).run(kept.states[0], Kept(), 1)["w"], go(run)[0]["w"])


def test_without_a_quorum_the_whole_cohort_must_deliver() -> None:
    run = manifest(quorum=0)
    with pytest.raises(UnavailableError):
        go(run, failing(run, 0, [2]))


def test_a_defect_of_the_program_is_not_taken_for_a_missing_silo() -> None:
    run = manifest(quorum=1)
    ports: list[SiloPort] = list(local_ports(run, shares()))

    class Broken:
        name = "north"

        def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
            raise ZeroDivisionError

    ports[0] = Broken()
    with pytest.raises(ZeroDivisionError):
        go(run, ports)


class OnDisk:
    """A port whose updates stay on the disk. failing: silos whose update cannot be read once after this one came."""

    def __init__(self, inner: SiloPort, folder: Path, failing: Sequence[str] = ()) -> None:
        self.name, self._inner, self._folder, self._failing = inner.name, inner, folder, failing

    def settle(self, fed: Federation, kind: TaskKind, included: bool) -> None:
        self._inner.settle(fed, kind, included)

    def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
        codec.write_bundle(self._inner.round(msg, fed, kind), self._folder / self.name)
        BadDisk.files.update(str(self._folder / name) for name in self._failing)
        return FileBundle(self._folder / self.name)


class BadDisk:
    """Reads like a disk that cannot give some files' bytes the next time it is asked."""

    files: ClassVar[set[str]] = set()

    @classmethod
    def preadv(cls, descriptor: int, rooms: Sequence[memoryview], begin: int) -> int:
        file = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if file in cls.files:
            cls.files.discard(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(descriptor, rooms, begin)


PREADV = os.preadv


@pytest.mark.parametrize("waiting", [2.5, 1e6])
def test_an_update_that_was_counted_and_cannot_be_read_ends_the_round_and_no_other_silo_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: float
) -> None:
    """Whether it is read when the third one comes, since only two and a half may wait, or at the close."""
    monkeypatch.setattr(accumulator, "SMALL", 0)
    monkeypatch.setattr(os, "preadv", BadDisk.preadv)
    run = manifest(quorum=1, rounds=1)
    inner, numbers = local_ports(run, shares()), [s for spec in run.layout.values() for s in spec.shapes.values()]
    monkeypatch.setattr(sums, "WAITING", waiting * sum(4 * math.prod(shape) for shape in numbers))
    assert same(go(run, [OnDisk(port, tmp_path) for port in inner])[0]["w"], go(run)[0]["w"])

    kept = Kept()
    ports = [*(OnDisk(port, tmp_path) for port in inner[:-1]), OnDisk(inner[-1], tmp_path, NAMES[:1])]
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.* of north cannot be read.*Input/output"):
        engine_of(run, ports, 1).run(initial_state(run), kept)
    assert not kept.records
    assert not BadDisk.files


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedmr"])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_resumed_run_equals_the_straight_run_bit_for_bit(method: str, start: int) -> None:
    run = manifest(method, rounds=3, cohort=2)
    straight, kept = go(run)
    resumed, again = go(run, start=start, state=kept.states[start - 1])
    assert all(same(resumed[group], straight[group]) for group in straight)
    assert again.accuracies == kept.accuracies[start:]


def test_parallel_ports_give_the_same_bits() -> None:
    run = manifest("fedmr")
    # Ports of one bench share a scratch model, so each gets a bench of its own.
    ports = [local_ports(run, shares())[k] for k in range(3)]
    assert same(go(run, ports, parallel=3)[0]["w"], go(run)[0]["w"])


def test_cohorts_are_sampled_without_replacement_and_repeat() -> None:
    drawn = [cohort.sample(3, t, 10, 4) for t in range(50)]
    assert drawn == [cohort.sample(3, t, 10, 4) for t in range(50)]
    assert all(len(set(ids)) == 4 and ids == sorted(ids) for ids in drawn)
    assert {k for ids in drawn for k in ids} == set(range(10))
    assert len({tuple(ids) for ids in drawn}) > 20
    assert cohort.sample(3, 0, 5, 0) == cohort.sample(3, 0, 5, 5) == list(range(5))
    with pytest.raises(ConfigError) as caught:
        cohort.sample(0, 0, 3, 4)
    assert caught.value.code == "E-CFG-04"


def test_only_the_cohort_trains_and_all_silos_are_evaluated_at_the_end() -> None:
    _, kept = go(manifest(cohort=2, rounds=4))
    asked = [names for _, _, names in kept.seen]
    assert all(len(names) == 2 for names in asked[:4])
    assert asked[4] == NAMES
    assert len(set(asked[:4])) > 1


def test_values_that_the_grid_cuts_off_are_reported() -> None:
    run = manifest(rounds=1)
    ports: list[SiloPort] = list(local_ports(run, shares()))

    class Huge(Failing):
        def round(self, msg: State, fed: Federation, kind: TaskKind) -> Bundle:
            bundle = dict(self._inner.round(msg, fed, kind))
            if kind is TaskKind.TRAIN:
                total = {k: v.clone() for k, v in bundle["delta"].total.items()}
                total["head.bias"] = torch.full_like(total["head.bias"], 1e12)
                bundle["delta"] = Part(total, bundle["delta"].weight)
            return bundle

    ports[0] = Huge(ports[0], [])
    _, kept = go(run, ports)
    assert [r.clipped for r in kept.records] == [4, 0]


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """Keeps the number of rounds that its silo believes to be part of, and shows each one its own sum."""

    mirrored: ClassVar[bool] = True

    @property
    def apart(self) -> frozenset[str]:
        return frozenset({"rounds"})

    def init_silo(self, model: nn.Module, fed: Federation) -> State:
        del model, fed
        return {"own": {"rounds": torch.zeros(1)}}

    def local(self, model: nn.Module, msg: State, silo: State, data: SiloData, turn: Turn) -> Outcome:
        done = {"own": {"rounds": silo["own"]["rounds"] + 1}}
        bundle = super().local(model, msg, silo, data, turn).bundle
        return Outcome({**bundle, "rounds": Part.of(done["own"], 1.0 + turn.silo)}, done)

    def merge(self, server: State, total: Bundle, fed: Federation) -> State:
        seen = {**server, "seen": {"rounds": total["rounds"].total["rounds"], "weight": total["rounds"].weight}}
        return super().merge(seen, total, fed)


@pytest.mark.parametrize("mirrored", [True, False])
def test_a_mirrored_silo_state_is_committed_only_when_the_round_names_the_silo(mirrored: bool) -> None:
    method = type("Sub", (Counting,), {"mirrored": mirrored})()
    run = manifest("fedavg", rounds=4)
    bench = bench_of(run)
    layout = derive_layout(method, bench.model, SCHEMA)
    ports = [
        LocalPort(m.name, k, shares()[k], Bench(method, bench.model, layout), run.train, run.seed, True)
        for k, m in enumerate(run.members)
    ]
    spoilt = [ports[0], Failing(ports[1], [1], spoil=True), ports[2]]  # an update that was made, and was not included
    engine = replace(engine_of(replace(run, layout=layout, quorum=2), spoilt, 1), method=method)
    final = engine.run(method.init_server(bench.model, engine_fed(run)), Silent())
    rounds = final["seen"]["rounds"].flatten() / final["seen"]["weight"]
    assert rounds.tolist() == ([4, 3, 4] if mirrored else [4, 4, 4])
    assert final["seen"]["weight"].tolist() == [1, 2, 3]  # one by one, in the roster's order


def engine_fed(run: RunManifest) -> Federation:
    return Federation(len(run.members), len(run.schema.classes), run.rounds)


class Keeping(FedAvg):
    """FedAvg whose server keeps the mean as it gets it."""

    def merge(self, server: State, total: Bundle, fed: Federation) -> State:
        return {**super().merge(server, total, fed), "mean": total["delta"].mean()}


def test_a_server_state_holds_tensors_and_nothing_deferred() -> None:
    run, kept = manifest(rounds=1), Kept()
    engine = replace(engine_of(run, local_ports(run, shares()), 1), method=Keeping())
    before = initial_state(run)
    engine.run(before, kept)
    mean = kept.states[0]["mean"]
    assert isinstance(mean, dict)
    for name, value in kept.states[0]["w"].items():
        assert torch.equal(value, before["w"][name] + mean[name])
