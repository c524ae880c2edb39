"""Parse references to PACS images (`dicomweb:URL?OPTION=VALUE&...`) and to image folders with separate labels.

| option | value |
|---|---|
| `labels` | `FILE.csv:COLUMN`, labels by study, series or patient (`label_table`); `FILE.toml:COLUMN`, a query |
| `modality` | `CT`, or several: `CR,DX` |
| `date` | of the study: `20240131`, `20240101-20241231`, `20240101-` |
| `description` | of the study, with `*` |
| `accession`, `accessions` | one accession number; a file with one on each line |
| `series` | which of a study: `all` (default), `first` (the lowest number), `largest`, `description:TEXT` with `*` |
| `credentials` | a file of mode 0600: `user:password`, or `Bearer TOKEN` |
| `ca` | the hospital's own certificate authority, PEM |
| `cache` | maximum GiB of images in the home (default 50) |

`folder:PATH?labels=FILE:COLUMN`: images in a folder, labelled by a table or query of the same kind. Its column `file`
(or `by=COLUMN`) names an image by its path below the folder, by its file name with or without extension, or by a
folder that contains it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from blake3 import blake3

from fl_core.csv_reader import read_lines
from fl_core.errors import ConfigError
from fl_core.label_table import KEYS
from fl_core.suggest import suggest

SCHEME, FOLDER = "dicomweb:", "folder:"
DICTIONARY = "labels.toml"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SERIES = ("all", "first", "largest")
_DESCRIPTION = "description:"
_DATE = re.compile(r"[0-9]{8}(-([0-9]{8})?)?|-[0-9]{8}")


@dataclass(frozen=True, slots=True)
class PacsReference:
    """A parsed reference; the fields after `url` are its options, as written. Files are absolute."""

    url: str
    labels: str
    modality: str = ""
    date: str = ""
    description: str = ""
    accession: str = ""
    accessions: str = ""
    series: str = "all"
    credentials: str = ""
    ca: str = ""
    cache: float = 50.0

    @classmethod
    def parse(cls, text: str) -> PacsReference:
        """Parse a reference; raises ConfigError: E-CFG-01 for an unknown option, E-CFG-02 for an invalid value.

        Guarantees: no error repeats a password from the URL.
        """
        try:
            address = urlsplit(text.removeprefix(SCHEME))
            host, _ = address.hostname, address.port
        except ValueError:
            host = None
        if host is None or address.scheme not in ("http", "https") or address.username is not None or address.fragment:
            raise _wrong("dicomweb:https://HOST/PATH?OPTION=VALUE&... without a user and password", "something else")
        options = _options(address.query, [f.name for f in fields(cls) if f.name != "url"], "a PACS")
        for name in ("credentials", "ca", "accessions"):
            if options.get(name):
                options[name] = str(_absolute(options[name]))
        try:
            cache = float(options.pop("cache", "50"))
        except ValueError:
            cache = 0.0
        made = cls(f"{address.scheme}://{address.netloc}{address.path.rstrip('/')}", cache=cache, **options)
        if not 0 < cache <= 2**20:
            raise _wrong("cache of more than 0 and at most 1048576 GiB", "another")
        if made.series not in _SERIES and not made.series.startswith(_DESCRIPTION):
            raise _wrong(f"series={'|'.join(_SERIES)}|{_DESCRIPTION}TEXT", repr(made.series[:40]))
        if made.date and not _DATE.fullmatch(made.date):
            raise _wrong("date=YYYYMMDD or YYYYMMDD-YYYYMMDD", repr(made.date[:40]))
        if made.credentials and address.scheme == "http" and host not in _LOOPBACK:
            raise _wrong("https with credentials", "http, which shows them to everybody on the way")
        return made

    @property
    def key(self) -> str:
        """Identifier of the selection, independent of credentials, certificate authority and cache size."""
        named = [str(getattr(self, f.name)) for f in fields(self) if f.name not in ("credentials", "ca", "cache")]
        return blake3("\n".join(named).encode()).hexdigest()[:12]

    @property
    def public(self) -> str:
        """Return the reference without its options, which hold file names and accession numbers."""
        return f"{SCHEME}{self.url}"

    @property
    def table(self) -> tuple[Path, str]:
        """Return the label file and its column."""
        return _table(self.labels)

    @property
    def keys(self) -> Sequence[str]:
        """Return the columns that can join labels to images."""
        return KEYS

    @property
    def modalities(self) -> list[str]:
        return [name for name in self.modality.split(",") if name]

    @property
    def dates(self) -> tuple[str, str]:
        """Return the first and last requested day."""
        first, dash, last = self.date.partition("-")
        return (first, last or "99999999") if dash else (first, first or "99999999")

    @property
    def wanted_series(self) -> str:
        """Return the pattern for series descriptions; empty if another rule selects series."""
        return self.series.removeprefix(_DESCRIPTION) if self.series.startswith(_DESCRIPTION) else ""

    def accession_numbers(self) -> list[str]:
        """Return the requested accession numbers, empty for any; raises DataError as `read_lines`."""
        lines = read_lines(Path(self.accessions)) if self.accessions else []
        return sorted({line.strip() for line in [self.accession, *lines]} - {""})


@dataclass(frozen=True, slots=True)
class FolderReference:
    """A folder of images whose labels come from elsewhere. Files are absolute."""

    path: str
    labels: str
    by: str = "file"

    @classmethod
    def parse(cls, text: str) -> FolderReference:
        """Parse a reference; raises as `PacsReference.parse`."""
        path, _, query = text.removeprefix(FOLDER).rpartition("?")
        return cls(str(_absolute(path)), **_options(query, ["labels", "by"], "a folder with labels"))

    @property
    def key(self) -> str:
        """Identifier of the selection, as in `PacsReference`."""
        return blake3("\n".join((self.path, self.labels, self.by)).encode()).hexdigest()[:12]

    @property
    def public(self) -> str:
        return f"{FOLDER}{self.path}"

    @property
    def table(self) -> tuple[Path, str]:
        return _table(self.labels)

    @property
    def keys(self) -> Sequence[str]:
        return (self.by,)


def parse(data: str) -> PacsReference | FolderReference | None:
    """Parse a reference whose image lists are kept in the home; None for data that are read in place."""
    if data.startswith(SCHEME):
        return PacsReference.parse(data)
    path, mark, query = data.removeprefix(FOLDER).rpartition("?")
    if not data.startswith(FOLDER) or "labels" not in dict(parse_qsl(query, keep_blank_values=True)):
        return None
    return None if Path(path + mark + query).expanduser().exists() else FolderReference.parse(data)


def _options(query: str, names: Sequence[str], whose: str) -> dict[str, Any]:
    """Parse the options of a reference; makes the label file's path absolute."""
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(names)):
        raise ConfigError("E-CFG-01", f"{whose} has no option {unknown[0][:40]!r}: {suggest(unknown[0], names)}")
    labels, colon, column = options.get("labels", "").rpartition(":")
    if not (labels and colon and column):
        raise _wrong("labels=FILE:COLUMN, which says what each image shows", repr(options.get("labels", "")))
    if Path(labels).name == DICTIONARY:
        raise _wrong(f"labels in a file of another name than {DICTIONARY}, which translates labels", "that name")
    return options | {"labels": f"{_absolute(labels)}:{column}"}


def _table(labels: str) -> tuple[Path, str]:
    file, _, column = labels.rpartition(":")
    return Path(file), column


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _wrong(expected: str, found: str) -> ConfigError:
    return ConfigError("E-CFG-02", f"expected {expected} in the reference to images, found {found}: see docs/data.md")
