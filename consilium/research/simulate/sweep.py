"""Many simulations at once: all combinations of comma-separated values, in parallel processes, in one table."""

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
"""Simulates one combination of words; must be importable, since it runs in another process."""


def combinations(words: Sequence[str], config_dir: Path | None = None) -> list[list[str]]:
    """List all combinations of the values that words sweep over, the last word's changing fastest.

    config_dir: as `compose_simulation` takes it.

    "seed=0,1 method=fedavg,fedmr" gives four; a comma in brackets or quotes separates nothing.
    Raises ConfigError (E-CFG-01) on a word that is no override, and what `compose_simulation` raises, before any run.
    """
    choices: list[list[str]] = []
    try:
        for word, parsed in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
            key = parsed.get_key_element()
            if not parsed.is_sweep_override():
                choices.append([word])
                continue
            # Hydra escapes values so that it reads them again; the place of an extension, package.module:Name, is ours.
            values = parsed.sweep_iterator() if key in GROUPS else parsed.sweep_string_iterator()
            choices.append([f"{key}={getattr(value, 'text', value)}" for value in values])
    except HydraException as error:
        raise ConfigError("E-CFG-01", unreadable_word(error)) from error
    products = [list(words) for words in itertools.product(*choices)]
    for words in products:
        compose_simulation(words, config_dir)
    return products


def swept(words: Sequence[str]) -> list[str]:
    """Name the keys that words sweep over, in their order; none of words that are no overrides."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException:
        return []  # `compose_simulation` says what is wrong
    return [word.get_key_element() for word in parsed if word.is_sweep_override()]


def folder_name(words: Sequence[str], keys: Sequence[str]) -> str:
    """Name the folder of one combination after the values of the swept keys, as "method=fedmr,seed=1".

    Guarantees: one visible path element of at most 100 characters; different combinations get different names.
    """
    name = ",".join(word for word in words if word.partition("=")[0] in keys) or "run"
    safe = re.sub(r"[^\w.=,+-]", "_", name, flags=re.ASCII).lstrip(".")
    return safe if safe == name and len(name) <= 100 else f"{safe[:80]}-{blake3(name.encode()).hexdigest()[:16]}"


class SweepTable:
    """The tables of a sweep, beside the folders of its runs.

    sweep.csv: one row per run, the swept keys and the numbers of its summary   history.csv: one row per run, round and
    measure; each with its .parquet beside it where pyarrow is there.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._folder, self._keys = folder, swept(words)
        self._runs: dict[str, dict[str, object]] = {}

    def add(self, result: Mapping[str, object]) -> None:
        """Take what `sweep` yielded."""
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
        """Put the runs' histories together."""
        rows = []
        for name, run in sorted(self._runs.items()):
            with (self._folder / name / f"{HISTORY}.csv").open(newline="") as file:
                rows += [{key: run[key] for key in self._keys} | typed(row) for row in csv.DictReader(file)]
        write_table(self._folder, HISTORY, rows)


def sweep(
    words: Sequence[str], job: Job, jobs: int = 0, config_dir: Path | None = None
) -> Iterator[Mapping[str, object]]:
    """Simulate all combinations, `jobs` at a time (0: one per core), and yield each result as it is there.

    Each process computes with its share of the cores' threads unless a run says `threads=`. A result has the words
    that made it under "overrides". Guarantees: how many run at a time changes no result of runs that say `threads=`.
    """
    for combination, result in in_processes(job, combinations(words, config_dir), jobs):
        yield {"overrides": combination, **result}


def in_processes(
    job: Callable[[Item], Outcome], items: Sequence[Item], jobs: int, threads: int = 0
) -> Iterator[tuple[Item, Outcome]]:
    """Yield each item with its result as soon as it is done; jobs: processes, 0 for one per core.

    threads: of each process, 0 for its share of the cores.
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
