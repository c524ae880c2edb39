"""Room for uploads and turns of downloads: bounded over all streams, and lent to nobody for ever."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api import admission
from coordinator.api.admission import LEASE_S, PER_SILO, DownloadTurns, LeadsFirst, UploadSlots
from coordinator.api.limits import Limits
from fl_core.errors import UnavailableError
from protos.wire.channel_options import window_bytes
from protos.wire.chunks import CHUNK_BYTES
from tests.support.coordinator import AWAY, DATA, FAST, code, cut, open_request, open_round, running
from tests.support.federations import NAMES

WINDOW = 4 << 20
ROOM = WINDOW + CHUNK_BYTES
LARGE = 45 << 20
BUSY = pytest.raises(UnavailableError, match="E-NET-12")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 1 << 62), st.booleans()), max_size=60))
def test_the_room_of_all_uploads_never_exceeds_the_budget(steps: list[tuple[int, int, int, bool]]) -> None:
    clock = Clock()
    slots = UploadSlots(3 * ROOM, WINDOW, clock)
    with ExitStack() as streams:
        for silo, upload, size, begins in steps:
            clock.now += 1
            try:
                slots.open(f"{silo}/{upload}", f"s{silo}", size)
                if begins:
                    streams.enter_context(slots.using(f"{silo}/{upload}", f"s{silo}"))
            except UnavailableError:
                pass
            assert 0 <= slots.room <= 3 * ROOM
    assert slots.room <= 3 * ROOM


def test_a_slot_that_nobody_uses_is_given_to_another() -> None:
    clock = Clock()
    slots = UploadSlots(ROOM, WINDOW, clock)
    slots.open("a", "north", LARGE)
    with BUSY:
        slots.open("b", "south", LARGE)
    clock.now = 20
    slots.open("b", "south", LARGE)
    with BUSY:
        slots.require("north")
    with BUSY, slots.using("b", "north"):
        pass


@pytest.mark.fault("a hospital", "uploads one byte a minute", "loses its place after two minutes if others wait")
def test_a_slow_upload_makes_room_when_another_waits() -> None:
    clock = Clock()
    slots = UploadSlots(ROOM, WINDOW, clock)
    slots.open("a", "north", LARGE)
    with slots.using("a", "north") as slot:
        clock.now = 10 * LEASE_S
        slots.yield_to_others(slot)  # nobody waits
        with BUSY:
            slots.open("b", "south", LARGE)
        with BUSY:
            slots.yield_to_others(slot)
    slots.open("b", "south", LARGE)
    with slots.using("b", "south") as slot:
        slots.yield_to_others(slot)


def test_a_silo_has_few_slots_and_takes_over_its_own() -> None:
    slots = UploadSlots(100 * ROOM, WINDOW, Clock())
    for k in range(PER_SILO):
        slots.open(f"a{k}", "north", LARGE)
    with BUSY:
        slots.open("a9", "north", LARGE)
    slots.open("b", "south", LARGE)
    with slots.using("a0", "north"):
        slots.open("a0", "north", LARGE)  # its connection was cut, and nobody knows yet
        with slots.using("a0", "north"), BUSY, slots.using("a0", "north"):
            pass
    with BUSY, slots.using("a0", "north"):
        pass


def test_a_slot_that_was_opened_again_outlives_the_stream_before() -> None:
    slots = UploadSlots(ROOM, WINDOW, Clock())
    slots.open("a", "north", LARGE)
    with slots.using("a", "north"):
        slots.open("a", "north", LARGE)
    with slots.using("a", "north"):
        pass


def test_a_large_object_fits_an_empty_budget_of_any_size() -> None:
    UploadSlots(1, WINDOW).open("a", "north", LARGE)


def test_windows_hold_what_a_line_of_one_gigabit_carries_in_a_round_trip() -> None:
    expected = {0: 1 << 20, 1: 1 << 20, 40: 5_000_000, 100: 12_500_000, 250: 31_250_000, 1e9: 32 << 20}
    assert {ms: window_bytes(ms) for ms in expected} == expected
    assert Limits.over(0) == Limits()
    for ms in (0, 40, 250):
        limits = Limits.over(ms)
        slots = UploadSlots(limits.upload_bytes, limits.window)
        for k in range(16):
            slots.open(f"{k}", f"s{k}", LARGE)
        with BUSY:
            for k in range(16, 30):
                slots.open(f"{k}", f"s{k}", LARGE)


def test_small_uploads_take_little_of_the_budget() -> None:
    slots = UploadSlots(Limits().upload_bytes, Limits().window)
    for k in range(300):
        slots.open(f"{k}", f"s{k}", 100_000)


def test_downloads_wait_in_line_and_give_their_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    async def story() -> None:
        turns = DownloadTurns(1, 2, clock)
        waited = asyncio.Event()

        async def second() -> None:
            async with turns.turn("south"):
                waited.set()

        async with turns.turn("north") as yield_to_others:
            clock.now = 10 * LEASE_S
            yield_to_others()
            task = asyncio.create_task(second())
            while not task.done() and not turns.waiting:
                await asyncio.sleep(0)
            with BUSY:
                yield_to_others()
            assert not waited.is_set()
        await task
        monkeypatch.setattr(admission, "LINE_S", 0.01)
        async with turns.turn("north"):
            with BUSY:
                async with turns.turn("south"):
                    pass
            first = asyncio.create_task(second())
            cancelled = asyncio.create_task(second())
            await asyncio.sleep(0)
            with BUSY:
                async with turns.turn("south"):
                    pass
            cancelled.cancel()
            await asyncio.gather(first, cancelled, return_exceptions=True)
        async with turns.turn("south"):
            pass

    asyncio.run(story())


@pytest.mark.fault("hospitals", "upload more at once than fits", "some wait with E-NET-12 and are admitted later")
def test_an_upload_beyond_the_budget_waits(tmp_path: Path) -> None:
    settings = replace(FAST, limits=replace(Limits(), upload_bytes=3 * len(DATA)))
    with running(tmp_path / "home", NAMES, settings) as world:
        _, offer = open_round(world)
        requests = {name: open_request(name, offer, DATA) for name in ("north", "south")}
        assert world.transfer("north").Open(requests["north"]).have == 0
        with pytest.raises(grpc.RpcError) as error:
            world.transfer("south").Open(requests["south"])
        assert code(error) == (AWAY, "E-NET-12")
        world.transfer("north").Put(cut(DATA, requests["north"].contribution_id))
        assert world.transfer("south").Open(requests["south"]).have == 0
        assert world.transfer("south").Put(cut(DATA, requests["south"].contribution_id)).have == len(DATA)


async def passed(uploads: LeadsFirst) -> bool:
    """Return whether an upload goes on at once."""
    going_on = asyncio.create_task(uploads.give_way())
    for _ in range(3):
        await asyncio.sleep(0)
    done = going_on.done()
    going_on.cancel()
    return done


def test_an_upload_waits_for_a_leads_call_and_no_longer_than_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PAUSE_S", 60.0)

    async def play() -> None:
        first = LeadsFirst()
        assert await passed(first)
        with first.call():
            with first.call():
                assert not await passed(first)
            waiting = asyncio.create_task(first.give_way())
            assert not await passed(first)
        async with asyncio.timeout(30.0):
            await waiting
        assert await passed(first)

    asyncio.run(play())


def test_leads_that_ask_without_end_hold_no_upload_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        clock = Clock()
        first = LeadsFirst(clock)
        with first.call():
            monkeypatch.setattr(admission, "PAUSE_S", 0.01)
            async with asyncio.timeout(30.0):
                await first.give_way()
            monkeypatch.setattr(admission, "PAUSE_S", 60.0)
            clock.now += admission.HELD_S
            assert await passed(first)

    asyncio.run(play())
