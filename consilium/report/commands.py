"""`coordinator card` and `silo card`: check a model's card, and write documents from it. The same for both sides.

A home contains the authority's fingerprint. Readers without a home, such as a board, give it with `--authority`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from consilium.report.card import Card
from consilium.report.signed_card import FileCheck, SignedCard, card_text, check_files
from fl_core.errors import ConfigError
from service_core.command_line import command
from service_core.console import CommandResult, KeyValues
from service_core.pki.identity import format_fingerprint
from service_core.storage.private_files import write_public

File = Annotated[Path, typer.Argument(help="The card: RUN.card.json, or its page RUN.card.html.")]
Authority = Annotated[
    str | None,
    typer.Option(
        "--authority",
        help="The authority's fingerprint, from `silo fingerprint` or from the lead. Default: the authority of this "
        "home.",
    ),
]
Home = Annotated[
    Path | None,
    typer.Option("--home", help="The home of this hospital or coordinator. Default: as for other commands."),
]
Pinned = Callable[[Path | None], str]
"""Returns the fingerprint of the authority that a home has pinned; raises if there is no home."""


@dataclass(frozen=True, slots=True)
class OwnRecord:
    """A fact on the card's run from this side's own records. agrees: with the card."""

    name: str
    text: str
    agrees: bool = True


Records = Callable[[Path | None, SignedCard, Card], Sequence[OwnRecord]]
"""Looks up this side's own records. Called only if the card is checked against the authority of its home."""


def make_app(pinned: Pinned, records: Records, help: str) -> typer.Typer:
    """Create the command group of one side."""
    app = typer.Typer(no_args_is_help=True, help=help)

    @app.command("verify")
    @command
    def verify(file: File, authority: Authority = None, home: Home = None) -> CommandResult:
        """Check that a lead of the consortium signed this card in its present form. The exit status is 2 if not.

        If the files that the card names are in the same folder, they are checked, too. A page is checked against the
        card inside it, and the card against the records of this home. The exit status is 1 if one does not agree.
        """
        wanted = _digits(authority) if authority else pinned(home)
        signed = SignedCard.read(file)
        card, signer = signed.verify(wanted)
        files = check_files(card, file.parent)
        page = _page_check(file, signed, card)
        own_records = records(home, signed, card) if authority is None else []
        notes = _notes(files, page, own_records)
        facts = [
            ("signed by", f"{signer.identity}, at {card.written} by the lead's clock"),
            ("authority", format_fingerprint(wanted)),
            ("run", f"{card.run.id} ({card.run.name}), {card.run.state}"),
            ("card", signed.digest),
            *((check.name, check.outcome) for check in files),
            *([("page", page)] if page else []),
            *((record.name, record.text) for record in own_records),
        ]
        value = {
            "signed_by": str(signer.identity),
            "authority": wanted,
            "digest": signed.digest,
            "files": {check.name: check.outcome for check in files},
            "page": page or None,
            "own_records": {record.name: record.text for record in own_records},
            "agrees": not notes,
            "card": asdict(card),
        }
        return CommandResult(value, [KeyValues(facts)], notes, int(bool(notes)))

    @app.command("write")
    @command
    def write(
        file: File,
        out: Annotated[Path, typer.Option("--out", help="The folder to write into.")] = Path(),
        authority: Authority = None,
        home: Home = None,
    ) -> CommandResult:
        """Check a card, then write its page, a data protection impact assessment and technical documentation.

        The assessment (GDPR, Article 35) and the documentation (AI Act, Annex IV) contain all answers that the card
        has, and say whom to ask for the rest.
        """
        signed = SignedCard.read(file)
        card, _ = signed.verify(_digits(authority) if authority else pinned(home))
        written = write_documents(signed, card, out)
        return CommandResult({"files": [str(path) for path in written]}, [f"wrote {', '.join(map(str, written))}"])

    return app


def write_documents(signed: SignedCard, card: Card, out: Path) -> list[Path]:
    """Write the page and the documents of a verified card; return their paths."""
    from consilium.report.documents import SKELETONS, page, skeleton

    made = {"card.html": page(signed, card)} | {name: skeleton(name, card, signed.digest) for name in SKELETONS}
    for ending, text in made.items():
        write_public(out / f"{card.run.id}.{ending}", text.encode())
    return [out / f"{card.run.id}.{ending}" for ending in made]


def _page_check(file: Path, signed: SignedCard, card: Card) -> str:
    """Compare a page with the one that this version writes from the card in it; "" if the file is no page."""
    text = card_text(file)
    if not text.lstrip().startswith("<"):
        return ""
    from consilium.report.documents import page

    return "the same" if text == page(signed, card) else "another"


def _notes(files: Sequence[FileCheck], page: str, own_records: Sequence[OwnRecord]) -> list[str]:
    notes = [
        f"{check.name} is not the file that the card names: use the one that the lead exported"
        for check in files
        if check.outcome == "another"
    ]
    if page == "another":
        notes.append(
            "the page differs from the one that this version writes from the card in it: somebody changed it, or "
            "another version wrote it. The card in it is valid: write its page again with `card write`"
        )
    if not all(record.agrees for record in own_records):
        notes.append("the card differs from the records of this side: ask the lead before you rely on it")
    return notes


def _digits(text: str) -> str:
    digits = text.replace(":", "").replace(" ", "").strip().lower()
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            "E-CFG-02",
            f"expected --authority of 64 hexadecimal digits, with or without colons, found {text[:80]!r}: copy the "
            "whole fingerprint",
        )
    return digits
