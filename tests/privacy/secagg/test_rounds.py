"""One opening per round, whatever the coordinator asks and whoever is away."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from fl_core.errors import ConfigError, FederationError
from privacy.secagg import silo_side
from privacy.secagg.coordinator_side import OpenedSum, SealedRound, UploadSum
from privacy.secagg.messages import Confirmation, MaskedUpload, RevealedShares, Seal
from privacy.secagg.terms import Round, SecaggError
from tests.privacy.secagg.federation import (
    BASE,
    Federation,
    check_coordinator,
    federation,
    object_digest,
    signed_by_coordinator,
)

pytestmark = pytest.mark.integration


def subsets(n: int) -> list[tuple[int, ...]]:
    return [found for k in range(n + 1) for found in itertools.combinations(range(n), k)]


def forget(fed: Federation) -> None:
    """Let every silo forget what it confirmed: so that one federation serves many patterns."""
    for silo in fed.silos:
        silo.rows = {key: replace(row, seal_hash=b"", inside=()) for key, row in silo.rows.items()}


def code_of(action, *args, **named) -> str:
    with pytest.raises(FederationError) as caught:
        action(*args, **named)
    return caught.value.code


def seal_of(fed: Federation, inside: Iterable[int], **changed) -> Seal:
    """Seal whatever the coordinator likes, signed as it should be."""
    uploads = tuple((u, object_digest(fed.uploads[u])) for u in inside)
    fields = {"run_id": fed.run.run_id, "kind": "train", "round": 0, "base_digest": BASE}
    seal = Seal(**fields | {"keys_digest": fed.round.keys_digest, "uploads": uploads} | changed)
    round = fed.run.round(seal.keys_digest, seal.kind, seal.round, seal.base_digest)
    return replace(seal, signature=signed_by_coordinator(seal.message(round)))


class Patterns:
    """Every pattern of (sent, confirmed, answered), of which each distinct piece of work is done once.

    Whom a silo answers depends on who confirmed, but what it answers does not: so shares are made for every set of
    confirmations, held equal, and then joined for every set of answers.
    """

    def __init__(self, fed: Federation) -> None:
        self.fed, self.n = fed, len(fed.silos)
        self.t, self.m = fed.round.t, fed.round.m
        self.opened = self.aborted = 0

    def run(self) -> None:
        for inside in subsets(self.n):
            forget(self.fed)
            answers = self._answers(inside)
            for answering in subsets(self.n):
                confirming = sum(len(c) >= self.t for c in subsets(self.n))
                everything = 2**self.n
                if answers is None or not self._finish(inside, answers, answering):
                    self.aborted += everything
                else:
                    self.opened += confirming
                    self.aborted += everything - confirming

    def _answers(self, inside: tuple[int, ...]) -> list[RevealedShares] | None:
        fed = self.fed
        if len(inside) < self.m:
            assert code_of(fed.sealed, inside) == "E-RUN-51"
            assert {code_of(silo.confirm, seal_of(fed, inside)) for silo in fed.silos} == {"E-RUN-51"}
            return None
        signatures = [silo.confirm(fed.sealed(inside).seal) for silo in fed.silos]
        found: list[RevealedShares] | None = None
        for confirming in subsets(self.n):
            state = fed.sealed(inside)
            for w in confirming:
                state.confirm(w, signatures[w])
            if len(confirming) < self.t:
                assert code_of(state.opening, 0) == "E-RUN-45"
                continue
            answers = [silo.answer(state.opening(w)) for w, silo in enumerate(fed.silos)]
            assert found in (None, answers)
            found = answers
        return found

    def _finish(self, inside: tuple[int, ...], answers: list[RevealedShares], answering: tuple[int, ...]) -> bool:
        state = self.fed.sealed(inside)
        for w in answering:
            state.answer(w, answers[w])
        if len(answering) < self.t:
            assert code_of(state.finish) == "E-RUN-45"
            return False
        opened = state.finish()
        assert np.array_equal(opened.model, self.fed.plain(inside, 0))
        if self.fed.run.terms.class_sums == "each" or len(inside) == self.n:
            assert opened.classes is not None
            assert np.array_equal(opened.classes, self.fed.plain(inside, 1))
        else:
            assert opened.classes is None
        assert opened.wrong == ()
        return True


@pytest.mark.parametrize("class_sums", ["complete", "each"])
@pytest.mark.parametrize("ring", ["ring32", "ring64"])
def test_t30_all_32768_patterns_of_absences_of_five_silos_end_in_the_exact_sum_or_in_nothing(
    ring: str, class_sums: str
) -> None:
    patterns = Patterns(federation(5, of_test=(3, 3), ring=ring, class_sums=class_sums).send())
    patterns.run()
    assert (patterns.opened, patterns.aborted) == (4_096, 28_672)  # those of the independent reference


def test_t30_all_patterns_with_the_thresholds_of_five_silos() -> None:
    patterns = Patterns(federation(5).send())
    assert (patterns.t, patterns.m) == (4, 4)
    patterns.run()
    assert (patterns.opened, patterns.aborted) == (6**3, 32_768 - 6**3)  # 5 choose 4, and all 5, three times


def sampled(patterns: int, n: int, ring: str, class_sums: str) -> int:
    fed = federation(n, ring=ring, class_sums=class_sums).send()
    drawn, opened = np.random.default_rng(n), 0
    t, m = fed.round.t, fed.round.m
    for _ in range(patterns):
        share = drawn.uniform(0.6, 1.0)
        inside, confirming, answering = (tuple(np.flatnonzero(drawn.random(n) < share).tolist()) for _ in range(3))
        forget(fed)
        if len(inside) < m:
            assert code_of(fed.sealed, inside) == "E-RUN-51"
            continue
        state = fed.confirmed(fed.sealed(inside), confirming)
        if len(confirming) < t:
            assert code_of(state.opening, 0) == "E-RUN-45"
            continue
        for w in answering:
            fed.silos[w].confirm(state.seal)  # also where the confirmation was lost on its way
        fed.answered(state, answering)
        if len(answering) < t:
            assert code_of(state.finish) == "E-RUN-45"
            continue
        sums = state.finish()
        assert np.array_equal(sums.model, fed.plain(inside, 0))
        if class_sums == "each" or len(inside) == n:
            assert np.array_equal(sums.classes, fed.plain(inside, 1))
        else:
            assert sums.classes is None
        opened += 1
    return opened


@pytest.mark.parametrize(("ring", "class_sums"), [("ring32", "complete"), ("ring64", "each")])
def test_t30_sampled_patterns_of_twenty_silos(ring: str, class_sums: str) -> None:
    assert sampled(12, 20, ring, class_sums) > 0


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("class_sums", ["complete", "each"])
def test_t30_two_thousand_sampled_patterns_of_twenty_silos(class_sums: str) -> None:
    assert sampled(2_000, 20, "ring32", class_sums) > 300


def opened_sum(fed: Federation, round: Round, cohort: Iterable[int], senders: Iterable[int]) -> OpenedSum:
    """Open the sum of who sent, confirmed and answered by all of the cohort; a share is of an opened block alone."""
    cohort, total = tuple(cohort), UploadSum(round, *(len(words) for words in fed.inputs[0]))
    for u in senders:
        upload = fed.silos[u].upload(round, *fed.inputs[u])
        total.add(u, object_digest(upload), upload)
    state = SealedRound(total, total.seal(signed_by_coordinator), fed.silos[0].keys.peers)
    for u in cohort:
        state.confirm(u, fed.silos[u].confirm(state.seal, cohort))
    shared = set[int]()
    for u in cohort:
        answer = fed.silos[u].answer(state.opening(u), cohort)
        shared |= {block for block, *_ in answer.shares}
        state.answer(u, answer)
    opened = state.finish()
    assert shared == ({0} if opened.classes is None else {0, 1})
    return opened


def test_t60_with_complete_no_share_of_class_rows_is_given_in_a_round_with_an_absence() -> None:
    fed = federation(5, class_sums="complete")
    whole, part = _two_rounds(fed)
    assert np.array_equal(whole, fed.plain(range(5), 1))
    assert part is None


def test_t60_with_each_they_are_opened_always_and_the_difference_tells() -> None:
    fed = federation(5, class_sums="each")
    whole, part = _two_rounds(fed)
    assert part is not None
    assert np.array_equal(whole - part, fed.inputs[4][1])


def _two_rounds(fed: Federation) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the class sums of a round of all and of one without the last silo; all counts are the same in both."""
    first, second = (fed.run.round(fed.round.keys_digest, "train", number, BASE) for number in (0, 1))
    whole, part = opened_sum(fed, first, range(5), range(5)), opened_sum(fed, second, range(5), range(4))
    assert np.array_equal(whole.model - part.model, fed.inputs[4][0])
    assert whole.classes is not None
    return whole.classes, part.classes


