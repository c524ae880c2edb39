"""`coordinator log` and `silo log`: read and check this side's audit log. The same commands for both sides."""

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
from service_core.console import OUT, Facts, Reply, local_time, print_parts, printable

_LOOK_S = 0.5
Home = Annotated[Path | None, typer.Option("--home", help="The folder of this side. Default: as for other commands.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines; of `show` the lines as they are.")]

Since = Annotated[str | None, typer.Option("--since", help="A day or a time, as 2026-11-23 or 2026-11-23T14:30.")]
Who = Annotated[str | None, typer.Option("--who", help="Lines whose caller contains this.")]
What = Annotated[str | None, typer.Option("--what", help="Lines whose call or event contains this.")]
Last = Annotated[int | None, typer.Option("--last", min=1, max=10_000, help="Only the newest so many lines of these.")]
Refused = Annotated[bool, typer.Option("--refused", help="Only what was refused.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on with the lines that are added, until it is stopped.")]
Against = Annotated[
    Path | None,
    typer.Option("--against", help="Lines of the other side: what `log show --what head --json` prints there."),
]
Archived = Annotated[
    bool, typer.Option("--archived", help="Files of 0.1.0 were moved away: begin where the log begins.")
]
Restored = Annotated[
    list[int] | None,
    typer.Option(
        "--restored",
        help="The line at which you restored this home, as restore told: what the other side holds of lines that are "
        "lost since then is no finding. May be repeated.",
        metavar="LINE",
    ),
]


@dataclass(frozen=True, slots=True)
class Side:
    """Whose log it is. identity: its URI; authority_pem: the consortium's; both are asked for when they are needed."""

    home: Path
    identity: Callable[[], str]
    authority_pem: Callable[[], bytes]

    def log(self) -> AuditLog:
        return AuditLog.existing(self.home / FOLDER)


def make_app(side: Callable[[Path | None], Side], help: str) -> typer.Typer:
    """Make the group of commands. side: finds the side of a home, or of none, which is the default."""
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
        """Show the lines of the log, oldest first. Whether they are what was written says `log verify`."""
        from_time = _time(since)

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
    ) -> Reply:
        """Check that no line was edited, removed or moved; exit status 1, with the first such line, when one was.

        Somebody who can write here can also make the whole log anew. With --against, the ends of this log that
        the other side keeps, signed by this one, show that too.
        """
        log_side = side(home)
        heads = [] if against is None else heads_in(against, log_side.identity(), log_side.authority_pem())
        with closing(log_side.log()) as log:
            result = verify(log, heads, archived, restored or ())
        value = {"lines": result.lines, "first": result.first, "last": result.last, "hash": result.hash}
        facts = [
            ("lines", f"{result.first} to {result.last}, unbroken"),
            ("hash", result.hash),
            ("other side", "not compared: --against FILE" if against is None else f"{result.agreed} ends agree"),
            *(("note", note) for note in result.notes),
        ]
        return Reply(value | {"agreed": result.agreed, "notes": list(result.notes)}, [Facts(facts)])

    return app


def _show(log: AuditLog, fits: Callable[[LogLine], bool], as_json: bool, last: int | None, follow: bool) -> None:
    after, shown = 0, deque[tuple[LogLine, str]](maxlen=last)
    while True:
        for number, text in log.texts(after):
            after = number
            try:
                line = LogLine.decode(text)
            except ValueError:
                typer.echo(f"line {number} is no line of an audit log: log verify", err=True)
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
        raise ConfigError("E-CFG-02", f"--since: expected a day or a time as 2026-11-23T14:30: {error}") from None


def _show_line(line: LogLine) -> None:
    """Print all fields with tabs between, on a terminal those that say something."""
    entry = line.entry
    extra = [f"{entry.bytes} bytes"] * bool(entry.bytes) + [f"x {entry.times}"] * (entry.times != 1)
    words = (entry.who, entry.address, entry.what, entry.about, entry.outcome, entry.code, *extra)
    number, when = str(line.number), local_time(line.at)
    if OUT.is_terminal:
        print_parts(OUT, f"{number:<6}  {when}", *filter(None, words))
    else:
        OUT.print("\t".join((number, when, *(printable(word) or "-" for word in words))), soft_wrap=True)
