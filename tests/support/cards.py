"""A model's card, and consortia whose leads sign one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from consilium.report import documents
from consilium.report.card import (
    Card,
    CardShare,
    ClassFacts,
    Hospital,
    Model,
    Privacy,
    Results,
    RunFacts,
    TrainingDescription,
    Updates,
)
from consilium.report.export import NOTHING_SAID
from consilium.report.facts import Statement, card_of
from consilium.report.signed_card import SignedCard
from coordinator.pki.authority import Authority
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import CertificateRole, Identity
from service_core.storage.private_files import Credentials

LUCKY = CardShare(0.75, 0.5, 0.9, of="sampling of test images")
PRIVATE = Privacy(
    "dp_record", "each record", 1.0, 1e-5, planned=0.8, test_data="private", noise_from="secure", placement="there"
)


def lead(home: Path, consortium: str = "skin") -> Credentials:
    """Make a consortium and its lead."""
    return Authority.create(home, consortium, ["127.0.0.1:8443"]).issue_lead("lead")


def card(**other: object) -> Card:
    """Make a card of a run without privacy; other: fields that differ."""
    made = Card(
        consortium="skin",
        written=_now(),
        written_by="lead",
        intended_use="",
        licence="",
        run=RunFacts("r1", "study", "finished", 2, 2, _now(), _now(), "digits", "1" * 64, "2" * 64),
        model=Model("simple_cnn", {"width": 8}, 1234, (1, 8, 8), "Values are divided by 255."),
        method=TrainingDescription("fedavg", {}, "Average of locally trained models.", "", "lr 0.1", 0),
        classes=(
            ClassFacts("nevus", 3, CardShare(1.0, 0.29, 1.0, of="luck"), ("north",), 0.9, 0.8, 0.82),
            ClassFacts("melanoma", 1, CardShare(0.0, 0.0, 0.98, of="luck")),
        ),
        hospitals=(Hospital("north", 2, (), "-", 30.0, "p" * 64, "f" * 64), Hospital("south", 1, ("2: offline",))),
        results=Results(LUCKY, replace(LUCKY, point=0.5, low=0.2), CardShare(0.8), 4, 0.5, True, classes_tested=2),
        privacy=Privacy("none"),
        masks=None,
        updates=Updates("norm_clipped", 1, 2, 0, 0, 1_500_000, 10),
        withdrawals=(),
        software={"coordinator": "fl 1+a", "north": "fl 1+a"},
        files={},
    )
    return replace(made, **other)


def markdown_of(detail: pb.RunDetail, said: Statement = NOTHING_SAID) -> str:
    """Write the card of a run for people."""
    manifest = RunManifest.from_json(detail.manifest_json)
    return documents.markdown(card_of(detail, manifest, (), Identity(CertificateRole.LEAD, "skin", "lead"), said, 99))


def signed(own: Credentials, **other: object) -> SignedCard:
    return SignedCard.sign(card(**other), own)


def _now() -> str:
    """Return a time within the certificates of a consortium that a test has just made."""
    return datetime.now(UTC).isoformat(timespec="seconds")
