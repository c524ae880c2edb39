r"""Run tables of the papers, and write each as CSV, Markdown and learning curves.

    python -m benchmarks.paper table=fedmr_1 scale=small
    python -m benchmarks.paper table=fedmr_1,fednh_1 scale=small seeds=0,1,2 jobs=2 --data-root /data
    python -m benchmarks.paper table=fedmr_1 scale=paper device=cuda jobs=1 methods=FedAvg,FedMR \
        "settings=CIFAR10 P5C2;CIFAR10 P10C2"
    python -m benchmarks.paper list

Words: table, scale (paper, small), seeds, methods (all by comma), settings (by semicolon), jobs (processes; 0: one per
core), device (cpu, cuda, auto), out (folder; results/ here), run (false: only write what is stored). Runs are kept in
OUT/runs_SCALE.jsonl: what is there is not computed again. What a run needs to go on is in OUT/checkpoints until it is
there: a killed table goes on where it stopped, within a run too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import curves, report, study, tables
from coordinator.simulation.checkpoints import Checkpoints
from coordinator.simulation.engine import SimulationEngine
from fl_core.errors import ConfigError, FederationError
from fl_core.suggest import suggest

RESULTS = Path(__file__).parent / "results"
KEYS = ("table", "scale", "seeds", "methods", "settings", "jobs", "device", "out", "run")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; exit with 2 and one line on a wrong word."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"of {', '.join(KEYS)}; or the word list")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets; CONSILIUM_TEST_DATA without it")
    given = parser.parse_args(argv)
    try:
        if given.words == ["list"]:
            print("\n".join(f"{name}: {tables.load(name, 'paper').paper}" for name in tables.names()))
            return
        run(parsed(given.words), given.data_root)
    except FederationError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def parsed(words: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE words; raises ConfigError (E-CFG-01) on any other, with the nearest key."""
    found = {"scale": "small", "seeds": "0,1,2", "methods": "", "settings": "", "jobs": "0", "device": "cpu"}
    found |= {"out": str(RESULTS), "run": "true"}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError("E-CFG-01", f"expected KEY=VALUE, found {word!r}: {suggest(key, KEYS)}")
        found[key] = value
    if "table" not in found:
        raise ConfigError("E-CFG-01", f"expected table=NAME, found none: valid: {', '.join(tables.names())}")
    if found["run"] not in ("true", "false"):
        raise ConfigError("E-CFG-01", f"expected run=true or run=false, found run={found['run']}")
    for key in ("seeds", "jobs"):
        if not all(part.lstrip("-").isdecimal() for part in found[key].split(",")):
            raise ConfigError("E-CFG-01", f"expected whole numbers for {key}, found {found[key]!r}: write {key}=0,1,2")
    return found


def run(words: dict[str, str], data_root: Path | None = None) -> None:
    """Run the tables of parsed words, one after another; every name is checked before anything runs."""
    listed = [part for part in words["table"].split(",") if part]
    picked = _listed(words["methods"], ","), _listed(words["settings"], ";")
    loaded = [tables.chosen(tables.load(name, words["scale"]), *picked) for name in listed]
    seeds, out = [int(s) for s in words["seeds"].split(",")], Path(words["out"])
    for table in loaded:
        jobs = None if words["run"] == "false" else int(words["jobs"])
        kept = Checkpoints(out / "checkpoints")
        write(table, seeds, out, jobs, data_root, SimulationEngine(device=words["device"], checkpoints=kept))


def write(
    table: tables.Table,
    seeds: Sequence[int],
    out: Path,
    jobs: int | None,
    data_root: Path | None,
    how: SimulationEngine | None = None,
) -> report.Results:
    """Compute what a table lacks (nothing without jobs), then write NAME_SCALE.csv, .md and .png into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"{table.name}, scale={table.scale}: composing", flush=True)
    grid = study.grid(table, seeds, data_root, how)
    store = out / f"runs_{table.scale}.jsonl"
    asked = study.points(grid)
    kept = study.stored(store)
    grid, asked = (study.only(grid, kept), []) if jobs is None else (grid, asked)
    runs = {**kept, **study.study(asked, store, jobs or 0, lambda t: print(t, flush=True))}
    for key in runs:
        shutil.rmtree(out / "checkpoints" / key, ignore_errors=True)
    results = report.Results(table, grid, runs)
    file = out / f"{table.name}_{table.scale}"
    report.write_csv(results, file.with_suffix(".csv"))
    file.with_suffix(".md").write_text(text := report.markdown(results, seeds))
    curves.draw(results, file.with_suffix(".png"))
    print(f"\n{text}", flush=True)
    return results


def _listed(text: str, between: str) -> list[str]:
    return [part.strip() for part in text.split(between) if part.strip()]
