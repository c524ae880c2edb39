"""A hospital in masked runs: keys, masks and answers over its session; what a liar asks is refused and recorded."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import ProtocolError
from fl_core.methods import build_method
from fl_core.rounds.manifest import NamedOptions, make_members
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import Secagg
from privacy.secagg.coordinator_side import SealedRound
from privacy.secagg.keys import OwnKeys
from privacy.secagg.messages import Seal
from privacy.secagg.terms import SecaggError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.chunks import CHUNK_BYTES
from protos.wire.tasks import TaskKey
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of
from service_core.pki.roster import RosterMember, renewal_link
from service_core.version import PROTOCOL
from silo.cli.main import run as run_command
from silo.identity.identity import SiloIdentity
from silo.reports.questions import PendingDecision, PolicyAndLedger
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.fake_coordinator import CONSORTIUM, MEMBERS, Hospital, authority, manifest
from tests.support.hospital import Slow, Watched
from tests.support.masked import (
    OWN,
    SINCE,
    Colleague,
    MaskedHospital,
    confirmation_of,
    in_clear,
    masked_manifest,
    open_message,
    seal_message,
    shares_of,
    sign_as_coordinator,
)
from tests.support.privacy import TRAIN, budgeted, private

pytestmark = pytest.mark.integration


@pytest.fixture
def hospital(tmp_path):
    made = MaskedHospital(tmp_path / "home0")
    made.start()
    yield made
    made.end()


def sealed(hospital, offer, own=True):
    total, plain = hospital.sum_of(offer, own)
    seal = total.seal(sign_as_coordinator)
    keys = next(iter(hospital.colleagues.values())).keys
    return SealedRound(total, seal, keys.peers), plain


def opened(hospital, state, silent=()):
    """Bring a sealed round to its end: the hospital and its colleagues confirm and answer."""
    hospital.send_seal(state.seal)
    state.confirm(OWN, confirmation_of(hospital.confirmed()))
    for u, colleague in hospital.colleagues.items():
        if u not in silent:
            state.confirm(u, colleague.confirm(hospital.run, state.seal))
    hospital.control.last.send(secagg_open=open_message(state.opening(OWN)))
    state.answer(OWN, shares_of(hospital.shares()))
    for u, colleague in hospital.colleagues.items():
        if u not in silent:
            state.answer(u, colleague.answer(hospital.run, state.opening(u)))
    return state.finish()


def test_a_masked_round_is_opened_to_the_exact_sum_of_what_the_hospital_and_its_colleagues_sent(hospital):
    hospital.exchange()
    offer = hospital.train()
    state, plain = sealed(hospital, offer)
    found = opened(hospital, state)
    own = in_clear(hospital.manifest, offer, hospital)
    assert (found.model == plain[0] + own[0]).all()
    assert (found.classes == plain[1] + own[1]).all()
    assert {"sealed", "opened"} <= set(hospital.events())


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_the_same_keys_are_sent_whenever_they_are_asked_for_and_after_a_restart(hospital):
    first = hospital.preflight()
    assert first.ready
    assert hospital.preflight().secagg_entry == first.secagg_entry
    hospital.stop()
    hospital.start()
    assert hospital.preflight().secagg_entry == first.secagg_entry


def swapped(hospital, entries):
    """Another identity, which the authority certified under the name of the first colleague."""
    return [Colleague(entries[0].name).entry(hospital.run), *entries[1:]]


def impersonated(hospital, entries):
    """A member with a certificate of its own, under the name of another (T-50)."""
    last = hospital.colleagues[2]
    stolen = Colleague(entries[0].name, last.key_pem, cert_pem=last.cert_pem)
    return [stolen.entry(hospital.run), *entries[1:]]


def unsigned(hospital, entries):
    return [entries[0]._replace(signature=b""), *entries[1:]]


def doubled(hospital, entries):
    return [entries[0], entries[1], entries[0]]


def left_out(hospital, entries):
    return entries[:-1]


def mine_replaced(hospital, entries):
    return [entries[0], entries[1]._replace(agree=bytes(31) + b"\x09"), entries[2]]


def not_a_certificate(hospital, entries):
    return [entries[0]._replace(certificate_pem=b"\xff" * 40), *entries[1:]]


@pytest.mark.fault(
    "a coordinator",
    "replaces a hospital's keys by its own in a run with secure aggregation",
    "refused with E-ID-33 before training: the owner's pinned identity must sign each key",
)
@pytest.mark.parametrize(
    "change", [swapped, impersonated, unsigned, doubled, left_out, mine_replaced, not_a_certificate]
)
def test_t49_keys_that_a_pinned_identity_did_not_sign_are_refused_before_any_record_is_read(
    hospital, monkeypatch, change
):
    watched = Watched(monkeypatch)
    digest = hospital.publish(change(hospital, hospital.entries()))
    hospital.ask(secagg_keys_digest=digest)
    assert hospital.refused().code == "E-ID-33"
    assert watched.read == 0
    assert hospital.transfer.uploads == {}
    assert "E-ID-33" in audit_codes(hospital)


def test_t49_bytes_that_are_no_keys_and_none_at_all_are_refused(hospital):
    hospital.entries()
    hospital.ask(secagg_keys_digest=hospital.transfer.offer(b"\xff\xff nothing"))
    assert hospital.refused().code == "E-ID-33"
    hospital.ask(secagg_keys_digest="", attempt=1)
    until(lambda: [a.code for a in hospital.answers()] == ["E-ID-33"] * 2)


def test_t49_a_colleague_whose_certificate_was_renewed_meanwhile_is_accepted(hospital):
    """It signed with the key before; the roster that this hospital follows has the one after, with its proof."""
    first = hospital.colleagues[0]
    entries = hospital.entries()
    other = certificates.new_key()
    renewed_pem = authority().sign_silo(certificates.make_request(other), first.name)
    old_key, old_cert = (
        certificates.load_key(first.key_pem, "a test"),
        certificates.load_certificate(first.cert_pem, ""),
    )
    new = certificates.public_key(certificates.load_certificate(renewed_pem, ""))
    message = certificates.renewal_message(Identity(CertificateRole.SILO, CONSORTIUM, first.name), new)
    link = renewal_link(old_cert, certificates.sign(old_key, certificates.RENEWAL, message))
    identity = SiloIdentity(hospital.folder)
    certs = [identity.current_credentials().cert_pem, hospital.colleagues[2].cert_pem]
    members = [RosterMember.of(c, SINCE) for c in certs] + [RosterMember.of(renewed_pem, SINCE, (link,))]
    change = identity.update_roster(authority().roster(members, [], 2))
    assert change.rekeyed == (first.name,)
    hospital.ask(secagg_keys_digest=hospital.publish(entries))
    hospital.sent()


@pytest.mark.fault(
    "a coordinator",
    "sends different keys in the middle of a run",
    "refused with E-ID-33: keys are checked once and never change",
)
def test_other_keys_in_the_middle_of_a_run_are_refused(hospital):
    entries = hospital.entries()
    hospital.exchange()
    hospital.train()
    hospital.settle()
    hospital.colleagues[0].own = OwnKeys.new()
    entries[0] = hospital.colleagues[0].entry(hospital.run)
    hospital.ask(1, secagg_keys_digest=hospital.publish(entries))
    assert hospital.refused().code == "E-ID-33"


# ---- seals and openings ----------------------------------------------------------------------------------------------


def another_round(seal):
    return replace(seal, round=1)


def another_kind(seal):
    return replace(seal, kind="evaluate", round=2)


def another_run(seal):
    return replace(seal, run_id="run-2")


def other_keys(seal):
    return replace(seal, keys_digest=bytes(32))


def other_base(seal):
    return replace(seal, base_digest=bytes(32))


def no_round(seal):
    return replace(seal, round=2**32 - 1)


def an_index_twice(seal):
    return replace(seal, uploads=(seal.uploads[0], seal.uploads[0], seal.uploads[2]))


def a_stranger(seal):
    return replace(seal, uploads=(*seal.uploads[:2], (7, seal.uploads[2][1])))


def another_order(seal):
    return replace(seal, uploads=seal.uploads[::-1])


def too_few(seal):
    return replace(seal, uploads=seal.uploads[:2])


def another_update_of_mine(seal):
    return replace(seal, uploads=(seal.uploads[0], (OWN, bytes(32)), seal.uploads[2]))


def of_nobody(seal):
    return replace(seal, signature=b"")


def of_another_key(seal):
    key = certificates.load_key(certificates.new_key(), "a test")
    return replace(seal, signature=certificates.sign(key, Seal.CONTEXT, b"this"))


LIES = {
    another_round: "E-ID-33",
    another_kind: "E-ID-33",
    another_run: "E-RUN-50",
    other_keys: "E-RUN-50",
    other_base: "E-RUN-50",
    no_round: "E-RUN-50",
    an_index_twice: "E-RUN-51",
    a_stranger: "E-RUN-51",
    another_order: "E-RUN-51",
    too_few: "E-RUN-51",
    another_update_of_mine: "E-ID-33",
    of_nobody: "E-ID-33",
    of_another_key: "E-ID-33",
}


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A hospital whose update of round 1 is in the coordinator's hands."""
    made = MaskedHospital(tmp_path_factory.mktemp("waiting") / "home0")
    made.start()
    made.exchange()
    offer = made.train()
    yield made, offer, sealed(made, offer)[0]
    made.end()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.fault(
    "a coordinator",
    "asks a hospital to confirm an invalid set, or one of another round, run, kind, model or update",
    "refused; no hospital signs it, and both sides record it",
)
def test_t51_t52_a_set_that_is_not_the_rounds_own_is_not_confirmed(waiting, lie):
    hospital, _, state = waiting
    wrong = lie(state.seal)
    if LIES[lie] != "E-ID-33":
        with suppress(SecaggError):  # signed by the coordinator, where such a set can be signed at all
            wrong = replace(wrong, signature=sign_as_coordinator(wrong.message(state.round)))
    seen = len(refusals(hospital))
    hospital.send_seal(wrong)
    until(lambda: len(refusals(hospital)) > seen)
    assert refusals(hospital)[-1].code == LIES[lie]
    assert [m for s in hospital.control.sessions for m in s.got("secagg_confirm")] == []
    assert hospital.service.store.secagg.row(TaskKey("run-1", 0, TaskKind.TRAIN)).seal_hash == b""


