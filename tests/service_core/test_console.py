"""Nothing that the other side wrote moves a cursor, turns the direction of writing, or begins a line of its own."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.lead import tables
from coordinator.lead.watcher import Watcher
from fl_core.errors import RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core import console
from service_core.console import ERR, KeyValues, PrintableFormatter, TextTable, error_text, print_json, printable, show
from silo.cli.foreground import Printer
from silo.events import error_event, event
from tests.support.cards import markdown_of
from tests.support.federations import manifest

# C0, DEL, C1, line separators, directions of writing, a byte order mark.
EVIL = "\x1b[2J\x1b]0;owned\x07\r\n2026 INFO forged\t\x7f\x9b31m\u0085\u2028\u2029\u202e\u2066\u200f\ufeff"
ALLOWED = "\n\t"
OURS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def unsafe(shown: str) -> set[str]:
    return {c for c in shown if not c.isprintable() and c not in ALLOWED}


def info(text: str) -> pb.RunInfo:
    return pb.RunInfo(run_id=text, name=text, state=text, reason=text, method=text, data=text, rounds=1, accuracy=-1)


def silos(text: str) -> list[pb.SiloInfo]:
    data = pb.DataOffer(name=text, classes=[text])
    return [
        pb.SiloInfo(name=text, state=text, data=data, software=text, policy_digest=text, alarm=text, fingerprint=text)
    ]


def watch(text: str) -> None:
    with Watcher() as watcher:
        watcher.show(pb.Event(kind=text, silo=text, text=text, info=info(text), at_unix=1))


def serve(text: str) -> None:
    printer = Printer(as_json=False)
    printer.show_event(error_event(RefusedError("E-ID-12", text)))
    printer.show_event(event("connected", f"connected ({text})"))
    printer.progress(pb.Pulse(activity=pb.TRAINING, run_id=text))
    printer.close()


def log(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("refused %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("in %s", text)
    written = stream.getvalue()
    assert [line for line in written.splitlines() if not line.startswith((" ", "WARNING ", "ERROR "))] == []
    print(written, end="")


SINKS: dict[str, Callable[[str], object]] = {
    "a line": show,
    "a line of errors": lambda t: ERR.print(f"{t}"),
    "runs": lambda t: show(tables.runs_table([info(t)])),
    "silos": lambda t: show(tables.silos_table(silos(t))),
    "alarms": lambda t: [show(line) for line in tables.alarms(silos(t))],
    "watch": watch,
    "a table": lambda t: show(console.make_table(t, (t,), [(t,)])),
    "rows": lambda t: show(TextTable(t, (t,), [(t, t)], headings=True, titled=True)),
    "facts": lambda t: show(KeyValues([(t, t)])),
    "events of a silo": serve,
    "an error": lambda t: print(error_text(RefusedError("E-ID-12", t))),
    "the log": log,
    "json": lambda t: print_json({"text": t, t: [t]}),
    "a model card": lambda t: print(
        markdown_of(pb.RunDetail(info=info(t), manifest_json=manifest().to_json(), rounds=[pb.RoundInfo(included=[t])]))
    ),
}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.fault(
    "the other side",
    "puts control characters or text-direction marks into names, reasons or errors",
    "escaped wherever they are shown or logged",
)
def test_what_the_other_side_wrote_is_escaped_wherever_it_is_shown(
    sink: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = SINKS[sink]
    told(EVIL)
    shown = "".join(capsys.readouterr())
    assert unsafe(shown) == set()
    assert not any(line.startswith("2026 INFO forged") for line in shown.splitlines())

    @settings(max_examples=25, deadline=None)
    @given(OURS)
    @example(EVIL)
    @example("\n\n\x1b")
    def any_text(text: str) -> None:
        told(text)
        assert unsafe("".join(capsys.readouterr())) == set()

    any_text()


@given(st.text())
def test_every_text_becomes_visible_and_a_visible_one_stays(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_json_gives_back_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": EVIL})
    assert json.loads(capsys.readouterr().out) == {"text": EVIL}