@pytest.mark.parametrize("class_sums", ["complete", "each"])
def test_class_rows_of_a_cohort_stay_closed_unless_each_round_opens_them_although_all_of_it_sent(
    class_sums: str,
) -> None:
    """Sums of two cohorts differ by a hospital's counts, as sums with and without an absence do."""
    fed = federation(7, class_sums=class_sums)
    cohort = (0, 2, 3, 6)
    opened = opened_sum(fed, fed.run.round(fed.round.keys_digest, "train", 1, BASE, cohort), cohort, cohort)
    assert np.array_equal(opened.model, fed.plain(cohort, 0))
    if class_sums == "each":
        assert np.array_equal(opened.classes, fed.plain(cohort, 1))
    else:
        assert opened.classes is None


def test_a_cohort_of_some_members_masks_confirms_and_opens_among_itself() -> None:
    fed = federation(7)
    cohort = (0, 2, 3, 6)
    round = fed.run.round(fed.round.keys_digest, "train", 1, BASE, cohort)
    assert (round.n, round.t, round.m) == (4, 3, 3)
    uploads = {u: fed.silos[u].upload(round, *fed.inputs[u]) for u in cohort}
    total = UploadSum(round, *(len(words) for words in fed.inputs[0]))
    for u in (6, 0, 3):
        total.add(u, object_digest(uploads[u]), uploads[u])
    state = SealedRound(total, total.seal(signed_by_coordinator), fed.silos[0].keys.peers)
    assert code_of(fed.silos[1].confirm, state.seal, cohort) == "E-RUN-51"
    for u in (0, 2, 6):
        state.confirm(u, fed.silos[u].confirm(state.seal, cohort))
    for u in (2, 3, 6):
        if u == 3:
            fed.silos[3].confirm(state.seal, cohort)
        state.answer(u, fed.silos[u].answer(state.opening(u), cohort))
    opened = state.finish()
    assert np.array_equal(opened.model, fed.plain((0, 3, 6), 0))
    assert opened.classes is None


