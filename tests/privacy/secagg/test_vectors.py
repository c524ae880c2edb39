"""T-47: every value of vectors.json, which the independent reference wrote, from the same fixed keys."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from fl_core.types.secagg import Secagg
from privacy.secagg import masks, packages, shamir, silo_side
from privacy.secagg.coordinator_side import OpenedSeeds
from privacy.secagg.keys import MemberKeys, OwnKeys, RunKeys
from privacy.secagg.terms import VERSION, SecaggError, digest, frame
from tests.privacy.secagg import reference
from tests.privacy.secagg.federation import BASE, MANIFEST, LooseRun, make_run

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
RINGS = {"u4": "ring32", "u8": "ring64"}


def drawn(label: str) -> shamir.Random:
    """Give the bytes that vectors.json describes under `randomness`."""
    counter = itertools.count()

    def draw(n: int) -> bytes:
        k = next(counter)
        return b"".join(hashlib.sha256(f"{label}|{k}|{i}".encode()).digest() for i in range(-(-n // 32)))[:n]

    return draw


def test_t47_the_version_the_prime_and_frames_are_those_of_the_vectors() -> None:
    assert VECTORS["version"].encode() == VERSION
    assert int(VECTORS["prime"]) == shamir.PRIME
    assert frame("a", b"\x00", 7).hex() == VECTORS["frame"]


def test_t47_shares_and_weights_are_those_of_the_vectors() -> None:
    known = VECTORS["shamir"]
    secret, points = bytes.fromhex(known["secret"]), range(1, known["n"] + 1)
    shares = shamir.split(secret, points, known["t"], drawn(known["label"]))
    assert [share.hex() for share in shares] == known["shares"]
    weights = shamir.weights([1, 3, 4])
    assert [str(w) for w in weights] == known["weights_of_1_3_4"]
    assert shamir.join([shares[0], shares[2], shares[3]], weights) == secret


@pytest.mark.parametrize("width", RINGS)
def test_t47_a_mask_is_that_of_the_vectors(width: str) -> None:
    known = VECTORS[f"mask_{width}"]
    words = np.zeros(8, f"<{width}")
    masks.add_mask(words, bytes.fromhex(known["seed"]), bytes.fromhex(known["context"]), known["block"])
    assert words.tolist() == known["words"]


@pytest.mark.parametrize("width", RINGS)
def test_t47_a_whole_round_is_that_of_the_vectors(width: str) -> None:
    known = VECTORS[f"run_{width}"]
    base = bytes.fromhex(known["base_digest"])
    run = LooseRun(
        known["run_id"], bytes.fromhex(known["manifest_digest"]), tuple(known["members"]), 1,
        RINGS[width], Secagg(collusion=0), (known["t"], known["m"]),
    )  # fmt: skip
    randoms = [drawn(f"silo{u}") for u in range(5)]
    own = [OwnKeys.new(random) for random in randoms]
    assert [[key.hex() for key in keys.publics()] for keys in own] == known["entries"]
    entries = [MemberKeys(name, *keys.publics(), b"", b"") for name, keys in zip(run.members, own, strict=True)]
    silos = [
        RunKeys.agree(run, name, keys, entries, lambda *_: True) for name, keys in zip(run.members, own, strict=True)
    ]
    assert silos[0].keys_digest.hex() == known["keys_digest"]
    assert {str(v): chain.hex() for v, chain in enumerate(silos[0].chains)} == known["chains_of_silo0"]

    round = run.round(silos[0].keys_digest, known["kind"], known["round"], base)
    assert round.context.hex() == known["context"]
    seeds = [[silos[0].pair_seed(round, v, block).hex() for v in range(1, 5)] for block in (0, 1)]
    assert seeds == known["pair_seeds_of_silo0"]

    inputs = [tuple(np.array(words, f"<{width}") for words in blocks) for blocks in known["inputs"]]
    uploads = [
        silo_side.masked(keys, round, words, random) for keys, words, random in zip(silos, inputs, randoms, strict=True)
    ]
    for upload, expected in zip(uploads, known["uploads"], strict=True):
        assert upload.salt.tobytes().hex() == expected["salt"]
        assert [[bytes(c).hex() for c in block] for block in upload.commitments] == expected["commitments"]
        assert [bytes(package).hex() for package in upload.packages] == expected["packages"]
        assert [upload.model.tolist(), upload.classes.tolist()] == expected["words"]
        parts = [*upload.commitments.reshape(-1, 32), *upload.packages, upload.model, upload.classes]
        assert digest("upload", *(part.tobytes() for part in (upload.salt, *parts))).hex() == expected["digest"]

    inside = known["sealed"]
    sealed = tuple((u, bytes.fromhex(known["uploads"][u]["digest"])) for u in inside)
    hashed = round.seal_hash(sealed)
    assert hashed.hex() == known["seal_hash"]
    signatures = {w: silos[w].confirm(hashed) for w in (1, 2, 4)}
    assert {str(w): signature.hex() for w, signature in signatures.items()} == known["confirmations"]

    answers: dict[int, dict[tuple[int, int, int], bytes]] = {}
    for w in (1, 2, 4):
        given = {u: (uploads[u].salt.tobytes(), uploads[u].packages[w].tobytes()) for u in inside}
        plain = {u: packages.decrypt(round, silos[w].chains[u], salt, u, w, p) for u, (salt, p) in given.items()}
        answers[w] = {(b, u, v): packages.share_at(round, plain[u], b, v) for b, u, v in round.opened(inside)}
        assert [[*slot, share.hex()] for slot, share in answers[w].items()] == known["answers"][str(w)]

    weights = shamir.weights([w + 1 for w in answers])
    seeds = {slot: shamir.join([answer[slot] for answer in answers.values()], weights) for slot in round.opened(inside)}
    for (block, dealer, slot), seed in seeds.items():
        bound = known["uploads"][dealer]["commitments"][block][slot]
        assert packages.commitment(round, dealer, slot, block, seed).hex() == bound
    sums = [np.sum([uploads[u].model for u in inside], axis=0, dtype=f"<{width}"), np.zeros(0)]
    with pytest.raises(SecaggError, match="check words"):  # the vectors' blocks begin with none
        OpenedSeeds(round.title, round.context, inside, seeds).unmask(sums)
    assert sums[0].tolist() == known["sum"]


@pytest.mark.parametrize(("n", "width"), [(3, "u4"), (4, "u8"), (7, "u4")])
def test_t47_the_independent_reference_makes_the_same_uploads_and_answers_and_opens_the_same_sum(
    n: int, width: str
) -> None:
    run = make_run(n, ring=RINGS[width])
    t, m = run.thresholds(n)
    theirs = reference.Run(run.run_id, MANIFEST, run.members, t, m)
    others = [reference.Silo(theirs, u, drawn(f"silo{u}")) for u in range(n)]
    for other in others:
        other.setup([silo.entry for silo in others])
    context = theirs.context(others[0].keys, "train", 0, BASE)

    randoms = [drawn(f"silo{u}") for u in range(n)]
    own = [OwnKeys.new(random) for random in randoms]
    named = list(zip(run.members, own, strict=True))
    entries = [MemberKeys(name, *keys.publics(), b"", b"") for name, keys in named]
    silos = [RunKeys.agree(run, name, keys, entries, lambda *_: True) for name, keys in named]
    round = run.round(silos[0].keys_digest, "train", 0, BASE)
    assert round.context == context

    vectors = [
        [np.frombuffer(drawn(f"x{u}{b}")(8 * k), f"<{width}")[:k] for b, k in ((0, 41), (1, 6))] for u in range(n)
    ]
    expected = [other.upload(context, vector) for other, vector in zip(others, vectors, strict=True)]
    for keys, vector, random, theirs_ in zip(silos, vectors, randoms, expected, strict=True):
        upload = silo_side.masked(keys, round, (vector[0].copy(), vector[1].copy()), random)
        assert [bytes(package) for package in upload.packages] == theirs_.packages
        assert [[bytes(c) for c in block] for block in upload.commitments] == theirs_.commitments
        assert all(np.array_equal(*pair) for pair in zip((upload.model, upload.classes), theirs_.words, strict=True))
    inside = tuple(range(m))
    seal = tuple((u, expected[u].digest()) for u in inside)
    hashed = round.seal_hash(seal)
    assert hashed == reference.seal_hash(context, seal)
    signatures = {w: silos[w].confirm(hashed) for w in range(t)}
    answers = {}
    for w, other in enumerate(others):
        given = {u: (expected[u].salt, expected[u].packages[w]) for u in inside}
        answers[w] = other.answer(context, seal, signatures, given)  # with the signatures of this implementation
        assert sorted(answers[w]) == list(round.opened(inside))
    uploads = {u: expected[u] for u in inside}
    model, classes = reference.open_sum(theirs, context, seal, uploads, answers)
    assert np.array_equal(model, np.sum([vectors[u][0] for u in inside], axis=0, dtype=f"<{width}"))
    assert (classes is None) == (m < n)
