"""`silo peers`: the operator's consent to a key that is held back."""

from __future__ import annotations

import json

import pytest

from service_core.pki.identity import colons, identity_of
from silo.cli.service import run
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
    assert run(["peers", "accept", "north", colons(key), "--home", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert run(["peers", "show", "--home", str(folder)]) == 0
    assert ["north", "confirmed", "by", "hand", colons(key)] in [
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
