"""`silo policy` and `silo approve`: what this hospital takes part in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_core.extensions import registry
from service_core.command_line import command
from service_core.console import CommandResult, KeyValues, TextTable, local_time
from silo.cli.options import SiloHome, open_store

if TYPE_CHECKING:
    from silo.reports.run_request import SurveyPreview

app = typer.Typer(no_args_is_help=True, help="The hospital's policy: policy.toml in the silo's home.")


@app.command("show")
@command
def show_policy(home: SiloHome) -> CommandResult:
    """Show the current policy and its digest. The digest is sent with every update."""
    from silo.admission.policy_in_force import in_force

    policy = in_force(home)
    facts = [("file", str(home.policy) if policy.digest else f"{home.policy}: no file, so the defaults apply")]
    facts += [("digest", policy.digest or "-")]
    for section in ("runs", "privacy", "prototypes", "evaluation", "secagg", "peers", "survey"):
        facts += [
            (f"{section}.{key}", _text(value, _EMPTY.get(f"{section}.{key}", "none")))
            for key, value in asdict(getattr(policy, section)).items()
        ]
    facts += [(f"budget of {name}", f"epsilon {e:g} at delta {d:g}") for name, (e, d) in policy.budgets.items()]
    return CommandResult(
        {"file": str(home.policy), "there": home.policy.exists(), **asdict(policy)}, [KeyValues(facts)]
    )


_EMPTY = {
    "runs.methods": "any",
    "runs.leads": "any",
    "survey.allow": "none: surveys get no numbers",
    "privacy.labels": "the classes of the published data, or --holds",
}
"""The meaning of an empty list; for all others: none."""


def _text(value: object, empty: str) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or empty
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value) or "-"


@app.command()
@command
def check(
    file: Annotated[Path | None, typer.Argument(help="The file to check. Default: the one in force.")] = None,
    *,
    home: SiloHome,
) -> CommandResult:
    """Check the policy for errors that would refuse all runs, or all private runs; then the exit status is 1."""
    from privacy.policy import Policy, closed
    from silo.admission.policy_in_force import in_force

    place = file or home.policy
    policy = in_force(home) if file is None else Policy.read(file)
    if file is not None and not policy.digest:
        raise closed(f"there is no policy file {file}: check the path")
    if policy.budgets and home.ledger.exists():
        from privacy.ledger.ledger import Ledger

        policy.require_collections(Ledger(home.ledger).collections())
    facts = [("file", str(place)), ("sound", "yes" if policy.digest else "there is no file, so the defaults apply")]
    facts += [(f"extension {name}", version) for name, version in registry.installed(policy.runs.extensions).items()]
    if policy.budgets and not home.ledger.exists():
        facts += [("budgets", "not compared with the ledger, which does not exist yet: silo ledger register")]
    return CommandResult({"file": str(place), "digest": policy.digest, "sound": True}, [KeyValues(facts)])


@command
def approve(
    run: Annotated[
        str | None,
        typer.Argument(help="A run's id or name, or `latest` if only one waits. Default: list all waiting runs."),
    ] = None,
    deny: Annotated[bool, typer.Option("--deny", help="Deny the run instead.")] = False,
    *,
    home: SiloHome,
) -> CommandResult:
    """Decide about a run that waits for this hospital, if its policy says approve = "by hand".

    A decision is for one manifest: if the run changes, it asks again. The cost that is shown for a waiting run is an
    upper bound over all its rounds.
    """
    from silo.reports.questions import PendingDecision, PolicyAndLedger

    with open_store(home.database) as store:
        approvals = store.approvals.all() if run is None else [store.approvals.decide(run, not deny)]
    waiting = any(a.decided is None for a in approvals)
    basis = PolicyAndLedger.of(home) if waiting else None
    pending = {a: PendingDecision.of(a, basis) for a in approvals if basis and a.decided is None}
    spends = {a: question.all_spends for a, question in pending.items()}
    word = {None: "waits", True: "approved", False: "denied"}
    value = [
        {
            "run": a.run_id,
            "name": a.name,
            "manifest_digest": a.manifest_digest,
            "about": a.about,
            "asked": a.asked,
            "decided": word[a.decided],
            "spends": spends.get(a, ""),
            **({} if a not in pending or (survey := pending[a].survey) is None else {"survey": asdict(survey)}),
        }
        for a in approvals
    ]
    none = "No run waits for a decision. A run that was just started asks within a minute."
    rows = [(a.run_id, a.name, word[a.decided], local_time(a.asked), a.about, spends.get(a, "-")) for a in approvals]
    head = ("run", "name", "decision", "asked", "what it asks for", "what it would spend")
    shown: list[str | TextTable] = [TextTable("Runs", head, rows) if approvals else none]
    for a, question in pending.items():
        if question.survey is not None:
            shown += _survey(a.run_id, question.survey)
    return CommandResult({"runs": value}, shown)


def _survey(run: str, preview: SurveyPreview) -> list[str | TextTable]:
    """Show what would leave in a survey, cell by cell."""
    title = f"What this hospital would send for {run}"
    return [TextTable(title, preview.head, preview.cells(), headings=True, titled=True), preview.sentence()]
