"""How many hospitals hold a class: counted with a proof, and what is left out by it (T-59)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from fl_core.errors import FederationError
from fl_core.types.secagg import EACH, Secagg
from privacy.secagg import shamir
from privacy.secagg.coordinator_side import OpenedSum
from privacy.secagg.messages import Seal
from privacy.secagg.silo_side import CensusProof, verify_census
from privacy.secagg.terms import CLASSES, SecaggError
from tests.privacy.secagg.federation import (
    BASE,
    Federation,
    federation,
    make_run,
    object_digest,
    signed_by_coordinator,
)

HELD = np.array([[1, 1, 0, 0, 1], [1, 0, 0, 0, 1], [1, 0, 1, 0, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0]], "<u4")
H = [5, 2, 1, 0, 4]


def census(held: np.ndarray = HELD, **terms) -> tuple[Federation, OpenedSum, CensusProof]:
    n, classes = held.shape
    fed = federation(n, kind="census", sizes=(0, classes), **{"min_contributors": 2, **terms})
    empty = np.zeros(0, fed.run.dtype)
    fed.inputs = [(empty, words.astype(fed.run.dtype)) for words in held]
    state = fed.send().sealed()
    opened = fed.answered(fed.confirmed(state)).finish()
    uploads = {u: (object_digest(upload), upload) for u, upload in enumerate(fed.uploads)}
    seeds = {u: opened.own_seeds[CLASSES, u] for u in range(n)}
    return fed, opened, CensusProof(state.seal, dict(state.confirmations), uploads, seeds)


def told(fed: Federation, proof: CensusProof, silo: int) -> list[int]:
    keeper = fed.silos[silo]
    return verify_census(fed.run, keeper.keys, len(fed.inputs[0][1]), proof, keeper.row("census", 0)).tolist()


@pytest.mark.parametrize("ring", ["ring32", "ring64"])
def test_t59_every_silo_finds_the_same_numbers_of_holders_as_the_coordinator(ring: str) -> None:
    fed, opened, proof = census(ring=ring)
    assert opened.classes is not None
    assert opened.classes.tolist() == H
    assert [told(fed, proof, silo) for silo in range(5)] == [H] * 5
    few = replace(proof, confirmations=dict(list(proof.confirmations.items())[:4]))
    assert told(fed, few, 0) == H
    away = replace(fed.silos[4], rows={})  # its confirmation was lost, or its row
    assert verify_census(fed.run, away.keys, 5, proof, None).tolist() == H


def lies(fed: Federation, proof: CensusProof) -> dict[str, CensusProof]:
    """Tell the census wrongly, in every part of the proof."""
    seal, one = proof.seal, proof.uploads[2]
    raised = one[1].classes.copy()
    raised[4 + 3] += 1
    forged = replace(one[1], classes=raised)
    forged_digest = object_digest(forged)
    swapped = tuple((u, forged_digest if u == 2 else d) for u, d in seal.uploads)
    resealed = replace(seal, uploads=swapped)
    resealed = replace(resealed, signature=signed_by_coordinator(resealed.message(fed.round)))
    other = census(1 - HELD)[2]
    return {
        "an upload of other bytes": replace(proof, uploads=proof.uploads | {2: (forged_digest, forged)}),
        "and a seal to go with it": replace(proof, seal=resealed, uploads=proof.uploads | {2: (forged_digest, forged)}),
        "an upload left out": replace(proof, uploads={u: x for u, x in proof.uploads.items() if u != 2}),
        "two uploads exchanged": replace(proof, uploads=proof.uploads | {2: proof.uploads[3], 3: proof.uploads[2]}),
        "another seed": replace(proof, seeds=proof.seeds | {2: bytes(32)}),
        "a seed left out": replace(proof, seeds={u: s for u, s in proof.seeds.items() if u != 2}),
        "a seed of somebody else": replace(proof, seeds=proof.seeds | {2: proof.seeds[3]}),
        "a set without one": replace(proof, seal=replace(seal, uploads=seal.uploads[:4])),
        "a set with one twice": replace(proof, seal=replace(seal, uploads=(*seal.uploads[:4], seal.uploads[3]))),
        "too few who confirmed": replace(proof, confirmations=dict(list(proof.confirmations.items())[:3])),
        "one who confirmed for all": replace(proof, confirmations=dict.fromkeys(range(5), proof.confirmations[0])),
        "another run's": other,
        "another run": replace(proof, seal=replace(seal, run_id="run-2")),
        "a round of training": replace(proof, seal=replace(seal, kind="train")),
        "a later round": replace(proof, seal=replace(seal, round=1)),
        "another base": replace(proof, seal=replace(seal, base_digest=BASE)),
        "other keys": replace(proof, seal=replace(seal, keys_digest=BASE)),
        "nothing": CensusProof(Seal("", "", 0, b"", b"", ()), {}, {}, {}),
    }


@pytest.mark.parametrize("with_row", [True, False])
def test_t59_a_census_that_is_told_wrongly_is_refused_by_every_silo(with_row: bool) -> None:
    fed, _, proof = census()
    for what, lie in lies(fed, proof).items():
        for silo in fed.silos:
            row = silo.row("census", 0) if with_row else None
            with pytest.raises(FederationError) as caught:
                verify_census(fed.run, silo.keys, 5, lie, row)
            assert caught.value.code in ("E-RUN-45", "E-RUN-48", "E-RUN-50", "E-RUN-51"), what


def test_t59_a_census_other_than_the_one_that_was_sent_or_confirmed_here_is_refused() -> None:
    fed, _, proof = census()
    row = fed.silos[1].row("census", 0)
    for changed in ({"object_digest": b"o" * 32}, {"seal_hash": b"s" * 32}):
        with pytest.raises(SecaggError) as caught:
            verify_census(fed.run, fed.silos[1].keys, 5, proof, replace(row, **changed))
        assert caught.value.code == "E-RUN-50"


def test_t59_the_tampered_upload_is_named() -> None:
    fed, _, proof = census()
    lie = lies(fed, proof)
    for what in ("an upload of other bytes", "an upload left out", "another seed"):
        with pytest.raises(SecaggError, match="silo2") as caught:
            told(fed, lie[what], 0)
        assert caught.value.blamed == 2, what


def test_t59_a_silo_that_claims_more_than_all_hospitals_is_seen() -> None:
    held = HELD.copy()
    held[0, 3] = 9
    fed, _, proof = census(held)
    with pytest.raises(SecaggError, match="at most 5") as caught:
        told(fed, proof, 1)
    assert caught.value.code == "E-RUN-48"


def test_t59_one_silo_that_lies_can_claim_as_many_holders_as_the_others_leave_room_for() -> None:
    """No range proof is made: a word is bounded by the ring, and the sum by the number of members alone."""
    held = HELD.copy()
    held[0, 2] = 4  # silo 2 alone holds class 2
    fed, _, proof = census(held)
    assert told(fed, proof, 1)[2] == 5


def test_a_census_is_of_all_members_or_none() -> None:
    fed = federation(5, kind="census", sizes=(0, 5)).send()
    assert fed.round.m == 5
    with pytest.raises(SecaggError, match="at least 5"):
        fed.sealed((0, 1, 2, 3))
    with pytest.raises(SecaggError, match="E-RUN-51"):
        fed.run.round(fed.round.keys_digest, "census", 0, fed.round.keys_digest, (0, 1, 2, 3))


def test_t59_the_rows_of_a_class_of_one_hospital_are_left_out_and_k_of_one_leaves_all() -> None:
    assert [Secagg(k).least_holders(5, 5) for k in (1, 2, 3)] == [1, 2, 3]
    # of 5 hospitals one may be absent in a round (m = 4), so one holder more is asked for where each round opens rows
    assert Secagg(2, EACH).least_holders(5, 5) == 3


@pytest.mark.parametrize("class_sums", ["complete", "each"])
@pytest.mark.parametrize("k", [2, 3])
def test_t59_of_random_partitions_every_row_that_is_opened_has_at_least_k_contributors(k: int, class_sums: str) -> None:
    drawn = np.random.default_rng(k)
    for n in (3, 5, 6, 9):
        run = make_run(n, min_contributors=k, class_sums=class_sums)
        m = run.thresholds(n).m
        for _ in range(20):
            held = drawn.random((n, 12)) < drawn.uniform(0.1, 0.9, 12)
            kept = held.sum(axis=0) >= run.terms.least_holders(n, n)
            smallest = n if class_sums == "complete" else m
            fewest = min(
                (held[list(inside)].sum(axis=0) for inside in combinations(range(n), smallest)),
                key=lambda found: found[kept].min(initial=n),
            )
            assert (fewest[kept] >= k).all()


def test_t59_a_class_of_one_hospital_is_a_row_of_zeros_in_every_opened_sum() -> None:
    """A silo zeroes what it does not keep, so the sums of such a class are zeros whatever its counts are."""
    fed, opened, proof = census()
    kept = verify_census(fed.run, fed.silos[0].keys, 5, proof, None) >= Secagg(2).least_holders(5, 5)
    counts = HELD * np.arange(1, 6, dtype="<u4")[:, None] * 100
    model = np.zeros(3, "<u4")
    fed.round = fed.run.round(fed.round.keys_digest, "train", 0, BASE)
    fed.inputs = [(model, np.where(kept, row, 0).astype("<u4")) for row in counts]
    fed.uploads = []
    sums = fed.send().answered(fed.confirmed(fed.sealed())).finish()
    assert sums.classes is not None
    assert sums.classes.tolist() == [1_500, 600, 0, 0, 1_000]
    assert opened.own_seeds.keys() == {(block, u) for block in (0, 1) for u in range(5)}
    assert sums.own_seeds == {}


def test_t59_a_census_whose_check_words_say_that_masks_did_not_cancel_is_refused_by_every_silo() -> None:
    fed = federation(5, kind="census", sizes=(0, 5)).send()
    fed.uploads[0].classes[1] += 1
    fed.silos[0].store(replace(fed.silos[0].rows["census", 0], object_digest=object_digest(fed.uploads[0])))
    state = fed.confirmed(fed.sealed())
    answers = [silo.answer(state.opening(w)).shares for w, silo in enumerate(fed.silos)]
    at, by = {(b, u): k for k, (b, u, _, _) in enumerate(answers[0])}, shamir.weights([1, 2, 3, 4])
    seeds = {u: shamir.join([answers[w][at[CLASSES, u]][3] for w in range(4)], by) for u in range(5)}
    uploads = {u: (object_digest(upload), upload) for u, upload in enumerate(fed.uploads)}
    proof = CensusProof(state.seal, dict(state.confirmations), uploads, seeds)
    for silo in range(5):
        with pytest.raises(SecaggError, match="check words of 5"):
            told(fed, proof, silo)
