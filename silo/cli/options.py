"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_core.errors import ConfigError, StateError
from fl_core.text import composed, decoded, read_text
from service_core.command_line import COMMON, RARE, Depends
from service_core.operations.logs import VARIABLE, LogFormat
from service_core.storage.unfinished import require_finished
from silo.storage.home import Home
from silo.storage.store import SiloStore

if TYPE_CHECKING:
    from service_core.loopback import LoopbackAddress

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="The silo's folder. Default: $CONSILIUM_SILO_HOME, else ~/.consilium/silo.",
        rich_help_panel=COMMON,
    ),
]


def _any_home(home: HomeOption = None) -> Home:
    return Home.at(home)


def home_of(home: HomeOption = None) -> Home:
    """Return the silo's home; raises StateError (E-STATE-26) if a command on it was interrupted."""
    require_finished((place := Home.at(home)).path)
    return place


@contextmanager
def open_store(database: Path, accept_loss: bool = False) -> Iterator[SiloStore]:
    if not database.parent.exists():
        raise StateError(
            "E-STATE-44",
            f"there is no silo's home in {database.parent}: run `silo join TOKEN`, or name its home",
        )
    store = SiloStore(database, accept_loss=accept_loss)
    try:
        yield store
    finally:
        store.close_database()


SiloHome = Annotated[Home, Depends(home_of)]
AnyHome = Annotated[Home, Depends(_any_home)]
"""Also accepts a home with an interrupted command, for commands that finish or inspect it."""
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        help=f"Log to standard error, as text or JSON, instead of showing progress. Default: ${VARIABLE}.",
        rich_help_panel=RARE,
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus on this loopback port, for instance 9465. Default: off.",
        rich_help_panel=RARE,
    ),
]
MetricsBudgetsOption = Annotated[
    bool,
    typer.Option(
        "--metrics-budgets",
        help="With --metrics: also show how much of each budget is spent. Everybody on this machine can read it.",
        rich_help_panel=RARE,
    ),
]
AnswerAfterOption = Annotated[
    float,
    typer.Option(
        "--answer-after",
        help="In private runs, send answers only at multiples of this many seconds of training.",
        rich_help_panel=RARE,
    ),
]
PageOption = Annotated[
    bool, typer.Option("--page", help="Also show this hospital's page; page.html in the home opens it, as `silo page`.")
]
DataRootOption = Annotated[
    Path | None,
    typer.Option(
        "--data-root", help="Folder of named data sets. Default: $CONSILIUM_DATA_ROOT.", rich_help_panel=COMMON
    ),
]

Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="The run's classes, in the same order as in the run, for instance nevus,melanoma.",
        metavar="A,B,...",
    ),
]
ImageCacheOption = Annotated[
    float,
    typer.Option(
        "--image-cache",
        help="Size of the cache of decoded images in the home, in GiB; 0: no cache. It is deleted when the service "
        "stops.",
        rich_help_panel=RARE,
    ),
]
FeatureCacheOption = Annotated[
    float,
    typer.Option(
        "--feature-cache",
        help="Size of the cache of features of frozen models in the home, in GiB; 0: refuse runs that need it.",
        rich_help_panel=RARE,
    ),
]
LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="How to start the worker process, which reads images: local, 'slurm OPTIONS' with options of srun, or "
        "'command ...' with your own command, such as 'command podman run -i ... {worker}' "
        "(docs/operations/launchers.md).",
        metavar="LAUNCHER",
        rich_help_panel=RARE,
    ),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        help="Number of processes that share each training step. If --device is a GPU, each uses its own GPU.",
        rich_help_panel=RARE,
    ),
]
PulseFloorOption = Annotated[
    float,
    typer.Option(
        "--pulse-floor",
        help="Minimum seconds between heartbeats, even if the coordinator asks for less.",
        rich_help_panel=RARE,
    ),
]


def metrics_address(text: str | None, budgets: bool) -> LoopbackAddress | None:
    """Read --metrics; raises ConfigError (E-CFG-02) on an address other than loopback, or on budgets without one."""
    from service_core.loopback import LoopbackAddress

    if budgets and text is None:
        raise ConfigError("E-CFG-02", "--metrics-budgets needs --metrics PORT: add it")
    return None if text is None else LoopbackAddress.parse(text)


def text_of(file: Path | None) -> str:
    """Read a file, or standard input for None or "-"; raises ConfigError (E-CFG-02)."""
    try:
        return decoded(sys.stdin.buffer.read()) if file is None or str(file) == "-" else read_text(file)
    except (OSError, ValueError) as error:
        raise ConfigError("E-CFG-02", f"cannot read {file}: {error}. Expected a text file: check the path") from None


def label_space(text: str | None) -> list[str] | None:
    return None if text is None else [composed(name.strip()) for name in text.split(",")]


def grey_window(text: str | None) -> tuple[float, float] | None:
    """Read CENTRE,WIDTH; raises ConfigError (E-CFG-02)."""
    if text is None:
        return None
    center, _, width = text.partition(",")
    try:
        return float(center), float(width)
    except ValueError:
        raise ConfigError("E-CFG-02", f"expected --window CENTRE,WIDTH, found {text[:40]!r}: correct it") from None
