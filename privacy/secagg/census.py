"""How many hospitals contribute rows of a class: counted once, before round 0, with a proof that every silo checks.

A word of the `classes` block is 1 where a silo will contribute rows of the class, else 0; the sum over all members is
H. The coordinator returns it with what it was opened from, so that it can misstate nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privacy.secagg import packages
from privacy.secagg.keys import RunKeys, confirmed_by
from privacy.secagg.masks import add_mask, check_words
from privacy.secagg.messages import CHECK_WORDS, Seal, Upload
from privacy.secagg.silo_side import RoundRow
from privacy.secagg.terms import CLASSES, SecaggError, SecaggRun


@dataclass(frozen=True, slots=True)
class Proof:
    """What a census was opened from: seal, confirmations by member, own seeds of the class block by member.

    uploads: by member, with the digest of the object's bytes as the reader computed it.
    """

    seal: Seal
    confirmations: Mapping[int, bytes]
    uploads: Mapping[int, tuple[bytes, Upload]]
    seeds: Mapping[int, bytes]


def verify(run: SecaggRun, keys: RunKeys, classes: int, proof: Proof, row: RoundRow | None) -> NDArray[np.int64]:
    """Recompute H, one number per class, from its proof. row: of the census here, None where this silo was away.

    Raises SecaggError: E-RUN-50 for another run's set, or another than this silo sent and confirmed, E-RUN-51 for one
    that is not of all members, E-RUN-45 where too few confirmed it, E-RUN-48 where uploads, seeds or sums do not fit;
    ProtocolError (E-WIRE-06) for an upload of another shape.
    Guarantees: H is the sum of what t members confirmed, the same at every silo; the coordinator cannot change it, only
    what a silo sends can.
    """
    seal = proof.seal
    if (seal.run_id, seal.kind, seal.round, seal.keys_digest) != (run.run_id, "census", 0, keys.keys_digest):
        raise SecaggError("E-RUN-50", "expected the census of this run and its keys, found another set")
    round = run.round(keys.keys_digest, "census", 0, seal.base_digest)
    inside, hashed, sealed = round.check_set(seal.uploads), round.seal_hash(seal.uploads), dict(seal.uploads)
    if row is not None and (row.object_digest not in (b"", sealed[keys.index]) or row.seal_hash not in (b"", hashed)):
        raise SecaggError("E-RUN-50", "expected the census that was sent and confirmed here, found another")
    good = sum(u in inside and confirmed_by(keys.peers[u], hashed, s) for u, s in proof.confirmations.items())
    if good < round.t:
        raise SecaggError("E-RUN-45", f"expected a census that {round.t} members confirmed, found {good}")
    total = np.zeros(classes + CHECK_WORDS, run.terms.dtype)
    for u in inside:
        digest, upload = proof.uploads.get(u, (b"", None))
        if upload is None or digest != sealed[u]:
            raise SecaggError("E-RUN-48", f"expected the census of {run.members[u]} that was confirmed", u)
        upload.check(round, 0, classes)
        seed = proof.seeds.get(u, b"")
        if packages.commitment(round, u, u, CLASSES, seed) != upload.commitment(round, CLASSES, u):
            raise SecaggError("E-RUN-48", f"expected the seed that {run.members[u]} is bound to, found another", u)
        np.add(total, upload.classes, out=total)
        add_mask(total, seed, round.context, CLASSES, subtract=True)
    check_words(total, round.n, round)
    if (total > round.n).any():
        raise SecaggError("E-RUN-48", f"expected at most {round.n} hospitals of a class, found more: a silo lied")
    return total[CHECK_WORDS:].astype(np.int64)


def kept_classes(run: SecaggRun, holders: NDArray[np.int64], cohort: int) -> NDArray[np.bool_]:
    """Say of which classes a silo leaves its rows in, by how many hold them; all rows of the others become zero.

    cohort: members of a round. With class sums of each round as many holders may be absent as the thresholds allow.
    Guarantees: where silos count honestly, a row that is opened is a sum over at least k that contribute to it.
    """
    fewest = run.terms.min_contributors
    if run.terms.class_sums == "each":
        fewest += len(run.members) - run.thresholds(cohort).m
    return np.asarray(holders >= fewest)
