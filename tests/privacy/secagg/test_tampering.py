"""What a liar changes is refused or found, the right silo is named, and no other error is raised (T-38)."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_core.errors import FederationError
from privacy.secagg import shamir, silo_side
from privacy.secagg.coordinator_side import UploadSum
from privacy.secagg.keys import MemberKeys, OwnKeys, RunKeys, confirmed_by, pinned_signature
from privacy.secagg.messages import Confirmation, Opening, RevealedShares, Seal
from privacy.secagg.terms import SecaggError
from tests.privacy.secagg.federation import (
    BASE,
    Federation,
    check_coordinator,
    federation,
    identity_signature,
    make_run,
    object_digest,
    trusted,
)


def flipped(data: bytes, at: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def tampered(shares: RevealedShares, wanted=lambda *_: True) -> RevealedShares:
    """Put other numbers in the place of the shares that `wanted` picks."""
    other = tuple(
        (b, u, v, hashlib.sha256(s).digest() + b"\0" if wanted(b, u, v) else s) for b, u, v, s in shares.shares
    )
    return replace(shares, shares=other)


def answers_of(fed: Federation, inside=None) -> tuple:
    state = fed.confirmed(fed.sealed(inside))
    return state, [silo.answer(state.opening(w)) for w, silo in enumerate(fed.silos)]


def test_t38_a_tampered_package_is_refused_by_its_reader_who_names_the_dealer() -> None:
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed())
    opening = state.opening(1)
    for u, salt, package in opening.packages:
        for found in ((flipped(salt), package), (salt, flipped(package)), (salt, flipped(package, -1))):
            changed = tuple((v, *found) if v == u else (v, s, p) for v, s, p in opening.packages)
            with pytest.raises(SecaggError, match=f"silo{u}") as caught:
                fed.silos[1].answer(replace(opening, packages=changed))
            assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", u)


@pytest.mark.parametrize("inside", [(0, 1, 2, 3, 4, 5), (0, 2, 3, 5)])
@pytest.mark.parametrize("liars", [(w,) for w in range(6)] + [(0, 1), (2, 5), (4, 5)])
def test_t38_wrong_shares_are_found_by_name_and_the_sum_is_exact_while_t_good_answers_exist(
    liars: tuple[int, ...], inside: tuple[int, ...]
) -> None:
    fed = federation(6).send()
    state, answers = answers_of(fed, inside)
    for w, shares in enumerate(answers):
        state.answer(w, tampered(shares) if w in liars else shares)
    opened = state.finish()
    assert np.array_equal(opened.model, fed.plain(inside, 0))
    assert {w for w, _ in opened.wrong} <= set(liars)
    if set(liars) & set(range(fed.round.t)):  # liars among the answers that are tried first are named, all of them
        assert {w for w, _ in opened.wrong} == set(liars)


def test_t38_a_share_that_is_wrong_for_one_secret_alone_names_its_answerer_and_its_dealer() -> None:
    fed = federation(6).send()
    state, answers = answers_of(fed, (0, 1, 2, 3))
    answers[1] = tampered(answers[1], lambda b, u, v: (b, u, v) == (0, 2, 5))
    for w, shares in enumerate(answers):
        state.answer(w, shares)
    opened = state.finish()
    assert opened.wrong == ((1, 2),)
    assert np.array_equal(opened.model, fed.plain((0, 1, 2, 3), 0))


def test_t38_with_exactly_t_answers_a_wrong_one_is_found_and_one_more_answer_mends_it() -> None:
    fed = federation(6).send()
    state, answers = answers_of(fed)
    for w in (0, 1, 2):
        state.answer(w, answers[w])
    state.answer(3, tampered(answers[3]))
    with pytest.raises(SecaggError, match="one more answer") as caught:
        state.finish()
    assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", None)
    state.answer(4, answers[4])
    opened = state.finish()
    assert np.array_equal(opened.model, fed.plain(range(6), 0))
    assert {w for w, _ in opened.wrong} == {3}


@pytest.mark.parametrize("dealer", [0, 3, 5])
def test_t38_a_dealer_whose_commitment_or_shares_fit_nothing_is_named(dealer: int) -> None:
    fed = federation(6).send()
    commitments = fed.uploads[dealer].commitments.copy()
    commitments[0, dealer, 7] ^= 1
    fed.uploads[dealer] = replace(fed.uploads[dealer], commitments=commitments)
    silo = fed.silos[dealer]
    silo.store(replace(silo.rows["train", 0], object_digest=object_digest(fed.uploads[dealer])))
    state = fed.answered(fed.confirmed(fed.sealed()))
    with pytest.raises(SecaggError, match=f"silo{dealer}") as caught:
        state.finish()
    assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", dealer)


def test_t38_shares_that_are_not_those_asked_for_are_refused_by_the_answerers_name() -> None:
    fed = federation(6).send()
    state, answers = answers_of(fed, (0, 1, 2, 3))
    good = answers[2].shares
    whole = (1).to_bytes(33, "little")
    block, dealer, slot, share = good[0]
    for bad in (
        good[1:],
        (*good, good[0]),
        good[::-1],
        (),
        ((block, dealer, slot, share[:32]), *good[1:]),
        ((block, dealer, slot, b"\xff" * 33), *good[1:]),  # not in the field
        ((block, dealer, slot, (shamir.PRIME).to_bytes(33, "little")), *good[1:]),
        ((1, dealer, slot, share), *good[1:]),
        ((block, 4, 4, whole), *good[1:]),  # of the own seed of a silo that is absent
    ):
        with pytest.raises(SecaggError, match="silo2") as caught:
            state.answer(2, replace(answers[2], shares=tuple(bad)))
        assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", 2)
    for changed in ({"seal_hash": bytes(32)}, {"round": 1}, {"kind": "evaluate"}, {"run_id": "run-2"}):
        with pytest.raises(SecaggError) as caught:
            state.answer(2, replace(answers[2], **changed))
        assert (caught.value.code, caught.value.blamed) == ("E-RUN-50", 2)
    with pytest.raises(SecaggError, match="E-RUN-51"):
        state.answer(6, answers[2])
    assert state.unanswered == tuple(range(6))


def test_t38_every_single_wrong_signature_is_refused() -> None:
    fed = federation(4).send()
    state = fed.sealed()
    for w, silo in enumerate(fed.silos):
        good = silo.confirm(state.seal)
        for wrong in (flipped(good.signature), flipped(good.signature, -1), b"", good.signature + b"\0", bytes(64)):
            with pytest.raises(SecaggError) as caught:
                state.confirm(w, replace(good, signature=wrong))
            assert (caught.value.code, caught.value.blamed) == ("E-ID-33", w)
        with pytest.raises(SecaggError, match="E-RUN-50"):
            state.confirm(w, replace(good, seal_hash=bytes(32)))


def test_t38_two_answers_that_are_made_to_fit_each_other_get_nobody_else_named() -> None:
    """Their errors cancel in the choice (0, 1, 2, 5), so that the others look as if they were off a polynomial."""
    fed = federation(6).send()
    state, answers = answers_of(fed)
    by = shamir.weights([1, 2, 3, 6])
    error = by[1], shamir.PRIME - by[0]

    def moved(share: bytes, by_: int) -> bytes:
        return ((int.from_bytes(share, "little") + by_) % shamir.PRIME).to_bytes(33, "little")

    for w in (0, 1):
        forged = tuple((b, u, v, moved(s, error[w])) for b, u, v, s in answers[w].shares)
        answers[w] = replace(answers[w], shares=forged)
    for w, shares in enumerate(answers):
        state.answer(w, shares)
    opened = state.finish()
    assert opened.wrong == ()
    assert np.array_equal(opened.model, fed.plain(range(6), 0))


@pytest.mark.parametrize(
    ("n", "liars"), [(14, (0, 3, 8, 9)), (20, (0, 7, 13)), pytest.param(50, (1, 30), marks=pytest.mark.slow)]
)
def test_t38_among_many_answers_as_many_may_be_wrong_as_the_docstring_says(n: int, liars: tuple[int, ...]) -> None:
    fed = federation(n, sizes=(2, 0))
    state, answers = answers_of(fed.send())
    for w, shares in enumerate(answers):
        state.answer(w, tampered(shares) if w in liars else shares)
    opened = state.finish()
    assert np.array_equal(opened.model, fed.plain(range(n), 0))
    assert {w for w, _ in opened.wrong} == set(liars)


def test_the_choice_of_answers_goes_through_every_one_and_the_first_t_first() -> None:
    """Seen from outside: any set of liars that leaves t good answers is worked around."""
    fed = federation(7).send()
    state, answers = answers_of(fed)
    for liars in combinations(range(7), 7 - fed.round.t):
        again = fed.sealed()
        for w, shares in enumerate(answers):
            again.answer(w, tampered(shares) if w in liars else shares)
        assert np.array_equal(again.finish().model, fed.plain(range(7), 0))
    assert state.hash == again.hash


# Any bytes: a message is made of a true one with one field exchanged, or of nothing true.

INTS = st.integers(-(2**70), 2**70) | st.integers(-1, 6)
BYTES = st.binary(max_size=80) | st.binary(min_size=32, max_size=32) | st.binary(min_size=64, max_size=64)
TEXT = st.text(max_size=12) | st.sampled_from(["train", "evaluate", "census", "run-1"])
PAIRS = st.lists(st.tuples(INTS, BYTES), max_size=7).map(tuple)
PACKAGES = st.lists(st.tuples(INTS, BYTES, BYTES | st.binary(min_size=346, max_size=346)), max_size=7).map(tuple)
SHARES = st.lists(st.tuples(INTS, INTS, INTS, BYTES | st.binary(min_size=33, max_size=33)), max_size=20).map(tuple)
FIELDS = {
    "run_id": TEXT,
    "kind": TEXT,
    "round": INTS,
    "base_digest": BYTES,
    "keys_digest": BYTES,
    "seal_hash": BYTES,
    "signature": BYTES,
    "uploads": PAIRS,
    "confirmations": PAIRS,
    "packages": PACKAGES,
    "shares": SHARES,
}


def changes(kind: type) -> st.SearchStrategy[dict[str, object]]:
    """Exchange any of a message's fields."""
    return st.fixed_dictionaries({}, optional={field.name: FIELDS[field.name] for field in fields(kind)})