def test_t34_of_two_sets_shown_to_any_two_groups_at_most_one_is_signed_by_t_and_nobody_signs_twice() -> None:
    fed = federation(5).send()
    sets = (0, 1, 2, 3, 4), (0, 1, 2, 3)
    seals = [fed.sealed(inside).seal for inside in sets]
    colluders = (3, 4)  # as many as are withstood: they sign whatever they are shown
    for shown in itertools.product((0, 1), repeat=3):
        forget(fed)
        signed = [set(colluders), set(colluders)]
        for u, first in enumerate(shown):
            assert isinstance(fed.silos[u].confirm(seals[first]), Confirmation)
            signed[first].add(u)
            assert code_of(fed.silos[u].confirm, seals[1 - first]) == "E-RUN-50"
        assert sum(len(found) >= fed.round.t for found in signed) <= 1


def test_t34_the_same_set_under_another_base_or_digest_is_another_set() -> None:
    fed = federation(5).send()
    silo = fed.silos[0]
    silo.confirm(seal_of(fed, (0, 1, 2, 3)))
    replaced = tuple((u, object_digest(fed.uploads[u]) if u != 3 else b"x" * 32) for u in range(4))
    for other in (
        seal_of(fed, (0, 1, 2, 3, 4)),
        seal_of(fed, (0, 1, 2, 3), base_digest=b"c" * 32),
        seal_of(fed, (), uploads=replaced),
    ):
        assert code_of(silo.confirm, other) == "E-RUN-50"


