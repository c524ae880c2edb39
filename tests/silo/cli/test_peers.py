"""`silo peers`: the operator's consent to a key that is not confirmed."""

from __future__ import annotations

import json

import pytest

from service_core.pki import certificates
from service_core.pki.identity import format_fingerprint, identity_of
from service_core.pki.roster import renewal_link
from silo.admission.policy_in_force import accepts_new_peers
from silo.cli.main import run
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from tests.support.pki import authority, certified, join, member, roster, today


@pytest.fixture
def home(tmp_path):
    """A silo that holds back another key of `north`."""
    ca = authority(tmp_path / "ca", today())
    pinned, other = certified(ca, "north"), certified(ca, "north")
    silo = join(ca, tmp_path / "silo", "me", (member(ca, pinned),))
    own = member(ca, silo.current_credentials().cert_pem)
    assert "north" in silo.update_roster(roster(ca, [own, member(ca, other)], 2)).held
    return tmp_path / "silo", identity_of(other).fingerprint


def test_a_held_key_is_shown_and_accepted_with_its_fingerprint(home, capsys):
    folder, key = home
    assert run(["peers", "show", "--home", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["held"] == {"north": key}
    assert set(shown["accepted"]) == {"me"}
    assert run(["peers", "accept", "north", format_fingerprint(key), "--home", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert run(["peers", "show", "--home", str(folder)]) == 0
    assert ["north", "confirmed", "by", "hand", format_fingerprint(key)] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.parametrize(
    ("name", "key"), [("north", "ab" * 32), ("south", None), ("north", "abcd"), ("north", "zz" * 32)]
)
def test_another_key_name_or_half_a_fingerprint_is_refused_with_what_was_found(home, capsys, name, key):
    folder, held = home
    assert run(["peers", "accept", name, key or held, "--home", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("E-ID-16: expected")
    assert run(["peers", "show", "--home", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held"] == {"north": held}


def test_what_was_confirmed_goes_on_with_a_renewed_key_and_never_with_another_one(tmp_path):
    ca = authority(tmp_path / "ca", today())
    key_pem = certificates.new_key()
    first = ca.sign_silo(certificates.make_request(key_pem), "north")
    silo = join(ca, tmp_path / "silo", "me", (member(ca, first),))
    assert silo.pins().confirmed() == set()
    silo.pins().accept("north", identity_of(first).fingerprint)
    assert silo.pins().confirmed() == {"north"}
    own, renewed, other = (
        member(ca, silo.current_credentials().cert_pem),
        certified(ca, "north"),
        certified(ca, "north"),
    )
    new = certificates.public_key(certificates.load_certificate(renewed, ""))
    message = certificates.renewal_message(identity_of(first).identity, new)
    proof = certificates.sign(certificates.load_key(key_pem, ""), certificates.RENEWAL, message)
    link = renewal_link(certificates.load_certificate(first, ""), proof)
    assert silo.update_roster(roster(ca, [own, member(ca, renewed, (link,))], 2)).rekeyed == ("north",)
    assert silo.pins().confirmed() == {"north"}
    assert silo.update_roster(roster(ca, [own], 3)).removed == ("north",)
    assert silo.pins().confirmed() == set()
    assert "north" in silo.update_roster(roster(ca, [own, member(ca, other)], 4)).held
    assert silo.pins().confirmed() == set()
    silo.update_roster(roster(ca, [own, member(ca, renewed, (link,))], 5))
    assert silo.pins().confirmed() == {"north"}


def test_a_list_of_pins_from_before_opens_and_names_nobody_as_confirmed(home):
    folder, key = home
    file = folder / "identity/roster.json"
    raw = json.loads(file.read_text())
    raw.pop("by_hand")
    file.write_text(json.dumps(raw))
    pins = SiloIdentity(folder).pins()
    assert pins.confirmed() == set()
    pins.accept("north", key)
    assert pins.confirmed() == {"north"}


def test_where_additions_wait_for_consent_a_new_member_is_held_back(tmp_path):
    ca = authority(tmp_path / "ca", today())
    silo = join(ca, tmp_path / "silo", "me")
    own, new = member(ca, silo.current_credentials().cert_pem), certified(ca, "north")
    home = Home(tmp_path / "silo")
    for policy, accepts in (("", True), ("[peers]\naccept = 'by hand'\n", False), ("[peers", False)):
        home.policy.write_text(policy)
        assert accepts_new_peers(home) is accepts
    assert "north" in silo.update_roster(roster(ca, [own, member(ca, new)], 2), accepts_new_peers(home)).held
    assert set(silo.peers()) == {"me"}