def test_t51_a_signed_set_with_another_update_of_this_hospital_is_not_confirmed(waiting):
    hospital, _, state = waiting
    wrong = another_update_of_mine(state.seal)
    wrong = replace(wrong, signature=sign_as_coordinator(wrong.message(state.round)))
    seen = len(refusals(hospital))
    hospital.send_seal(wrong)
    until(lambda: len(refusals(hospital)) > seen)
    assert refusals(hospital)[-1].code == "E-RUN-50"


def test_a_set_that_another_identity_of_the_consortium_signed_is_not_confirmed(waiting):
    """A silo's certificate is the authority's as well: the coordinator's name must be in it."""
    hospital, _, state = waiting
    silo = hospital.colleagues[0]
    signature = certificates.sign(
        certificates.load_key(silo.key_pem, "a test"), Seal.CONTEXT, state.seal.message(state.round)
    )
    seen = len(refusals(hospital))
    forged = seal_message(replace(state.seal, signature=signature), signer_pem=silo.cert_pem)
    hospital.control.last.send(secagg_seal=forged)
    until(lambda: len(refusals(hospital)) > seen)
    assert refusals(hospital)[-1].code == "E-ID-33"


def test_an_opening_without_a_confirmed_set_is_refused(waiting):
    hospital, _, state = waiting
    seen = len(refusals(hospital))
    ask = pb.SecaggOpen(run_id="run-1", round=0, kind=pb.TRAIN, seal_hash=state.hash)
    hospital.control.last.send(secagg_open=ask)
    until(lambda: len(refusals(hospital)) > seen)
    found = refusals(hospital)[-1]
    assert (found.code, found.seal_hash) == ("E-RUN-50", state.hash)


