"""A card that is not what a lead of the reader's consortium signed is refused, whatever was done to it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from consilium.report.card import Card, CardShare
from consilium.report.documents import page
from consilium.report.signed_card import CONTEXT, MAX_BYTES, SignedCard, canonical, check_files
from fl_core.errors import ConfigError, FederationError, RefusedError
from service_core.pki import certificates
from service_core.pki.identity import certificate_fingerprint
from service_core.storage.private_files import Credentials
from tests.support.cards import card, lead, signed
from tests.support.coordinator import credentials


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coordinator") / "home"


@pytest.fixture(scope="module")
def own(home: Path) -> Credentials:
    return lead(home)


@pytest.fixture(scope="module")
def authority(own: Credentials) -> str:
    return certificate_fingerprint(own.ca_pem)


def test_what_was_signed_comes_back_from_its_json_and_from_its_page(
    own: Credentials, authority: str, tmp_path: Path
) -> None:
    made = signed(own, intended_use="</script><b>sort moles & more", files={"r1.safetensors": "a" * 64})
    for name, text in (("a.json", made.to_json()), ("a.html", page(made, Card.of(made.document)))):
        (tmp_path / name).write_text(text)
        found, signer = SignedCard.read(tmp_path / name).verify(authority)
        assert found.intended_use == "</script><b>sort moles & more"
        assert canonical(found.facts()) == canonical(made.document)
        assert str(signer.identity) == "lead://skin/lead"


def changed(text: str, path: tuple[str | int, ...], value: object) -> str:
    raw: Any = json.loads(text)
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("card", "licence"), "MIT"),
        (("card", "results", "balanced", "point"), 0.6),
        (("card", "hospitals", 1, "rounds"), 2),
        (("card", "privacy", "epsilon"), 1.0),
        (("card", "written"), "2020-01-01T00:00:00+00:00"),
        (("card", "more"), "a field"),
        (("signature",), base64.b64encode(b"no signature").decode()),
        (("signature",), "!"),
        (("signature",), 7),
        (("certificate",), "-----BEGIN"),
        (("certificate",), None),
        (("authority",), ""),
        (("card",), []),
        (("card", "results", "best", "point"), math.nan),
        (("card", "results", "best", "point"), 1e999),
        (("more",), "a part"),
    ],
)
@pytest.mark.fault("an attacker", "changes the card of a model", "refused")
def test_a_change_anywhere_is_refused(own: Credentials, authority: str, path: tuple[str, ...], value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SignedCard.from_json(changed(signed(own).to_json(), path, value)).verify(authority)
    assert caught.value.code == "E-ID-34"


def test_a_name_that_stands_twice_is_refused(own: Credentials) -> None:
    text = signed(own).to_json().replace('"licence": ""', '"licence": "", "licence": "MIT"')
    with pytest.raises(ConfigError, match=r"E-ID-34.*'licence' twice"):
        SignedCard.from_json(text)


def resigned(own: Credentials, document: object) -> SignedCard:
    """Sign any document with a lead's key, as a lead who lies can."""
    raw = json.loads(canonical(document))
    key = certificates.load_key(own.key_pem, "test")
    return SignedCard(raw, certificates.sign(key, CONTEXT, canonical(raw)), own.cert_pem, own.ca_pem)


@pytest.mark.fault("an attacker", "signs a card under another authority", "refused")
def test_another_authority_is_refused_though_it_has_the_same_names(tmp_path: Path, authority: str) -> None:
    other = signed(lead(tmp_path / "other"))
    with pytest.raises(RefusedError, match=r"E-ID-10.*compare the fingerprint"):
        other.verify(authority)


def test_a_certificate_of_another_authority_beside_ours_is_refused(
    tmp_path: Path, own: Credentials, authority: str
) -> None:
    other = signed(lead(tmp_path / "other"))
    with pytest.raises(ConfigError, match="did not issue"):
        replace(other, authority=own.ca_pem).verify(authority)