@pytest.fixture(scope="module")
def opened() -> tuple:
    fed = federation(5).send()
    return fed, *answers_of(fed)


@given(changes(Seal), st.booleans())
def test_any_seal_is_the_confirmed_one_or_refused_and_then_nothing_is_stored(opened, changed, signed: bool) -> None:
    fed, state, _ = opened
    stored: list[silo_side.MaskedTaskRow] = []
    seal, silo = replace(state.seal, **changed), fed.silos[0]
    row = silo.row(seal.kind, seal.round)
    row = row and replace(row, seal_hash=b"", inside=())
    told = {"cohort": range(5), "store": stored.append}
    check = (lambda *_: True) if signed else check_coordinator
    try:
        silo_side.confirm(fed.run, silo.keys, seal, row, signed=check, **told)
    except FederationError:
        assert stored == []
    else:
        assert replace(seal, signature=b"") == replace(state.seal, signature=b"")


@given(changes(Opening))
def test_any_opening_gives_the_one_answer_or_is_refused(opened, changed) -> None:
    fed, state, answers = opened
    try:
        found = fed.silos[3].answer(replace(state.opening(3), **changed))
    except FederationError:
        return
    assert found == answers[3]


@given(changes(Confirmation), INTS)
def test_any_confirmation_counts_for_its_signer_or_is_refused(opened, changed, member: int) -> None:
    fed, state, _ = opened
    fresh = fed.sealed()
    true = Confirmation("run-1", "train", 0, state.hash, fed.silos[2].keys.confirm(state.hash))
    try:
        fresh.confirm(member, replace(true, **changed))
    except FederationError:
        assert fresh.unconfirmed == (0, 1, 2, 3, 4)
    else:
        assert (member, fresh.unconfirmed) == (2, (0, 1, 3, 4))


