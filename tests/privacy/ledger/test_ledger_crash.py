"""The ledger under kill -9 at every write, at any moment, and under two runs that want the last of a budget."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.errors import RefusedError
from fl_core.rounds.run_setup import RunSetup
from privacy.accounting.accountant import Mechanism, aggregated
from privacy.accounting.release_plan import Release
from privacy.compiled_run import CompiledRun
from privacy.ledger import event_chain
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import version
from privacy.ledger.run_ledger import RunLedger
from privacy.profiles.record import release_plan
from tests.support.privacy import TEST, TRAIN, budgeted, private

pytestmark = pytest.mark.integration

DATA = "digits/p3c4/1"
READ = b"a record was read\n"
RUN, RECORDS = private(), datasets.load(DATA)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Do work in a child; return its id and the end of a pipe that it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            work(writing)
            status = 0
        except BaseException:  # the child must not return into pytest, so what went wrong is printed here
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return child, reading


def ended(child: int, reading: int) -> tuple[int, bytes]:
    """Wait for a child: its exit status, minus the signal that ended it, and what it wrote."""
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), written


def killed_before(statement: int) -> Callable[[], int]:
    """End this process without warning before its n-th statement of SQL; the returned function counts them."""
    seen = 0

    def watch(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    honest = sqlite3.connect

    def connect(*given: object, **named: object) -> sqlite3.Connection:
        db = honest(*given, **named)  # type: ignore[call-overload]
        db.set_trace_callback(watch)
        return db

    event_chain.sqlite3.connect = connect  # type: ignore[attr-defined]  # of this process, which ends here
    return lambda: seen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Release]]:
    """A ledger with a budget, and what one round releases; every child starts from a copy of it."""
    folder = tmp_path_factory.mktemp("home")
    ledger = budgeted(folder, epsilon=20.0)
    planned = release_plan(RunSetup.of(RUN), 1).releases(0, True)
    assert {r.collection for r in planned} == {"train", "test"}
    assert ledger.budget(TRAIN).admits(
        ledger.history(TRAIN), [r.mechanism for r in planned if r.collection == "train"]
    )  # loads the accountant once
    return folder / "ledger.db", planned


def round_of(file: Path, planned: list[Release]) -> Callable[[int], None]:
    """Do what a task does: reserve, read a record, commit."""

    def work(pipe: int) -> None:
        run_ledger = RunLedger(Ledger(file), CompiledRun.of(RUN), RECORDS)
        run_ledger.begin("run")
        run_ledger.reserve(0, True, planned)
        os.write(pipe, READ)
        run_ledger.commit("sha")

    return work


def copied(template: Path, file: Path) -> None:
    """Copy a ledger with its key."""
    shutil.copy(template, file)
    shutil.copy(template.with_suffix(".key"), file.with_suffix(".key"))


def charged(ledger: Ledger) -> list[Mechanism]:
    return aggregated([*ledger.history(TRAIN), *ledger.history(TEST)])


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_t_40_kill_9_at_every_write_never_counts_too_little(
    tmp_path: Path, home: tuple[Path, list[Release]], stride: int
) -> None:
    """A round with two collections is killed before each of its statements: what was read is charged in full.

    With a stride, before every so manieth.
    """
    template, planned = home
    whole = aggregated([r.mechanism for r in planned])
    states, statement, reached_end = set[str](), 1 - stride, False
    while not reached_end:
        statement += stride
        file = tmp_path / f"{statement}.db"
        copied(template, file)
        work = round_of(file, planned)

        def child(pipe: int, work: Callable[[int], None] = work, statement: int = statement) -> None:
            killed_before(statement)
            work(pipe)

        status, written = ended(*forked(child))
        assert status in (0, -signal.SIGKILL)
        reached_end = status == 0
        ledger = Ledger(file)
        before = charged(ledger)
        if written:
            assert before == whole
        ledger.recover()
        assert charged(ledger) == before  # recovery forgets nothing
        assert ledger.verify() > 0
        entries = [e for name in (TRAIN, TEST) for e in ledger.entries(name)]
        states |= {state for _, state, _ in entries}
        assert all(state in ("SPENT", "SPENT_ON_RECOVERY") for _, state, _ in entries)
        run_ledger = RunLedger(ledger, CompiledRun.of(RUN), RECORDS)
        run_ledger.begin("run")
        run_ledger.reserve(0, True, planned)  # the ledger goes on: the round anew is charged anew
        assert sum(m.steps for m in charged(ledger)) == sum(m.steps for m in (*before, *whole))
    assert statement > 30
    assert states == {"SPENT", "SPENT_ON_RECOVERY"}


@pytest.mark.slow
def test_t_40_kill_9_at_any_moment_never_counts_too_little(tmp_path: Path, home: tuple[Path, list[Release]]) -> None:
    """Not between statements but inside them, wherever the moment falls: a child spends until it is killed."""
    template, planned = home
    steps = sum(r.mechanism.steps for r in planned)
    for moment in range(25):
        file = tmp_path / f"{moment}.db"
        copied(template, file)

        def child(pipe: int, file: Path = file) -> None:
            ledger = Ledger(file)
            for name in (TRAIN, TEST):
                ledger.set_budget(name, 1e4, 1e-5, "dpo", "room for as many as fit into the time")
            for number in range(1000):
                run_ledger = RunLedger(
                    ledger, CompiledRun.of(replace(RUN, name=f"run {number}")), RECORDS
                )  # each its own bounds
                run_ledger.begin(f"run{number}")
                run_ledger.reserve(0, True, planned)
                os.write(pipe, READ)
                run_ledger.commit("sha")

        process, reading = forked(child)
        first = os.read(reading, len(READ))
        time.sleep(0.003 * moment)  # any moment will do
        os.kill(process, signal.SIGKILL)
        status, written = ended(process, reading)
        assert status == -signal.SIGKILL
        reads = len(first + written) // len(READ)
        ledger = Ledger(file)
        ledger.recover()
        ledger.verify()
        assert sum(m.steps for m in charged(ledger)) >= reads * steps


def test_two_runs_race_for_the_last_of_a_budget_and_exactly_one_starts(tmp_path: Path) -> None:
    """Thirty of the 47 rounds that fit: two processes ask for them at one moment, several times over."""
    most = [PlannedRelease("training", Mechanism(2.85, 0.032, 31 * 30))]
    for attempt in range(5):
        file = tmp_path / f"{attempt}.db"
        ledger = Ledger(file)
        ledger.register("isic/center3", "record", "v1", 2, ["a", "b"])
        ledger.set_budget("isic/center3", 2.0, 1e-5, "dpo", "the board")
        assert ledger.budget("isic/center3").admits(ledger.history("isic/center3"), [p.mechanism for p in most])
        waiting, starting = os.pipe()

        def child(pipe: int, file: Path = file, waiting: int = waiting, starting: int = starting) -> None:
            os.close(starting)
            ledger = Ledger(file)
            os.read(waiting, 1)  # ends for both as soon as the parent closes its end
            try:
                entry = ledger.reserve("isic/center3", LedgerTask(f"run{os.getpid()}", "m", 0, "train", "v1"), most)
                ledger.start(entry)
                os.write(pipe, b"started")
            except RefusedError as error:
                os.write(pipe, error.code.encode())

        children = [forked(child), forked(child)]
        os.close(waiting)
        os.close(starting)
        written = sorted(ended(*c)[1] for c in children)
        assert written == [b"E-BUDGET-01", b"started"]
        assert ledger.history("isic/center3") == [most[0].mechanism]
        assert sorted(state for _, state, _ in ledger.entries("isic/center3")) == ["REFUSED", "RUNNING"]
        ledger.verify()


def test_the_rounds_of_these_tests_read_what_is_registered(home: tuple[Path, list[Release]]) -> None:
    ledger = Ledger(home[0])
    assert ledger.collection_of(version(RECORDS, "train")) == TRAIN
    assert ledger.collection_of(version(RECORDS, "test")) == TEST
