"""A model's card beside what this hospital noted itself: was it in the run, how often, and of which configuration."""

from __future__ import annotations

from fl_core.types.enums import TaskKind
from service_core.model_card.card import Card
from service_core.model_card.commands import OwnRecord
from silo.storage.store import Store


def own_records(store: Store, name: str, card: Card) -> list[OwnRecord]:
    """Compare a card with the hospital's database. name: of this hospital in the consortium."""
    claimed = next((hospital.rounds for hospital in card.hospitals if hospital.name == name), None)
    run = next((found for found in store.history() if found.run_id == card.run.id), None)
    if run is None:
        known = OwnRecord("own records", "have no such run", agrees=not claimed)
        return [known] if claimed is None else [known, _claimed(claimed, agrees=not claimed)]
    digest = store.manifest_of(run.run_id)
    same = digest is None or digest == card.run.manifest_digest
    given = sum(task.included is True and task.key.kind is TaskKind.TRAIN for task in run.tasks)
    waits = sum(task.included is None and task.receipt and task.key.kind is TaskKind.TRAIN for task in run.tasks)
    agrees = given <= (claimed or 0) <= given + waits
    counted = f"{given} of this hospital's updates are in the model"
    counted += f", and of {waits} nothing was heard" if waits else ""
    return [
        OwnRecord("configuration", "the same as here" if same else f"here it was {digest}", same),
        OwnRecord("own records", counted, agrees),
        _claimed(claimed, agrees),
    ]


def _claimed(rounds: int | None, agrees: bool) -> OwnRecord:
    said = "that this hospital was not in the run" if rounds is None else f"{rounds} of its updates"
    return OwnRecord("the card says", said, agrees)
