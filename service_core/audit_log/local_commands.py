"""Records in the audit log every command that changes something, however it ends."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from fl_core.errors import FederationError
from service_core.audit_log.lines import ALLOWED, REFUSED, LogEntry
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.storage.unfinished import marker_of

Command = Callable[..., Any]
SHOWN = frozenset(
    (
        "acknowledge",
        "accept_loss",
        "address",
        "again",
        "authority",
        "collection",
        "consortium",
        "data",
        "delta",
        "deny",
        "entry",
        "epsilon",
        "file",
        "fingerprint",
        "hours",
        "key",
        "name",
        "operator",
        "out",
        "path",
        "reason",
        "request",
        "quorum",
        "run",
        "signed",
        "silo",
        "to",
    )
)
"""Arguments that are recorded. No others are, in particular no tokens."""


def recorded(command: Command, name: str, home_of: Callable[[Path | None], Path]) -> Command:
    """Wrap a command so that it is recorded at its end: user, name, arguments of `SHOWN`, outcome.

    Guarantees: the command does not start if the log cannot be opened. Without a home there is no log.
    """

    @wraps(command)
    def wrapped(*args: object, **options: Any) -> object:  # noqa: ANN401
        with recording(home_of(options.get("home")), name, options):
            return command(*args, **options)

    return wrapped


@contextmanager
def recording(home: Path, name: str, options: Mapping[str, Any], via: str = "") -> Iterator[None]:
    """Record the block as one line, however it ends. via: where the user gave the order, such as `page`.

    Raises UnavailableError (E-STATE-63) if the line cannot be written.
    Guarantees: the block does not start if the log cannot be opened. Without a home, or in an unfinished one, there is
    no log.
    """
    if marker_of(home) is None and (home / FOLDER).is_dir():
        AuditLog(home / FOLDER).close()
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, typer.Exit) and error.exit_code == 0):
            code = error.code if isinstance(error, FederationError) else type(error).__name__
            if marker_of(home) is None and (home / FOLDER).is_dir():  # a refused command creates no home
                _append(home, _entry(name, options, via, REFUSED, code))
        raise
    if home.is_dir():
        _append(home, _entry(name, options, via))


def record_commands(
    app: typer.Typer, reading: Collection[str], home_of: Callable[[Path | None], Path], group: str = ""
) -> None:
    """Wrap all commands of an application or group, except those that only read (by full name)."""
    for info in app.registered_commands:
        assert info.callback is not None
        command_name = info.name or info.callback.__name__.replace("_", "-")
        name = f"{group} {command_name}".strip()
        if name not in reading and not hasattr(info.callback, "__wrapped__"):
            info.callback = recorded(info.callback, name, home_of)
    for inner in app.registered_groups:
        assert inner.typer_instance is not None
        name = f"{group} {inner.name}".strip()
        if name not in reading:
            record_commands(inner.typer_instance, reading, home_of, name)


def _entry(name: str, options: Mapping[str, Any], via: str, outcome: str = ALLOWED, code: str = "") -> LogEntry:
    shown = {key: value for key, value in options.items() if key in SHOWN and value not in (None, False)}
    about = " ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}" for key, value in shown.items()
    )
    return LogEntry(f"{_user()}, {via}" if via else _user(), f"command {name}", about, outcome, code)


def _user() -> str:
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _append(home: Path, entry: LogEntry) -> None:
    with closing(AuditLog(home / FOLDER)) as log:
        log.append(entry)
