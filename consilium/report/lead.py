"""`coordinator export` and `coordinator card`: a model with its card, and the card beside the home's own records."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from consilium.report.card import Card, stated
from consilium.report.commands import OwnRecord, make_app
from consilium.report.signed_card import SignedCard
from coordinator.cli.options import Extensions, Place, home_of
from coordinator.cli.runs import Run
from coordinator.lead.client import LeadClient, credentials_of
from coordinator.pki.authority import Authority
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import ConfigError
from service_core.command_line import command
from service_core.console import CommandResult
from service_core.pki.identity import identity_of


@command
def export(
    run: Run = "latest",
    out: Annotated[Path, typer.Option(help="Folder for the model and its card.")] = Path("models"),
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help="Also write the model as onnx, or as torch (a program of plain torch). May be repeated."
        ),
    ] = None,
    licence: Annotated[
        str,
        typer.Option(help="Licence of the model, an SPDX name or your words, for the card and the files of --format."),
    ] = "",
    intended_use: Annotated[
        str, typer.Option("--intended-use", help="What the model is for, in your words, for the card.")
    ] = "",
    survey: Annotated[
        str | None,
        typer.Option("--survey", metavar="RUN", help="Repeat in the card what hospitals answered to this survey."),
    ] = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature", help="Let `consilium predict` use a temperature estimated from hospitals' counts."
        ),
    ] = False,
    extension: Extensions = None,
    *,
    home: Place,
) -> CommandResult:
    """Write a run's newest model as safetensors, with its card; with --format also for other programs.

    RUN.md and RUN.card.html are the card for people, and RUN.card.json is the card as you signed it: whoever has the
    authority's fingerprint can check it (card verify) and write documents from it (card write).
    """
    from consilium.model import portable
    from consilium.report.export import export_model, frozen_weights, state_limit
    from consilium.report.facts import Statement, survey_of
    from coordinator.lead.run_detail import check_detail
    from coordinator.lead.surveys import fetched
    from fl_core.extensions import loading

    loading.load_distributions(extension)
    more = [name for name in formats or () if name != "safetensors"]
    portable.require(more)
    purpose, terms = stated(intended_use, "--intended-use"), stated(licence, "--licence")

    with closing(LeadClient.open(home)) as client, TemporaryDirectory() as scratch:
        detail = client.show(run)
        if not detail.info.model_object:
            raise ConfigError(
                "E-RUN-11", f"expected a run with a closed round, found {run!r} in state {detail.info.state}"
            )
        state, manifest, body, answered = Path(scratch) / "state", check_detail(detail), None, None
        if survey is not None:
            survey_detail = client.show(survey)
            answered = survey_of(manifest, check_detail(survey_detail), survey_detail, fetched(client, survey_detail))
        client.fetch(detail.info.model_object, state, state_limit(manifest))
        if (weights := frozen_weights(manifest)) is not None:
            body = Path(scratch) / "weights"
            client.fetch(weights.object, body, weights.size)
        said, lead = Statement(purpose, terms, answered), credentials_of(home)
        made = export_model(detail, state, out, lead, said, client.silos().silos, more, body, temperature)
    files = {"model": str(made.model), "card": str(made.card), "others": [str(file) for file in made.others]}
    files |= {"signed_card": str(made.signed_card), "card_page": str(made.card_page)}
    shown = f"wrote {', '.join(map(str, (made.model, *made.others)))} and {made.card}; signed card {made.signed_card}, "
    shown += f"its page {made.card_page}"
    return CommandResult({**files, "model_digest": detail.info.model_digest}, [shown])


# ---- a model's card --------------------------------------------------------------------------------------------------


def _authority_fingerprint(home: Path | None) -> str:
    return Authority.open(home_of(home)).fingerprint()


def _lead_in_force(home: Path | None, signed: SignedCard, card: Card) -> list[OwnRecord]:
    """Say whether the lead who signed has been revoked since: hospitals have no list of leads."""
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
    help="The card of an exported model: whether it is as a lead signed it, and documents written from it.",
)
