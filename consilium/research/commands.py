"""Commands that need no service: simulate, demo, methods, models, data. Heavy imports happen when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilium.research.simulate import EVERY
from coordinator.cli.options import Trackers
from fl_core.errors import ConfigError
from service_core.command_line import RARE, Json, command
from service_core.console import CommandResult, make_table
from service_core.progress import Steps


@command
def simulate(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, such as method=fedmr data=digits federation=p5c2.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run all combinations of values: seed=0,1,2.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="With -m: number of simulations at a time. 0 means one per core.", min=0)
    ] = 0,
    engine: Annotated[
        str,
        typer.Option(
            help="Where silos train: `local` is on this machine, `ray` on several machines.", rich_help_panel=RARE
        ),
    ] = "local",
    workers: Annotated[
        int,
        typer.Option(
            help="Number of processes that train the silos of a round. 0 uses all cores if that is faster.",
            min=0,
            rich_help_panel=RARE,
        ),
    ] = 0,
    device: Annotated[str, typer.Option(help="Device to train on: cpu, cuda, cuda:N or auto.")] = "cpu",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Use only computations that give the same bits each time.", rich_help_panel=RARE
        ),
    ] = False,
    spill: Annotated[
        Path | None, typer.Option(help="Folder for the silos' states, to save memory.", rich_help_panel=RARE)
    ] = None,
    fine_tune: Annotated[
        int,
        typer.Option(
            help="Number of epochs to fine-tune the best global model at each silo, to measure personalised accuracy "
            "(PA).",
            min=0,
            rich_help_panel=RARE,
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, summary, model and plot. An interrupted simulation continues from there."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help=f"With --out: number of rounds between two checkpoints. Default: {EVERY}. One is also written at the "
            "start of a round if the last one is a minute old.",
            min=1,
            rich_help_panel=RARE,
        ),
    ] = None,
    config_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with your own configurations, in the same structure as configs/.", rich_help_panel=RARE
        ),
    ] = None,
    tracker: Trackers = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of a running Ray cluster. Default: start one here.", rich_help_panel=RARE),
    ] = None,
    ray_actors: Annotated[
        int, typer.Option(help="Number of silos that train at the same time.", min=1, rich_help_panel=RARE)
    ] = 2,
    ray_gpus: Annotated[
        float, typer.Option(help="GPUs per actor. A fraction lets actors share one.", min=0, rich_help_panel=RARE)
    ] = 0.0,
    as_json: Json = False,
) -> CommandResult | None:
    """Simulate a federation in this process, with the code that hospitals run.

    To partition your own images among simulated hospitals: data=folder data.path=/data/images (one folder per class),
    or data=manifest data.path=/data/images.csv (columns path, label, group, split), with federation=p5c2 or another
    partition. If you give several paths, each is one hospital: data.path=[north/images,south/images].
    """
    from consilium.research.engines.ray import Cluster
    from consilium.research.simulate.answer import answer
    from consilium.research.simulate.engine import SimulationEngine
    from consilium.research.simulate.runner import SimulationJob

    if checkpoint_every is not None and out is None:
        raise ConfigError("E-CFG-08", "--checkpoint-every needs --out FOLDER for the checkpoints: add it")
    cluster = Cluster(ray_address, ray_actors, gpus=ray_gpus)
    simulator = SimulationEngine(engine, device, spill, deterministic, cluster, workers=workers)
    job = SimulationJob(simulator, data_root, config_dir, fine_tune, out, checkpoint_every or EVERY, tracker or ())
    return answer(job, overrides or [], jobs if multirun else None, as_json)


@command
def methods(
    papers: Annotated[
        bool, typer.Option("--papers", help="Show paper, equations, requirements and benchmark tables of each method.")
    ] = False,
) -> CommandResult:
    """List the methods: what the server must see, whether the loss mixes examples, and what a silo sends."""
    from consilium.research import listings

    return listings.papers() if papers else listings.methods()


@command
def models(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Count parameters for these examples, such as data=isic2019.")
    ] = None,
) -> CommandResult:
    """List the models with their numbers of parameters, for the data of the papers or for the chosen data."""
    from consilium.research import listings

    return listings.models(overrides or ())


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the summary, the page and the plot.")] = Path("runs/demo"),
    rounds: Annotated[
        int,
        typer.Option(
            help="Number of rounds for FedAvg and FedGELA. The other two methods need one and two rounds.", min=1
        ),
    ] = 20,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print each event of the runs.")] = False,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine: a coordinator, six hospitals, four models. It ends with a page."""
    with Steps(quiet=as_json or verbose) as steps:
        steps.show("Set-up", 0, 13, "loads PyTorch")
        from consilium.research.demo import run_demo

        status = run_demo(out, rounds, steps, as_json, verbose)
    raise typer.Exit(status)


data = typer.Typer(no_args_is_help=True, help="Look at data before a run.")
data.callback()(lambda: None)


@data.command()
@command
def split(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="The data set and how it is partitioned among silos, such as data=cifar10 federation=p10c3."
        ),
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Use the published class counts. No data on disk are needed.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the examples of each silo and class into this PNG file.")
    ] = None,
) -> CommandResult:
    """Show how many training examples of each class each silo gets, as a table and as a picture."""
    from consilium.research.simulate import partition_plot
    from coordinator.config.hydra_config import compose_spec

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
