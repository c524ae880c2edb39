"""Many simulations at once: all combinations of comma-separated values, in parallel processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import TypeVar

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from coordinator.config.hydra_config import compose_spec
from fl_core.errors import ConfigError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Job = Callable[[Sequence[str]], Mapping[str, object]]
"""Simulates one combination of words; must be importable, since it runs in another process."""


def combinations(words: Sequence[str]) -> list[list[str]]:
    """List all combinations of the values that words sweep over, the last word's changing fastest.

    "seed=0,1 method=fedavg,fedmr" gives four; a comma in brackets or quotes separates nothing.
    Raises ConfigError (E-CFG-01) on a word that is no override, and what `compose_spec` raises, before anything runs.
    """
    choices: list[list[str]] = []
    try:
        for word, parsed in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
            key = parsed.get_key_element()
            choices.append(
                [f"{key}={v}" for v in parsed.sweep_string_iterator()] if parsed.is_sweep_override() else [word]
            )
    except HydraException as error:
        raise ConfigError("E-CFG-01", " ".join(str(error).split("\n")[0].split())) from error
    found = [list(words) for words in itertools.product(*choices)]
    for words in found:
        compose_spec(words)
    return found


def is_sweep(words: Sequence[str]) -> bool:
    try:
        return any(w.is_sweep_override() for w in OverridesParser.create().parse_overrides(list(words)))
    except HydraException:
        return False  # `compose_spec` says what is wrong


def sweep(words: Sequence[str], job: Job, jobs: int = 0) -> Iterator[Mapping[str, object]]:
    """Simulate all combinations, `jobs` at a time (0: one per core), and yield each result as it is there.

    Each process computes with its share of the cores' threads unless a run says `threads=`. A result has the words
    that made it under "overrides". Guarantees: how many run at a time changes no result of runs that say `threads=`.
    """
    for combination, result in in_processes(job, combinations(words), jobs):
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
