r"""Run tables of the papers, and write each as CSV, Markdown and learning curves; or figures.

    python -m benchmarks.paper table=fedmr_1 scale=small
    python -m benchmarks.paper table=fedmr_1,fednh_1 scale=small seeds=0,1,2 jobs=2 --data-root /data
    python -m benchmarks.paper table=fedmr_1 scale=paper device=cuda jobs=1 methods=FedAvg,FedMR \
        "settings=CIFAR10 P5C2;CIFAR10 P10C2"
    python -m benchmarks.paper list
    python -m benchmarks.paper figure=fednh_rho
    python -m benchmarks.paper figure=list

Words: table, scale (paper, small), seeds, methods (all by comma), settings (by semicolon), jobs (processes; 0: one per
core), device (cpu, cuda, auto), out (folder; results/ here), run (false: only write what is stored). Runs are kept in
OUT/runs_SCALE.jsonl: what is there is not computed again. What a run needs to go on is in OUT/checkpoints until it is
there: a killed table goes on where it stopped, within a run too. Seeds, methods and settings say what is computed; what
is written is all that the store has of the table.

figure: names by comma, or all; of the other words jobs, out and run are theirs. OUT/figures has runs.jsonl, which keeps
their runs, and NAME.png. figure=all without `out` also writes the list and all numbers into docs/paper-figures.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import run_store
from benchmarks.paper import curves, drawings, figures, report, study, tables
from benchmarks.paper.drawn import DRAWN
from consilium.research.simulate.checkpoints import Checkpoints
from consilium.research.simulate.engine import SimulationEngine
from fl_core.errors import ConfigError, DataError, FederationError
from fl_core.suggest import suggest

RESULTS = Path(__file__).parent / "results"
KEYS = ("table", "figure", "scale", "seeds", "methods", "settings", "jobs", "device", "out", "run")


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
        if given.words == ["figure=list"]:
            print("\n".join(f"{f.name}: {f.title}" for f in figures.load()[0].values()))
            print("\n".join(f"{name}: drawn without runs of its own" for name in DRAWN))
            return
        words = parsed(given.words)
        (run_figures if "figure" in words else run)(words, given.data_root)
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
    if ("table" in found) == ("figure" in found):
        raise ConfigError(
            "E-CFG-01",
            f"expected table=NAME or figure=NAME, found {'both' if 'table' in found else 'neither'}: valid tables: "
            f"{', '.join(tables.names())}; figures: python -m benchmarks.paper figure=list",
        )
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
    loaded = [tables.load(name, words["scale"]) for name in listed]
    parts = [tables.chosen(table, *picked) for table in loaded]
    seeds, out = [int(s) for s in words["seeds"].split(",")], Path(words["out"])
    how = SimulationEngine(device=words["device"], checkpoints=Checkpoints(out / "checkpoints"))
    for table, part in zip(loaded, parts, strict=True):
        if words["run"] == "true":
            compute(part, seeds, out, int(words["jobs"]), data_root, how)
        print(f"\n{write(table, out)}", flush=True)


def run_figures(words: dict[str, str], data_root: Path | None = None) -> None:
    """Compute what figures lack, draw them and print their numbers."""
    out = Path(words["out"]) / "figures"
    known = figures.load()[0]
    for name in figures.chosen(words["figure"], [*known, *DRAWN]):
        if name in DRAWN:
            out.mkdir(parents=True, exist_ok=True)
            drawn = DRAWN[name]()
            drawn.save(out / f"{name}.png")
            print("\n".join(["", f"{name}: {drawn.title}", *drawn.rows]), flush=True)
            continue
        figure = known[name]
        print(f"\n{figure.name}: {figure.title}", flush=True)
        if words["run"] == "true":
            figures.compute(figure, out, int(words["jobs"]), data_root)
        found = figures.stored(figure, out)
        drawings.save(found, out / f"{figure.name}.png")
        print("\n".join(figures.numbers(found)), flush=True)
    if words["figure"] == "all" and out == RESULTS / "figures":
        figures.PAGE.write_text(figures.written(figures.PAGE.read_text(), out))


def compute(
    table: tables.Table,
    seeds: Sequence[int],
    out: Path,
    jobs: int,
    data_root: Path | None,
    how: SimulationEngine | None = None,
) -> None:
    """Compute what the store of a folder lacks of a table."""
    print(f"{table.name}, scale={table.scale}: composing", flush=True)
    asked = study.points(study.grid(table, seeds, data_root, how))
    done = run_store.complete(asked, _store(table, out), study.measure, jobs, lambda t: print(t, flush=True))
    for key in done:
        shutil.rmtree(out / "checkpoints" / key, ignore_errors=True)


def write(table: tables.Table, out: Path) -> str:
    """Write NAME_SCALE.csv, .md and .png into `out`, from all that its store has of the table; return the text.

    Raises DataError (E-DATA-02) where it has nothing: a table that is there is not replaced by an empty one.
    """
    kept = run_store.read(_store(table, out))
    seeds = sorted({int(str(run["seed"])) for run in kept.values()})
    grid = study.only(study.grid(table, seeds, None), kept) if seeds else {}
    if not grid:
        raise DataError(
            "E-DATA-02",
            f"expected runs of {table.name} in {_store(table, out)}, found none: leave out run=false to compute them",
        )
    results = report.Results(table, grid, kept)
    file = out / f"{table.name}_{table.scale}"
    report.write_csv(results, file.with_suffix(".csv"))
    file.with_suffix(".md").write_text(text := report.markdown(results))
    curves.draw(results, file.with_suffix(".png"))
    return text


def _store(table: tables.Table, out: Path) -> Path:
    return out / f"runs_{table.scale}.jsonl"


def _listed(text: str, between: str) -> list[str]:
    return [part.strip() for part in text.split(between) if part.strip()]
