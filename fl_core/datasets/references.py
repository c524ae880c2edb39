"""References: the short texts that name data of a hospital or a simulation.

| reference               | data                                                                            |
|-------------------------|---------------------------------------------------------------------------------|
| digits/p5c2/3           | silo 3 of the digits, in a partition of `federations.py`                         |
| digits/hospital2        | the same as digits/hospitals6/2                                                  |
| cifar10/p10c3/7         | silo 7 of a public data set below the data root, partitioned in the same way    |
| isic2019/center3        | centre 3 of Fed-ISIC2019 below the data root                                     |
| isic2019/clients20/7    | client 7 of 20: the centres, cut into parts by their size                        |
| folder:PATH             | class subfolders, with or without a train/ and test/ level                       |
| manifest:FILE.csv       | a CSV file: path,label,group,split, or what FILE.toml says                       |
| table:FILE.csv          | rows of numbers and categories, CSV or Parquet, with FILE.toml beside it         |
| package:Name            | a loaded data set of another distribution, whole                                 |
| package:Name/p5c2/3     | silo 3 of it, in a partition                                                     |

A folder, a manifest or a table may be partitioned as well, to simulate hospitals: folder:/data/cifar10#p5c2/3.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.partition.federations import FORMS, Partitioner, parse_federation, require_short
from fl_core.datasets.sources.isic2019 import CENTERS, parts
from fl_core.errors import ConfigError
from fl_core.extensions import registry
from fl_core.suggest import suggest

OWN = ("isic2019", "folder", "manifest", "table")
"""Data with a grammar of their own; all others are NAME/FEDERATION/SILO."""
FILES = ("folder", "manifest", "table")
"""A hospital's own data, named by their path."""
PARTITIONED = ("digits", "spiral", *PUBLISHED)
SOURCES = (*PARTITIONED, *OWN)
VALID_FORMS = (
    "digits/p5c2/3, digits/hospital2, isic2019/center3, isic2019/clients20/7, folder:PATH, manifest:FILE.csv, "
    f"table:FILE.csv, and NAME/p10c3/7 with a NAME of {', '.join(PARTITIONED[1:])}"
)
_KNOWN = (
    *(f"digits/hospital{k}" for k in range(6)),
    *(f"{name}/{form}/0" for name in PARTITIONED for form in FORMS),
    *(f"isic2019/center{k}" for k in range(CENTERS)),
    *(*PARTITIONED, "isic2019", "folder:", "manifest:", "table:"),
)


@dataclass(frozen=True, slots=True)
class DataRef:
    """A parsed reference.

    Attributes:
        source: one of SOURCES, or the name of a loaded data set
        silo: the position in `federation`, or the centre or client of Fed-ISIC2019
        federation: how examples are partitioned, if they are
        path: of a folder, a manifest or a table
        clients: number of clients that the centres of Fed-ISIC2019 are divided into; 0: centres are not divided
        seed: of that division
    """

    source: str
    silo: int | None = None
    federation: Partitioner | None = None
    path: Path | None = None
    clients: int = 0
    seed: int = 0

    def __str__(self) -> str:
        partition = f"{self.federation.text}/{self.silo}" if self.federation else ""
        if _is_loaded(self.source) and not partition:
            return self.source
        if self.source not in OWN:
            return f"{self.source}/{partition}"
        if self.clients:
            return f"isic2019/clients{self.clients}{f'@{self.seed}' if self.seed else ''}/{self.silo}"
        if self.source == "isic2019":
            return f"isic2019/center{self.silo}"
        return f"{self.source}:{self.path}{f'#{partition}' if partition else ''}"