def test_whatever_bytes_a_seal_or_an_opening_has_the_hospital_answers_or_refuses_and_goes_on(hospital):
    """Bytes are changed at random; nothing but the true set is ever signed or opened."""
    hospital.exchange()
    state, _ = sealed(hospital, hospital.train())
    drawn = random.Random(3)
    hospital.send_seal(state.seal)
    true = hospital.confirmed()
    for u, colleague in hospital.colleagues.items():
        state.confirm(u, colleague.confirm(hospital.run, state.seal))
    state.confirm(OWN, confirmation_of(true))
    said: list[pb.SiloMessage] = []
    member = replace(hospital.service._secagg, send=said.append)
    seal, opening = seal_message(state.seal), open_message(state.opening(OWN))
    for kind, message, answer in ((pb.SecaggSeal, seal, member.seal), (pb.SecaggOpen, opening, member.open)):
        raw = message.SerializeToString()
        for _ in range(300):
            changed = bytearray(raw)
            for _ in range(drawn.choice((1, 1, 2, 20))):
                changed[drawn.randrange(len(changed))] = drawn.randrange(256)
            with suppress(DecodeError):
                found = kind.FromString(bytes(changed))
                before = len(said)
                with suppress(ProtocolError):  # it names no task
                    answer(found)
                    assert len(said) == before + 1
    confirmed = {m.secagg_confirm.SerializeToString() for m in said if m.WhichOneof("body") == "secagg_confirm"}
    assert confirmed <= {true.SerializeToString()}
    shares = {m.secagg_shares.SerializeToString() for m in said if m.WhichOneof("body") == "secagg_shares"}
    hospital.control.last.send(secagg_open=opening)
    assert shares <= {hospital.shares().SerializeToString()}
    assert sum(m.WhichOneof("body") == "secagg_refusal" for m in said) > 100


