"""A silo's half of a round: it masks one vector, confirms one set, answers only for that set, and verifies a census.

Two values must survive a crash, and the caller stores them: the `RunKeys` of the run, and a `MaskedTaskRow` of each
task until its close. The row of a set is passed to `store` before the signature is made: a signature leaves a silo only
when the row is on its disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_core.types.secagg import SECRET
from privacy.secagg import packages
from privacy.secagg.keys import RunKeys, confirmed_by
from privacy.secagg.masks import add_mask, check_words, subtracted
from privacy.secagg.messages import (
    CHECK_WORDS,
    Confirmation,
    MaskedUpload,
    Opening,
    RevealedShares,
    Seal,
    Words,
    check_about,
)
from privacy.secagg.shamir import Random, split
from privacy.secagg.terms import BLOCKS, CLASSES, Round, SecaggError, SecaggRun


@dataclass(frozen=True, slots=True)
class MaskedTaskRow:
    """A silo's data of one task until its close; fields are empty until they are known.

    base_digest: of the state that the task begins from. object_digest: of its only upload. seal_hash, inside: the only
    set that the silo confirmed.
    """

    kind: str
    number: int
    base_digest: bytes
    object_digest: bytes = b""
    seal_hash: bytes = b""
    inside: tuple[int, ...] = ()


Store = Callable[[MaskedTaskRow], None]
"""Writes a row to the disk in place of the task's earlier row; raises if it cannot, or if the row on the disk is not
the one that was read."""


def blank(words: int, dtype: str) -> Words:
    """Create a block of zeros with room for check words; the caller fills `block[CHECK_WORDS:]`."""
    return np.zeros(words + CHECK_WORDS, dtype)


def mask(
    keys: RunKeys,
    round: Round,
    row: MaskedTaskRow | None,
    model: Words,
    classes: Words,
    random: Random = secrets.token_bytes,
) -> MaskedUpload:
    """Mask the vector of a task, in place. model, classes: as from `blank`; check words are written here.

    Write the file, then store `uploaded(...)`, then send. Raises SecaggError: E-RUN-49 if the task has an upload,
    E-RUN-50 if its set is confirmed, its keys are gone, or it was offered with another base.
    Guarantees: a task that has an upload is never masked again.
    """
    require_unmasked(row, round)
    for block in (model, classes):
        if (block.dtype.str, block.flags.c_contiguous) != (round.run.dtype, True):
            raise ValueError(f"expected contiguous words {round.run.dtype}, found {block.dtype.str}")
        block[:CHECK_WORDS] = 1
    return masked(keys.of(round), round, (model, classes), random)


def require_unmasked(row: MaskedTaskRow | None, round: Round) -> None:
    """Raise the errors of `mask` before its vector exists: E-RUN-49; E-RUN-50 on another base or a sealed task."""
    if row is None:
        return
    _check_row(row, round)
    if row.object_digest:
        raise SecaggError(
            "E-RUN-49",
            f"the masked update of {round.kind} in round {round.number} is damaged, or was requested again: a second "
            "one would reveal the difference of two updates. This hospital skips the round",
        )
    if row.seal_hash:
        raise SecaggError("E-RUN-50", f"round {round.number} is sealed: this update is too late")


def uploaded(round: Round, object_digest: bytes) -> MaskedTaskRow:
    """Make the row of a task whose upload is on the disk. object_digest: of the file, 32 bytes."""
    if len(object_digest) != SECRET:
        raise ValueError(f"expected a digest of {SECRET} bytes, found {len(object_digest)}")
    return MaskedTaskRow(round.kind, round.number, round.base_digest, object_digest)


def masked(keys: RunKeys, round: Round, blocks: tuple[Words, Words], random: Random) -> MaskedUpload:
    """Mask both blocks in place and make shares, packages and commitments. keys: at the round's position."""
    index, cohort = keys.index, round.cohort
    round.place(index)
    salt = random(SECRET)
    seeds = {
        (block, v): random(SECRET) if v == index else keys.pair_seed(round, v, block)
        for block in BLOCKS
        for v in cohort
    }
    points = [w + 1 for w in cohort]
    shares = [split(seed, points, round.t, random) for seed in seeds.values()]
    for (block, v), seed in seeds.items():
        add_mask(blocks[block], seed, round.context, block, subtract=subtracted(index, v))
    sealed = [
        packages.encrypt(round, keys.chains[w], salt, index, w, b"".join(of_seed[k] for of_seed in shares))
        for k, w in enumerate(cohort)
    ]
    bound = [packages.commitment(round, index, v, block, seed) for (block, v), seed in seeds.items()]
    return MaskedUpload(
        np.frombuffer(salt, np.uint8),
        np.frombuffer(b"".join(bound), np.uint8).reshape(len(BLOCKS), round.n, SECRET),
        np.frombuffer(b"".join(sealed), np.uint8).reshape(round.n, -1),
        *blocks,
    )


