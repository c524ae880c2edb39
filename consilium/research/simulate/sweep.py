"""Sweeps: simulate all combinations of comma-separated values in parallel processes, and collect one table."""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from blake3 import blake3
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from consilium.research.simulate.results import HISTORY, typed, write_table
from coordinator.config.hydra_config import GROUPS, compose_simulation, unreadable_word
from fl_core.errors import ConfigError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Job = Callable[[Sequence[str]], Mapping[str, object]]
"""Simulates one combination of words. It runs in another process, so it must be importable."""


def combinations(words: Sequence[str], config_dir: Path | None = None) -> list[list[str]]:
    """List all combinations of the swept values; the last word changes fastest.

    config_dir: as in `compose_simulation`.

    "seed=0,1 method=fedavg,fedmr" gives four combinations; commas in brackets or quotes do not separate.
    Raises ConfigError (E-CFG-01) on a word that is no override, and as `compose_simulation`, before any run.
    """
    choices: list[list[str]] = []
    try:
        for word, parsed in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
            key = parsed.get_key_element()
            if not parsed.is_sweep_override():
                choices.append([word])
                continue
            # Hydra escapes values so that it can parse them again. An extension, package.module:Name, must stay as is.
            values = parsed.sweep_iterator() if key in GROUPS else parsed.sweep_string_iterator()
            choices.append([f"{key}={getattr(value, 'text', value)}" for value in values])
    except HydraException as error:
        raise ConfigError("E-CFG-01", unreadable_word(error)) from error
    products = [list(words) for words in itertools.product(*choices)]
    for words in products:
        compose_simulation(words, config_dir)
    return products


def swept(words: Sequence[str]) -> list[str]:
    """Return the swept keys in order; empty if a word is no override."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException:
        return []  # `compose_simulation` reports the error
    return [word.get_key_element() for word in parsed if word.is_sweep_override()]


def folder_name(words: Sequence[str], keys: Sequence[str]) -> str:
    """Build a combination's folder name from the swept keys, such as "method=fedmr,seed=1".

    Guarantees: one path element that is not hidden, at most 100 characters; different combinations get different names.
    """
    name = ",".join(word for word in words if word.partition("=")[0] in keys) or "run"
    safe = re.sub(r"[^\w.=,+-]", "_", name, flags=re.ASCII).lstrip(".")
    return safe if safe == name and len(name) <= 100 else f"{safe[:80]}-{blake3(name.encode()).hexdigest()[:16]}"


class SweepTable:
    """The tables of a sweep, in the folder that contains its runs' folders.

    sweep.csv: one row per run, with the swept keys and the numbers of its summary   history.csv: one row per run, round
    and measure. If pyarrow is installed, both are also written as .parquet.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._folder, self._keys = folder, swept(words)
        self._runs: dict[str, dict[str, object]] = {}

    def add(self, result: Mapping[str, object]) -> None:
        """Add a result that `sweep` yielded."""
        words, summary = result["overrides"], {k: v for k, v in result.items() if k != "overrides"}
        assert isinstance(words, list)
        values = dict(word.split("=", 1) for word in words if word.partition("=")[0] in self._keys)
        private = summary.get("privacy")
        if isinstance(private, Mapping):
            summary |= {"epsilon": private.get("epsilon"), "delta": private.get("delta")}
        numbers = {k: v for k, v in summary.items() if isinstance(v, str | int | float) or v is None}
        chosen = {key: values[key] for key in self._keys}
        self._runs[folder_name(words, self._keys)] = chosen | {k: v for k, v in numbers.items() if k not in chosen}
        write_table(self._folder, "sweep", self._uniform())

    def _uniform(self) -> list[dict[str, object]]:
        columns = list(dict.fromkeys(key for row in self._runs.values() for key in row))
        return [{key: row.get(key) for key in columns} for _, row in sorted(self._runs.items())]

    def close(self) -> None:
        """Write history.csv from the runs' histories."""
        rows = []
        for name, run in sorted(self._runs.items()):
            with (self._folder / name / f"{HISTORY}.csv").open(newline="") as file:
                rows += [{key: run[key] for key in self._keys} | typed(row) for row in csv.DictReader(file)]
        write_table(self._folder, HISTORY, rows)


def sweep(
    words: Sequence[str], job: Job, jobs: int = 0, config_dir: Path | None = None
) -> Iterator[Mapping[str, object]]:
    """Simulate all combinations, `jobs` at a time (0: one per core), and yield each result when it is ready.

    Each process uses its share of the cores unless a run sets `threads=`. A result contains its words under
    "overrides". Guarantees: `jobs` does not change the results of runs that set `threads=`.
    """
    for combination, result in in_processes(job, combinations(words, config_dir), jobs):
        yield {"overrides": combination, **result}


def in_processes(
    job: Callable[[Item], Outcome], items: Sequence[Item], jobs: int, threads: int = 0
) -> Iterator[tuple[Item, Outcome]]:
    """Yield each item with its result as soon as it is done.

    jobs: number of processes, 0 for one per core   threads: of each process, 0 for its share of the cores.
    """
    cores = os.cpu_count() or 1
    number = max(1, min(jobs or cores, len(items)))
    begin = partial(torch.set_num_threads, threads or max(1, cores // number))
    with ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"), initializer=begin) as pool:
        waiting = {pool.submit(job, item): item for item in items}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            for future in waiting:
                future.cancel()
