"""What a person sees of numbers."""

from __future__ import annotations

import pytest

from coordinator import console as display
from coordinator.console import percent


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0.00 %"), (0.923, "92.30 %"), (1.0, "100.00 %"), (-1.0, "-"),
     (-0.031, "withheld: no counts can be these"), (1.2, "withheld: no counts can be these")],
)  # fmt: skip
def test_what_can_be_no_accuracy_is_not_shown_as_one(share: float, shown: str) -> None:
    assert percent(share) == shown


AS_IT_IS = "29:AB:FB:0A /data/[b]/x [/dim] :smile:"


@pytest.mark.parametrize("console", ["OUT", "ERR"])
def test_text_is_shown_as_it_is(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fingerprints are read out to others: no part of one may turn into a picture."""
    getattr(display, console).print(AS_IT_IS)
    getattr(display, console).print(display.table("[/title]", ("[/head]",), [(AS_IT_IS,)]))
    shown = "".join(capsys.readouterr())
    assert shown.count(AS_IT_IS) == 2
    assert "[/title]" in shown
    assert "[/head]" in shown
