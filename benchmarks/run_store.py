"""A store of simulated runs: JSON lines, one per finished run, looked up by what the run computes.

Finished runs are never computed again, whichever table needs them, and an interrupted study continues where it stopped.
The key depends only on what a run computes: not on paths, caches, the machine or the version of the manifest. A new
default that changes numbers changes the keys of the runs that have it.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from consilium.research.simulate.results import Result
from consilium.research.simulate.sweep import in_processes
from coordinator.config.run_spec import RunSpec, SecaggSpec
from fl_core import datasets
from fl_core.converter import stated
from fl_core.errors import DataError
from fl_core.methods import method_class
from fl_core.training.devices import choose_device
from fl_core.types.records import update_outcomes
from privacy import profiles

Run = Mapping[str, object]
_ALWAYS = ("method", "model", "data", "privacy", "aggregator", "train", "rounds", "seed", "cohort", "prototype_share")
_ALWAYS += ("threads", "personal")
_IRRELEVANT = ("name", "quorum", "deadline_s", "patience_s", "lost_state", "silos", "federation")
"""Fields of a configuration that change no number of a simulation, and the partition, which has a text of its own.
Fields in neither list are newer than the first store: a key has them only if they differ from their default. Fields
of `train` that manifests leave out at their default are left out here, too."""
_LATER = (("adapter", "none"), ("patch", 0), ("grid", 0), ("shrink", 0))
"""Options of models that are newer than the first store, at their defaults."""

_OUTCOMES = {
    "updates_refused": "updates refused",
    "updates_cut": "updates cut",
    "cut_rows": "rows of prototypes cut",
    "clipped": "values clipped by the fixed-point grid",
}


MAY_DIFFER = frozenset({"made", "device", "cpu_seconds"})
"""What two equal runs may differ in."""


class TimeUpError(Exception):
    """The time limit of a computation is over; finished runs are stored."""


class Kept(Protocol):
    """An item that a store can look up."""

    @property
    def key(self) -> str: ...


Item = TypeVar("Item", bound=Kept)


def machine(device: str = "cpu") -> str:
    """Name what decides the last bits of a run: GPU or processor with its vector instructions, Python and torch.

    Includes the processor's vendor where Linux names it, since matrix libraries choose their kernels by it.
    """
    chosen, cpuinfo = choose_device(device), Path("/proc/cpuinfo")
    maker = re.search(r"vendor_id\s*:(\s*\S+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = f"{platform.machine()}{maker[1] if maker else ''} {torch.backends.cpu.get_cpu_capability()}"
    processor = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else processor
    return f"{processor}, Python {platform.python_version()}, torch {torch.__version__}"


def kind_of_machine(device: str = "cpu") -> str:
    """Name a machine for the key of runs that are compared on one machine: `machine`, with the version of numpy."""
    return f"{machine(device)}, numpy {np.__version__}"


def seeded(spec: RunSpec, seed: int) -> RunSpec:
    """Use one seed for partition, weights and batches."""
    partition = {"partition_seed": seed} if "partition_seed" in spec.federation else {}
    return replace(spec, seed=seed, federation={**spec.federation, **partition})


def key_of(spec: RunSpec, images: str = "", **also: object) -> str:
    """Digest what a run computes; images: the name of a cut image set, instead of its folder.

    also: additional measurements, or how they are made.
    """
    plain = {f.name: f.default for f in fields(spec)} | {"secagg": asdict(SecaggSpec())}
    values = {
        name: value
        for name, value in asdict(spec).items()
        if name in _ALWAYS or (name not in _IRRELEVANT and value != plain[name])
    }
    if images:
        values["data"] = {"images": images, "image_size": spec.data.get("image_size")}
    if spec.privacy["name"] != "none" and "secagg" in values:  # in a private run, 0 (the default of 0.1.0) meant 1
        values["secagg"] = {k: 0 if (k, v) == ("min_contributors", 1) else v for k, v in values["secagg"].items()}
    values["privacy"] = profiles.stated_options(str(spec.privacy["name"]), spec.privacy)
    values["method"] = stated(method_class(str(spec.method["name"])), spec.method)
    if spec.privacy["name"] == "none" and values["method"].get("head") == "auto":  # chooses ridge, the default of 0.1.0
        values["method"] |= {"head": "ridge"}
    values["model"] = {key: value for key, value in spec.model.items() if (key, value) not in _LATER}
    values |= {"train": spec.train.facts(), "federation": datasets.federation_text(spec.federation), **also}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]


def judged(result: Result) -> dict[str, object]:
    """Return a run's aggregator, and how many updates and numbers it refused or clipped."""
    clipped = sum(record.clipped for record in result.records)
    return {"aggregator": result.aggregator, **update_outcomes(result.records), "clipped": clipped}