@pytest.mark.fault(
    "a coordinator",
    "requests a second set for a round",
    "refused with E-RUN-50: a hospital signs one set and stores it first",
)
def test_t34_a_second_set_of_a_round_is_refused_also_after_a_restart(hospital):
    hospital.exchange()
    offer = hospital.train()
    state, _ = sealed(hospital, offer)
    hospital.send_seal(state.seal)
    first = hospital.confirmed()
    other = replace(state.seal, uploads=((0, b"\x07" * 32), *state.seal.uploads[1:]))
    other = replace(other, signature=sign_as_coordinator(other.message(state.round)))
    hospital.send_seal(other)
    assert hospital.refusal().code == "E-RUN-50"
    hospital.stop()
    hospital.start()
    hospital.send_seal(other)
    assert hospital.refusal(2).code == "E-RUN-50"
    hospital.send_seal(state.seal)
    assert hospital.confirmed(2) == first
    assert audit_codes(hospital).count("E-RUN-50") == 2


def test_t35_t51_nothing_of_a_closed_round_is_confirmed_or_opened(hospital):
    hospital.exchange()
    offer = hospital.train()
    state, _ = sealed(hospital, offer)
    opened(hospital, state)
    again = open_message(state.opening(OWN))
    hospital.control.last.send(secagg_open=again)
    assert hospital.shares(2) == hospital.shares(1)
    hospital.settle()
    hospital.control.last.send(secagg_open=again)
    assert hospital.refusal().code == "E-RUN-50"
    hospital.send_seal(state.seal)
    assert hospital.refusal(2).code == "E-RUN-50"
    hospital.transfer.forget()
    hospital.control.last.send(offer=offer)
    assert hospital.refused().code == "E-RUN-33"
    offer.incarnation = "restored"
    hospital.control.last.send(offer=offer)
    until(lambda: [a.code for a in hospital.answers()].count("E-RUN-33") == 2)


def test_t51_a_package_of_another_update_and_too_few_confirmations_open_nothing(hospital):
    hospital.exchange()
    offer = hospital.train()
    state, _ = sealed(hospital, offer)
    hospital.send_seal(state.seal)
    state.confirm(OWN, confirmation_of(hospital.confirmed()))
    for u, colleague in hospital.colleagues.items():
        state.confirm(u, colleague.confirm(hospital.run, state.seal))
    good = open_message(state.opening(OWN))
    few, changed, swapped_, twice = (pb.SecaggOpen.FromString(good.SerializeToString()) for _ in range(4))
    del few.confirmations[1:]
    changed.packages[0].package = bytes(len(changed.packages[0].package))
    swapped_.packages[0].salt, swapped_.packages[2].salt = good.packages[2].salt, good.packages[0].salt
    twice.confirmations[1].CopyFrom(twice.confirmations[0])
    twice.confirmations[2].CopyFrom(twice.confirmations[0])
    for number, (ask, code) in enumerate(
        [(few, "E-RUN-45"), (changed, "E-RUN-48"), (swapped_, "E-RUN-48"), (twice, "E-RUN-45")], 1
    ):
        hospital.control.last.send(secagg_open=ask)
        found = hospital.refusal(number)
        assert found.code == code
        assert list(found.blamed) == ([0] if code == "E-RUN-48" else [])
    assert [m for s in hospital.control.sessions for m in s.got("secagg_shares")] == []
    hospital.control.last.send(secagg_open=good)
    state.answer(OWN, shares_of(hospital.shares()))


def ask_with_roster(hospital, roster: bytes) -> pb.PreflightAnswer:
    session = hospital.control.last
    before = len(session.got("preflight"))
    session.send(preflight=pb.Preflight(run_id=hospital.run_id, manifest_digest=hospital.digest, signed_roster=roster))
    until(lambda: len(session.got("preflight")) > before, what=str([n.text for n in hospital.notices]))
    return session.got("preflight")[-1]


