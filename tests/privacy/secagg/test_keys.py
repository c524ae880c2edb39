"""Whose keys count (T-49), and that nobody speaks in another's name (T-50)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.errors import ConfigError
from fl_core.types.secagg import MAX_MASKED, MAX_ROUNDS, Secagg, tolerated_colluders
from privacy.secagg.keys import KEYS_CONTEXT, MemberKeys, OwnKeys, RunKeys, pinned_signature, verify_keys
from privacy.secagg.terms import SecaggError, SecaggRun
from service_core.pki import certificates
from service_core.pki.roster import RosterMember, renewal_link
from tests.privacy.secagg.federation import federation, identity_signature, make_run, trusted
from tests.support.pki import authority, join, member, today


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"), today())


@pytest.fixture
def hospitals(ca, tmp_path):
    return {name: join(ca, tmp_path / name, name) for name in ("silo0", "silo1", "silo2")}


def signed_entry(run: SecaggRun, silo, name: str) -> MemberKeys:
    cert = silo.current_credentials().cert_pem
    return OwnKeys.new().entry(run, name, cert, lambda message: silo.sign(KEYS_CONTEXT, message))


def pins_of(hospitals) -> dict[str, str]:
    return {name: silo.load().fingerprint for name, silo in hospitals.items()}


def test_t49_keys_signed_by_pinned_identities_are_accepted(hospitals) -> None:
    run, pins = make_run(3), pins_of(hospitals)
    entries = [signed_entry(run, silo, name) for name, silo in hospitals.items()]
    found = verify_keys(run, entries, lambda entry, message: pinned_signature(entry, message, "demo", pins, {}))
    assert found.sign == tuple(entry.sign for entry in entries)


def test_t49_an_entry_of_another_identity_or_unsigned_is_refused_by_name(ca, hospitals, tmp_path) -> None:
    run, pins = make_run(3), pins_of(hospitals)
    stranger = join(ca, tmp_path / "again", "silo1")  # the authority certified another key in the name of silo1
    good = [signed_entry(run, silo, name) for name, silo in hospitals.items()]
    other_run = replace(run, run_id="run-2")
    wrong = {
        "another identity": signed_entry(run, stranger, "silo1"),
        "unsigned": good[1]._replace(signature=b""),
        "no signature at all": good[1]._replace(signature=b"\x30\x06\x02\x01\x01\x02\x01\x01"),
        "another run's": signed_entry(other_run, hospitals["silo1"], "silo1"),
        "another silo's, under this name": signed_entry(run, hospitals["silo0"], "silo1"),
        "of other keys": good[1]._replace(agree=bytes(range(32))),
        "no certificate": good[1]._replace(certificate_pem=b"-----BEGIN"),
    }
    for what, entry in wrong.items():
        with pytest.raises(SecaggError, match="silo1") as caught:
            verify_keys(run, [good[0], entry, good[2]], lambda e, m: pinned_signature(e, m, "demo", pins, {}))
        assert (caught.value.code, caught.value.blamed) == ("E-ID-33", 1), what


def test_t49_a_signature_made_for_another_purpose_is_none(hospitals) -> None:
    run, pins = make_run(3), pins_of(hospitals)
    silo = hospitals["silo1"]
    cert = silo.current_credentials().cert_pem
    entry = OwnKeys.new().entry(run, "silo1", cert, lambda message: silo.sign(certificates.RENEWAL, message))
    assert not pinned_signature(entry, entry.message(run), "demo", pins, {})


def test_t50_a_certificate_of_the_pinned_key_under_another_name_does_not_count(ca, hospitals) -> None:
    run, pins = make_run(3), pins_of(hospitals)
    entry = signed_entry(run, hospitals["silo1"], "silo1")
    request = certificates.make_request(hospitals["silo1"].current_credentials().key_pem)
    other = entry._replace(certificate_pem=ca.sign_silo(request, "silo9"))
    assert pinned_signature(entry, entry.message(run), "demo", pins, {})
    assert not pinned_signature(other, other.message(run), "demo", pins, {})
    assert not pinned_signature(entry, entry.message(run), "another", pins, {})


def test_t49_a_doubled_a_left_out_and_a_moved_entry_are_refused() -> None:
    run = make_run(4)
    own = [OwnKeys.new() for _ in run.members]
    entries = [k.entry(run, name, b"", identity_signature(name)) for name, k in zip(run.members, own, strict=True)]
    copied = own[0].entry(run, "silo3", b"", identity_signature("silo3"))  # a colluder repeats the keys of silo0
    swapped = MemberKeys("silo3", own[3].publics()[0], own[0].publics()[1], b"", b"")
    swapped = swapped._replace(signature=identity_signature("silo3")(swapped.message(run)))
    for bad in (
        entries[:3],
        [*entries[:3], entries[0]],
        [*entries, entries[0]],
        [entries[1], entries[0], *entries[2:]],
        [*entries[:3], copied],
        [*entries[:3], swapped],
        [*entries[:3], entries[3]._replace(agree=b"short")],
        [],
    ):
        with pytest.raises(SecaggError) as caught:
            RunKeys.agree(run, "silo1", own[1], bad, trusted)
        assert caught.value.code == "E-ID-33"


def test_t49_keys_in_ones_own_name_that_are_not_ones_own_are_refused() -> None:
    run = make_run(3)
    entries = [OwnKeys.new().entry(run, name, b"", identity_signature(name)) for name in run.members]
    with pytest.raises(SecaggError, match="found others in its name") as caught:
        RunKeys.agree(run, "silo1", OwnKeys.new(), entries, trusted)
    assert caught.value.code == "E-ID-33"


@pytest.mark.parametrize("low_order", [bytes(32), b"\x01" + bytes(31)])
def test_t49_a_key_that_gives_every_pair_the_same_secret_is_refused(low_order: bytes) -> None:
    run = make_run(3)
    own = [OwnKeys.new() for _ in run.members]
    entries = [k.entry(run, name, b"", identity_signature(name)) for name, k in zip(run.members, own, strict=True)]
    bad = entries[2]._replace(agree=low_order)
    entries[2] = bad._replace(signature=identity_signature("silo2")(bad.message(run)))
    with pytest.raises(SecaggError) as caught:
        RunKeys.agree(run, "silo0", own[0], entries, trusted)
    assert (caught.value.code, caught.value.blamed) == ("E-ID-33", 2)


def test_t49_a_certificate_that_was_renewed_in_between_is_accepted_on_both_sides_of_the_renewal(ca, hospitals) -> None:
    run, pins = make_run(3), pins_of(hospitals)
    silo = hospitals["silo1"]
    before = signed_entry(run, silo, "silo1")
    old = certificates.load_certificate(before.certificate_pem, "test")
    request = silo.renewal_request()
    cert = ca.renew(request.csr_pem, before.certificate_pem, request.proof)
    silo.install(cert, ca.ca_pem)
    after = signed_entry(run, silo, "silo1")
    renewed = member(ca, cert, [renewal_link(old, request.proof)])
    roster, repinned = {"silo1": renewed}, pins | {"silo1": renewed.fingerprint}

    assert pins["silo1"] != renewed.fingerprint
    assert pinned_signature(
        after, after.message(run), "demo", pins, roster
    )  # made anew, and this side still pins the old
    assert pinned_signature(before, before.message(run), "demo", repinned, roster)  # made before, pinned anew since
    assert pinned_signature(before, before.message(run), "demo", pins, roster)

    unproved = {"silo1": replace(renewed, renewal_proof=())}
    assert not pinned_signature(after, after.message(run), "demo", pins, unproved)
    assert not pinned_signature(before, before.message(run), "demo", repinned, unproved)
    invented = {"silo1": replace(renewed, renewal_proof=(renewal_link(old, b"no proof"),))}
    assert not pinned_signature(after, after.message(run), "demo", pins, invented)
    assert not pinned_signature(after, after.message(run), "demo", pins, {})
    assert not pinned_signature(after, after.message(run), "demo", {}, roster)
    assert isinstance(renewed, RosterMember)


def test_t50_a_confirmation_under_another_name_is_refused() -> None:
    fed = federation(4).send()
    state = fed.sealed()
    mine = fed.silos[0].confirm(state.seal)
    with pytest.raises(SecaggError, match="silo1") as caught:
        state.confirm(1, mine)
    assert (caught.value.code, caught.value.blamed) == ("E-ID-33", 1)
    assert state.unconfirmed == (0, 1, 2, 3)
    with pytest.raises(SecaggError):
        state.confirm(7, mine)


def test_t50_confirmations_under_other_names_do_not_add_up_at_a_silo() -> None:
    fed = federation(4).send()
    state = fed.confirmed(fed.sealed())
    opening = state.opening(3)
    one = opening.confirmations[0][1]
    forged = replace(opening, confirmations=((0, one), (1, one), (2, one), (3, one)))
    with pytest.raises(SecaggError) as caught:
        fed.silos[3].answer(forged)
    assert caught.value.code == "E-RUN-45"


def test_secrets_do_not_show_in_the_text_of_keys() -> None:
    fed = federation(3)
    keys, own = fed.silos[0].keys, OwnKeys.new()
    for secret in (keys.sign, *keys.chains, own.agree, own.sign):
        for text in (repr(keys), str(keys), repr(own)):
            assert repr(secret)[2:-1] not in text
            assert secret.hex() not in text


def test_a_chain_that_has_gone_on_gives_other_seeds_and_never_those_of_a_closed_round() -> None:
    fed = federation(3)
    first, second = fed.round, fed.run.round(fed.round.keys_digest, "train", 1, fed.round.base_digest)
    a, b = fed.silos[0].keys, fed.silos[1].keys
    assert a.of(first).pair_seed(first, 1, 0) == b.of(first).pair_seed(first, 0, 0)
    assert a.of(second).pair_seed(second, 1, 0) == b.of(second).pair_seed(second, 0, 0)
    seeds = {a.of(r).pair_seed(r, v, block) for r in (first, second) for v in (1, 2) for block in (0, 1)}
    assert len(seeds) == 8
    closed = a.closed(first)
    assert closed.closed(first) == closed  # processed twice
    assert closed.of(second) == a.of(second)  # whoever missed closes steps as often as needed
    with pytest.raises(SecaggError) as caught:
        closed.of(first)
    assert caught.value.code == "E-RUN-50"
    assert not set(closed.chains) & set(a.of(first).chains)


def test_thresholds_are_those_of_the_specification_and_two_sets_need_more_colluders_than_are_withstood() -> None:
    table = {3: (2, 3, 1), 4: (3, 3, 1), 6: (4, 4, 1), 10: (7, 7, 3), 20: (14, 14, 7), 50: (34, 34, 17)}
    for n, (t, m, c) in table.items():
        assert (*make_run(n).thresholds(n), tolerated_colluders(n)) == (t, m, c)
    for n in range(4, MAX_MASKED + 1):
        t, m = make_run(n).thresholds(n)
        assert 2 * t > n + tolerated_colluders(n)
        assert t <= m <= n


def test_a_run_whose_last_round_would_take_a_hospital_minutes_to_step_to_is_refused() -> None:
    names = ("a", "b", "c")
    assert SecaggRun("run-1", bytes(32), names, MAX_ROUNDS, "ring32", Secagg()).rounds == MAX_ROUNDS
    with pytest.raises(ConfigError, match="at most 10000 rounds"):
        SecaggRun("run-1", bytes(32), names, MAX_ROUNDS + 1, "ring32", Secagg())


@pytest.mark.parametrize(
    ("n", "ring", "terms"),
    [
        (2, "ring32", Secagg()),
        (MAX_MASKED + 1, "ring32", Secagg()),
        (4, "ring32", Secagg(collusion=2)),
        (4, "ring32", Secagg(min_contributors=0)),
        (4, "ring32", Secagg(min_contributors=5)),
        (4, "ring32", Secagg(min_sum=5)),
        (4, "ring16", Secagg()),
        (4, "ring32", Secagg(class_sums="some")),
    ],
)
def test_terms_that_no_run_can_have_are_refused(n: int, ring: str, terms: Secagg) -> None:
    with pytest.raises(ValueError, match="E-CFG-02"):
        SecaggRun("run-1", bytes(32), tuple(map(str, range(n))), 1, ring, terms)