def outcomes_text(rows: Mapping[str, Sequence[Run]]) -> str:
    """Describe how the updates of a table's runs were aggregated, and in which rows any were refused or changed.

    rows: the runs by row. A run that ended without a model counts nothing; runs of an older store lack these counts.
    """
    every = [run for runs in rows.values() for run in runs]
    rule = f"Updates were aggregated with aggregator={' or '.join(sorted({str(run['aggregator']) for run in every}))}."
    if not all("failed" in run or all(key in run for key in _OUTCOMES) for run in every):
        return f"{rule} These runs did not count refused and clipped updates."
    counts = []
    for key, label in _OUTCOMES.items():
        by_row = {row: sum(int(str(run.get(key, 0))) for run in runs) for row, runs in rows.items()}
        where = ", ".join(f"{row} {n}" for row, n in by_row.items() if n)
        counts.append(f"{label} {sum(by_row.values())}" + (f" ({where})" if where else ""))
    return f"{rule} Over all runs of the table: {'; '.join(counts)}."


def read(file: Path) -> dict[str, Run]:
    """Read the runs of a store, by key.

    An incomplete last line, left by a killed process, is ignored; raises DataError (E-DATA-07) on any other invalid
    line, and on two lines of a key that differ in more than when, where and how fast they were made.
    """
    runs: dict[str, Run] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            run = json.loads(line)
            before = runs.setdefault(str(run["key"]), run)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            if number == len(lines):
                continue
            raise DataError(
                "E-DATA-07",
                f"{file}, line {number}: expected a run with its key, found {line[:60]!r}: remove that line",
            ) from error
        if any(before.get(name) != run.get(name) for name in {*before, *run} - MAY_DIFFER):
            raise DataError(
                "E-DATA-07",
                f"{file}, line {number}: expected the numbers of an earlier line with the key {run['key']}, found "
                "others: remove one of the two lines",
            )
    return runs


def append(file: Path, run: Run) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    if torn:  # an incomplete line: appending to it would make the next one unreadable
        whole = file.read_bytes()
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with file.open("a") as out:
        out.write(json.dumps(run, sort_keys=True) + "\n")


def complete(
    items: Sequence[Item],
    file: Path,
    work: Callable[[Item], Run],
    jobs: int = 0,
    tell: Callable[[str], None] = print,
    until: float = math.inf,
) -> dict[str, Run]:
    """Compute the runs that the store lacks, appending each when it ends; return the requested runs by key.

    jobs: processes at a time, each on one core (0: one per core), or -1: in this process   until: of `time.monotonic`;
    no run begins later. A run that fails does not stop the others; the first error is raised at the end. Raises
    TimeUpError if the time was up before all runs had begun.
    """
    kept = read(file)
    missing = list({item.key: item for item in items if item.key not in kept}.values())
    tell(f"{len(items)} runs, {len(items) - len(missing)} of them done before")
    start, errors, attempt = time.monotonic(), [], partial(_attempt, work, until)
    outcomes = ((item, attempt(item)) for item in missing) if jobs < 0 else in_processes(attempt, missing, jobs)
    for done, (item, outcome) in enumerate(outcomes, start=1):
        if isinstance(outcome, Exception):
            errors.append(outcome)
            if not isinstance(outcome, TimeUpError):
                tell(f"{item}: {outcome}")
            continue
        kept[item.key] = outcome
        append(file, outcome)
        left = (time.monotonic() - start) / done * (len(missing) - done)
        tell(f"{done}/{len(missing)}  {item}  ({left:.0f} s left)")
    if others := [e for e in errors if not isinstance(e, TimeUpError)]:
        raise others[0]
    if errors:
        raise TimeUpError(
            f"the time was up before {len(errors)} of {len(items)} runs: run the same command again to continue"
        )
    return {item.key: kept[item.key] for item in items}


def _attempt(work: Callable[[Item], Run], until: float, item: Item) -> Run | Exception:
    try:
        return work(item) if time.monotonic() < until else TimeUpError()
    except Exception as error:
        return error