@given(changes(RevealedShares), INTS)
def test_any_answer_is_taken_whole_or_refused_and_a_wrong_one_opens_nothing_else(opened, changed, member: int) -> None:
    fed, _, answers = opened
    fresh = fed.sealed()
    try:
        fresh.answer(member, replace(answers[2], **changed))
        for w in range(1, 5):
            if w != member:
                fresh.answer(w, answers[w])
        found = fresh.finish()
    except FederationError:
        return
    assert np.array_equal(found.model, fed.plain(range(5), 0))


@given(st.lists(st.binary(min_size=33, max_size=33), min_size=12, max_size=12))
def test_an_answer_of_any_numbers_leaves_the_sum_exact(opened, numbers: list[bytes]) -> None:
    fed, _, answers = opened
    fresh = fed.sealed()
    forged = tuple((b, u, v, s) for (b, u, v, _), s in zip(answers[0].shares, numbers, strict=False))
    for w in range(1, 5):
        fresh.answer(w, answers[w])
    try:
        fresh.answer(0, replace(answers[0], shares=forged))
    except FederationError:
        assert fresh.unanswered == (0,)
    assert np.array_equal(fresh.finish().model, fed.plain(range(5), 0))


@given(
    st.lists(st.tuples(TEXT | st.sampled_from(["silo0", "silo1"]), BYTES, BYTES, BYTES, BYTES), max_size=4),
    st.booleans(),
)
def test_any_keys_are_everybodys_or_refused(found: list[tuple[str, bytes, bytes, bytes, bytes]], whole: bool) -> None:
    run = make_run(3)
    own = [OwnKeys.new() for _ in run.members]
    good = [k.entry(run, name, b"", identity_signature(name)) for name, k in zip(run.members, own, strict=True)]
    entries = [MemberKeys(*fields_) for fields_ in found]
    if whole:  # in the right places, under any signature
        entries = [entry._replace(name=name) for entry, name in zip(entries, run.members, strict=False)]
        entries = [good[0], *entries[1:3]]
    for check in (trusted, lambda *_: True):
        try:
            keys = RunKeys.agree(run, "silo0", own[0], entries, check)
        except FederationError:
            continue
        assert check is not trusted
        assert len(set(keys.chains)) == 3