def test_t35_before_the_close_a_silo_gives_the_same_answer_byte_for_byte_also_after_a_restart() -> None:
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed((0, 1, 2, 3)))
    silo, opening = fed.silos[4], state.opening(4)
    first, confirmed = silo.answer(opening), silo.confirm(state.seal)
    silo.keys, silo.rows = replace(silo.keys), dict(silo.rows)  # what a restart reads from the disk
    assert silo.confirm(state.seal) == confirmed
    assert silo.answer(opening) == first
    fewer = replace(opening, confirmations=opening.confirmations[:4])
    assert silo.answer(fewer) == first


@pytest.mark.parametrize("inside", [(0, 1, 2, 3, 4), (0, 1, 2, 3)])
def test_t35_after_the_close_nothing_of_the_round_is_confirmed_opened_or_masked(inside: tuple[int, ...]) -> None:
    """As it is asked for by a coordinator that was put back from a backup, with the same set or another."""
    fed = federation(5).send()
    state = fed.answered(fed.confirmed(fed.sealed()))
    state.finish()
    openings = [state.opening(w) for w in range(5)]
    confirmed_rows = [dict(silo.rows) for silo in fed.silos]
    fed.close()
    for w, silo in enumerate(fed.silos):
        assert code_of(silo.confirm, fed.sealed(inside).seal) == "E-RUN-50"
        assert code_of(silo.answer, openings[w]) == "E-RUN-50"
        assert code_of(silo.upload, fed.round, *fed.inputs[w]) == "E-RUN-50"
        silo.rows = confirmed_rows[w]  # even where the rows came back, the keys are gone
        assert code_of(silo.answer, openings[w]) == "E-RUN-50"


def test_t35_a_sum_is_opened_once() -> None:
    fed = federation(5).send()
    state = fed.answered(fed.confirmed(fed.sealed()))
    state.finish()
    assert code_of(state.finish) == "E-RUN-48"


def test_t36_a_silo_that_was_given_another_base_is_found_before_anything_is_opened() -> None:
    fed = federation(5).send(base={4: b"another model".ljust(32)})
    state = fed.sealed()
    assert code_of(fed.silos[4].confirm, state.seal) == "E-RUN-50"
    fed.confirmed(state, range(4))
    for w in range(4):
        with pytest.raises(SecaggError, match="round 0") as caught:
            fed.silos[w].answer(state.opening(w))
        assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", 4)


def test_t36_a_base_that_was_offered_and_not_masked_for_counts_as_well() -> None:
    fed = federation(5).send()
    seal = fed.sealed((0, 1, 2, 3)).seal
    absent = replace(fed.silos[4], rows={})
    assert code_of(absent.confirm, seal, offered=b"another model".ljust(32)) == "E-RUN-50"
    assert isinstance(absent.confirm(seal, offered=BASE), Confirmation)


@pytest.mark.parametrize("block", ["model", "classes"])
def test_t36_masks_that_do_not_cancel_are_seen_in_the_check_words_and_nothing_is_merged(block: str) -> None:
    fed = federation(5).send()
    wrong = getattr(fed.uploads[2], block).copy()
    wrong += np.arange(len(wrong), dtype=wrong.dtype) + 1  # what a mask of another model leaves, or a liar
    fed.uploads[2] = replace(fed.uploads[2], **{block: wrong})
    silo = fed.silos[2]
    silo.rows["train", 0] = replace(silo.rows["train", 0], object_digest=object_digest(fed.uploads[2]))
    state = fed.answered(fed.confirmed(fed.sealed()))
    with pytest.raises(SecaggError, match="train of round 0: expected check words of 5") as caught:
        state.finish()
    assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", None)
    assert code_of(state.finish) == "E-RUN-48"


