"""What masks and shares tell: nothing but the sum (T-31, T-32, T-54, T-55, T-56)."""

from __future__ import annotations

import hashlib
import hmac
import tracemalloc
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import chi2

from fl_core.types.secagg import tolerated_colluders
from privacy.secagg import masks, packages, shamir, silo_side
from privacy.secagg.terms import SecaggError
from tests.privacy.secagg.federation import BASE, federation

P_VALUE = 1e-4


def p_of_bytes(words: np.ndarray) -> list[float]:
    """Return the chi-square p-value of each byte position of words: that all values are equally frequent."""
    found = []
    for column in words.view(np.uint8).reshape(len(words), -1).T:
        expected = len(words) / 256
        statistic = ((np.bincount(column, minlength=256) - expected) ** 2 / expected).sum()
        found.append(float(chi2.sf(statistic, 255)))
    return found


def a_real_update(words: int, dtype: str) -> np.ndarray:
    """Make what an update looks like on the grid: small numbers of both signs around zero, of a few scales."""
    drawn = np.random.default_rng(1)
    values = drawn.standard_t(4, words) * np.repeat(10.0 ** drawn.uniform(-4, 0, words // 1024), 1024)
    return np.rint(values * 2**20).astype(np.int64).astype(dtype)


@pytest.mark.parametrize("ring", ["ring32", "ring64"])
def test_t31_masked_zeros_are_uniform_in_every_byte_of_both_blocks(ring: str) -> None:
    fed = federation(3, ring=ring, sizes=(2**20, 2**20), repeatable=True)
    zeros = np.zeros(2**20, fed.run.dtype)
    upload = fed.silos[1].upload(fed.round, zeros, zeros)
    for block in (upload.model, upload.classes):
        assert min(p_of_bytes(block[4:])) > P_VALUE
        assert min(p_of_bytes(block[4:] - np.roll(block[4:], 1))) > P_VALUE
    assert not np.array_equal(upload.model, upload.classes)  # equal vectors are masked differently
    seen = p_of_bytes(a_real_update(2**20, fed.run.dtype))
    assert max(seen[1:]) < P_VALUE  # without a mask it shows in all but the last byte


@pytest.mark.parametrize("ring", ["ring32", "ring64"])
def test_t32_a_masked_update_is_uniform_and_tells_nothing_of_it(ring: str) -> None:
    fed = federation(3, ring=ring, repeatable=True)
    update = a_real_update(2**20, fed.run.dtype)
    masked = fed.silos[0].upload(fed.round, update, update).model[4:]
    assert min(p_of_bytes(masked)) > P_VALUE
    signed = f"<i{masked.itemsize}"
    correlation = np.corrcoef(masked.view(signed).astype(float), update.view(signed).astype(float))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(2**20)


def test_t54_with_every_answer_and_c_silos_an_upload_that_came_late_stays_uniform() -> None:
    """An absence of silo 4 is claimed: all its pair seeds are opened, and then its upload is there after all."""
    fed = federation(5, sizes=(2**18, 11), repeatable=True)
    fed.inputs = [(np.zeros(2**18, "<u4"), classes) for _, classes in fed.inputs]
    fed.send()
    inside, colluders = (0, 1, 2, 3), (0, 1)
    state = fed.answered(fed.confirmed(fed.sealed(inside)))
    assert np.array_equal(state.finish().model, fed.plain(inside, 0))
    late = fed.uploads[4].model.copy()
    for u in inside:  # what the answers open: the seeds of pairs with silo 4
        keys = fed.silos[u].keys.of(fed.round)
        masks.add_mask(late, keys.pair_seed(fed.round, 4, 0), fed.round.context, 0, subtract=not masks.subtracted(4, u))
    assert min(p_of_bytes(late[4:])) > P_VALUE
    assert len(colluders) == tolerated_colluders(5) < fed.round.t  # they hold shares of its own seed
    assert not any(dealer == 4 for _, dealer, _ in fed.round.opened(inside))


def every_share(fed, state, colluders) -> dict[tuple[int, int, int], dict[int, bytes]]:
    """Collect all shares that the coordinator and its colluders see, by secret and by holder."""
    found: dict[tuple[int, int, int], dict[int, bytes]] = {}
    for w, silo in enumerate(fed.silos):
        for block, dealer, slot, share in silo.answer(state.opening(w)).shares:
            found.setdefault((block, dealer, slot), {})[w] = share
    for w in colluders:  # who open their packages in uploads of everybody, also of those outside the set
        for u, upload in enumerate(fed.uploads):
            chain = fed.silos[w].keys.of(fed.round).chains[u]
            plain = packages.decrypt(fed.round, chain, upload.salt.tobytes(), u, w, upload.packages[w].tobytes())
            for block, slot in product((0, 1), range(len(fed.silos))):
                share = packages.share_at(fed.round, plain, block, slot)
                found.setdefault((block, u, slot), {})[w] = share
    return found


def rank(rows: np.ndarray, prime: int = 2_147_483_647) -> int:
    """Return the rank over a prime field of small integer rows."""
    rows, found = rows.astype(object) % prime, 0
    for column in range(rows.shape[1]):
        pivot = next((r for r in range(found, len(rows)) if rows[r, column]), None)
        if pivot is None:
            continue
        rows[[found, pivot]] = rows[[pivot, found]]
        rows[found] = rows[found] * pow(int(rows[found, column]), -1, prime) % prime
        for r in range(len(rows)):
            if r != found:
                rows[r] = (rows[r] - rows[r, column] * rows[found]) % prime
        found += 1
    return found


@pytest.mark.parametrize("class_sums", ["complete", "each"])
@pytest.mark.parametrize("inside", [(0, 1, 2, 3, 4), (0, 1, 2, 3), (1, 2, 3, 4)])
def test_t55_c_colluding_silos_and_the_coordinator_learn_the_sum_over_the_others_and_nothing_else(
    inside: tuple[int, ...], class_sums: str
) -> None:
    fed = federation(5, class_sums=class_sums).send()
    state = fed.confirmed(fed.sealed(inside))
    for colluders in combinations(range(5), tolerated_colluders(5)):
        shares = every_share(fed, state, colluders)
        t = fed.round.t
        joined = {secret for secret, by in shares.items() if len(by) >= t}
        assert joined == set(fed.round.opened(inside))  # of all other secrets they hold fewer than t shares
        honest = [u for u in range(5) if u not in colluders]
        for block in (0, 1):
            opened = {(u, v) for b, u, v in joined if b == block}
            # Known to them: seeds that were opened, and all seeds of pairs with a colluder.
            secret = [(u, u) for u in honest if (u, u) not in opened]
            secret += [(u, v) for u, v in combinations(honest, 2) if (u, v) not in opened and (v, u) not in opened]
            # An honest upload is its vector plus or minus unknown masks: what combination of uploads is free of them?
            signs = np.zeros((len(honest), len(secret)), int)
            for column, (u, v) in enumerate(secret):
                signs[honest.index(u), column] += 1
                if u != v:
                    signs[honest.index(v), column] -= 1
            free = len(honest) - rank(signs) if secret else len(honest)
            summed = [u for u in honest if u in inside]
            closed = block == 1 and class_sums == "complete" and len(inside) < 5
            assert free == (0 if closed else 1)
            if not closed:  # the one combination is the sum over the set, and it is that one to the last bit
                assert not (np.array([u in inside for u in honest], int) @ signs).any()
                summed = [u for u in honest if u in inside]
                assert np.array_equal(what_they_find(fed, inside, colluders, block), fed.plain(summed, block))


def what_they_find(fed, inside, colluders, block: int) -> np.ndarray:
    """Take off the sum of the honest uploads of a set all masks that colluders and answers know the seeds of."""
    state = fed.confirmed(fed.sealed(inside))
    answers = [silo.answer(state.opening(w)) for w, silo in enumerate(fed.silos)]
    shares = [{(b, d, s): share for b, d, s, share in answer.shares} for answer in answers]
    joined = shamir.weights([1, 2, 3, 4])
    total = np.zeros_like((fed.uploads[0].model, fed.uploads[0].classes)[block])
    for u in set(inside) - set(colluders):
        total += (fed.uploads[u].model, fed.uploads[u].classes)[block]
        for v in range(5):
            if v in colluders:
                seed = fed.silos[v].keys.of(fed.round).pair_seed(fed.round, u, block)
            elif v == u or v not in inside:
                seed = shamir.join([shares[w][block, u, v] for w in range(4)], joined)
            else:
                continue
            masks.add_mask(total, seed, fed.round.context, block, subtract=not masks.subtracted(u, v))
    return total[4:]


def test_t55_as_many_colluders_as_answers_open_a_sum_would_open_more() -> None:
    """The bound is the thresholds' own: t silos hold t shares of every seed."""
    fed = federation(5).send()
    state = fed.confirmed(fed.sealed((0, 1, 2, 3)))
    shares = every_share(fed, state, range(fed.round.t))
    assert all(len(by) >= fed.round.t for by in shares.values())


def test_t56_shares_of_t_minus_one_silos_open_nothing() -> None:
    secret, t = bytes(range(32)), 4
    shares = shamir.split(secret, range(1, 6), t)
    for points in combinations(range(1, 6), t):
        assert shamir.join([shares[x - 1] for x in points], shamir.weights(points)) == secret
    for points in combinations(range(1, 6), t - 1):
        known = [shares[x - 1] for x in points]
        assert shamir.join(known, shamir.weights(points)) != secret
        # every other secret is as possible: it has one polynomial through the same shares
        for candidate in (bytes(32), b"\xff" * 32, hashlib.sha256(b"any").digest()):
            through = shamir.weights([0, *points], 5)
            completed = shamir.combine([candidate + b"\0", *known], through).to_bytes(33, "little")
            four = [*points, 5] if 5 not in points else None
            if four is not None:
                assert shamir.join([*known, completed], shamir.weights(four)) == candidate


@pytest.mark.integration
def test_t56_shares_of_one_secret_are_uniform_one_by_one_and_two_by_two() -> None:
    n, random = 20_000, np.random.default_rng(5).bytes
    drawn = np.array(
        [
            [int.from_bytes(s, "little") >> 248 & 255 for s in shamir.split(bytes(32), (1, 2), 3, random)]
            for _ in range(n)
        ]
    )
    low = np.array(
        [[share[0] for share in shamir.split(b"\xff" * 32, (1, 2), 3, random)] for _ in range(n)], dtype=np.uint8
    )
    for top in (drawn.astype(np.uint8), low):
        for values in (top[:, 0], top[:, 1], top[:, 0] ^ top[:, 1], top[:, 0] - top[:, 1]):
            statistic = ((np.bincount(values, minlength=256) - n / 256) ** 2 / (n / 256)).sum()
            assert chi2.sf(statistic, 255) > P_VALUE


def test_t56_t_minus_one_answers_do_not_open_a_round() -> None:
    fed = federation(5).send()
    state = fed.answered(fed.confirmed(fed.sealed()), range(3))
    with pytest.raises(Exception, match=r"E-RUN-45.*4 of 5 hospitals to answer.*found 3; missing: silo3, silo4"):
        state.finish()
    assert state.unanswered == (3, 4)


@pytest.mark.parametrize("length", [1, 3, 4, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_a_mask_is_the_stream_of_aes_256_under_a_key_of_seed_context_and_block(dtype: str, length: int) -> None:
    """Against HKDF by its definition (RFC 5869) and one call of the cipher, at every edge of a chunk."""
    seed, context, block = b"s" * 32, b"c" * 32, 1
    info = b"".join(len(f).to_bytes(4, "big") + f for f in (b"consilium.secagg.v1", b"mask", block.to_bytes(8, "big")))
    extracted = hmac.digest(context, seed, "sha256")
    key = hmac.digest(extracted, info + b"\x01", "sha256")
    nbytes = length * np.dtype(dtype).itemsize
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(nbytes))
    start = np.random.default_rng(length).integers(0, 2**32, length, dtype=np.uint64).astype(dtype)
    words = start.copy()
    masks.add_mask(words, seed, context, block)
    assert np.array_equal(words, start + np.frombuffer(stream, dtype))
    masks.add_mask(words, seed, context, block, subtract=True)
    assert np.array_equal(words, start)


def test_seeds_salts_and_package_keys_never_repeat_over_uploads_rounds_and_blocks() -> None:
    fed = federation(4)
    seen: list[bytes] = []
    for number in range(3):
        round = fed.run.round(fed.round.keys_digest, "train", number, BASE)
        for silo, words in zip(fed.silos, fed.inputs, strict=True):
            upload = silo.upload(round, *words)
            seen += [upload.salt.tobytes(), *(bytes(c) for c in upload.commitments.reshape(-1, 32))]
            seen += [bytes(package) for package in upload.packages]
    assert len(set(seen)) == len(seen)


def test_another_model_manifest_key_round_kind_or_run_gives_other_seeds() -> None:
    fed = federation(4)
    rounds = [
        fed.round,
        fed.run.round(fed.round.keys_digest, "train", 0, b"c" * 32),
        fed.run.round(fed.round.keys_digest, "evaluate", 0, BASE),
        replace(fed.run, manifest_digest=b"m" * 32).round(fed.round.keys_digest, "train", 0, BASE),
        replace(fed.run, run_id="run-2").round(fed.round.keys_digest, "train", 0, BASE),
        fed.run.round(b"k" * 32, "train", 0, BASE),
    ]
    keys = fed.silos[0].keys
    assert len({keys.pair_seed(round, 1, block) for round in rounds for block in (0, 1)}) == 2 * len(rounds)
    seed = b"s" * 32
    assert len({packages.commitment(round, 0, 1, 0, seed) for round in rounds}) == len(rounds)


def test_a_base_that_is_no_digest_is_no_round() -> None:
    with pytest.raises(SecaggError):
        federation(4).run.round(bytes(32), "train", 0, b"short")


def test_masking_takes_less_than_a_mebibyte_beside_the_vector() -> None:
    fed = federation(6)
    model, classes = (silo_side.blank(words, "<u4") for words in (2**22, 60))
    tracemalloc.start()
    try:
        silo_side.mask(fed.silos[0].keys, fed.round, None, model, classes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert np.count_nonzero(model) > 2**21  # and it was masked
