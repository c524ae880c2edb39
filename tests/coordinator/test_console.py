"""What a person sees of numbers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coordinator import console as display
from coordinator.console import percent
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import make_table


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0.00 %"),
        (0.923, "92.30 %"),
        (1.0, "100.00 %"),
        (-1.0, "-"),
        (-0.031, "withheld: no counts can be these"),
        (1.2, "withheld: no counts can be these"),
    ],
)
def test_what_can_be_no_accuracy_is_not_shown_as_one(share: float, shown: str) -> None:
    assert percent(share) == shown


AS_IT_IS = "29:AB:FB:0A /data/[b]/x [/dim] :smile:"


@pytest.mark.parametrize("console", ["OUT", "ERR"])
def test_text_is_shown_as_it_is(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fingerprints are read out to others: no part of one may turn into a picture."""
    getattr(display, console).print(AS_IT_IS)
    getattr(display, console).print(make_table("[/title]", ("[/head]",), [(AS_IT_IS,)]))
    shown = "".join(capsys.readouterr())
    assert shown.count(AS_IT_IS) == 2
    assert "[/title]" in shown
    assert "[/head]" in shown


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [("opened", 0, "round 1/3"), ("closed", 2, "round 3/3"), ("closed", 3, "evaluation"), ("ended", 3, "")],
)
def test_rounds_are_counted_from_one_for_people(
    kind: str, number: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with display.Watcher() as watcher:
        watcher.show(pb.Event(kind=kind, round=number, info=pb.RunInfo(rounds=3, accuracy=-1, best_accuracy=-1)))
    shown = capsys.readouterr().out
    assert said in shown
    assert ("round" in shown) == said.startswith("round")


def test_a_round_is_named_by_its_place_and_the_evaluation_after_the_last_by_what_it_is() -> None:
    assert display.round_text(0, pb.TRAIN) == "1"
    assert display.round_text(3, pb.EVALUATE) == "evaluation"


SOUTH = pb.AwaitedSilo(name="south", left_s=725, offline_s=2400, classes=["keratosis"])
WAITING = pb.RunInfo(
    run_id="run-1", rounds=9, closed=6, state="running", waiting=pb.Waiting(round=6, there=5, needed=4, silos=[SOUTH])
)


def test_who_is_awaited_is_named_with_a_countdown_and_the_classes_that_depend_on_it() -> None:
    line = "south (offline 40 min, 12 min more; nobody else holds keratosis)"
    assert display.waiting_lines(WAITING) == [
        "round 7: 5 updates are there, 4 close it; waits for",
        f"  {line}",
    ]
    assert display.run_json(WAITING)["waiting"] == {
        "round": 6,
        "there": 5,
        "needed": 4,
        "silos": [{"name": "south", "left": 725.0, "online": False, "offline": 2400.0, "classes": ["keratosis"]}],
    }
    out = io.StringIO()
    with display.Watcher(Console(file=out, force_terminal=True, width=200)) as watcher:
        watcher.show(pb.Event(kind="silo", info=WAITING, silos=[pb.SiloInfo(name="south", state="offline")]))
    assert "offline; awaited: offline 40 min, 12 min more; nobody else holds keratosis" in out.getvalue()


def closed(number: int, correct: float) -> pb.Event:
    return pb.Event(
        kind="closed", round=number, closed=pb.RoundInfo(round=number, correct=[correct], examples=[4]), info=WAITING
    )


def test_a_terminal_shows_the_accuracies_of_a_run_as_a_chart_and_a_pipe_does_not() -> None:
    shown, piped = io.StringIO(), io.StringIO()
    for out, terminal in ((shown, True), (piped, False)):
        with display.Watcher(Console(file=out, force_terminal=terminal, width=80)) as watcher:
            for number, correct in enumerate((1.0, 2.0, 4.0)):
                watcher.show(closed(number, correct))
    assert "accuracy over 2 rounds of training" in shown.getvalue()
    assert " 100 % ┤" in shown.getvalue()
    assert "█" not in piped.getvalue()
    assert "accuracy over" not in piped.getvalue()
