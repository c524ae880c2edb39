"""`silo card`: check a model's card against this hospital's own records and its pinned authority."""

from __future__ import annotations

from pathlib import Path

from consilium.report.card import Card
from consilium.report.commands import OwnRecord, make_app
from consilium.report.signed_card import SignedCard
from fl_core.errors import ConfigError
from silo.cli.options import home_of, open_store
from silo.identity.identity import SiloIdentity
from silo.storage.store import SiloStore


def _authority_of(home: Path | None) -> str:
    identity = SiloIdentity(home_of(home).path)
    if not identity.joined:
        raise ConfigError(
            "E-CFG-02",
            "expected --authority FINGERPRINT, or the home of a hospital that has joined, found neither at "
            f"{identity.home}: ask the lead for the authority's fingerprint by telephone",
        )
    return identity.ca_fingerprint()


def _records_of(home: Path | None, signed: SignedCard, card: Card) -> list[OwnRecord]:
    del signed
    place = home_of(home)
    with open_store(place.database) as store:
        return _compared(store, SiloIdentity(place.path).load().identity.name, card)


def _compared(store: SiloStore, name: str, card: Card) -> list[OwnRecord]:
    """Compare the card with this hospital's records: whether and how often it took part, and the configuration."""
    claimed = next((hospital.rounds for hospital in card.hospitals if hospital.name == name), None)
    run = next((record for record in store.history() if record.run_id == card.run.id), None)
    if run is None:
        missing_run = OwnRecord("own records", "no such run", agrees=not claimed)
        return [missing_run] if claimed is None else [missing_run, _claimed(claimed, agrees=not claimed)]
    digest = store.manifest_of(run.run_id)
    same = digest is None or digest == card.run.manifest_digest
    included = sum(task.included is True and task.key.kind.trains for task in run.tasks)
    waits = sum(task.included is None and task.receipt and task.key.kind.trains for task in run.tasks)
    agrees = included <= (claimed or 0) <= included + waits
    counted = f"{included} of this hospital's updates are in the model"
    counted += f", and {waits} more may be" if waits else ""
    return [
        OwnRecord("configuration", "the same as in the own records" if same else f"{digest} in the own records", same),
        OwnRecord("own records", counted, agrees),
        _claimed(claimed, agrees),
    ]


def _claimed(rounds: int | None, agrees: bool) -> OwnRecord:
    recorded = "this hospital was not in the run" if rounds is None else f"{rounds} of its updates are in the model"
    return OwnRecord("the card says", recorded, agrees)


app = make_app(
    _authority_of,
    _records_of,
    help="Check the signed card of an exported model, and write documents from it.",
)