def test_a_member_that_enrolled_since_the_session_began_is_known_from_the_question_before_the_run(hospital):
    identity = SiloIdentity(hospital.folder)
    certs = [identity.current_credentials().cert_pem, *(c.cert_pem for c in hospital.colleagues.values())]
    newer = authority().roster(
        [RosterMember.of(cert, SINCE) for cert in (*certs, Colleague("newcomer").cert_pem)], [], 2
    )
    assert "newcomer" not in identity.pins().members()
    assert ask_with_roster(hospital, newer.pack()).ready
    assert "newcomer" in identity.pins().members()


def test_a_list_beside_a_question_that_a_newer_one_overtook_refuses_no_run(hospital):
    identity = SiloIdentity(hospital.folder)
    certs = [identity.current_credentials().cert_pem, *(c.cert_pem for c in hospital.colleagues.values())]
    listed = [RosterMember.of(cert, SINCE) for cert in certs]
    newest = authority().roster([*listed, RosterMember.of(Colleague("newcomer").cert_pem, SINCE)], [], 3)
    assert ask_with_roster(hospital, newest.pack()).ready
    assert ask_with_roster(hospital, authority().roster(listed, [], 2).pack()).ready
    assert "newcomer" in identity.pins().members()  # the newer one stays


def test_bytes_that_are_no_roster_are_an_answer_and_the_session_goes_on(hospital):
    answer = ask_with_roster(hospital, b"no roster")
    assert (answer.ready, answer.code) == (False, "E-WIRE-06")
    assert hospital.preflight().ready
    assert len(hospital.control.sessions) == 1


def test_a_hospital_that_sent_nothing_helps_to_open_a_sum_of_the_others(tmp_path):
    """It was offered the round and its update came too late: its masks are taken off with what others share with it."""
    members = (*MEMBERS, "center3")
    run = masked_manifest(members=make_members(members, 3, 1.0), grid=FixedPointFormat("ring64", 4))
    slow = Slow()
    hospital = MaskedHospital(tmp_path / "home0", run, run_round=slow)
    hospital.start()
    try:
        hospital.exchange()
        offer = hospital.ask()
        assert slow.started.wait(20)
        state, plain = sealed(hospital, offer, own=False)
        found = opened(hospital, state)
        assert (found.model == plain[0]).all()
        assert found.classes is None
        slow.free.set()
        until(lambda: any(not a.accepted for a in hospital.answers()))
        assert hospital.refused().code == "E-RUN-50"
        assert hospital.transfer.uploads == {}
    finally:
        slow.free.set()
        hospital.end()


@pytest.mark.parametrize(("policy", "code"), [("[secagg]\nmin_sum = 4\n", "E-POLICY-17"), ("[secagg", "E-POLICY-01")])
def test_t52_a_set_below_the_policys_sum_is_not_confirmed(hospital, policy, code):
    hospital.exchange()
    offer = hospital.train()
    state, _ = sealed(hospital, offer)
    hospital.folder.joinpath("policy.toml").write_text(policy)
    hospital.send_seal(state.seal)
    found = hospital.refusal()
    assert found.code == code
    assert "4" not in found.reason  # a number of the policy


# ---- one update for ever ---------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a coordinator",
    "offers a round of a masked run again with another model",
    "refused with E-RUN-50: a task is masked once",
)
def test_t57_a_round_that_was_masked_is_not_masked_for_another_model(hospital):
    hospital.exchange()
    hospital.train()
    state = {group: {k: v + 1 for k, v in values.items()} for group, values in hospital.server.items()}
    hospital.ask(state=build_method("fedavg", {}).broadcast(state))
    assert hospital.refused().code == "E-RUN-50"
    assert hospital.events().count("training") == 1
    assert len(hospital.transfer.uploads) == 1


@pytest.mark.fault(
    "a disk",
    "damages a masked update before it is sent",
    "the hospital skips the round (E-RUN-49) and takes part in the next",
)
def test_t57_a_damaged_masked_update_is_never_made_again(hospital):
    hospital.exchange()
    hospital.transfer.hold, hospital.transfer.held = threading.Event(), {"Put"}
    offer = hospital.ask()
    assert hospital.transfer.holding.wait(20)
    hospital.stop()
    hospital.transfer.hold.set()
    hospital.transfer.hold = None
    hospital.transfer.forget()
    store = SiloStore(hospital.folder / "silo.db")
    (entry,) = store.outbox()
    store.close_database()
    file = hospital.folder / "objects" / entry.object_digest
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")  # the last byte is of a weight, 0
    hospital.start()
    hospital.control.last.send(offer=offer)
    assert hospital.refused().code == "E-RUN-49"
    assert all(not data for data in hospital.transfer.uploads.values())
    hospital.close(included=False)
    hospital.settled()
    hospital.train(1)


