"""`coordinator export` and `coordinator card`: export a model with its card, and check a card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.report.card import Card, stated
from consilium.report.commands import OwnRecord, make_app
from consilium.report.signed_card import SignedCard
from coordinator.cli.options import Extensions, Place, home_of
from coordinator.cli.runs import Run
from coordinator.lead.client import LeadClient, credentials_of
from coordinator.pki.authority import Authority
from coordinator.storage.store import CoordinatorStore
from service_core.command_line import command
from service_core.console import CommandResult
from service_core.pki.identity import identity_of

if TYPE_CHECKING:
    from consilium.report.export import ExportedFiles


@command
def export(
    run: Run = "latest",
    out: Annotated[Path, typer.Option(help="Folder for the model and its card.")] = Path("models"),
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Also write the model as onnx, or as torch (a program that needs only torch). May be repeated.",
        ),
    ] = None,
    licence: Annotated[
        str,
        typer.Option(
            help="Licence of the model, as an SPDX name or in your words, for the card and the files of --format."
        ),
    ] = "",
    intended_use: Annotated[
        str, typer.Option("--intended-use", help="What the model is for, in your words, for the card.")
    ] = "",
    survey: Annotated[
        str | None,
        typer.Option("--survey", metavar="RUN", help="Include the answers to this survey in the card."),
    ] = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature", help="Estimate a temperature from the hospitals' counts, for `consilium predict`."
        ),
    ] = False,
    extension: Extensions = None,
    *,
    home: Place,
) -> CommandResult:
    """Write a run's newest model as safetensors, with its card; with --format also for other programs.

    RUN.md and RUN.card.html are the card for people. RUN.card.json is the card with your signature: anybody who has the
    authority's fingerprint can check it (card verify) and write documents from it (card write).
    """
    from fl_core.extensions import loading

    loading.load_distributions(extension)
    wanted = ExportOptions.of(formats or (), licence, intended_use, survey, temperature)
    with closing(LeadClient.open(home)) as client:
        made, digest = export_run(client, home, run, out, wanted)
    files = {"model": str(made.model), "card": str(made.card), "others": [str(file) for file in made.others]}
    files |= {"signed_card": str(made.signed_card), "card_page": str(made.card_page)}
    shown = f"wrote {', '.join(map(str, (made.model, *made.others)))} and {made.card}; signed card {made.signed_card}, "
    shown += f"its page {made.card_page}"
    return CommandResult({**files, "model_digest": digest}, [shown])


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export. formats: other than safetensors   survey: a survey whose answers the card includes."""

    formats: Sequence[str]
    licence: str
    intended_use: str
    survey: str | None
    temperature: bool

    @classmethod
    def of(
        cls, formats: Sequence[str], licence: str, intended_use: str, survey: str | None, temperature: bool
    ) -> ExportOptions:
        """Check options before fetching: the formats' libraries are installed, and statements are one short line."""
        from consilium.model import portable

        others = [name for name in formats if name != "safetensors"]
        portable.require(others)
        purpose, terms = stated(intended_use, "--intended-use"), stated(licence, "--licence")
        return cls(others, terms, purpose, survey, temperature)


def export_run(
    client: LeadClient, home: Path, run: str, out: Path, options: ExportOptions
) -> tuple[ExportedFiles, str]:
    """Write a run's newest model and its card, as `coordinator export`; return the files and the model's digest.

    home: contains the key and certificate of the signing lead
    """
    from consilium.report.export import export_model, fetched
    from consilium.report.facts import Statement, survey_of
    from coordinator.lead import surveys
    from coordinator.lead.run_detail import check_detail

    with fetched(client, run) as stored:
        answered = None
        if options.survey is not None:
            survey = client.show(options.survey)
            answers = surveys.fetched(client, survey)
            answered = survey_of(check_detail(stored.detail), check_detail(survey), survey, answers)
        said, lead = Statement(options.intended_use, options.licence, answered), credentials_of(home)
        silos = client.silos().silos
        detail, state, weights = stored
        files = export_model(
            detail, state, out, lead, said, silos, options.formats, weights, temperature=options.temperature
        )
    return files, detail.info.model_digest


# ---- a model's card --------------------------------------------------------------------------------------------------


def _authority_fingerprint(home: Path | None) -> str:
    return Authority.open(home_of(home)).fingerprint()


def _lead_in_force(home: Path | None, signed: SignedCard, card: Card) -> list[OwnRecord]:
    """Check whether the signing lead has been revoked. Only the coordinator has the list of leads."""
    signer = identity_of(signed.certificate)
    with closing(CoordinatorStore(home_of(home))) as store:
        listed = next((lead for lead in store.members.leads.all() if lead.serial == signer.serial), None)
    if listed is None:
        return [OwnRecord("lead", f"{card.written_by} is not in this home's list of leads", agrees=False)]
    revoked = listed.revoked is not None
    return [OwnRecord("lead", f"revoked: {listed.revoked}" if revoked else "in force", agrees=not revoked)]


card = make_app(
    _authority_fingerprint,
    _lead_in_force,
    help="Check the signed card of an exported model, and write documents from it.",
)
