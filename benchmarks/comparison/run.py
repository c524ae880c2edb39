"""Compare methods, each at its own learning rate.

    python -m benchmarks.comparison list
    python -m benchmarks.comparison digits_linear                 computes what is missing, then writes the table
    python -m benchmarks.comparison digits_linear --stored        writes the table of stored runs; computes nothing
    python -m benchmarks.comparison cifar10_p5c2 --data-root /path/to/images --jobs 4
    python -m benchmarks.comparison fmnist_p5c2_resnet18 --jobs 12 --minutes 8     on a GPU; the same command goes on

    python -m benchmarks.comparison fmnist_p5c2_claims --jobs 1   a protocol: of the protocols/, fixed before it runs
    python -m benchmarks.comparison fmnist_p5c2_claims --recompute 39ac5797   one stored run again: 1 if it differs

Runs are kept in results/NAME.jsonl, the table is results/NAME.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import run_store
from benchmarks.comparison import protocol, report, search, settings, study, verdicts
from benchmarks.comparison.protocol import Protocol
from benchmarks.comparison.search import Searched
from benchmarks.comparison.settings import Comparison
from benchmarks.comparison.study import Complete
from benchmarks.run_store import Run, TimeUpError
from fl_core.errors import ConfigError, DataError, FederationError
from fl_core.training.devices import choose_device

RESULTS = Path(__file__).parent / "results"

Rows = dict[str, Searched]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; exit with 2 and one line on what cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a file of settings/ or protocols/, or the word list")
    parser.add_argument("--stored", action="store_true", help="compute nothing: fail where a run is missing")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time, one core each; 0: one per core")
    parser.add_argument("--data-root", type=Path, help="folder of the image sets; CONSILIUM_TEST_DATA without it")
    parser.add_argument("--device", help="cpu, cuda, cuda:N or auto; without it what the comparison names")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later than after these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the store and the table")
    parser.add_argument(
        "--recompute", metavar="KEY", help="simulate one stored run again and compare it; store nothing"
    )
    given = parser.parse_args(argv)
    try:
        if given.recompute:
            differs, text = recompute(given.out / f"{given.name}.jsonl", given.recompute, given.data_root)
            print(text)
            raise SystemExit(int(differs))
        if given.name == "list":
            print("\n".join(f"{name}: {settings.load(name).title}" for name in settings.names()))
            print("\n".join(f"{name}: protocol, {protocol.load(name).title}" for name in protocol.names()))
            return
        until = time.monotonic() + 60 * given.minutes
        if given.name in protocol.names():
            if given.device:
                raise ConfigError("E-CFG-02", "expected no --device: the runs of a protocol are of one processor")
            fixed = protocol.load(given.name)
            print(follow(fixed, given.out, given.jobs, given.data_root, stored=given.stored, until=until))
            return
        asked = settings.load(given.name)
        asked = replace(asked, device=given.device or asked.device)
        print(compare(asked, given.out, given.jobs, given.data_root, stored=given.stored, until=until))
    except (FederationError, TimeUpError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def compare(
    asked: Comparison,
    out: Path,
    jobs: int,
    data_root: Path | None,
    *,
    stored: bool = False,
    until: float = math.inf,
) -> str:
    """Compute what the store lacks, write the table and return it.

    until: of `time.monotonic`: no run begins later, and TimeUpError says how many are missing

    Guarantees: a table is written only when all of its runs are there, so that none takes the place of a fuller one.
    """
    store = out / f"{asked.name}.jsonl"
    computed = partial(run_store.complete, file=store, work=study.measure, jobs=jobs, until=until)
    if not stored:
        choose_device(asked.device)  # a machine without it says so once
    found = study.compared(asked, stored_runs(store) if stored else computed, data_root)
    text = report.markdown(asked, found)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{asked.name}.md").write_text(text)
    return text


def follow(
    fixed: Protocol,
    out: Path,
    jobs: int,
    data_root: Path | None,
    *,
    stored: bool = False,
    until: float = math.inf,
) -> str:
    """Do as `compare` with a protocol: what no machine has made all of is computed on this one."""
    store = out / f"{fixed.name}.jsonl"
    computed = None if stored else partial(run_store.complete, file=store, work=study.measure, jobs=jobs, until=until)
    text = verdicts.page(fixed, protocol_rows(fixed, store, computed, data_root))
    (out / f"{fixed.name}.md").write_text(text)
    return text


def protocol_rows(
    fixed: Protocol, store: Path, computed: Complete | None = None, data_root: Path | None = None
) -> Rows:
    """Find a protocol's trials and its table, each of the first machine in the store that made all of them.

    computed: makes on this machine what no machine has made all of
    Raises DataError (E-DATA-02) where something is missing and nothing computes it.
    """
    kept = stored_runs(store)
    machines = dict.fromkeys(str(run.get("machine")) for run in run_store.read(store).values())

    def of_one_machine(stage: Callable[[Complete, str], Rows]) -> Rows:
        missing = DataError("E-DATA-02", f"expected runs of {fixed.name} in {store}, found none")
        for machine in machines:
            try:
                return stage(kept, machine)
            except DataError as error:
                missing = error
        if computed is None:
            raise missing
        return stage(computed, run_store.kind_of_machine())

    rows = of_one_machine(lambda complete, machine: search.tuned(fixed, complete, machine, data_root))
    return of_one_machine(lambda complete, machine: search.tabled(fixed, rows, complete, machine, data_root))


def recompute(store: Path, key: str, data_root: Path | None = None) -> tuple[bool, str]:
    """Simulate a stored run again; return whether a number differs, and a sentence that names machines and numbers.

    key: how the run's key begins. The last bits of a model are those of one kind of processor and versions.
    Raises DataError (E-DATA-02) unless one run of the store has this key.
    """
    found = [run for name, run in run_store.read(store).items() if name.startswith(key)]
    if len(found) != 1:
        raise DataError("E-DATA-02", f"expected one run of {store} whose key begins with {key}, found {len(found)}")
    (kept,) = found
    again = study.measure(trial_of(kept, store.stem, data_root))
    # A setting's older keys do not follow from the words alone; a protocol's do.
    unasked = {"machine"} if store.stem in protocol.names() else {"machine", "key"}
    apart = sorted({*kept, *again} - run_store.MAY_DIFFER - unasked)
    apart = [name for name in apart if kept.get(name) != again.get(name)]
    result = (
        f"differs in {', '.join(apart)}" if apart else f"equal in every number and in its model {kept.get('model')}"
    )
    where = f"stored on {kept.get('device', 'a machine that is not named')}, here {run_store.machine()}"
    return bool(apart), f"{store.name}, run {kept['key']}, seed {kept['seed']}: {result}; {where}"


def trial_of(kept: Run, name: str, data_root: Path | None = None) -> study.Trial:
    """Compose a stored run of a setting or protocol again, with the key that follows from what it says of itself."""
    *words, rate = (str(word) for word in kept["words"])  # type: ignore[attr-defined]
    seed, also = int(str(kept["seed"])), {part: kept[part] for part in ("protocol", "machine") if part in kept}
    diagnostics, hits = tuple(d for d in settings.DIAGNOSTICS if d in kept), "test_images" in kept
    if name in protocol.names():  # a run that failed has neither
        fixed = protocol.load(name)
        diagnostics, hits = fixed.diagnostics, seed in fixed.seeds
    also = {**also, "hits": hits} if also else also
    lr = float(rate.removeprefix("train.lr="))
    (trial,) = study.trials("", words, [lr], [seed], data_root, diagnostics, also=also)
    return trial


def stored_runs(store: Path) -> Complete:
    """Make what finds trials in a store; it raises DataError (E-DATA-02) where one is missing."""
    kept = run_store.read(store)

    def complete(asked: Sequence[study.Trial]) -> Mapping[str, Run]:
        if missing := [t for t in asked if t.key not in kept]:
            raise DataError(
                "E-DATA-02",
                f"expected all runs of the table in {store}, found {len(asked) - len(missing)} of {len(asked)} "
                f"({missing[0]} is missing): leave out --stored to compute them",
            )
        return kept

    return complete
