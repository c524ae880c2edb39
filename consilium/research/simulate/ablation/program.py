"""`coordinator ablation`: run the grid of the privacy ablation in parallel and report on it."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf

from consilium.research.simulate import runner
from consilium.research.simulate.ablation import report
from consilium.research.simulate.ablation.grid import Control, Grid, GridRun, Words, canonical, controls
from consilium.research.simulate.ablation.report import Check
from consilium.research.simulate.sweep import in_processes
from coordinator.config.hydra_config import CONFIGS, compose_spec
from coordinator.config.run_spec import RunSpec
from fl_core.converter import read_options
from fl_core.errors import ConfigError
from privacy.accounting.record_config import RecordDpConfig
from privacy.compiled_run import CompiledRun
from privacy.profiles.base import Projection
from service_core.command_line import command
from service_core.console import ERR, CommandResult, format_duration
from service_core.storage.private_files import write_public
from service_core.version import software, version

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """A composed ablation.

    plain, private: further words for runs at epsilon = inf, and at finite epsilon   rates: learning rate of all methods
    by epsilon; without an entry the configuration's rate is used.
    """

    methods: tuple[str, ...]
    epsilons: tuple[float, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...]
    base: Words
    plain: Words
    private: Words
    rates: Mapping[float, float]
    out: str
    jobs: int = 0
    controls: bool = True

    @property
    def grid(self) -> Grid:
        return Grid(self.methods, self.epsilons, self.shares, self.seeds)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def schedule(self, epsilon: float) -> Words:
        rate = (f"train.lr={self.rates[epsilon]:g}",) if epsilon in self.rates else ()
        return (*self.base, *(self.plain if math.isinf(epsilon) else self.private), *rate)

    def words(self, run: GridRun) -> Words:
        """Return all words of a run; a variant with a model of its own does not take the options of the common one."""
        own = any(word.startswith("model=") for word in run.words)
        return (*(w for w in self.schedule(run.epsilon) if not (own and w.startswith("model"))), *run.words)

    def key(self, run: GridRun) -> str:
        return run.key(self.schedule(run.epsilon), version())


def composed(words: Sequence[str]) -> AblationPlan:
    """Compose `scale=...` and `key=value` words; raises ConfigError (E-CFG-01, E-CFG-02) on invalid words."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS / "ablation"), version_base="1.3"):
            raw = OmegaConf.to_container(compose("config", overrides=list(words)), resolve=True)
    except (ConfigCompositionException, HydraException) as error:
        raise ConfigError("E-CFG-01", " ".join(str(error).split("\n")[0].split())) from error
    assert isinstance(raw, dict)
    plan = read_options(AblationPlan, "", {str(key): value for key, value in raw.items()})
    _ = plan.grid  # checks the values
    return plan


_SCALES = "|".join(sorted(file.stem for file in (CONFIGS / "ablation" / "scale").glob("*.yaml")))
_KEYS = ", ".join(f"{field.name}=" for field in fields(AblationPlan))


@command
def ablation(
    words: Annotated[
        list[str] | None,
        typer.Argument(help=f"The grid, scale={_SCALES} (default: small), and changes to it: {_KEYS}."),
    ] = None,
) -> CommandResult:
    """Compare methods over privacy budgets: run a grid of simulations in parallel, and check the expected results.

    Finished runs are kept in `runs.csv`, so the same command continues an interrupted grid. All cells use the same
    seeds for noise, so differences between cells are paired. The exit status is 1 if a check fails.
    """
    checks = ablate(composed(words or ()), ERR.print)
    lines = [f"{'passed' if check.holds else 'FAILED'} {check.name}: {check.found}" for check in checks]
    return CommandResult(
        [asdict(check) for check in checks], lines, status=int(not all(check.holds for check in checks))
    )


