"""Ways that need a process of their own: rounds when they are asked for, an end that is told, and none left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.simulate import engines
from benchmarks.simulate.others import Other
from benchmarks.timing import Timed

PROGRAM = """
import sys
from benchmarks.simulate.others import DONE, READY, say, wait_for_turn
say("starting"); say(READY)
for k in range(int(sys.argv[2])):
    wait_for_turn()
    open(sys.argv[1], "a").write(f"{k} ")
    say("chatter of a library"); say(DONE)
wait_for_turn()
"""


def test_a_round_is_done_when_it_is_asked_for_and_nothing_is_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "rounds"
    other = Other((sys.executable, "-c", PROGRAM, str(file), "3"))
    child = psutil.Process(other._process.pid)
    assert not file.exists()
    for k, done in enumerate(("0 ", "0 1 ", "0 1 2 ")):
        other(k)
        assert file.read_text() == done
    assert other.cpu_seconds() > 0
    other.close()
    assert not child.is_running()


def test_a_process_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="last words"):
        Other((sys.executable, "-c", "print('last words')"))


def test_ratios_are_of_one_turn() -> None:
    timed = {"ours": Timed([1.0, 10.0, 2.0], [1.0, 1.0, 1.0]), "flower": Timed([2.0, 40.0, 2.0], [3.0, 3.0, 3.0])}
    assert engines._to_ours(timed) == {"ours": {"ratio": 2.0, "cpu_ratio": 3.0, "least": 1.0, "most": 4.0}}
