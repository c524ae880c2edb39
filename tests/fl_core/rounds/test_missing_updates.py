"""Updates that do not come, or cannot be used: who is missing, and what of a round is left."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers_core import NAMES, manifest, same, shares
from helpers_rounds import Failing, Kept, go

from fl_core.aggregation import aggregator as accumulator
from fl_core.aggregation import partial_sums as sums
from fl_core.errors import ProtocolError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import local_ports
from fl_core.types.interfaces import SiloPort
from fl_core.types.values import Bundle, Part, RoundContext, State, TaskKind
from protos.wire import codec
from protos.wire.bundle_file import FileBundle


def failing(run: RunManifest, which: int, rounds: Sequence[int], *, spoil: bool = False) -> list[SiloPort]:
    ports: list[SiloPort] = list(local_ports(RunSetup.of(run), shares()))
    ports[which] = Failing(ports[which], rounds, spoil)
    return ports


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
    assert kept.records[0].missing["east"].startswith("E-WIRE-02: expected the parts ['delta', 'metrics'], found [")
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


def test_without_a_quorum_the_whole_cohort_must_deliver() -> None:
    run = manifest(quorum=0)
    with pytest.raises(UnavailableError):
        go(run, failing(run, 0, [2]))


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


class OnDisk:
    """A port whose updates stay on the disk. came: is told each file that is written."""

    def __init__(self, inner: SiloPort, folder: Path, came: Callable[[Path], object]) -> None:
        self.name, self._inner, self._file, self._came = inner.name, inner, folder / inner.name, came

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        self._inner.settle(context, kind, included)

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        codec.write_bundle(self._inner.round(msg, context, kind), self._file)
        self._came(self._file)
        return FileBundle(self._file)


@pytest.mark.parametrize("waiting", [2.5, 1e6])
def test_an_update_that_was_counted_and_cannot_be_read_ends_the_round_and_no_other_silo_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: float
) -> None:
    """Whether it is read when the third one comes, since only two and a half may wait, or at the close."""
    unreadable, read = set[Path](), os.preadv

    def failing_once(descriptor: int, rooms: Sequence[memoryview], begin: int) -> int:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if file in unreadable:
            unreadable.discard(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, rooms, begin)

    def last_came(file: Path) -> None:
        if file.name == NAMES[-1]:
            unreadable.add(file.with_name(NAMES[0]))

    monkeypatch.setattr(accumulator, "SMALL", 0)
    monkeypatch.setattr(os, "preadv", failing_once)
    run = manifest(quorum=1, rounds=1)
    inner, numbers = (
        local_ports(RunSetup.of(run), shares()),
        [s for spec in run.layout.values() for s in spec.shapes.values()],
    )
    monkeypatch.setattr(sums, "WAITING", waiting * sum(4 * math.prod(shape) for shape in numbers))
    assert same(go(run, [OnDisk(port, tmp_path, unreadable.discard) for port in inner])[0]["w"], go(run)[0]["w"])

    kept = Kept()
    with pytest.raises(ProtocolError, match=r"E-WIRE-06.* of north cannot be read.*Input/output"):
        RunSetup.of(run).round_loop([OnDisk(port, tmp_path, last_came) for port in inner], 1).run(
            RunSetup.of(run).initial_state(), kept
        )
    assert not kept.records
    assert not unreadable