def test_t46_after_a_restart_in_the_middle_of_an_upload_the_same_bytes_are_sent(hospital):
    hospital.exchange()
    hospital.transfer.put_cut.at = [CHUNK_BYTES // 2]
    hospital.transfer.hold, hospital.transfer.held = threading.Event(), {"Put"}
    offer = hospital.ask()
    assert hospital.transfer.holding.wait(20)
    store = hospital.service.store
    (entry,) = store.outbox()  # on the disk before the first byte leaves
    row = store.secagg.row(entry.key)
    assert row.object_digest.hex() == entry.object_digest
    hospital.stop()
    hospital.transfer.hold.set()
    hospital.transfer.hold = None
    hospital.start()
    hospital.control.last.send(offer=offer)
    hospital.sent()
    assert hospital.uploaded()[0] == row.object_digest
    assert hospital.events().count("training") == 1


def test_keys_of_a_closed_round_and_of_an_ended_run_are_nowhere_in_the_home(hospital):
    """T-62, the hospital's part: also not in pages of the database that were freed, or in its log."""
    hospital.exchange()
    hospital.train()
    store = hospital.service.store
    before = store.secagg.masked_run("run-1").keys
    assert all(secret in home_bytes(hospital) for secret in (*before.chains, before.sign))
    hospital.settle()
    until(lambda: store.secagg.masked_run("run-1").keys.position == 2)
    left = home_bytes(hospital)
    assert not any(chain in left for chain in before.chains)
    assert all(chain in left for chain in store.secagg.masked_run("run-1").keys.chains)
    after = store.secagg.masked_run("run-1").keys
    hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-1", state="finished"))
    until(lambda: store.secagg.state("run-1") == "gone")
    until(lambda: not any(secret in home_bytes(hospital) for secret in (*after.chains, after.sign)))
    assert not hospital.preflight().ready


# ---- policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a coordinator of an older version, or a lead",
    "asks for a plain run at a hospital that requires secure aggregation",
    "refused with E-POLICY-17; the session reveals no counted size and no class",
)
def test_t63_where_masks_are_required_nothing_leaves_without_them(tmp_path, monkeypatch):
    home = tmp_path / "home0"
    home.mkdir(mode=0o700)
    home.joinpath("policy.toml").write_text("[secagg]\nrequire = true\n")
    hospital = Hospital(home, manifest(), holds=("3", "7"))
    hospital.start()
    try:
        watched = Watched(monkeypatch)
        data = hospital.control.last.hello.data
        assert (data.nominal_size, data.train_examples, data.test_examples, list(data.holds)) == (0, 0, 0, [])
        hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
        until(lambda: hospital.control.last.got("preflight"))
        (answer,) = hospital.control.last.got("preflight")
        assert (answer.ready, answer.code) == (False, "E-POLICY-17")
        hospital.offer()
        assert hospital.refused().code == "E-POLICY-17"
        assert watched.read == 0
        assert hospital.transfer.uploads == {}
    finally:
        hospital.end()


@pytest.mark.parametrize("holds", [(), ("3", "7")])
def test_t63_without_the_policy_sizes_and_classes_are_declared_as_before(tmp_path, holds):
    hospital = Hospital(tmp_path / "home0", manifest(), holds=holds)
    hospital.start()
    try:
        data = hospital.control.last.hello.data
        assert (data.nominal_size, tuple(data.holds)) == (510, holds)
    finally:
        hospital.end()


def test_t63_a_masked_run_of_fewer_than_three_members_is_refused(tmp_path):
    run = masked_manifest(members=make_members(MEMBERS[:2], 3, 1.0), grid=FixedPointFormat("ring64", 2))
    hospital = Hospital(tmp_path / "home0", run)
    hospital.start()
    try:
        hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
        until(lambda: hospital.control.last.got("preflight"))
        (answer,) = hospital.control.last.got("preflight")
        assert (answer.ready, answer.code) == (False, "E-CFG-02")
        hospital.offer()
        assert not hospital.refused().accepted
        assert hospital.transfer.uploads == {}
    finally:
        hospital.end()