def test_t51_a_seal_of_another_round_run_kind_or_keys_is_refused() -> None:
    fed, other = federation(5).send(), federation(5, seed=1).send()
    silo = fed.silos[0]
    good = seal_of(fed, range(5))
    for changed, code in (
        ({"run_id": "run-2"}, "E-RUN-50"),
        ({"keys_digest": bytes(32)}, "E-RUN-50"),
        ({"kind": "census"}, "E-RUN-50"),
        ({"kind": "test"}, "E-RUN-50"),
        ({"round": 3}, "E-RUN-50"),
        ({"round": 2**70}, "E-RUN-50"),
        ({"round": -1}, "E-RUN-50"),
        ({"base_digest": b""}, "E-RUN-50"),
        ({"signature": b""}, "E-ID-33"),
    ):
        assert code_of(silo.confirm, replace(good, **changed)) == code, changed
    assert code_of(silo.confirm, other.sealed().seal) == "E-RUN-50"
    assert code_of(silo.confirm, seal_of(fed, range(5), round=1)) == "E-RUN-50"  # of what this silo sent in round 0
    assert isinstance(silo.confirm(good), Confirmation)


def test_t51_a_signature_of_the_coordinator_over_another_set_is_none() -> None:
    fed = federation(5).send()
    mixed = replace(fed.sealed().seal, signature=fed.sealed((0, 1, 2, 3)).seal.signature)
    assert code_of(fed.silos[0].confirm, mixed) == "E-ID-33"
    assert fed.silos[0].rows["train", 0].seal_hash == b""


def test_t51_an_opening_of_another_round_or_set_is_refused() -> None:
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed())
    opening = state.opening(0)
    silo = fed.silos[0]
    for changed in ({"run_id": "run-2"}, {"round": 1}, {"kind": "evaluate"}, {"seal_hash": bytes(32)}):
        assert code_of(silo.answer, replace(opening, **changed)) == "E-RUN-50", changed
    assert code_of(replace(silo, rows={}).answer, opening) == "E-RUN-50"


def test_t51_a_package_of_another_upload_round_or_member_opens_nothing() -> None:
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed())
    silo = fed.silos[0]
    opening = state.opening(0)
    again = federation(5)
    again.silos = [
        replace(s, rows={}) for s in fed.silos
    ]  # silo 3 masked twice, having crashed before its row was stored
    again.send()
    (_, salt, package) = opening.packages[3]
    other_salt, other_package = again.uploads[3].salt.tobytes(), again.uploads[3].packages[0].tobytes()
    later = fed.run.round(fed.round.keys_digest, "train", 1, BASE)
    next_round = fed.silos[3].upload(later, *fed.inputs[3])
    for found in (
        (salt, other_package),
        (other_salt, package),
        (next_round.salt.tobytes(), next_round.packages[0].tobytes()),
        (salt, fed.uploads[3].packages[1].tobytes()),
        (salt, fed.uploads[2].packages[0].tobytes()),
        (b"", package),
        (salt, b""),
    ):
        packages = (*opening.packages[:3], (3, *found), *opening.packages[4:])
        with pytest.raises(SecaggError) as caught:
            silo.answer(replace(opening, packages=packages))
        assert (caught.value.code, caught.value.blamed) == ("E-RUN-48", 3)


@pytest.mark.parametrize(
    "inside", [(0, 1, 2), (0, 0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 7), (0, 1, 2, -1), (3, 2, 1, 0), (), (0, 1, 2, 2**65)]
)
def test_t52_a_set_of_m_minus_one_an_index_twice_and_a_stranger_are_refused(inside: tuple[int, ...]) -> None:
    fed = federation(5).send()
    uploads = tuple((u, bytes(32)) for u in inside)
    seal = replace(seal_of(fed, range(5)), uploads=uploads)
    for silo in fed.silos:
        assert code_of(silo.confirm, seal) == "E-RUN-51"
    assert all(silo.rows["train", 0].seal_hash == b"" for silo in fed.silos)


