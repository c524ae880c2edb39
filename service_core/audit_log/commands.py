"""`coordinator log` and `silo log`: show and verify this side's audit log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core.audit_log.lines import REFUSED, LogLine
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.audit_log.verification import heads_in, verify
from service_core.command_line import command
from service_core.console import OUT, CommandResult, KeyValues, local_time, print_parts, printable
from service_core.progress import silent_from_now

_LOOK_S = 0.5
Home = Annotated[Path | None, typer.Option("--home", help="The home of this side. Default: as for other commands.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; `show` prints the lines as stored.")]

Since = Annotated[
    str | None, typer.Option("--since", help="Lines since a day or time: 2026-11-23 or 2026-11-23T14:30.")
]
Who = Annotated[str | None, typer.Option("--who", help="Lines whose caller contains this.")]
What = Annotated[str | None, typer.Option("--what", help="Lines whose call or event contains this.")]
Last = Annotated[int | None, typer.Option("--last", min=1, max=10_000, help="Only the newest N of these lines.")]
Refused = Annotated[bool, typer.Option("--refused", help="Only refused calls.")]
Follow = Annotated[bool, typer.Option("--follow", help="Keep printing new lines until stopped.")]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        help="The other side's record of this log's last lines. To get it, run `log show --what head --json` on "
        "that machine.",
    ),
]
Archived = Annotated[
    bool,
    typer.Option(
        "--archived", help="Start at the first line that still exists, if old files of version 0.1.0 were moved away."
    ),
]
Restored = Annotated[
    list[int] | None,
    typer.Option(
        "--restored",
        help="The line number that `restore` printed. Lines lost by that restore are then accepted as missing. May be "
        "repeated.",
        metavar="LINE",
    ),
]


@dataclass(frozen=True, slots=True)
class LogOwner:
    """The side whose log it is. identity: its URI   authority_pem: the consortium's CA; both are read when needed."""

    home: Path
    identity: Callable[[], str]
    authority_pem: Callable[[], bytes]

    def log(self) -> AuditLog:
        return AuditLog.existing(self.home / FOLDER)


def make_app(side: Callable[[Path | None], LogOwner], help: str) -> typer.Typer:
    """Make the command group. side: returns the owner of a home; None is the default home."""
    app = typer.Typer(no_args_is_help=True, help=help)

    @app.command("show")
    @command
    def show(
        since: Since = None,
        who: Who = None,
        what: What = None,
        refused: Refused = False,
        last: Last = None,
        follow: Follow = False,
        home: Home = None,
        as_json: Json = False,
    ) -> None:
        """Show the lines of the log, oldest first. `log verify` checks them."""
        from_time = _time(since)
        if follow:
            silent_from_now()

        def fits(line: LogLine) -> bool:
            entry = line.entry
            matches = (who or "") in entry.who and (what or "") in entry.what and line.at >= from_time
            return matches and not (refused and entry.outcome != REFUSED)

        with closing(side(home).log()) as log:
            _show(log, fits, as_json, last, follow)

    @app.command("verify")
    @command
    def verify_log(
        against: Against = None,
        archived: Archived = False,
        restored: Restored = None,
        home: Home = None,
    ) -> CommandResult:
        """Check that no line was edited, removed or moved. If one was, it is named, and the exit status is 1.

        Somebody who can write to this folder can also replace the whole log. Use --against to detect that: the other
        side keeps signed copies of this log's last line.
        """
        log_side = side(home)
        heads = [] if against is None else heads_in(against, log_side.identity(), log_side.authority_pem())
        with closing(log_side.log()) as log:
            result = verify(log, heads, archived, restored or ())
        value = {"lines": result.lines, "first": result.first, "last": result.last, "hash": result.hash}
        facts = [
            ("lines", f"{result.first} to {result.last}, unbroken"),
            ("hash", result.hash),
            ("other side", "not compared: --against FILE" if against is None else f"{result.agreed} heads agree"),
            *(("note", note) for note in result.notes),
        ]
        return CommandResult(value | {"agreed": result.agreed, "notes": list(result.notes)}, [KeyValues(facts)])

    return app


def _show(log: AuditLog, fits: Callable[[LogLine], bool], as_json: bool, last: int | None, follow: bool) -> None:
    after, shown = 0, deque[tuple[LogLine, str]](maxlen=last)
    while True:
        for number, text in log.texts(after):
            after = number
            try:
                line = LogLine.decode(text)
            except ValueError:
                typer.echo(f"line {number} cannot be read: run log verify", err=True)
                continue
            if fits(line):
                shown.append((line, text))
            while shown and last is None:
                _print(*shown.popleft(), as_json)
        while shown:
            _print(*shown.popleft(), as_json)
        if not follow:
            return
        last = None
        time.sleep(_LOOK_S)


def _print(line: LogLine, text: str, as_json: bool) -> None:
    typer.echo(text) if as_json else _show_line(line)


def _time(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError("E-CFG-02", f"--since: expected a day or time such as 2026-11-23T14:30: {error}") from None


def _show_line(line: LogLine) -> None:
    """Print the fields, on a terminal without empty ones, else separated by tabs."""
    entry = line.entry
    extra = [f"{entry.bytes} bytes"] * bool(entry.bytes) + [f"x {entry.times}"] * (entry.times != 1)
    words = (entry.who, entry.address, entry.what, entry.about, entry.outcome, entry.code, *extra)
    number, when = str(line.number), local_time(line.at)
    if OUT.is_terminal:
        print_parts(OUT, f"{number:<6}  {when}", *filter(None, words))
    else:
        OUT.print("\t".join((number, when, *(printable(word) or "-" for word in words))), soft_wrap=True)
