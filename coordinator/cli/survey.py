"""`coordinator survey`: ask hospitals about their records before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Place
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError, StateError
from fl_core.errors.extras import load
from fl_core.types.survey import QUESTIONS, parse_questions
from protos.consilium.v1 import federation_pb2 as pb
from service_core.command_line import Json, command
from service_core.console import ERR, CommandResult

if TYPE_CHECKING:
    from coordinator.lead.submission import RunSubmission

_IMAGES = {"folder", "manifest", "isic2019"}

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="QUESTION... [KEY=VALUE...]",
        help=f"Questions ({', '.join(QUESTIONS)}), some with a bin width (ages:5). Then settings, as for `run`: "
        'data=folder "data.classes=[a,b]", secagg=off, privacy=dp_record.',
    ),
]


@command
def survey(
    words: Words = None,
    of: Annotated[
        str | None, typer.Option("--of", metavar="RUN", help="Show the answers of an earlier survey.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the answers: a .png or a .svg file.")] = None,
    by_hospital: Annotated[
        bool,
        typer.Option(
            "--by-hospital",
            help="Show each hospital's answers separately, if policies allow it. Not with secure aggregation.",
        ),
    ] = False,
    as_json: Json = False,
    *,
    home: Place,
) -> CommandResult:
    """Ask hospitals for counts of their records: classes, patients, sizes, ages. Each hospital decides per question.

    Hospitals whose policy.toml allows no questions ([survey] allow) are left out. Counts of fewer than 10 patients are
    suppressed. With privacy=dp_record, counts have noise, and each hospital's ledger is charged for them once.
    """
    from coordinator.lead.surveys import fetched

    draw = None if picture is None else load("consilium.research.plots:survey_drawing", "--picture")(picture)
    if (of is None) == (not words):
        raise ConfigError("E-CFG-02", "expected either questions or --of RUN: give one of them")
    with closing(LeadClient.open(home)) as client:
        run_id = of or _asked(client, words or [], by_hospital, as_json)
        detail = client.show(run_id)
        if of is None:
            require_finished(detail.info)
        answers = fetched(client, detail)
    if draw is not None:
        draw(answers)
    value = {"run": detail.info.run_id, "manifest_digest": detail.info.manifest_digest, **answers.as_json()}
    notes = [f"wrote {picture}"] if picture is not None else []
    return CommandResult(value, answers.lines(), notes)


def require_finished(info: pb.RunInfo) -> None:
    """Raise StateError (E-RUN-11) with the reason why a survey that was asked has ended without answers."""
    if info.state != "finished":
        raise StateError(
            "E-RUN-11",
            f"{info.run_id} ended without answers ({info.state}): {info.reason or 'no reason was recorded'}",
        )


def _asked(client: LeadClient, words: list[str], by_hospital: bool, as_json: bool) -> str:
    """Submit a survey and wait for its end; return its run id."""
    from coordinator.cli.runs import follow

    info = survey_request(words, by_hospital).submit(client)
    if not as_json:
        ERR.print(f"asked as {info.run_id}; manifest {info.manifest_digest[:16]}", soft_wrap=True)
    follow(client, info.run_id, quiet=as_json)
    return info.run_id


def survey_request(words: Sequence[str], by_hospital: bool = False) -> RunSubmission:
    """Put a survey together. words: questions and keys of a run; raises as `survey_words` and `RunSubmission.of`."""
    from coordinator.lead.submission import RunSubmission, spec_of

    return RunSubmission.of(spec_of(survey_words(words, by_hospital)))


def survey_words(words: Sequence[str], by_hospital: bool = False) -> list[str]:
    """Turn questions and `key=value` words into the words of a run; raises ConfigError as `parse_questions`.

    A run needs a model, which a survey never trains or sends: for images, a small one fills the place.
    """
    questions = parse_questions(",".join(word for word in words if "=" not in word))
    more = [word for word in words if "=" in word]
    keys = {word.lstrip("+").partition("=")[0] for word in more}
    data = next((word.partition("=")[2] for word in more if word.startswith("data=")), "")
    small = ["model=simple_cnn", "data.image_size=32"] if data in _IMAGES else []
    settings = ["method=survey", f"method.questions='{','.join(map(str, questions))}'", "aggregator=mean", *small]
    settings += ["method.by_hospital=true", "secagg=off"] if by_hospital else []
    return [word for word in settings if word.partition("=")[0] not in keys] + more