def test_t52_a_set_with_something_else_than_a_digest_is_refused() -> None:
    fed = federation(5).send()
    for found in (b"", b"x" * 31, b"x" * 33):
        uploads = (*((u, object_digest(fed.uploads[u])) for u in range(4)), (4, found))
        assert code_of(fed.silos[0].confirm, seal_of(fed, (), uploads=uploads)) == "E-RUN-51"


def test_t52_a_set_below_the_policys_sum_is_refused_there_alone() -> None:
    fed = federation(5).send()
    fed.silos[2].min_sum = 5
    seal = seal_of(fed, range(4))
    assert code_of(fed.silos[2].confirm, seal) == "E-POLICY-17"
    assert isinstance(fed.silos[1].confirm(seal), Confirmation)
    assert isinstance(fed.silos[2].confirm(seal_of(fed, range(5))), Confirmation)


def test_t52_an_opening_for_other_members_than_the_confirmed_set_is_refused() -> None:
    """The list of packages says who is inside: one that differs would open a seed of its own beside one of a pair."""
    fed = federation(5).send()
    whole, less = fed.confirmed(fed.sealed()), fed.sealed((0, 1, 2, 3))
    opening = whole.opening(0)
    twice = (*opening.packages, opening.packages[4])
    for packages in (opening.packages[:4], opening.packages[::-1], twice, ()):
        assert code_of(fed.silos[0].answer, replace(opening, packages=packages)) == "E-RUN-51"
    assert code_of(fed.silos[0].answer, replace(opening, seal_hash=less.hash)) == "E-RUN-50"


def test_t52_no_answer_opens_a_members_own_seed_beside_one_that_it_shares_with_an_absent_one() -> None:
    fed = federation(6, class_sums="each")
    for inside in subsets(6):
        slots = fed.round.opened(inside)
        own = {(block, u) for block, u, v in slots if u == v}
        shared = {(block, v) for block, u, v in slots if u != v}
        assert not own & shared
        assert own == {(block, u) for block in (0, 1) for u in inside}


def test_too_few_confirmations_give_no_answer_whoever_repeats_them() -> None:
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed())
    opening = state.opening(0)
    few = opening.confirmations[:3]
    for confirmations in (few, few * 3, (*few, (7, few[0][1])), (*few, (-1, few[0][1])), (*few, (3, b""))):
        assert code_of(fed.silos[0].answer, replace(opening, confirmations=confirmations)) == "E-RUN-45"


def test_t54_an_upload_after_the_seal_is_refused_by_the_coordinator_and_not_made_by_the_silo() -> None:
    fed = federation(5).send()
    total = UploadSum(fed.round, *(len(words) for words in fed.inputs[0]))
    for u in range(4):
        total.add(u, object_digest(fed.uploads[u]), fed.uploads[u])
    SealedRound(total, total.seal(signed_by_coordinator), fed.silos[0].keys.peers)
    assert code_of(total.add, 4, object_digest(fed.uploads[4]), fed.uploads[4]) == "E-RUN-06"
    late = replace(fed.silos[4], rows={})
    late.confirm(seal_of(fed, range(4)))
    assert code_of(late.upload, fed.round, *fed.inputs[4]) == "E-RUN-50"


def test_t57_a_task_is_masked_once_whatever_base_it_is_offered_with_and_also_after_a_restart() -> None:
    fed = federation(5).send()
    silo = fed.silos[0]
    silo.keys, silo.rows = replace(silo.keys), dict(silo.rows)
    assert code_of(silo.upload, fed.round, *fed.inputs[0]) == "E-RUN-49"
    other_base = fed.run.round(fed.round.keys_digest, "train", 0, b"c" * 32)
    assert code_of(silo.upload, other_base, *fed.inputs[0]) == "E-RUN-50"
    assert isinstance(silo.upload(fed.run.round(fed.round.keys_digest, "train", 1, BASE), *fed.inputs[0]), MaskedUpload)