@pytest.mark.fault("a hospital", "signs a card as if it were a lead", "refused")
def test_only_a_lead_signs(home: Path, own: Credentials, authority: str) -> None:
    hospital = credentials(home, "north")
    with pytest.raises(ConfigError, match=r"E-ID-34.*silo://skin/north"):
        signed(hospital).verify(authority)


def test_a_signature_for_something_else_is_none(own: Credentials, authority: str) -> None:
    made = signed(own)
    key = certificates.load_key(own.key_pem, "test")
    with pytest.raises(ConfigError, match="E-ID-34"):
        replace(made, signature=certificates.sign(key, "another context", canonical(made.document))).verify(authority)


@pytest.mark.parametrize("other", [{"written_by": "anna"}, {"consortium": "lungs"}])
def test_a_card_in_somebody_elses_name_is_refused(own: Credentials, authority: str, other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"expected a card of lead://skin/lead"):
        signed(own, **other).verify(authority)


@pytest.mark.parametrize("days", [-400, 4000])
def test_a_card_of_a_time_for_which_its_certificate_is_not_is_refused(
    own: Credentials, authority: str, days: int
) -> None:
    when = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    with pytest.raises(ConfigError, match="while its certificate was valid"):
        signed(own, written=when).verify(authority)


@pytest.mark.parametrize(
    "lie",
    [
        {"results": {"accuracy": CardShare(1.5)}},
        {"results": {"balanced": CardShare(0.5, 0.6, 0.9)}},
        {"results": {"balanced": CardShare(None, 0.6, 0.9)}},
        {"results": {"confusion": ((1, 2), (3,))}},
        {"results": {"confusion": ((1,),)}},
        {"results": {"confusion": ((1, -2), (0, 0))}},
        {"results": {"macro_auc_low": 0.9, "macro_auc_high": 0.8}},
        {"results": {"macro_auc_low": 0.9}},
        {"results": {"calibration_error": 2.0}},
        {"results": {"test_examples": -1}},
        {"privacy": {"epsilon": 1.0}},
        {"privacy": {"epsilon": -1.0, "delta": 0.1}},
        {"privacy": {"epsilon": 1.0, "delta": 2.0}},
    ],
)
@pytest.mark.fault("a lead", "signs a card with numbers that no run can produce", "refused")
def test_numbers_that_no_run_gives_are_refused_though_they_are_signed(
    own: Credentials, authority: str, lie: dict[str, dict[str, object]]
) -> None:
    made = card()
    other = {name: replace(getattr(made, name), **fields) for name, fields in lie.items()}
    with pytest.raises(ConfigError) as caught:
        SignedCard.sign(replace(made, **other), own).verify(authority)
    assert caught.value.code == "E-ID-34"


def test_another_format_says_so(own: Credentials, authority: str) -> None:
    with pytest.raises(ConfigError, match=r"format consilium.card.v1, found 'consilium.card.v9'"):
        resigned(own, card().facts() | {"format": "consilium.card.v9"}).verify(authority)


def test_files_beside_a_card_are_held_against_it(own: Credentials, tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"model")
    (tmp_path / "other").write_bytes(b"another")
    digest = hashlib.sha256(b"model").hexdigest()
    made = card(files={"same": digest, "other": digest, "gone": digest})
    assert {c.name: c.outcome for c in check_files(made, tmp_path)} == {
        "same": "the same",
        "other": "another",
        "gone": "not here",
    }
    for name in ("../same", "/etc/passwd", "a/b"):
        with pytest.raises(ConfigError, match="E-ID-34"):
            check_files(card(files={name: digest}), tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{", b"<html></html>", b"[" * 100_000])
def test_a_file_that_is_no_card_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FederationError) as caught:
        SignedCard.read(tmp_path / "file")
    assert caught.value.code in ("E-ID-34", "E-CFG-02")


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*more than"):
        SignedCard.read(tmp_path / "file")