def confirm(
    run: SecaggRun,
    keys: RunKeys,
    seal: Seal,
    row: MaskedTaskRow | None,
    *,
    cohort: Sequence[int],
    signed: Callable[[bytes, bytes], bool],
    store: Store,
    offered: bytes | None = None,
    min_sum: int = 0,
) -> Confirmation:
    """Sign the only set of a task. The row is stored before the signature is made.

    cohort: of the task, as this silo computes it. signed: (message, signature) -> whether the coordinator signed it,
    under `Seal.CONTEXT`. offered: the task's base in the offer to this silo, if any. min_sum: of the silo's policy.
    Raises SecaggError: E-RUN-50 for another set, task, base or upload, or a round that is closed here; E-RUN-51 for an
    invalid set or one that is too small; E-ID-33 without the coordinator's signature; E-POLICY-17 below the policy's
    minimum.
    Guarantees: at most one set per task is signed; a repeated request gets the same bytes.
    """
    if (seal.run_id, seal.keys_digest) != (run.run_id, keys.keys_digest):
        raise SecaggError("E-RUN-50", "the set belongs to another run or to other keys")
    round = run.round(keys.keys_digest, seal.kind, seal.round, seal.base_digest, cohort)
    round.place(keys.index)
    keys.check_open(round)
    if row is not None:
        _check_row(row, round)
    if offered is not None and offered != round.base_digest:
        raise SecaggError(
            "E-RUN-50",
            f"round {round.number} was offered with a different base model than its set: masks would not cancel",
        )
    inside = round.check_set(seal.uploads)
    if not signed(seal.message(round), seal.signature):
        raise SecaggError("E-ID-33", "the set is not signed by the coordinator")
    if len(inside) < min_sum:
        raise SecaggError(
            "E-POLICY-17",
            f"expected a sum of at least {min_sum} hospitals, found {len(inside)}: wait for more, or lower min_sum",
        )
    mine = row.object_digest if row is not None else b""
    if dict(seal.uploads).get(keys.index, mine) != mine:
        raise SecaggError("E-RUN-50", "the set contains a different update than the one that this hospital sent")
    hashed = round.seal_hash(seal.uploads)
    if row is not None and row.seal_hash and row.seal_hash != hashed:
        raise SecaggError(
            "E-RUN-50",
            f"this hospital already confirmed another set of {round.kind} in round {round.number}: a second one "
            "would reveal the difference of two sums. This run ends; a new run can continue from its last model",
        )
    stored = row or MaskedTaskRow(round.kind, round.number, round.base_digest)
    if not stored.seal_hash:
        store(replace(stored, seal_hash=hashed, inside=inside))
    return Confirmation(run.run_id, round.kind, round.number, hashed, keys.confirm(hashed))


def answer(
    run: SecaggRun, keys: RunKeys, opening: Opening, row: MaskedTaskRow | None, *, cohort: Sequence[int]
) -> RevealedShares:
    """Return the shares that open the set confirmed here; nothing is stored.

    Raises SecaggError: E-RUN-50 for another set than the confirmed one, or a round that is closed here; E-RUN-51 for
    packages of another set; E-RUN-45 with too few confirmations; E-RUN-48 for a wrong package.
    Guarantees: the answer depends only on the confirmed set and its uploads: a repeated request gets the same bytes.
    """
    if row is None or not row.seal_hash:
        raise SecaggError("E-RUN-50", "this hospital has not confirmed a set yet: send the seal first")
    round = run.round(keys.keys_digest, row.kind, row.number, row.base_digest, cohort)
    check_about(opening, round, row.seal_hash)
    name = round.run.members[keys.index]
    by_member = dict(opening.confirmations)
    confirmed = sum(
        u in round.cohort and confirmed_by(keys.peers[u], row.seal_hash, signature)
        for u, signature in by_member.items()
    )
    if confirmed < round.t:
        raise SecaggError("E-RUN-45", f"only {confirmed} members confirmed the set, {round.t} are needed")
    if tuple(u for u, _, _ in opening.packages) != row.inside:
        raise SecaggError(
            "E-RUN-51", f"expected one package for {name} from each member of {row.inside}, found other packages"
        )
    stepped = keys.of(round)
    plain = {
        u: packages.decrypt(round, stepped.chains[u], salt, u, keys.index, package)
        for u, salt, package in opening.packages
    }
    shares = tuple((b, u, v, packages.share_at(round, plain[u], b, v)) for b, u, v in round.opened(row.inside))
    return RevealedShares(run.run_id, round.kind, round.number, row.seal_hash, shares)


