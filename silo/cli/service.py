"""`silo serve`, and the audit log of the requests to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service_core import startup
from service_core.audit_log import commands as audit_log
from service_core.command_line import Json, command
from service_core.operations import logs
from silo.cli.options import (
    AnswerAfterOption,
    DataRootOption,
    FeatureCacheOption,
    ImageCacheOption,
    LauncherOption,
    LogFormatOption,
    MetricsBudgetsOption,
    MetricsOption,
    PageOption,
    ProcessesOption,
    PulseFloorOption,
    SiloHome,
    home_of,
    label_space,
    metrics_address,
)
from silo.identity.identity import SiloIdentity


@command
def serve(
    data: Annotated[
        str, typer.Option("--data", help="Data to serve, such as folder:images or isic2019/center3.", metavar="REF")
    ],
    data_root: DataRootOption = None,
    device: Annotated[
        str, typer.Option("--device", help="Device to train on: cpu, cuda, cuda:N, or auto for a GPU if there is one.")
    ] = "auto",
    nominal_size: Annotated[
        float | None,
        typer.Option(
            "--nominal-size",
            help="Number of training examples (or patients) to declare to the coordinator. Default: the true number, "
            "rounded up.",
        ),
    ] = None,
    holds: Annotated[
        str | None,
        typer.Option(
            "--holds",
            help="Classes A,B,... to declare to the coordinator. A round waits longer for the only hospital with a "
            "class. A private run must include all of them, or all of [privacy] labels if the policy has these.",
        ),
    ] = None,
    no_prototypes: Annotated[bool, typer.Option("--no-prototypes", help="Never send class prototypes.")] = False,
    answer_after: AnswerAfterOption = 0.0,
    pulse_floor: PulseFloorOption = 1.0,
    image_cache: ImageCacheOption = 4.0,
    feature_cache: FeatureCacheOption = 4.0,
    processes: ProcessesOption = 1,
    launcher: LauncherOption = "local",
    metrics: MetricsOption = None,
    metrics_budgets: MetricsBudgetsOption = False,
    show_page: PageOption = False,
    log_format: LogFormatOption = None,
    as_json: Json = False,
    *,
    home: SiloHome,
) -> None:
    """Take part in runs until stopped.

    After Ctrl-C or SIGTERM, a running upload is finished, training stops and is repeated later, and finished work stays
    on disk. A second Ctrl-C ends the service at once. Image size, classes and schedule come from each run's manifest.
    """
    startup.end_on_interrupt()
    from silo.cli import foreground
    from silo.settings import SiloSettings

    settings = SiloSettings(
        home,
        data,
        data_root,
        device,
        nominal_size,
        not no_prototypes,
        answer_after,
        pulse_floor,
        tuple(label_space(holds) or ()),
        metrics_address(metrics, metrics_budgets),
        metrics_budgets,
        image_cache,
        feature_cache,
        processes,
        launcher=launcher,
    )
    foreground.serve(settings, as_json, log_format=logs.chosen_format(log_format), page=show_page)


def _log_of(home: Path | None) -> audit_log.LogOwner:
    place = home_of(home).path
    identity = SiloIdentity(place)
    return audit_log.LogOwner(place, lambda: identity.load().identity.uri, identity.authority_pem)


log = audit_log.make_app(_log_of, help="The audit log: who did what, when, and with which result.")
