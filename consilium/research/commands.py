"""Commands without a service: simulate, demo, methods, models, explain, data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from consilium.report.papers import CLAIMS, TABLES, Claim, Paper, claims_of, needs, paper_of
from consilium.research.engines.ray import Cluster
from consilium.research.simulate import partition_plot
from consilium.research.simulate.checkpoints import EVERY
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.results import Result, left_out
from consilium.research.simulate.round_printer import RoundPrinter
from consilium.research.simulate.runner import SimulationJob
from consilium.research.simulate.sweep import SweepTable, combinations, sweep, swept
from coordinator.cli.options import Trackers
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import schema_of
from coordinator.config.run_spec import RunSpec
from coordinator.lead import tables
from fl_core.errors import ConfigError
from fl_core.extensions import registry
from fl_core.methods import METHODS
from fl_core.models import MODELS, ModelFacts, describe
from fl_core.training import clinical_report
from fl_core.types.records import update_outcomes
from privacy.accounting.measures import EvaluationResult, plain
from service_core.command_line import Json, command
from service_core.console import ERR, CommandResult, format_duration, make_table, print_json, show


@command
def simulate(
    overrides: Annotated[list[str] | None, typer.Argument(help="method=fedmr data=digits federation=p5c2 ...")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the data sets.")] = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="All combinations: seed=0,1,2 ...")] = False,
    jobs: Annotated[int, typer.Option(help="With -m: simulations at a time; 0: one per core.", min=0)] = 0,
    engine: Annotated[str, typer.Option(help="local; ray: in actors, on several machines.")] = "local",
    workers: Annotated[
        int, typer.Option(help="Processes for the silos of a round; 0: all cores where that pays.", min=0)
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    deterministic: Annotated[bool, typer.Option(help="Only kernels that repeat to the last bit.")] = False,
    spill: Annotated[Path | None, typer.Option(help="Folder for silos' states, when memory is short.")] = None,
    fine_tune: Annotated[int, typer.Option(help="Epochs of the best global model at each silo, for PA.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, summary, model, picture; of a sweep a folder each. Goes on where it was."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help=f"With --out: rounds that a kill costs at most ({EVERY}, or a minute's).", min=1)
    ] = None,
    config_dir: Annotated[Path | None, typer.Option(help="Your own configurations, laid out as configs/.")] = None,
    tracker: Trackers = None,
    ray_address: Annotated[str | None, typer.Option(help="Of a running Ray cluster; none starts one here.")] = None,
    ray_actors: Annotated[int, typer.Option(help="Silos at work at a time.", min=1)] = 2,
    ray_gpus: Annotated[float, typer.Option(help="GPUs per actor; fractions share one.", min=0)] = 0.0,
    as_json: Json = False,
) -> CommandResult | None:
    """Run a federation in this process, with the code that the hospitals run.

    On your own images, dealt to simulated hospitals: data=folder data.path=/data/images (one folder per class), or
    data=manifest data.path=/data/images.csv (columns path, label, group, split), with federation=p5c2 or another.
    Several paths are a hospital each: data.path=[north/images,south/images].
    """
    if checkpoint_every is not None and out is None:
        raise ConfigError(
            "E-CFG-08", "expected --out FOLDER with --checkpoint-every, found none: checkpoints lie there"
        )
    cluster = Cluster(ray_address, ray_actors, gpus=ray_gpus)
    simulator = SimulationEngine(engine, device, spill, deterministic, cluster, workers=workers)
    job = SimulationJob(simulator, data_root, config_dir, fine_tune, out, checkpoint_every or EVERY, tracker or ())
    return _simulate(job, overrides or [], jobs if multirun else None, as_json)


def _simulate(job: SimulationJob, words: Sequence[str], sweep_jobs: int | None, as_json: bool) -> CommandResult | None:
    if sweep_jobs is not None:
        _sweep(words, job, sweep_jobs, as_json)
        return None
    if swept(words):
        raise ConfigError("E-CFG-08", f"expected one value per key, found {' '.join(words)}: add -m for all of them")
    try:
        result = job.run(words, None if as_json else RoundPrinter)
    except KeyboardInterrupt:
        if job.out is not None:
            ERR.print("interrupted: the same command goes on at its newest checkpoint")
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
            yield f"their mean accuracy on the whole test set, which papers call GA: {plain(scores['ga']).text()}"


def _say_where(out: Path) -> None:
    less = "".join(f"; without {file}, which needs {extra}" for file, extra in left_out().items())
    ERR.print(f"results in {out}{less}", soft_wrap=True)


def _sweep(words: Sequence[str], job: SimulationJob, jobs: int, as_json: bool) -> None:
    """Print a table of the runs, or one JSON line per run as it ends; on stderr how far the sweep is."""
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
    """Return the values of the swept keys, and what a line says of their run."""
    words = dict(word.split("=", 1) for word in result["overrides"])
    private = result.get("privacy") or {}
    names = (("global_accuracy", "withheld"), ("best_global_accuracy", "best_withheld"))
    numbers = [_share(result, name, hidden) for name, hidden in (*names, ("balanced_accuracy", "balanced_withheld"))]
    spent = private.get("epsilon")
    return tuple(words[key] for key in keys), (*numbers, "-" if spent is None else f"{spent:.3f}")


def _share(result: Mapping[str, Any], name: str, hidden: str) -> str:
    point = result.get(name)
    return "withheld" if result.get(hidden) else "-" if point is None else f"{100 * point:.2f} %"


@command
def methods(
    papers: Annotated[
        bool, typer.Option("--papers", help="Which paper and equations, what it needs, its tables.")
    ] = False,
) -> CommandResult:
    """List the methods: what the server must see, whether the loss mixes examples, what a silo sends."""
    if papers:
        return _papers()
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "exposure": "each" if method.unsummed_parts else "sum",
            "coupling": method.coupling.value,
            "sends": list(method.sends),
            "personal_model": method.has_personal_model,
            "summary": (type(method).__doc__ or "").split("\n")[0],
        }
        for name, method in ((name, kind()) for name, kind in METHODS.items())
    ]
    head = ("method", "server sees", "loss per", "silo sends", "personal model", "")
    shown = [
        r | {"sends": ", ".join(r["sends"]), "personal_model": "yes" if r["personal_model"] else "no"} for r in rows
    ]
    tables = [make_table("Methods", head, [tuple(r.values()) for r in shown])]
    others = [(point.kind, point.name, point.reference) for point in registry.entry_points()]
    if others:
        tables.append(make_table("Installed extensions", ("kind", "name", "place"), others))
    return CommandResult(rows, tables)


def _papers() -> CommandResult:
    """Say where each method is from, what a run must offer it, what of its paper reproduces, which tables have it."""
    rows: list[dict[str, Any]] = []
    for name, kind in METHODS.items():
        paper = asdict(paper_of(kind) or Paper("", "", "", ""))
        facts = {"tables": list(TABLES.get(name, ())), "claims": [asdict(claim) for claim in claims_of(name)]}
        rows.append({"name": name, **paper, "needs": needs(kind()), **facts})
    lines = [
        (
            str(row["name"]),
            f"{row['title']}, {row['venue']}" if row["title"] else "a lower bound, from no paper",
            str(row["where"]),
            ", ".join(row["needs"]) or "-",
            _verdicts(claims_of(row["name"])),
            ", ".join(row["tables"]) or "-",
        )
        for row in rows
    ]
    claims = [(c.method, c.claim, c.printed, c.ours, _verdict(c), c.scale or "-") for c in CLAIMS]
    return CommandResult(
        rows,
        [
            make_table("Papers", ("method", "paper", "where", "needs", "reproduces", "tables"), lines),
            make_table("Claims", ("paper of", "claim", "printed", "ours, points", "verdict", "scale"), claims),
            "tables: python -m benchmarks.paper table=NAME; how claims are judged: benchmarks/paper/README.md",
        ],
    )


def _verdicts(found: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in found)
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())) or "-"


def _verdict(claim: Claim) -> str:
    return f"{claim.verdict}: {claim.why}" if claim.why else claim.verdict


@command
def models(
    overrides: Annotated[list[str] | None, typer.Argument(help="data=isic2019 ...: count for these examples")] = None,
) -> CommandResult:
    """List the models with their parameter counts: as the papers use them, or those that take the chosen data."""
    rows = _chosen_rows(compose_spec(overrides)) if overrides else _published_rows()
    head = ("model", "data", "example", "classes", "feature dimension", "parameters", "with buffers", "paper, options")
    lines = [
        (
            str(r["name"]),
            str(r["data"]),
            "x".join(map(str, r["shape"])),
            str(r["classes"]),
            str(r["feature_dim"]),
            f"{r['parameters']:,}",
            f"{r['total']:,}",
            " ".join([str(r["paper"]), *(f"{k}={v}" for k, v in r["options"].items())]),
        )
        for r in rows
    ]
    return CommandResult(rows, [make_table("Models", head, lines)])


def _published_rows() -> list[dict[str, Any]]:
    from consilium.report.papers import SETTINGS

    return [_row(s.facts(), s.paper, s.data, s.shape, s.classes, s.options) for s in SETTINGS]


def _chosen_rows(spec: RunSpec) -> list[dict[str, Any]]:
    schema = schema_of(spec)
    rows = []
    for name in dict.fromkeys([*MODELS, str(spec.model["name"])]):
        options = {k: v for k, v in spec.model.items() if k != "name"} if name == spec.model["name"] else {}
        try:
            facts = describe(name, schema, options)
        except ConfigError:  # this architecture cannot take examples of this shape
            continue
        rows.append(_row(facts, "", str(spec.data["name"]), schema.shape, len(schema.classes), options))
    return rows


def _row(
    facts: ModelFacts, paper: str, data: str, shape: Sequence[int], classes: int, options: Mapping[str, object]
) -> dict[str, Any]:
    return {
        "name": facts.name,
        "paper": paper,
        "data": data,
        "shape": list(shape),
        "classes": classes,
        "options": dict(options),
        "feature_dim": facts.feature_dim,
        "parameters": facts.parameters,
        "total": facts.total_with_buffers,
    }


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the summary and the picture.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(help="Rounds per method.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """Run a federation on this machine: a coordinator, six hospitals, mutual TLS; FedAvg, FedGELA, that in private."""
    from consilium.research.demo import run_demo

    raise typer.Exit(run_demo(out, rounds, as_json))


data = typer.Typer(no_args_is_help=True, help="Look at data before a run.")
data.callback()(lambda: None)


@data.command()
@command
def split(
    overrides: Annotated[list[str] | None, typer.Argument(help="data=cifar10 federation=p10c3 ...")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the data sets.")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Deal the published class counts; needs no data on disk.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw silos by classes into this PNG file.")] = None,
) -> CommandResult:
    """Show which silo gets how many training examples of which class, as a table and as a picture."""
    spec = compose_spec(overrides or [])
    partition = partition_plot.published(spec) if published else partition_plot.on_disk(spec, data_root)
    if plot is not None:
        partition_plot.draw(partition, plot)
    wide = len(partition.classes) > partition_plot.SHOWN
    head = ("silo", "train", "test", "classes", *(() if wide else partition.classes))
    rows = [
        (
            name,
            f"{sum(train)}",
            f"{sum(test)}",
            str(sum(n > 0 for n in train)),
            *([] if wide else (str(n or ".") for n in train)),
        )
        for name, train, test in zip(partition.silos, partition.train, partition.test, strict=True)
    ]
    drawn = [] if plot is None else [f"drawn: {plot}"]
    return CommandResult(
        partition.as_json() | ({"plot": str(plot)} if plot else {}), [make_table(partition.title, head, rows), *drawn]
    )
