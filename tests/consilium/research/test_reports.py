"""`coordinator compare`, `plot` and `logs` against a service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.lead.client import LeadClient
from coordinator.lead.run_log import AuditTail, run_lines
from coordinator.storage.records import RunState
from service_core.audit_log.lines import LogEntry
from service_core.audit_log.log import FOLDER, AuditLog
from tests.support.coordinator import World, running
from tests.support.federations import NAMES, manifest
from tests.support.processes import here
from tests.support.recorded_runs import SPEC, record_run

LONG = "fedgela-isic2019-with-a-frozen-body-20261127-101500-1f2e3d"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with runs that are over."""
    with running(tmp_path_factory.mktemp("reports") / "home", NAMES) as world:
        assert world.server is not None
        store = world.server.store
        record_run(store, "run-a", [0.1, 0.2, 0.3])
        record_run(store, "run-b", [0.1, 0.4, 0.5], spec={**SPEC, "train": {"lr": 0.5}})
        hostile = {"south": "\x1b]0;owned\x07<b>E-RUN-13"}
        record_run(store, "run-c", [0.1, 0.4, 0.5], missing=hostile, finished=False, reason="E-X \u202e")
        record_run(store, LONG, [0.1, 0.2, 0.6])
        yield world


def said(world: World, *words: str, refused: bool = False) -> str:
    done = here(*words, "--home", str(world.home))
    assert (done.returncode != 0) == refused, done.stderr
    return done.stdout


def test_runs_are_compared_as_tables_and_as_json(told: World) -> None:
    text = said(told, "compare", "run-a", "run-b")
    for words in (
        "train.lr",
        "0.5",
        "50.00 %",  # of run-b's last model, as `show` has it; classes of 10, 20, 30, 40: 0, 20, 30 and 0 are right
        "Scores: the last evaluation",
        "balanced_accuracy",
        "behind the best",
        "note: ",
    ):
        assert words in text
    found = json.loads(said(told, "compare", "run-a", "run-b", "--json"))
    assert found["differences"] == {"train.lr": {"run-a": "0.1", "run-b": "0.5"}}
    assert [run["scores"]["accuracy"]["final"]["value"] for run in found["runs"]] == pytest.approx([0.3, 0.5])
    standing = found["standing"]
    assert (standing["best"], standing["evaluations"], standing["not_compared"]) == ("run-b", 1, {})
    assert standing["ahead"]["run-a"]["low"] < standing["ahead"]["run-a"]["point"]
    values = {
        run: {name: found["value"] for name, found in standing["values"][run].items()} for run in ("run-a", "run-b")
    }
    assert values["run-a"] == pytest.approx({"accuracy": 0.3, "balanced_accuracy": (0 + 1 + 10 / 30 + 0) / 4})
    assert values["run-b"] == pytest.approx({"accuracy": 0.5, "balanced_accuracy": (0 + 1 + 1 + 0) / 4})
    assert [run["scores"]["accuracy"]["mean_last"]["value"] for run in found["runs"]] == pytest.approx([0.25, 0.45])


def test_runs_with_long_names_have_letters_and_lines_stay_within_80_columns(
    told: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = said(told, "compare", "run-a", LONG)
    assert f"B: {LONG}" in text
    assert text.count(LONG) == 1
    assert "B ends ahead of A in balanced accuracy" in text
    tables = [line for line in text.splitlines() if line[:1] in "┃│┏┡├└"]
    assert tables
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("compare", "run-a", "run-a"), "E-CFG-02"),
        (("compare", "run-a", "nothing"), "E-RUN-10"),
        (("compare", *["run-a"] * 21), "E-CFG-02"),
        (("plot", "run-a", "--out", "x.bmp"), "E-CFG-02"),
        (("logs", "nothing"), "E-RUN-10"),
    ],
)
def test_a_wrong_question_is_refused_with_a_code(told: World, words: tuple[str, ...], code: str) -> None:
    done = here(*words, "--home", str(told.home))
    assert done.returncode in (1, 2)
    assert code in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plot_is_written(told: World, tmp_path: Path) -> None:
    out = tmp_path / "curves.svg"
    found = json.loads(said(told, "plot", "run-a", "run-b", "--out", str(out), "--json"))
    assert found["measures"] == ["accuracy", "balanced_accuracy"]
    assert out.stat().st_size > 1000


def test_the_log_of_a_run_is_its_events_and_the_audit_lines_that_name_it_by_time(told: World) -> None:
    lines = [json.loads(line) for line in said(told, "logs", "run-a", "--json").splitlines()]
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    events = [line for line in lines if line["source"] == "event"]
    assert [e["event"] for e in events if e["event"] in ("submitted", "ended")] == ["submitted", "ended"]
    assert all(e["run"] == "run-a" for e in events)
    said(told, "extend", "run-c", "--hours", "1", refused=True)
    lines = [json.loads(line) for line in said(told, "logs", "run-c", "--json").splitlines()]
    (audit,) = [line for line in lines if line["source"] == "audit"]
    assert (audit["who"], audit["what"], audit["outcome"]) == ("lead://test/lead", "Lead/Extend", "refused")
    assert "run-c" in audit["about"]


def test_what_others_wrote_can_neither_move_the_cursor_nor_begin_a_line(told: World) -> None:
    text = said(told, "logs", "run-c")
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "E-X" in text


def test_following_ends_with_the_run_and_misses_nothing(told: World) -> None:
    assert told.server is not None
    store = told.server.store
    agreed = manifest(rounds=3)
    record_run(store, "run-open", [0.1, 0.2], agreed=agreed, finished=False)
    seen: list[str] = []
    with closing(LeadClient.open(told.home)) as client:
        lines = run_lines(client, told.home, "run-open", follow=True)
        first = threading.Event()

        def read() -> None:
            for line in lines:
                seen.append(line.event.kind if line.event else "audit")
                if seen.count("opened") == 2:
                    first.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert first.wait(20)
        store.runs.event("run-open", "warning", 1, "north", "late")
        told.server.dispatcher.changes.notify()
        store.runs.end("run-open", RunState.ABORTED, "by hand")
        told.server.dispatcher.changes.notify()
        thread.join(20)
        assert not thread.is_alive()
    assert seen.count("warning") == seen.count("ended") == 1
    assert seen.index("warning") < seen.index("ended")


def test_a_line_of_the_audit_log_is_read_once_and_only_if_it_names_the_run(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / FOLDER)
    tail = AuditTail(tmp_path, frozenset(("run-1", "study")))
    for about in ("run=run-1 round=1", "run=run-10", "run_id=study", "xrun=run-1", "object run-1"):
        log.append(LogEntry("lead", "call", about))
    log.append(LogEntry("lead", "Lead/Show", "run_id=run-1"))
    assert [line.entry.about for line in tail.fresh()] == ["run=run-1 round=1", "run_id=study"]
    assert not list(tail.fresh())
    log.append(LogEntry("lead", "call", "run=run-1 again"))
    assert [line.entry.about for line in tail.fresh()] == ["run=run-1 again"]
