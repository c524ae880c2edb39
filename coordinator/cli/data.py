"""Commands on data sets, without a service: how a federation splits them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Json
from coordinator.config.hydra_config import compose_spec
from coordinator.lead import console
from coordinator.simulate import partition_plot
from service_core.console import make_table, print_json

data = typer.Typer(no_args_is_help=True, help="Look at data before a run.")
data.callback()(lambda: None)


@data.command()
def split(
    overrides: Annotated[list[str] | None, typer.Argument(help="data=cifar10 federation=p10c3 ...")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the data sets.")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Deal the published class counts; needs no data on disk.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw silos by classes into this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show which silo gets how many training examples of which class, as a table and as a picture."""
    spec = compose_spec(overrides or [])
    found = partition_plot.published(spec) if published else partition_plot.on_disk(spec, data_root)
    if plot is not None:
        partition_plot.draw(found, plot)
    if as_json:
        print_json(found.as_json() | ({"plot": str(plot)} if plot else {}))
        return
    wide = len(found.classes) > partition_plot.SHOWN
    head = ("silo", "train", "test", "classes", *(() if wide else found.classes))
    rows = [
        (
            name,
            f"{sum(train)}",
            f"{sum(test)}",
            str(sum(n > 0 for n in train)),
            *([] if wide else (str(n or ".") for n in train)),
        )
        for name, train, test in zip(found.silos, found.train, found.test, strict=True)
    ]
    console.OUT.print(make_table(found.title, head, rows))
    if plot is not None:
        console.OUT.print(f"drawn: {plot}")