# ---- the census: how many hospitals contribute rows of a class -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CensusProof:
    """The proof of a census: its seal, and by member confirmations, uploads and own seeds of the class block.

    uploads: with the digest that the reader computed from the object's bytes.
    """

    seal: Seal
    confirmations: Mapping[int, bytes]
    uploads: Mapping[int, tuple[bytes, MaskedUpload]]
    seeds: Mapping[int, bytes]


def verify_census(
    run: SecaggRun, keys: RunKeys, classes: int, proof: CensusProof, row: MaskedTaskRow | None
) -> NDArray[np.int64]:
    """Recompute the census H, one number per class, from its proof. row: this silo's row of the census, if any.

    Raises SecaggError: E-RUN-50 on a set of another run, or not the one that this silo sent and confirmed, E-RUN-51 on
    a set without all members, E-RUN-45 if too few confirmed it, E-RUN-48 if uploads, seeds or sums do not fit;
    ProtocolError (E-WIRE-06) on an upload of another shape.
    Guarantees: H is the sum that t members confirmed, the same at every silo. It depends only on the silos' uploads;
    the coordinator cannot change it.
    """
    seal = proof.seal
    if (seal.run_id, seal.kind, seal.round, seal.keys_digest) != (run.run_id, "census", 0, keys.keys_digest):
        raise SecaggError("E-RUN-50", "the set is not the census of this run and its keys")
    round = run.round(keys.keys_digest, "census", 0, seal.base_digest)
    inside, hashed, sealed = round.check_set(seal.uploads), round.seal_hash(seal.uploads), dict(seal.uploads)
    if row is not None and (row.object_digest not in (b"", sealed[keys.index]) or row.seal_hash not in (b"", hashed)):
        raise SecaggError("E-RUN-50", "the census differs from the one that this hospital sent and confirmed")
    confirmed = sum(u in inside and confirmed_by(keys.peers[u], hashed, s) for u, s in proof.confirmations.items())
    if confirmed < round.t:
        raise SecaggError("E-RUN-45", f"only {confirmed} members confirmed the census, {round.t} are needed")
    total = np.zeros(classes + CHECK_WORDS, run.dtype)
    for u in inside:
        digest, upload = proof.uploads.get(u, (b"", None))
        if upload is None or digest != sealed[u]:
            raise SecaggError(
                "E-RUN-48", f"the upload of {run.members[u]} differs from the one in the confirmed census", u
            )
        upload.check(round, 0, classes)
        seed = proof.seeds.get(u, b"")
        if packages.commitment(round, u, u, CLASSES, seed) != upload.commitment(round, CLASSES, u):
            raise SecaggError("E-RUN-48", f"the seed differs from the one that {run.members[u]} committed to", u)
        np.add(total, upload.classes, out=total)
        add_mask(total, seed, round.context, CLASSES, subtract=True)
    check_words(total, round.n, round.title)
    if (total > round.n).any():
        raise SecaggError(
            "E-RUN-48", f"expected at most {round.n} hospitals of a class, found more: a silo sent false counts"
        )
    return total[CHECK_WORDS:].astype(np.int64)


def _check_row(row: MaskedTaskRow, round: Round) -> None:
    if (row.kind, row.number) != (round.kind, round.number):
        raise ValueError(f"expected the row of {round.kind} in round {round.number}, found that of {row}")
    if row.base_digest != round.base_digest:
        raise SecaggError(
            "E-RUN-50",
            f"{round.kind} of round {round.number} started here from a different base model: masks of two bases do "
            "not cancel",
        )