@pytest.mark.parametrize(
    ("policy", "terms", "code"),
    [
        ("min_sum = 4", {}, "E-POLICY-17"),
        ("min_sum = 3", {}, ""),
        ("min_contributors = 2", {}, "E-POLICY-20"),
        ("class_sums = 'complete'", {"class_sums": "each"}, "E-POLICY-17"),
        ("class_sums = 'each'", {"class_sums": "each"}, ""),
        ("collusion = 1", {"collusion": 0}, "E-POLICY-17"),
        ("collusion = 1", {}, ""),
        ("confirmed_peers = 1", {}, "E-POLICY-17"),
        ("require = true", {}, ""),
        ("class_sums = 'all'", {}, "E-POLICY-01"),
    ],
)
def test_the_policy_says_what_of_secure_aggregation_a_run_must_have(tmp_path, policy, terms, code):
    hospital = MaskedHospital(tmp_path / "home0", masked_manifest(secagg=Secagg(1, **terms)))
    hospital.folder.joinpath("policy.toml").write_text(f"[secagg]\n{policy}\n")
    hospital.start()
    try:
        answer = hospital.preflight()
        assert (answer.ready, answer.code) == (not code, code)
        assert answer.HasField("secagg_entry") is not bool(code)
    finally:
        hospital.end()


def test_t53_an_invented_member_is_held_back_and_a_run_with_it_is_refused_where_the_policy_says_so(tmp_path):
    """The coordinator has the authority's key and enrols a silo of its own."""
    hospital = MaskedHospital(tmp_path / "home0")
    invented = hospital.colleagues[2]
    home = Home(hospital.folder)
    identity = SiloIdentity(home.path)
    known = [identity.current_credentials().cert_pem, hospital.colleagues[0].cert_pem]
    members = [RosterMember.of(cert, SINCE) for cert in known]
    identity.pins().path.unlink()
    identity.pins().first(authority().roster(members, [], 1)).save()
    home.policy.write_text("[peers]\naccept = 'by hand'\n[secagg]\nconfirmed_peers = 2\n")
    told = authority().roster([*members, RosterMember.of(invented.cert_pem, SINCE)], [], 2)
    hospital.control.welcome = lambda hello: pb.CoordinatorMessage(
        welcome=pb.Welcome(protocol=PROTOCOL, software="fake 1", pulse_seconds=0.5, signed_roster=told.pack())
    )
    hospital.start()
    try:
        until(lambda: "held" in hospital.events())
        assert invented.name in identity.pins().held()
        assert hospital.preflight().code == "E-POLICY-17"
        home.policy.write_text("[peers]\naccept = 'by hand'\n")
        hospital.ask(secagg_keys_digest=hospital.publish(hospital.entries()))
        assert hospital.refused().code == "E-ID-33"
        home.policy.write_text("[peers]\naccept = 'by hand'\n[secagg]\nconfirmed_peers = 2\n")
        for colleague in hospital.colleagues.values():
            assert hospital.preflight().code == "E-POLICY-17"
            identity.pins().accept(colleague.name, identity_of(colleague.cert_pem).fingerprint)
        assert identity.pins().confirmed() == {colleague.name for colleague in hospital.colleagues.values()}
        assert hospital.preflight().ready
        hospital.exchange()
        hospital.ask(attempt=1)
        hospital.sent()
    finally:
        hospital.end()


