"""Logs of both services: one line per event, as text or JSON, without data, secrets or names of files.

Logs often leave the hospital. So everything that may be about a person is removed: errors about data are cut to code
and title; paths outside the home and names of image and table files are masked.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
import traceback
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TextIO

from fl_core.errors import ConfigError
from fl_core.errors.catalogue import EXPLANATIONS
from service_core.console import printable

VARIABLE = "CONSILIUM_LOG_FORMAT"
FIELDS = ("event", "run", "round", "kind", "silo", "code", "bytes", "included")
"""Fields of a record (`extra`). Rounds count from 0 in JSON, from 1 in text."""
_CHARACTERS = 4000
_LAST_LINES_S = 2.0
_CODE = re.compile(r"\bE-[A-Z]+-\d\d\b")
_ABOUT_DATA = re.compile(r"\b(E-DATA-\d\d)\b.*", re.DOTALL)
_SECRETS = (
    (re.compile(r"-----BEGIN.*?(-----END[^-]*-----|\Z)", re.DOTALL), "<secret>"),
    (re.compile(r"consilium1\.[\w=-]+"), "<token>"),
    (re.compile(r"://[^\s/@]*@"), "://<hidden>@"),
    (re.compile(r"\b(folder|manifest):[^:;,'\"()\n]*"), r"\1:<path>"),
)
_LONG, _HEX = re.compile(r"[\w+/=-]{80,}"), re.compile(r"[0-9a-f]*")
_PATH = re.compile(r"(?:(?<![\w/.>])/(?!/|consilium\.v1\.|grpc\.)|(?<![\w:/.>])//|~/|\.\./)[^:;,'\"()\n]*")
_SIGNS = re.compile(r"([:;,'\"()\n])")
"""Characters that end a file name; blanks do not."""
_FILE = re.compile(r"\.(?:png|jpe?g|tiff?|bmp|gif|webp|dcm|dicom|nii|npy|npz|csv|tsv|xlsx?|parquet)\b", re.IGNORECASE)


class LogFormat(Enum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


def chosen_format(option: LogFormat | None) -> LogFormat | None:
    """Return the format set by the option, else by the environment, else None.

    Raises ConfigError (E-CFG-02) on an unknown value in the environment.
    """
    word = os.environ.get(VARIABLE)
    if option is not None or not word:
        return option
    try:
        return LogFormat(word)
    except ValueError:
        raise ConfigError("E-CFG-02", f"expected {VARIABLE}=text or json, found {word[:80]!r}: change it") from None


def set_up(format: LogFormat, home: Path) -> None:
    """Log to standard error only. home: paths below it are not masked."""
    stream = _whole_stderr() if format is LogFormat.JSON else sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter(format, home))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _whole_stderr() -> TextIO:
    """Return the original standard error; lines that libraries write to fd 2 become log records."""
    true = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)

    def read() -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    logging.getLogger("stderr").warning("%s", line.strip())

    reading = threading.Thread(target=read, name="stderr", daemon=True)
    reading.start()

    def give_back() -> None:
        sys.stderr.flush()
        os.dup2(true.fileno(), 2)
        reading.join(_LAST_LINES_S)

    atexit.register(give_back)
    return true


class OneLineFormatter(logging.Formatter):
    """Formats a record as one masked, printable line."""

    def __init__(self, format: LogFormat, home: Path) -> None:
        super().__init__()
        self._json = format is LogFormat.JSON
        self._home = str(home.absolute())

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = self._clean(record.getMessage())
        facts = {name: self._fact(value) for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        if "code" not in facts and (code := _CODE.search(text)):
            facts["code"] = code[0]
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = self._error(record.exc_info[1])
        if self._json:
            line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": text} | facts
            return json.dumps(line)
        if isinstance(facts.get("round"), int):
            facts["round"] = int(facts["round"]) + 1
        rest = "".join(f" {name}={value}" for name, value in facts.items() if name not in ("code", "kind"))
        return f"{at} {record.levelname} {text}{rest}"

    def _fact(self, value: object) -> str | int | float | bool:
        return value if isinstance(value, int | float | bool) else self._clean(str(value))

    def _clean(self, text: str) -> str:
        text = mask(text[: 4 * _CHARACTERS], self._home)
        return printable(text)[:_CHARACTERS]

    def _error(self, error: BaseException) -> str:
        """Return type, message and call stack of an error, without source lines and values."""
        frames = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        where = " < ".join(reversed(frames[-12:]))
        return self._clean(f"{type(error).__name__}: {error}") + (f" at {where}" if where else "")


def mask(text: str, home: str) -> str:
    """Mask secrets and anything that may be about a person. home: paths below it stay."""
    text = _ABOUT_DATA.sub(lambda match: f"{match[1]}: {_title(match[1])}", text)
    for pattern, put in _SECRETS:
        text = pattern.sub(put, text)
    text = _LONG.sub(lambda match: match[0] if _HEX.fullmatch(match[0]) else "<long>", text)
    text = _PATH.sub(lambda match: match[0] if _is_within(match[0], home) else "<path>", text)
    return "".join(" <file>" if _FILE.search(part) else part for part in _SIGNS.split(text))


def _title(code: str) -> str:
    return EXPLANATIONS[code].title if code in EXPLANATIONS else "see `coordinator explain`"


def _is_within(path: str, home: str) -> bool:
    return (path == home or path.startswith((f"{home}/", f"{home} "))) and ".." not in path