def test_t57_an_upload_other_than_the_one_that_left_is_not_confirmed() -> None:
    fed = federation(5).send()
    silo = fed.silos[0]
    other = tuple((u, b"o" * 32 if u == 0 else object_digest(fed.uploads[u])) for u in range(5))
    assert code_of(silo.confirm, seal_of(fed, (), uploads=other)) == "E-RUN-50"
    assert code_of(replace(silo, rows={}).confirm, seal_of(fed, range(5))) == "E-RUN-50"  # it sent nothing


def test_no_signature_is_made_before_the_row_is_stored() -> None:
    fed = federation(5).send()
    silo, seal = fed.silos[0], seal_of(fed, range(5))

    def full_disk(_: silo_side.MaskedTaskRow) -> None:
        raise OSError("no space left")

    told = {"cohort": range(5), "signed": check_coordinator}
    with pytest.raises(OSError, match="no space"):
        silo_side.confirm(fed.run, silo.keys, seal, silo.row("train", 0), store=full_disk, **told)
    stored: list[silo_side.MaskedTaskRow] = []
    silo_side.confirm(fed.run, silo.keys, seal, silo.row("train", 0), store=stored.append, **told)
    round_hash = fed.round.seal_hash(seal.uploads)
    assert stored == [
        silo_side.MaskedTaskRow("train", 0, BASE, object_digest(fed.uploads[0]), round_hash, (0, 1, 2, 3, 4))
    ]


def test_a_coordinator_that_lost_an_upload_or_holds_another_cannot_go_on_with_the_sealed_set() -> None:
    fed = federation(5).send()
    seal = fed.sealed().seal
    total = UploadSum(fed.round, *(len(words) for words in fed.inputs[0]))
    for u in range(4):
        total.add(u, object_digest(fed.uploads[u]), fed.uploads[u])
    assert code_of(SealedRound, total, seal, fed.silos[0].keys.peers) == "E-RUN-51"
    total.add(4, b"o" * 32, fed.uploads[4])
    assert code_of(SealedRound, total, seal, fed.silos[0].keys.peers) == "E-RUN-51"


def test_an_upload_of_another_shape_or_type_or_a_second_one_is_refused_and_changes_nothing() -> None:
    fed = federation(4).send()
    total = UploadSum(fed.round, *(len(words) for words in fed.inputs[0]))
    good = fed.uploads[0]
    assert [name for name, _ in MaskedUpload.tensors(fed.round, 37, 11).items()] == list(MaskedUpload.__slots__)
    for changed in (
        {"salt": good.salt[:31]},
        {"commitments": good.commitments[:1]},
        {"packages": good.packages[:, :-1]},
        {"model": good.model[:-1]},
        {"classes": good.classes.astype("<u8")},
        {"model": good.model.view("<i4")},
    ):
        assert code_of(total.add, 0, bytes(32), replace(good, **changed)) == "E-WIRE-06"
    for u in range(4):
        total.add(u, object_digest(fed.uploads[u]), fed.uploads[u])
    assert code_of(total.add, 0, object_digest(good), good) == "E-RUN-51"
    assert code_of(total.add, 9, bytes(32), good) == "E-RUN-51"
    state = SealedRound(total, total.seal(signed_by_coordinator), fed.silos[0].keys.peers)
    opened = fed.answered(fed.confirmed(state)).finish()
    assert np.array_equal(opened.model, fed.plain(range(4), 0))


def test_every_silo_of_a_round_uploads_the_same_number_of_bytes() -> None:
    fed = federation(6).send()
    shapes = MaskedUpload.tensors(fed.round, 37, 11)
    assert shapes["packages"] == ("|u1", (6, 66 * 6 + 16))
    for upload in fed.uploads:
        upload.check(fed.round, 37, 11)


def test_the_error_codes_of_a_run_that_is_no_run_are_those_of_a_configuration() -> None:
    with pytest.raises(ConfigError, match="each silo once"):
        replace(federation(3).run, members=("a", "a", "b"))