def test_t53_without_the_policy_an_invented_member_is_accepted_and_the_hospital_is_told_how_many_it_confirmed(
    tmp_path, capsys
):
    hospital = MaskedHospital(tmp_path / "home0")
    hospital.start()
    try:
        hospital.exchange()
        hospital.train()
        assert run_command(["status", "--home", str(hospital.folder)]) == 0
        assert capsys.readouterr().out.count("0 of 2 other members confirmed by this hospital") == 2
        first = hospital.colleagues[0]
        SiloIdentity(hospital.folder).pins().accept(first.name, identity_of(first.cert_pem).fingerprint)
        assert run_command(["status", "--home", str(hospital.folder), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["runs"][0]["masked"] == {"others": ["center0", "center2"], "confirmed": ["center0"]}
        assert told["runs"][0]["privacy"].startswith(
            "no privacy: updates leave under masks, and the coordinator reads only sums over at least 3"
        )
        assert told["left"]["verdict"] == "No image has left this hospital"
    finally:
        hospital.end()


def test_the_question_for_approval_says_under_masks_and_whose_keys_were_confirmed(tmp_path):
    hospital = MaskedHospital(tmp_path / "home0")
    home = Home(hospital.folder)
    home.policy.write_text("[runs]\napprove = 'by hand'\n[secagg]\nmin_sum = 3\n")
    hospital.start()
    try:
        hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
        until(lambda: "approval" in hospital.events())
        (asked,) = hospital.service.store.approvals.all()
        assert "under masks" in asked.about
        question = PendingDecision.of(asked, PolicyAndLedger.of(home))
        assert question.contents.descriptions()[0].startswith("all of it is masked")
        rows = {c.what: (c.requested, c.policy) for c in question.comparisons}
        told, allowed = rows["Secure aggregation"]
        assert told.endswith(
            "only sums over at least 3 hospitals are read; 0 of 2 other members confirmed by this hospital"
        )
        assert allowed == "not required, sums over at least 3"
    finally:
        hospital.end()


def test_t46_a_private_masked_round_is_charged_once_though_the_service_ends_in_its_upload(tmp_path):
    home = tmp_path / "home0"
    ledger = budgeted(home)
    run = private()
    run = replace(run, secagg=Secagg(1), aggregator=NamedOptions("mean"))
    hospital = MaskedHospital(home, run)
    hospital.start()
    try:
        hospital.exchange()
        hospital.transfer.hold, hospital.transfer.held = threading.Event(), {"Put"}
        offer = hospital.ask()
        assert hospital.transfer.holding.wait(60)
        (entry,) = hospital.service.store.outbox()
        hospital.stop()
        hospital.transfer.hold.set()
        hospital.transfer.hold = None
        charged = ledger.history(TRAIN)
        assert charged
        hospital.start()
        hospital.control.last.send(offer=offer)
        hospital.sent()
        assert hospital.uploaded()[0].hex() == entry.object_digest
        assert ledger.history(TRAIN) == charged
        state, _ = sealed(hospital, offer)
        assert opened(hospital, state).inside == (0, 1, 2)
    finally:
        hospital.end()


# ---- a busy hospital, and homes that are put back --------------------------------------------------------------------


def test_t64_a_hospital_that_trains_for_another_run_confirms_and_opens_within_two_seconds(tmp_path):
    slow = Slow()
    slow.held = False
    hospital = MaskedHospital(tmp_path / "home0", run_round=slow)
    hospital.start()
    try:
        hospital.exchange()
        offer = hospital.train()
        state, _ = sealed(hospital, offer)
        slow.held = True
        slow.started.clear()
        other = hospital.transfer.offer(manifest(name="other").to_json().encode())
        hospital.offer(run_id="run-2", manifest_digest=other)
        assert slow.started.wait(20)
        began = time.monotonic()
        found = opened(hospital, state)
        assert time.monotonic() - began < 2
        assert found.inside == (0, 1, 2)
        assert hospital.service.pulse().activity == pb.TRAINING
    finally:
        slow.free.set()
        hospital.end()


def test_a_backup_has_no_keys_and_a_home_that_is_put_back_is_absent_for_the_rest_of_the_run(hospital, tmp_path, capsys):
    hospital.exchange()
    hospital.train()
    keys = hospital.service.store.secagg.masked_run("run-1").keys
    copy = tmp_path / "copy"
    assert run_command(["backup", str(copy), "--home", str(hospital.folder)]) == 0
    secrets = (*keys.chains, keys.sign)
    assert not any(s in f.read_bytes() for f in copy.rglob("*") if f.is_file() for s in secrets)
    assert hospital.service.store.secagg.state("run-1") == "ready"
    hospital.stop()
    shutil.rmtree(hospital.folder)
    assert run_command(["restore", str(copy), "--home", str(hospital.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["masked_runs"] == ["run-1"]
    hospital.start()
    answer = hospital.preflight()
    assert (answer.ready, answer.code) == (False, "E-RUN-50")
    hospital.settle()
    hospital.ask(1)
    assert hospital.refused().code == "E-RUN-50"


def test_a_database_that_is_behind_gives_up_its_masked_runs(hospital, capsys):
    """`silo restore --accept-loss`: which sets were confirmed since is not known."""
    hospital.exchange()
    hospital.train()
    hospital.stop()
    assert run_command(["restore", "--accept-loss", "--home", str(hospital.folder)]) == 0
    assert "absent for the rest of run-1" in capsys.readouterr().out
    hospital.start()
    assert hospital.preflight().code == "E-RUN-50"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def refusals(hospital):
    return [m for s in hospital.control.sessions for m in s.got("secagg_refusal")]


def audit_codes(hospital):
    return [e.facts["code"] for e in hospital.notices if e.facts.get("code")]


def home_bytes(hospital):
    return b"".join(f.read_bytes() for f in hospital.folder.glob("silo.db*") if f.is_file())