def ablate(plan: AblationPlan, report_progress: Callable[[str], None]) -> list[Check]:
    """Simulate the missing runs, then write runs.csv, cells.csv, table5.md, acc_vs_eps.png and report.json."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    file = plan.folder / "runs.csv"
    done = report.read(file)
    missing = [run for run in plan.grid.runs() if plan.key(run) not in done]
    report_progress(f"{len(plan.grid.runs())} runs, {len(missing)} to do, {len(plan.grid.cells())} cells")
    started = time.monotonic()
    jobs = {plan.words(run): run for run in missing}
    for count, (words, row) in enumerate(in_processes(_row, list(jobs), plan.jobs, threads=1), start=1):
        run = jobs[words]
        report.append(file, {"config_hash": plan.key(run), "shared_run_id": "", "method": run.variant, **row})
        left = (time.monotonic() - started) / count * (len(missing) - count)
        report_progress(
            f"{count} of {len(missing)}: {run.variant} epsilon {run.epsilon:g} share {run.share:g} seed {run.seed}, "
            f"accuracy {float(str(row['acc_final'])):.4f}; left {format_duration(left)}"
        )
    return _report(plan)


def _report(plan: AblationPlan) -> list[Check]:
    grid, rows = plan.grid, report.read(plan.folder / "runs.csv")
    mine = {run: rows[plan.key(run)] for run in grid.runs()}
    accuracy = {run: float(row["acc_final"]) for run, row in mine.items()}
    first = _composed(("privacy=dp_record", *plan.base))
    split = str(first.federation["name"])
    classes = len(json.loads(next(iter(mine.values()))["per_class_acc"]))
    cells: list[Row] = []
    for cell in grid.cells():
        row = mine[canonical(cell)]
        shared = "" if canonical(cell) == cell else row["config_hash"]
        cells.append({**row, "method": cell.variant, "share": f"{cell.share:g}", "shared_run_id": shared})
    report.write(plan.folder / "cells.csv", cells)
    text = report.table5(accuracy, grid, str(first.data["name"]), split)
    write_public(plan.folder / "table5.md", f"{text}\n{report.by_epsilon(accuracy, grid)}".encode())
    report.draw(accuracy, grid, plan.folder / "acc_vs_eps.png", f"{first.data['name']}, {split}")
    helps = report.full_share_helps(accuracy, grid)
    checks = [
        report.monotone(accuracy, grid),
        *([helps] if helps else []),
        report.spent(list(mine.values())),
        report.above_chance(accuracy, grid, classes),
    ]
    checks += _controls(plan) if plan.controls else []
    facts = {
        "checks": [asdict(c) for c in checks],
        "runs": len(mine),
        "cells": len(cells),
        "software": software(),
        "base": list(plan.base),
        "plain": list(plan.plain),
        "private": list(plan.private),
        "rates": {f"{e:g}": r for e, r in plan.rates.items()},
    }
    write_public(plan.folder / "report.json", f"{json.dumps(facts, indent=1)}\n".encode())
    return checks


def _controls(plan: AblationPlan) -> list[Check]:
    sides = {c.name: (plan.words(c.left), _right(plan, c)) for c in controls(plan.grid)}
    wordings = sorted({words for both in sides.values() for words in both})
    digests = dict(in_processes(_digest, wordings, plan.jobs, threads=1))
    return [
        Check(name, digests[left] == digests[right], f"{digests[left][:12]} and {digests[right][:12]}")
        for name, (left, right) in sides.items()
    ]


def _right(plan: AblationPlan, control: Control) -> Words:
    if control.right is not None:
        return plan.words(control.right)
    return tuple(word for word in plan.words(control.left) if not word.startswith("privacy"))


def _composed(words: Words) -> RunSpec:
    """Compose a run, with secagg=off unless a word sets it, since the ablation compares noise."""
    masks = () if any(word.startswith("secagg") for word in words) else ("secagg=off",)
    return compose_spec((*masks, *words))


def _digest(words: Words) -> str:
    return runner.run(replace(_composed(words), threads=1)).model_digest


def _row(words: Words) -> Row:
    """Simulate one run and return its row of `runs.csv`."""
    spec = replace(_composed(words), threads=1)
    started = time.monotonic()
    result = runner.run(spec)
    summary, manifest = result.summary(), result.manifest
    terms = RecordDpConfig.of(manifest.privacy.options)
    private = dict(result.privacy or {})
    silos = CompiledRun.of(manifest).profile.project()

    def over(choose: Callable[[list[float]], float], of: Callable[[Projection], float]) -> float | str:
        return choose([of(s) for s in silos]) if silos else ""

    personal = "pa" in summary and summary["global_accuracy"] is None
    accuracy = summary["pa" if personal else "global_accuracy"]
    by_class = [e.point for e in result.by_class().values() if e.point is not None]
    coupled = terms.coupled if silos else "full"
    return {
        "coupled_mode": coupled,
        "split": spec.federation["name"],
        "share": f"{spec.prototype_share:g}",
        "eps_target": f"{terms.epsilon:g}",
        "eps_rdp": private.get("epsilon", math.inf),
        "eps_prv": private.get("epsilon_prv", math.inf),
        "budget_used": over(max, lambda s: s.used),
        "delta": terms.delta,
        "z_min": over(min, lambda s: s.noise),
        "z_max": over(max, lambda s: s.noise),
        "z_p": terms.prototype_noise,
        "C1": terms.clip,
        "C2": terms.coupled_clip,
        "q_min": over(min, lambda s: s.rate),
        "q_max": over(max, lambda s: s.rate),
        "T": over(max, lambda s: s.steps),
        "rounds": spec.rounds,
        "seed": spec.seed,
        "acc_final": math.nan if accuracy is None else accuracy,
        "acc_best_public": summary["best_pa" if personal else "best_global_accuracy"],
        "worst_class_acc": min(by_class, default=""),
        "per_class_acc": json.dumps(summary["class_accuracy"]),
        "measure": "personal" if personal else "global",
        "wall_s": round(time.monotonic() - started, 2),
        "private": bool(private.get("private", False)),
        "git_sha": _commit(),
    }


def _commit() -> str:
    """Return the commit of this checkout; "none" outside a checkout."""
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"],  # noqa: S607
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "none"
