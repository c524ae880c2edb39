"""A table as data: methods, settings, measures, and what the paper printed; read from tables/NAME.yaml.

paper: "Authors, title, venue, Table 1"
experiment: fedmr_1                      # configs/experiment/fedmr_1.yaml: what all runs share
measures: [ga]                           # names of measures.py, in the order of the numbers of a printed cell
across: methods                          # what the columns of the printed table are: methods or settings
own: FedMR                               # the paper's method, compared with each other one
methods: {FedAvg: method=fedavg, ...}    # null: printed alone, nothing is run
settings:                                # NAME: words, or words of several runs whose mean is the cell, or a mapping
FMNIST P5C2: data=fmnist federation=p5c2
printed:                                 # by setting, numbers in the order of methods; "a/b" for two measures, - none
FMNIST P5C2: 67.29 69.60
fine_tune: {FedAvg: 10}                  # epochs on each silo before its personal accuracy, for these methods
small:                                   # the same on two cores
words: rounds=10                       # beside configs/scale/small.yaml
methods: [FedAvg, FedMR]               # all without it; a mapping adds words of the small scale
also: [balanced]                       # measures behind the paper's own, of which nothing is printed
settings: {digits P5C2: {words: data=digits federation=p5c2, beside: CIFAR10 P5C2}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from benchmarks.paper.measures import MEASURES
from fl_core.errors import ConfigError
from fl_core.suggest import suggest

FOLDER = Path(__file__).parent / "tables"
SCALES = ("paper", "small")
_KEYS = ("paper", "experiment", "measures", "across", "own", "methods", "settings", "printed", "fine_tune", "small")
_SMALL = ("words", "methods", "settings", "also")


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell's data: the words of its runs (their mean is the cell), the round read (0: all), the printed cell."""

    name: str
    runs: tuple[tuple[str, ...], ...]
    at: int = 0
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table at one scale. methods: words by name, None for what the paper alone has."""

    name: str
    scale: str
    paper: str
    experiment: str
    measures: tuple[str, ...]
    across: str
    own: str
    methods: Mapping[str, tuple[str, ...] | None]
    settings: Sequence[Setting]
    printed: Mapping[str, Mapping[str, tuple[str, ...]]]
    fine_tune: Mapping[str, int] = field(default_factory=dict)

    def printed_cell(self, method: str, setting: Setting) -> tuple[str, ...]:
        """Return what the paper printed of a cell, one text per measure; dashes where it printed nothing."""
        known = self.printed.get(setting.beside or setting.name, {}).get(method, ())
        return (*known, *("-",) * (len(self.measures) - len(known)))


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, scale: str, folder: Path = FOLDER) -> Table:
    """Read a table; raises ConfigError (E-CFG-01) on an unknown name, scale or key, with the nearest one."""
    if name not in (known := names(folder)):
        raise ConfigError("E-CFG-01", f"there is no table={name}: {suggest(name, known)}")
    if scale not in SCALES:
        raise ConfigError("E-CFG-01", f"there is no scale={scale}: {suggest(scale, SCALES)}")
    raw = _mapping(yaml.safe_load((folder / f"{name}.yaml").read_text()), name, _KEYS)
    methods = {m: None if w is None else tuple(str(w).split()) for m, w in _mapping(raw["methods"], name).items()}
    order, settings = list(methods), _mapping(raw["settings"], name)
    measures = _measures(raw["measures"], name)
    printed = {
        s: _cells(str(text), order, measures, f"{name}: {s}") for s, text in _mapping(raw["printed"], name).items()
    }
    if strangers := set(printed) - set(settings):
        raise ConfigError(
            "E-CFG-01", f"{name}: there is no setting {min(strangers)!r}: {suggest(min(strangers), settings)}"
        )
    if scale == "small":
        small = _mapping(raw["small"], name, _SMALL)
        methods, settings = _small_methods(methods, small, name), _mapping(small["settings"], name)
        shared = tuple(str(small.get("words") or "").split())
        measures += _measures(small.get("also") or [], name)
    else:
        shared = ()
    return Table(
        name=name,
        scale=scale,
        paper=str(raw["paper"]),
        experiment=str(raw["experiment"]),
        measures=measures,
        across=str(raw.get("across", "methods")),
        own=str(raw["own"]),
        methods=methods,
        settings=[_setting(s, value, shared, printed) for s, value in settings.items()],
        printed=printed,
        fine_tune={m: int(str(e)) for m, e in _mapping(raw.get("fine_tune") or {}, name, order).items()},
    )


def chosen(table: Table, methods: Sequence[str], settings: Sequence[str]) -> Table:
    """Keep some methods and settings of a table (empty: all); raises ConfigError (E-CFG-01) on an unknown one."""
    have = [s.name for s in table.settings]
    for wanted, valid in ((methods, list(table.methods)), (settings, have)):
        for name in wanted:
            if name not in valid:
                raise ConfigError("E-CFG-01", f"table {table.name} has no {name!r}: {suggest(name, valid)}")
    return replace(
        table,
        methods={m: w for m, w in table.methods.items() if not methods or m in methods},
        settings=[s for s in table.settings if not settings or s.name in settings],
    )


def _measures(raw: object, name: str) -> tuple[str, ...]:
    found = tuple(str(m) for m in raw)  # type: ignore[attr-defined]
    for measure in found:
        if measure not in MEASURES:
            raise ConfigError("E-CFG-01", f"{name}: there is no measure {measure!r}: {suggest(measure, MEASURES)}")
    return found


def _small_methods(
    methods: Mapping[str, tuple[str, ...] | None], small: Mapping[str, object], name: str
) -> dict[str, tuple[str, ...] | None]:
    kept = small.get("methods") or list(methods)
    extra = dict.fromkeys(map(str, kept), "") if isinstance(kept, list) else _mapping(kept, name)
    if strangers := set(extra) - set(methods):
        raise ConfigError(
            "E-CFG-01", f"{name}: there is no method {min(strangers)!r}: {suggest(min(strangers), methods)}"
        )
    return {m: (*words, *str(extra[m] or "").split()) if (words := methods[m]) is not None else None for m in extra}


def _setting(name: str, value: object, shared: tuple[str, ...], printed: Mapping[str, object]) -> Setting:
    given = _mapping(value, name, ("words", "at", "beside")) if isinstance(value, dict) else {"words": value}
    words = given["words"] if isinstance(given["words"], list) else [given["words"]]
    beside = str(given.get("beside") or "")
    if beside and beside not in printed:
        raise ConfigError("E-CFG-01", f"{name}: nothing is printed for {beside!r}: {suggest(beside, printed)}")
    return Setting(name, tuple((*shared, *str(w).split()) for w in words), int(str(given.get("at") or 0)), beside)


def _cells(text: str, order: Sequence[str], measures: Sequence[str], where: str) -> dict[str, tuple[str, ...]]:
    """Read a line of printed cells: one per method, each with one number per measure."""
    cells = [tuple(cell.split("/")) if cell != "-" else ("-",) * len(measures) for cell in text.split()]
    if len(cells) != len(order) or any(len(cell) != len(measures) for cell in cells):
        raise ConfigError(
            "E-CFG-01", f"{where}: expected {len(order)} cells of {len(measures)} numbers, found {text!r}: correct it"
        )
    return dict(zip(order, cells, strict=True))


def _mapping(raw: object, where: str, valid: Sequence[str] = ()) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise ConfigError("E-CFG-01", f"{where}: expected a mapping, found {raw!r}: correct the table's file")
    for key in raw:
        if valid and key not in valid:
            raise ConfigError("E-CFG-01", f"{where}: there is no key {key!r}: {suggest(str(key), valid)}")
    return {str(k): v for k, v in raw.items()}