@given(BYTES, BYTES, TEXT)
def test_any_certificate_and_signature_are_answered_by_no(certificate: bytes, signature: bytes, name: str) -> None:
    entry = MemberKeys(name, bytes(32), bytes(32), certificate, signature)
    assert not pinned_signature(entry, b"message", "demo", {name: "00"}, {})
    assert not confirmed_by(certificate, bytes(32), signature)


@given(INTS, BYTES, st.integers(0, 40), st.sampled_from(["<u4", "<u8", "<f4", "|u1"]))
def test_any_upload_is_added_whole_or_refused(opened, member: int, digest: bytes, words: int, dtype: str) -> None:
    fed = opened[0]
    total = UploadSum(fed.round, 37, 11)
    upload = replace(fed.uploads[0], classes=np.zeros(words, dtype))
    try:
        total.add(member, digest, upload)
    except FederationError:
        assert total.envelopes == {}
    else:
        assert (member in range(5), len(digest), words, dtype) == (True, 32, 15, "<u4")


@given(st.integers(-(2**70), 2**70), TEXT, BYTES, st.lists(INTS, max_size=6))
def test_any_round_is_one_of_the_run_or_refused(number: int, kind: str, base: bytes, cohort: list[int]) -> None:
    run = make_run(5)
    try:
        round = run.round(bytes(32), kind, number, base, cohort)
    except FederationError:
        return
    assert (len(round.context), round.n >= 3, 0 <= round.number <= run.rounds) == (32, True, True)
    assert round.context != BASE
