"""`dicomweb:URL?OPTION=VALUE&...`: which images of a PACS are a hospital's data.

| option | value |
|---|---|
| `labels` | `FILE.csv:COLUMN`, labels by study, series or patient (`label_table`); `FILE.toml:COLUMN`, a query |
| `modality` | `CT`, or several: `CR,DX` |
| `date` | of the study: `20240131`, `20240101-20241231`, `20240101-` |
| `description` | of the study, with `*` |
| `accession`, `accessions` | one accession number; a file with one on each line |
| `series` | which of a study: `all` (default), `first` (the lowest number), `largest`, `description:TEXT` with `*` |
| `credentials` | a file of mode 0600: `user:password`, or `Bearer TOKEN` |
| `ca` | the hospital's own authority, PEM |
| `cache` | GiB of images in the home at most (default 50) |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from blake3 import blake3

from fl_core.csv_reader import read_lines
from fl_core.errors import ConfigError
from fl_core.suggest import suggest

SCHEME = "dicomweb:"
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
        """Read a reference; raises ConfigError: E-CFG-01 for an unknown option, E-CFG-02 for a value out of range.

        Guarantees: no error repeats a password that was written into the address.
        """
        try:
            address = urlsplit(text.removeprefix(SCHEME))
            host, _ = address.hostname, address.port
        except ValueError:
            host = None
        if host is None or address.scheme not in ("http", "https") or address.username is not None or address.fragment:
            raise _wrong("dicomweb:https://HOST/PATH?OPTION=VALUE&... without a user and password", "something else")
        options = dict(parse_qsl(address.query, keep_blank_values=True))
        names = [f.name for f in fields(cls) if f.name != "url"]
        if unknown := sorted(set(options) - set(names)):
            hint = suggest(unknown[0], names)
            raise ConfigError("E-CFG-01", f"a PACS has no option {unknown[0][:40]!r}: {hint}")
        labels, colon, column = options.get("labels", "").rpartition(":")
        if not (labels and colon and column):
            raise _wrong("labels=FILE:COLUMN, which says what each image shows", repr(options.get("labels", "")))
        if Path(labels).name == DICTIONARY:
            raise _wrong(f"labels in a file of another name than {DICTIONARY}, which translates labels", "that name")
        options["labels"] = f"{_absolute(labels)}:{column}"
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
        """Name the selection: the same for the same images, whoever asks for them with which password."""
        named = [str(getattr(self, f.name)) for f in fields(self) if f.name not in ("credentials", "ca", "cache")]
        return blake3("\n".join(named).encode()).hexdigest()[:12]

    @property
    def public(self) -> str:
        """Return the reference without files and numbers of anybody."""
        return f"{SCHEME}{self.url}"

    @property
    def table(self) -> tuple[Path, str]:
        """Return the file of labels, and the column in it."""
        file, _, column = self.labels.rpartition(":")
        return Path(file), column

    @property
    def modalities(self) -> list[str]:
        return [name for name in self.modality.split(",") if name]

    @property
    def dates(self) -> tuple[str, str]:
        """Return the first and the last day that are asked for."""
        first, dash, last = self.date.partition("-")
        return (first, last or "99999999") if dash else (first, first or "99999999")

    @property
    def wanted_series(self) -> str:
        """Return the pattern of descriptions of series; empty for another rule."""
        return self.series.removeprefix(_DESCRIPTION) if self.series.startswith(_DESCRIPTION) else ""

    def accession_numbers(self) -> list[str]:
        """Return the accession numbers that are asked for, empty for any; raises DataError as `read_lines`."""
        lines = read_lines(Path(self.accessions)) if self.accessions else []
        return sorted({line.strip() for line in [self.accession, *lines]} - {""})


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _wrong(expected: str, found: str) -> ConfigError:
    return ConfigError("E-CFG-02", f"expected {expected} in the reference to a PACS, found {found}: docs/data.md")
