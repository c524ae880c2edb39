"""Output of `coordinator simulate`: tables for one run, a line per run for a sweep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from consilium.research.simulate.results import Result, left_out
from consilium.research.simulate.round_printer import RoundPrinter
from consilium.research.simulate.runner import SimulationJob
from consilium.research.simulate.sweep import SweepTable, combinations, sweep, swept
from coordinator.lead import tables
from fl_core.errors import ConfigError
from fl_core.training import clinical_report
from fl_core.types.records import update_outcomes
from privacy.accounting.measures import EvaluationResult, plain
from service_core.console import ERR, CommandResult, format_duration, make_table, print_json, show


def answer(job: SimulationJob, words: Sequence[str], sweep_jobs: int | None, as_json: bool) -> CommandResult | None:
    if sweep_jobs is not None:
        _sweep(words, job, sweep_jobs, as_json)
        return None
    if swept(words):
        raise ConfigError("E-CFG-08", f"expected one value per key, found {' '.join(words)}: add -m to run all values")
    try:
        result = job.run(words, None if as_json else RoundPrinter)
    except KeyboardInterrupt:
        if job.out is not None:
            ERR.print("interrupted: run the same command again to resume from the latest checkpoint")
        raise
    if job.out is not None:
        _say_where(job.out)
    return CommandResult(result.summary(), _shown(result))


def _shown(result: Result) -> Iterator[str | Table]:
    if not result.manifest.kind.measures:
        from coordinator.lead.surveys import answer_lines

        yield from answer_lines(result.manifest, result.server)
        return
    if text := tables.private_form(result.manifest.to_json()):
        yield text
    if text := tables.aggregator_text(result.aggregator, update_outcomes(result.records)):
        yield text
    if result.clinical is not None:
        rows = clinical_report.class_rows(result.clinical, result.manifest.schema.classes)
        yield make_table("By class", clinical_report.class_head(result.clinical), rows)
        yield clinical_report.sentence(result.clinical)
    else:
        rows = [(name, accuracy.text()) for name, accuracy in result.by_class().items()]
        yield make_table("By class", ("class", "accuracy"), rows)
    if result.clinical is None and result.noise.evaluation is not None:
        yield clinical_report.NOT_MEASURED
    yield from result.coverage.lines()
    yield f"global accuracy {result.estimates[-1].text()}, best {result.best.text()}, model {result.model_digest[:16]}"
    if scores := next((r.personal for r in reversed(result.measured or result.records) if r.personal), None):
        shown = tables.measured_parts(EvaluationResult(personal=scores, withheld=result.noise.scores & set(scores)))
        whose = "of the last round's silos" if result.privacy else "of all silos"
        yield f"newest personal models {whose}:  {'  '.join(shown)}"
        if result.method.ga_is_personal and "ga" in scores:
            yield f"their mean accuracy on the whole test set (GA in papers): {plain(scores['ga']).text()}"


def _say_where(out: Path) -> None:
    less = "".join(f"; without {file} (install {extra})" for file, extra in left_out().items())
    ERR.print(f"results in {out}{less}", soft_wrap=True)


def _sweep(words: Sequence[str], job: SimulationJob, jobs: int, as_json: bool) -> None:
    """Print a table of the runs, or one JSON line per run when it ends. Prints progress on stderr."""
    keys, rows = swept(words), dict[tuple[str, ...], tuple[str, ...]]()
    number, started = len(combinations(words, job.config_dir)), time.monotonic()
    table = None if job.out is None else SweepTable(job.out, words)
    run = partial(job.run_of_sweep, keys)
    for done, result in enumerate(sweep(words, run, jobs, job.config_dir), start=1):
        values, numbers = _of_sweep(result, keys)
        rows[values] = numbers
        if as_json:
            print_json(result)
        if table:
            table.add(result)
        spent = time.monotonic() - started
        what = "" if as_json else f"  {' '.join(map('='.join, zip(keys, values, strict=True)))}  accuracy {numbers[0]}"
        ERR.print(
            f"{done} of {number} done, left {format_duration(spent / done * (number - done))}{what}", soft_wrap=True
        )
    if not as_json:
        shown = [(*values, *numbers) for values, numbers in sorted(rows.items())]
        show(make_table("Runs", (*keys, "accuracy", "best", "balanced", "epsilon spent"), shown))
    if table and job.out:
        table.close()
        _say_where(job.out)


def _of_sweep(result: Mapping[str, Any], keys: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the values of the swept keys, and the run's numbers as text."""
    words = dict(word.split("=", 1) for word in result["overrides"])
    private = result.get("privacy") or {}
    names = (("global_accuracy", "withheld"), ("best_global_accuracy", "best_withheld"))
    numbers = [_share(result, name, hidden) for name, hidden in (*names, ("balanced_accuracy", "balanced_withheld"))]
    spent = private.get("epsilon")
    return tuple(words[key] for key in keys), (*numbers, "-" if spent is None else f"{spent:.3f}")


def _share(result: Mapping[str, Any], name: str, hidden: str) -> str:
    point = result.get(name)
    return "withheld" if result.get(hidden) else "-" if point is None else f"{100 * point:.2f} %"
