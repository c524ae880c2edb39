"""Commands without a service: simulate, demo, methods, models, data. They import what computes when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilium.research.simulate import EVERY
from coordinator.cli.options import Trackers
from fl_core.errors import ConfigError
from service_core.command_line import Json, command
from service_core.console import CommandResult, make_table


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
    from consilium.research.engines.ray import Cluster
    from consilium.research.simulate.answer import answer
    from consilium.research.simulate.engine import SimulationEngine
    from consilium.research.simulate.runner import SimulationJob

    if checkpoint_every is not None and out is None:
        raise ConfigError(
            "E-CFG-08", "expected --out FOLDER with --checkpoint-every, found none: checkpoints lie there"
        )
    cluster = Cluster(ray_address, ray_actors, gpus=ray_gpus)
    simulator = SimulationEngine(engine, device, spill, deterministic, cluster, workers=workers)
    job = SimulationJob(simulator, data_root, config_dir, fine_tune, out, checkpoint_every or EVERY, tracker or ())
    return answer(job, overrides or [], jobs if multirun else None, as_json)


@command
def methods(
    papers: Annotated[
        bool, typer.Option("--papers", help="Which paper and equations, what it needs, its tables.")
    ] = False,
) -> CommandResult:
    """List the methods: what the server must see, whether the loss mixes examples, what a silo sends."""
    from consilium.research import listings

    return listings.papers() if papers else listings.methods()


@command
def models(
    overrides: Annotated[list[str] | None, typer.Argument(help="data=isic2019 ...: count for these examples")] = None,
) -> CommandResult:
    """List the models with their parameter counts: as the papers use them, or those that take the chosen data."""
    from consilium.research import listings

    return listings.models(overrides or ())


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
