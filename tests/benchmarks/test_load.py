"""The benchmark of a load reports what happened: what the service has recorded, and what a server saw of strangers."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load import lead, strangers
from benchmarks.load.measure import Load, lead_report, measure, percentiles
from coordinator.storage.store import Store

QUICK = Load(sessions=5, uploads=1, params=250_000, strangers=5, seconds=2.0)


@pytest.mark.slow
@pytest.mark.slow
def test_the_report_of_a_small_load_is_what_the_service_has_recorded(tmp_path: Path) -> None:
    found = measure(QUICK, tmp_path)
    parts = [found["without_strangers"], found["with_strangers"]]
    with closing(Store(tmp_path / "coordinator")) as store:
        [run] = store.runs.all()
        arrived = [e for e in store.runs.events(run.id, 0) if e.kind == "arrived"]
        away = [e for e in store.runs.events(run.id, 0) if e.kind == "silo" and e.text.startswith("away")]
        assert len(run.members) == 5
    assert {int(e.text.split()[0]) for e in arrived} == {found["update_bytes"]}
    taken = [part["uploads"]["taken"] for part in parts]
    assert all(taken)
    assert sum(taken) <= len(arrived)  # some come before the parts, between them and after them
    for part in parts:
        assert part["uploads"]["bytes"] == pytest.approx(
            part["uploads"]["taken"] * found["update_bytes"], abs=found["update_bytes"]
        )
        assert (part["uploads"]["refused"], part["uploads"]["given_up"]) == ({}, {})
        assert part["lead"]["calls"] + part["lead"]["left_out"] + part["lead"]["without_answer_yet"] in range(15, 26)
        assert part["lead"]["refused"] == {}
        assert 0 < part["lead"]["all_s"]["p50"] <= part["lead"]["all_s"]["p99"] <= part["lead"]["all_s"]["max"] < 60
        assert (part["sessions"]["online"], part["sessions"]["lost"]) == (5, {})
    assert not [e for e in away if e.at <= min(a.at for a in arrived[-1:])]
    assert (parts[1]["strangers"]["open"], parts[1]["strangers"]["not_opened"]) == (5, {})
    assert 0 < found["memory"]["end_mib"] <= found["memory"]["peak_mib"]


def test_strangers_say_nothing_that_ends_and_come_back_when_they_are_cut() -> None:
    seen: list[tuple[str, bytes]] = []

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = b""
        if int(writer.get_extra_info("peername")[0].split(".")[-1]) % 2:
            said = await reader.readexactly(len(strangers._HELLO))
        seen.append((writer.get_extra_info("peername")[0], said))
        writer.close()

    async def play() -> dict[str, object]:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        crowd = strangers.Strangers({"port": server.sockets[0].getsockname()[1], "strangers": 4})
        crowd.handle({"ask": "start"})
        async with asyncio.timeout(20):
            while len(seen) < 12:
                await asyncio.sleep(0)
        for task in crowd._tasks:
            task.cancel()
        await asyncio.gather(*crowd._tasks, return_exceptions=True)
        server.close()
        return crowd.handle({"ask": "state"})

    found = asyncio.run(play())
    assert {host for host, _ in seen} == {f"127.0.0.{k}" for k in (2, 3, 4, 5)}
    assert {said for host, said in seen if int(host.split(".")[-1]) % 2} == {strangers._HELLO}
    assert abs(found["opened"] - len(seen)) <= 4  # one side knows of a connection before the other
    assert found["opened"] - found["cut"] <= 4
    assert 1 <= found["most_open"] <= 4


def test_a_lead_asks_on_while_nobody_answers_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "_EVERY_S", 0.001)
    monkeypatch.setattr(lead, "_AT_ONCE", 3)
    asked: list[str] = []

    async def play() -> dict[str, object]:
        free = asyncio.Event()

        async def ask() -> None:
            asked.append("runs")
            await free.wait()

        asking = lead.Lead({"runs": ask})
        asking.start()
        async with asyncio.timeout(20):
            while asking._left_out < 5:
                await asyncio.sleep(0)
            before = len(asked)
            free.set()
            while len(asking._answered) < 3:
                await asyncio.sleep(0)
        asking._asking.cancel()
        return {"before": before, "answered": list(asking._answered), "left_out": asking._left_out}

    found = asyncio.run(play())
    assert found["before"] == 3
    name, seconds, code = found["answered"][0]
    assert (name, code) == ("runs", "")
    assert seconds >= 0.005  # from when it was due: at least the five that were left out came meanwhile
    assert found["left_out"] >= 5


def test_refused_calls_are_counted_by_code_and_are_no_answers() -> None:
    answered = [("runs", 0.1, ""), ("silos", 0.4, ""), ("show", 9.0, "E-NET-12"), ("runs", 0.2, "")]
    found = lead_report({"answered": answered, "left_out": 2, "under_way": 1})
    assert (found["calls"], found["left_out"], found["without_answer_yet"]) == (4, 2, 1)
    assert found["refused"] == {"E-NET-12": 1}
    assert found["all_s"] == {"p50": 0.2, "p99": 0.4, "max": 0.4}
    assert found["show_s"] == {}


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1, (1, 1, 1)), (2, (1, 2, 2)), (100, (50, 99, 100)), (101, (51, 100, 101)), (1000, (500, 990, 1000))],
)
def test_percentiles_are_values_that_were_measured(number: int, expected: tuple[int, int, int]) -> None:
    found = percentiles([float(k) for k in range(number, 0, -1)])
    assert (found["p50"], found["p99"], found["max"]) == expected