def parse(reference: str) -> DataRef:
    """Read a reference; raises ConfigError (E-CFG-01) with the valid forms and the nearest one.

    Guarantees: parse(str(parse(r))) == parse(r).
    """
    require_short(reference)
    federation: Partitioner | None = None
    silo: int | None = None
    kind, colon, rest = reference.partition(":")
    if colon and kind in FILES:
        path, hash_sign, partition = rest.rpartition("#")
        if not hash_sign or Path(rest).expanduser().exists():  # a name may have the sign, too
            path, hash_sign = rest, ""
        if not path.strip():
            raise ConfigError("E-CFG-01", f"expected a path after {kind}:, found {reference!r}")
        if hash_sign:
            try:
                federation, silo = _parse_silo(partition, reference)
            except ConfigError as error:
                text = f"{error.message}; nor is there anything at {rest}, if # belongs to the path"
                raise ConfigError(error.code, text) from error
        return DataRef(kind, silo, federation, Path(path).expanduser())
    if match := re.fullmatch(r"digits/hospital(\d+)", reference):
        reference = f"digits/hospitals6/{match[1]}"
    name, slash, partition = reference.partition("/")
    if not slash and _is_loaded(name):
        return DataRef(name)
    if slash and (name in PARTITIONED or _is_loaded(name)):
        federation, silo = _parse_silo(partition, reference)
        return DataRef(name, silo, federation)
    if match := re.fullmatch(r"isic2019/center(\d+)", reference):
        if int(match[1]) >= CENTERS:
            raise ConfigError("E-CFG-01", f"expected isic2019/center0 to center{CENTERS - 1}, found {reference!r}")
        return DataRef("isic2019", int(match[1]))
    if match := re.fullmatch(r"isic2019/clients(\d+)(?:@(\d+))?/(\d+)", reference):
        clients, client = int(match[1]), int(match[3])
        parts(clients)
        if client >= clients:
            raise ConfigError("E-CFG-01", f"expected isic2019/clients{clients}/0 to {clients - 1}, found {reference!r}")
        return DataRef("isic2019", client, clients=clients, seed=int(match[2] or 0))
    raise ConfigError("E-CFG-01", f"there is no data {reference!r}: {_hint(reference)}valid forms: {VALID_FORMS}")


def _is_loaded(name: str) -> bool:
    return registry.loaded("data", name) is not None


def _parse_silo(text: str, reference: str) -> tuple[Partitioner, int]:
    name, slash, silo = text.partition("/")
    federation = parse_federation(name)
    if not slash or not silo.isdecimal() or int(silo) >= federation.silos:
        raise ConfigError(
            "E-CFG-01",
            f"{reference!r}: expected {name}/0 to {name}/{federation.silos - 1}, found {text!r}: name the silo",
        )
    return federation, int(silo)


def _hint(reference: str) -> str:
    """Guess the intention: an existing path, or the nearest name."""
    path = Path(reference).expanduser()
    with suppress(OSError, ValueError):
        if path.is_dir() and reference.strip():
            return f"did you mean folder:{reference}? "
        if path.is_file():
            kind = "table" if path.suffix == ".parquet" or path.with_suffix(".toml").is_file() else "manifest"
            return f"did you mean {kind}:{reference}? "
    hint = suggest(reference, _KNOWN)
    return f"{hint.split('? ')[0]}? " if hint.startswith("did you mean") else ""


def federation(data: str, federation: str) -> list[str]:
    """Return the references of all silos of a simulated federation; raises ConfigError (E-CFG-01).

    ("digits", "p5c2") -> ["digits/p5c2/0", ...]; ("isic2019", "centers-1-2") -> ["isic2019/center1", ...];
    ("folder:/data/cifar10", "p5c2") -> ["folder:/data/cifar10#p5c2/0", ...].
    """
    if data == "isic2019" and (match := re.fullmatch(r"clients(\d+)(@\d+)?", federation)):
        parts(int(match[1]))
        return [str(parse(f"isic2019/{federation}/{k}")) for k in range(int(match[1]))]
    if data == "isic2019":
        return [f"isic2019/center{k}" for k in _centers(federation)]
    if data in PARTITIONED or _is_loaded(data):
        join = f"{data}/"
    elif data.startswith(tuple(f"{kind}:" for kind in FILES)):
        join = f"{data}#"
    else:
        valid = (*PARTITIONED, "isic2019", "folder:PATH", "manifest:FILE.csv", "table:FILE.csv")
        raise ConfigError("E-CFG-01", f"there is no data {data!r} to partition: {suggest(data, valid)}")
    partitioner = parse_federation(federation)
    return [f"{join}{partitioner.text}/{k}" for k in range(partitioner.silos)]


def _centers(text: str) -> list[int]:
    if text == "centers":
        return list(range(CENTERS))
    if not re.fullmatch(r"centers(-\d)+", text):
        valid = ("centers", "centers-1-2-5", "clients20")
        raise ConfigError("E-CFG-01", f"isic2019 has no federation {text!r}: {suggest(text, valid)}")
    chosen = [int(k) for k in text.split("-")[1:]]
    if len(set(chosen)) != len(chosen) or max(chosen) >= CENTERS:
        raise ConfigError("E-CFG-01", f"expected different centres of 0 to {CENTERS - 1}, found {text!r}")
    return chosen
