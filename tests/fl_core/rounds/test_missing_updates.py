"""Updates that do not come, or cannot be used: who is missing, and what of a round is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core.errors import ProtocolError, RefusedError, UnavailableError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.computed_tensors import StoredTensors
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.interfaces import SiloPort
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Part, RoundContext, State, Tensors
from tests.support.federations import NAMES, Failing, Given, Kept, go, manifest, same, shares


def failing(run: RunManifest, which: int, rounds: Sequence[int], *, spoil: bool = False) -> list[SiloPort]:
    ports: list[SiloPort] = list(local_ports(RunSetup.of(run), shares()))
    ports[which] = Failing(ports[which], rounds, spoil)
    return ports


@pytest.mark.integration
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

        def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
            return {**self._inner.round(msg, context, kind), "long" * 100_000: Part.of({}, 1.0)}

    run = manifest(quorum=2, rounds=1)
    north, east, south = local_ports(RunSetup.of(run), shares())
    _, kept = go(run, [north, Long(east), south])
    assert kept.records[0].missing["east"].startswith("E-WIRE-06: expected the parts ['delta', 'metrics'], found [")
    assert len(kept.records[0].missing["east"]) == 500


def test_a_round_below_its_quorum_stops_the_run_after_the_last_closed_round() -> None:
    run = manifest(quorum=3)
    kept = Kept()
    with pytest.raises(UnavailableError) as caught:
        RunSetup.of(run).round_loop(failing(run, 1, [1]), 1).run(RunSetup.of(run).initial_state(), kept)
    assert caught.value.code == "E-RUN-03"
    assert "east" in str(caught.value)
    assert len(kept.states) == 1
    assert same(
        RunSetup.of(run).round_loop(local_ports(RunSetup.of(run), shares()), 1).run(kept.states[0], Kept(), 1)["w"],
        go(run)[0]["w"],
    )


def few_examples(*kept: int) -> list[SiloShare]:
    """The made-up shares, cut to so many training examples."""
    return [SiloShare(Given(s.train.x[:n], s.train.labels[:n]), s.test) for s, n in zip(shares(), kept, strict=True)]


BATCH_NORM, DROP_LAST = {"model_options": {"norm": "batch"}}, {"train": TrainConfig(batch_size=4, drop_last=True)}


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "scaffold", "fedrep"])
@pytest.mark.parametrize("options", [BATCH_NORM, DROP_LAST], ids=["batch norm", "drop last"])
def test_a_run_in_which_no_hospital_takes_a_step_fails_and_is_never_finished(
    method: str, options: dict[str, Any]
) -> None:
    run, kept = manifest(method, rounds=2, **options), Kept()
    ports = local_ports(RunSetup.of(run), few_examples(1, 1, 1))
    with pytest.raises(RefusedError, match=r"E-RUN-52: round 1: no hospital took a training step.*east: E-RUN-52"):
        RunSetup.of(run).round_loop(ports, 1).run(RunSetup.of(run).initial_state(), kept)
    assert kept.records == []


@pytest.mark.parametrize("options", [BATCH_NORM, DROP_LAST], ids=["batch norm", "drop last"])
def test_a_hospital_whose_data_give_no_step_is_named_with_the_reason_and_the_others_go_on(
    options: dict[str, Any],
) -> None:
    run = manifest(rounds=1, quorum=2, **options)
    _, kept = go(run, local_ports(RunSetup.of(run), few_examples(9, 1, 9)))
    assert kept.records[0].included == ("north", "south")
    assert kept.records[0].missing["east"].startswith("E-RUN-52: expected a")
    assert "train.batch_size" in kept.records[0].missing["east"]


def test_hospitals_without_a_step_beside_one_that_is_away_leave_the_run_paused() -> None:
    run = manifest(rounds=1, **BATCH_NORM)
    ports: list[SiloPort] = list(local_ports(RunSetup.of(run), few_examples(1, 1, 9)))
    ports[2] = Failing(ports[2], [0])
    with pytest.raises(UnavailableError, match=r"E-RUN-03.*east: E-RUN-52"):
        RunSetup.of(run).round_loop(ports, 1).run(RunSetup.of(run).initial_state(), Kept())


def test_batches_of_one_with_batch_norm_are_refused_before_round_1() -> None:
    train = TrainConfig(batch_size=1)
    with pytest.raises(RefusedError, match=r"E-RUN-52.*train\.batch_size=1"):
        RunSetup.of(manifest(train=train, **BATCH_NORM)).silo_runtime()
    RunSetup.of(manifest(train=train)).silo_runtime()
    RunSetup.of(manifest("analytic", train=train, **BATCH_NORM)).silo_runtime()  # it takes no steps


def test_without_a_quorum_two_thirds_of_the_cohort_must_deliver() -> None:
    run = manifest(quorum=0)
    assert go(run, failing(run, 0, [2]))[1].records[2].included == ("east", "south")
    ports = failing(run, 0, [2])
    ports[1] = Failing(ports[1], [2])
    with pytest.raises(UnavailableError, match="at least 2 of 3"):
        go(run, ports)


class NeedsEverybody(FedAvg):
    @property
    def unsupported(self) -> Mapping[Capability, str]:
        return {Capability.PARTIAL_PARTICIPATION: "all must train"}


def test_a_method_that_needs_everybody_gets_everybody() -> None:
    run = manifest(quorum=0)
    loop = replace(RunSetup.of(run).round_loop(failing(run, 0, [0]), 1), method=NeedsEverybody())
    with pytest.raises(UnavailableError, match="at least 3 of 3"):
        loop.run(RunSetup.of(run).initial_state(), Kept())


def test_a_defect_of_the_program_is_not_taken_for_a_missing_silo() -> None:
    run = manifest(quorum=1)
    ports: list[SiloPort] = list(local_ports(RunSetup.of(run), shares()))

    class Broken:
        name = "north"

        def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
            raise ZeroDivisionError

    ports[0] = Broken()
    with pytest.raises(ZeroDivisionError):
        go(run, ports)


class ReadOnce(StoredTensors):
    """Tensors of a file that can be read once; the disk fails after that."""

    def __init__(self, values: Tensors) -> None:
        self.shapes = {name: tuple(value.shape) for name, value in values.items()}
        self._values, self._left = values, set(values)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._left:
            raise ProtocolError("E-WIRE-06", f"tensor {name!r} cannot be read: Input/output error")
        self._left.discard(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class OnFailingDisk:
    def __init__(self, inner: SiloPort) -> None:
        self.name, self.settle, self._inner = inner.name, inner.settle, inner

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        bundle = self._inner.round(msg, context, kind)
        model = bundle["delta"]
        return {**bundle, "delta": Part(ReadOnce(model.total), model.weight)}


def test_an_update_that_is_half_added_and_cannot_be_read_ends_the_round_and_no_other_silo_is_blamed() -> None:
    run = manifest(quorum=1, rounds=1)
    north, east, south = local_ports(RunSetup.of(run), shares())
    loop, kept = RunSetup.of(run).round_loop([north, OnFailingDisk(east), south], 1), Kept()
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.*cannot be read.*Input/output"):
        loop.run(RunSetup.of(run).initial_state(), kept)
    assert not kept.records
