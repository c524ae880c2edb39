"""Simulated runs that are kept: JSON lines, one per finished run, found again by what the run computes.

What was computed once is not computed again, whichever table asks, and an interrupted study goes on where it stopped. A
key says what a run computes and nothing of where: no path, no cache, no machine, no version of the manifest. Whoever
adds a default that changes numbers changes the keys of runs that have it.
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
Fields that are in neither list are younger than the first store: a key has them where they are not at their default.
Those of `train` that manifests leave out at their default are left out here, too."""

_JUDGED = {
    "updates_refused": "updates refused",
    "updates_cut": "updates cut",
    "cut_rows": "rows of prototypes cut",
    "clipped": "values clipped by the fixed-point grid",
}


class TimeUpError(Exception):
    """The minutes that a computation was given are over; what was done is kept."""


class Kept(Protocol):
    """What a store can be asked for."""

    @property
    def key(self) -> str: ...


Item = TypeVar("Item", bound=Kept)


def machine(device: str = "cpu") -> str:
    """Name what decides the last bits of a run: GPU or processor with its vector instructions, Python and torch.

    The maker of the processor too, where Linux names it: libraries of matrices choose by it.
    """
    chosen, known = choose_device(device), Path("/proc/cpuinfo")
    maker = re.search(r"vendor_id\s*:(\s*\S+)", known.read_text()) if known.exists() else None
    processor = f"{platform.machine()}{maker[1] if maker else ''} {torch.backends.cpu.get_cpu_capability()}"
    processor = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else processor
    return f"{processor}, Python {platform.python_version()}, torch {torch.__version__}"


def kind_of_machine(device: str = "cpu") -> str:
    """Name a machine for the key of a run whose pairs are of one machine: as `machine`, with the version of numpy."""
    return f"{machine(device)}, numpy {np.__version__}"


def seeded(spec: RunSpec, seed: int) -> RunSpec:
    """Draw partition, weights and batches by one seed."""
    partition = {"partition_seed": seed} if "partition_seed" in spec.federation else {}
    return replace(spec, seed=seed, federation={**spec.federation, **partition})


def key_of(spec: RunSpec, images: str = "", **also: object) -> str:
    """Digest what a run computes; images: the word of a cut image set, in place of the folder where it lies.

    also: what is measured beside the run's own numbers, or how.
    """
    plain = {f.name: f.default for f in fields(spec)} | {"secagg": asdict(SecaggSpec())}
    found = {
        name: value
        for name, value in asdict(spec).items()
        if name in _ALWAYS or (name not in _IRRELEVANT and value != plain[name])
    }
    if images:
        found["data"] = {"images": images, "image_size": spec.data.get("image_size")}
    if spec.privacy["name"] != "none" and "secagg" in found:  # in a private run 0, the default of 0.1.0, meant 1
        found["secagg"] = {k: 0 if (k, v) == ("min_contributors", 1) else v for k, v in found["secagg"].items()}
    found["privacy"] = profiles.stated_options(str(spec.privacy["name"]), spec.privacy)
    found["method"] = stated(method_class(str(spec.method["name"])), spec.method)
    found["model"] = {key: value for key, value in spec.model.items() if (key, value) != ("adapter", "none")}
    found |= {"train": spec.train.facts(), "federation": datasets.federation_text(spec.federation), **also}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:20]


def judged(result: Result) -> dict[str, object]:
    """Say by which rule a run's updates became one, and how many of them and of their numbers that changed."""
    clipped = sum(record.clipped for record in result.records)
    return {"aggregator": result.aggregator, **update_outcomes(result.records), "clipped": clipped}


def outcomes_text(rows: Mapping[str, Sequence[Run]]) -> str:
    """Say by which rule the updates of a table's runs became one, and in which rows it refused or changed any.

    rows: the runs by row. A run that ended without a model counts nothing, and one of an older store says nothing.
    """
    every = [run for runs in rows.values() for run in runs]
    rule = f"Updates became one by aggregator={' or '.join(sorted({str(run['aggregator']) for run in every}))}."
    if not all("failed" in run or all(key in run for key in _JUDGED) for run in every):
        return f"{rule} How many it refused and cut was not counted when these runs were made."
    counts = []
    for key, label in _JUDGED.items():
        by_row = {row: sum(int(str(run.get(key, 0))) for run in runs) for row, runs in rows.items()}
        where = ", ".join(f"{row} {n}" for row, n in by_row.items() if n)
        counts.append(f"{label} {sum(by_row.values())}" + (f" ({where})" if where else ""))
    return f"{rule} In all of the table's runs: {'; '.join(counts)}."


def read(file: Path) -> dict[str, Run]:
    """Read the runs that a store holds, by key; the newest line of a key wins.

    A last line that a killed process did not finish is left out; raises DataError (E-DATA-07) on any other one that
    is no run.
    """
    found: dict[str, Run] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            run = json.loads(line)
            found[str(run["key"])] = run
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            if number == len(lines):
                continue
            raise DataError(
                "E-DATA-07",
                f"{file}, line {number}: expected a run with its key, found {line[:60]!r}: remove that line",
            ) from error
    return found


def append(file: Path, run: Run) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    if torn:  # the half of a line is no run: with the next one behind it, it would make that unreadable too
        whole = file.read_bytes()
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with file.open("a") as out:
        out.write(json.dumps(run, sort_keys=True) + "\n")


def complete(
    asked: Sequence[Item],
    file: Path,
    work: Callable[[Item], Run],
    jobs: int = 0,
    tell: Callable[[str], None] = print,
    until: float = math.inf,
) -> dict[str, Run]:
    """Compute what the store lacks, appending each run as it ends; return the runs asked for, by key.

    jobs: processes at a time, each on one core (0: one per core), or -1: in this process   until: of `time.monotonic`;
    no run begins later. One run that fails does not stop the others; the first error is raised at the end. Raises
    TimeUpError where the time was up before all runs had begun.
    """
    kept = read(file)
    missing = list({item.key: item for item in asked if item.key not in kept}.values())
    tell(f"{len(asked)} runs, {len(asked) - len(missing)} of them done before")
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
        raise TimeUpError(f"the time was up before {len(errors)} of {len(asked)} runs: the same command goes on")
    return {item.key: kept[item.key] for item in asked}


def _attempt(work: Callable[[Item], Run], until: float, item: Item) -> Run | Exception:
    try:
        return work(item) if time.monotonic() < until else TimeUpError()
    except Exception as error:
        return error
