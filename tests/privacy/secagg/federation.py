"""All members of a run in one process, each with its own store, and a coordinator that follows the protocol."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_core.types.secagg import Secagg
from privacy.secagg import silo_side
from privacy.secagg.coordinator_side import SealedRound, UploadSum
from privacy.secagg.keys import MemberKeys, OwnKeys, RunKeys
from privacy.secagg.messages import CHECK_WORDS, Confirmation, MaskedUpload, Opening, RevealedShares, Seal
from privacy.secagg.shamir import Random
from privacy.secagg.terms import Round, SecaggRun, Thresholds

MANIFEST, BASE = bytes(32), b"b" * 32
COORDINATOR = b"the coordinator's key"
SIZES = (37, 11)


@dataclass(frozen=True)
class LooseRun(SecaggRun):
    """A run with thresholds of a test's choice, as those of the reference; None: the protocol's own."""

    of_test: tuple[int, int] | None = None

    def thresholds(self, n: int) -> Thresholds:
        return super().thresholds(n) if self.of_test is None else Thresholds(*self.of_test)


def signed_by_coordinator(message: bytes) -> bytes:
    return hashlib.sha256(COORDINATOR + message).digest()


def check_coordinator(message: bytes, signature: bytes) -> bool:
    return signature == signed_by_coordinator(message)


def identity_signature(name: str) -> Callable[[bytes], bytes]:
    return lambda message: hashlib.sha256(name.encode() + message).digest()


def trusted(entry: MemberKeys, message: bytes) -> bool:
    return entry.signature == identity_signature(entry.name)(message)


def object_digest(upload: MaskedUpload) -> bytes:
    parts = (upload.salt, upload.commitments, upload.packages, upload.model, upload.classes)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()


@dataclass
class Silo:
    """One hospital: what its disk holds, and the calls that its service makes."""

    run: SecaggRun
    keys: RunKeys
    rows: dict[tuple[str, int], silo_side.MaskedTaskRow] = field(default_factory=dict)
    min_sum: int = 0
    random: Random = secrets.token_bytes

    @property
    def name(self) -> str:
        return self.run.members[self.keys.index]

    def row(self, kind: str, number: int) -> silo_side.MaskedTaskRow | None:
        return self.rows.get((kind, number))

    def store(self, row: silo_side.MaskedTaskRow) -> None:
        self.rows[row.kind, row.number] = row

    def upload(self, round: Round, model: np.ndarray, classes: np.ndarray) -> MaskedUpload:
        """Mask copies of both blocks, and store the row of the upload."""
        blocks = [silo_side.blank(len(words), round.run.dtype) for words in (model, classes)]
        for block, words in zip(blocks, (model, classes), strict=True):
            block[CHECK_WORDS:] = words
        upload = silo_side.mask(self.keys, round, self.row(round.kind, round.number), *blocks, self.random)
        self.store(silo_side.uploaded(round, object_digest(upload)))
        return upload

    def confirm(self, seal: Seal, cohort: Sequence[int] | None = None, **told) -> Confirmation:
        return silo_side.confirm(
            self.run, self.keys, seal, self.row(seal.kind, seal.round),
            cohort=range(len(self.run.members)) if cohort is None else cohort,
            signed=check_coordinator, store=self.store, min_sum=self.min_sum, **told,
        )  # fmt: skip

    def answer(self, opening: Opening, cohort: Sequence[int] | None = None) -> RevealedShares:
        everybody = range(len(self.run.members)) if cohort is None else cohort
        row = self.row(opening.kind, opening.round)
        return silo_side.answer(self.run, self.keys, opening, row, cohort=everybody)

    def close(self, round: Round) -> None:
        self.keys = self.keys.closed(round)
        self.rows.pop((round.kind, round.number), None)


def make_run(
    n: int, of_test: tuple[int, int] | None = None, rounds: int = 3, ring: str = "ring32", **terms
) -> LooseRun:
    fitting = Secagg(**{"collusion": 0, "min_contributors": 1, **terms})
    return LooseRun("run-1", MANIFEST, tuple(f"silo{u}" for u in range(n)), rounds, ring, fitting, of_test)


def members_of(run: SecaggRun, random: Random = secrets.token_bytes) -> list[Silo]:
    """Make everybody's keys, exchange them, and return the silos."""
    own = [OwnKeys.new(random) for _ in run.members]
    entries = [
        keys.entry(run, name, b"pem", identity_signature(name)) for name, keys in zip(run.members, own, strict=True)
    ]
    return [
        Silo(run, RunKeys.agree(run, name, keys, entries, trusted), random=random)
        for name, keys in zip(run.members, own, strict=True)
    ]


@dataclass
class Federation:
    """A run whose keys are exchanged, and one task of it with random vectors."""

    run: SecaggRun
    silos: list[Silo]
    round: Round
    inputs: list[tuple[np.ndarray, np.ndarray]]
    uploads: list[MaskedUpload] = field(default_factory=list)

    def send(self, base: dict[int, bytes] | None = None) -> Federation:
        """Let every member mask its vector. base: of a member that was offered another one than the others."""
        for silo, words in zip(self.silos, self.inputs, strict=True):
            told = (base or {}).get(silo.keys.index, self.round.base_digest)
            round = self.run.round(self.round.keys_digest, self.round.kind, self.round.number, told)
            self.uploads.append(silo.upload(round, *words))
        return self

    def sealed(self, inside: Iterable[int] | None = None) -> SealedRound:
        """Add the uploads of a set and seal it."""
        total = UploadSum(self.round, *(len(words) for words in self.inputs[0]))
        for u in range(len(self.silos)) if inside is None else inside:
            total.add(u, object_digest(self.uploads[u]), self.uploads[u])
        return SealedRound(total, total.seal(signed_by_coordinator), self.silos[0].keys.peers)

    def confirmed(self, state: SealedRound, by: Iterable[int] | None = None) -> SealedRound:
        for w in range(len(self.silos)) if by is None else by:
            state.confirm(w, self.silos[w].confirm(state.seal))
        return state

    def answered(self, state: SealedRound, by: Iterable[int] | None = None) -> SealedRound:
        for w in range(len(self.silos)) if by is None else by:
            state.answer(w, self.silos[w].answer(state.opening(w)))
        return state

    def plain(self, inside: Iterable[int], block: int) -> np.ndarray:
        return np.sum([self.inputs[u][block] for u in inside], axis=0, dtype=self.run.dtype)

    def close(self) -> None:
        for silo in self.silos:
            silo.close(self.round)


def federation(
    n: int = 5,
    of_test: tuple[int, int] | None = None,
    kind: str = "train",
    number: int = 0,
    sizes: tuple[int, int] = SIZES,
    seed: int = 0,
    repeatable: bool = False,
    **terms,
) -> Federation:
    """Make a run of n members and its round with random vectors; nothing is sent yet.

    repeatable: keys and seeds are drawn from `seed`, for tests of distributions, which must not fail by chance.
    """
    run = make_run(n, of_test, **terms)
    silos = members_of(run, np.random.default_rng(seed).bytes if repeatable else secrets.token_bytes)
    keys_digest = silos[0].keys.keys_digest
    round = run.round(keys_digest, kind, number, keys_digest if kind == "census" else BASE)
    drawn = np.random.default_rng(seed)
    top = np.iinfo(run.dtype).max
    inputs = [
        tuple(drawn.integers(0, top, k, dtype=np.dtype(run.dtype).newbyteorder("="), endpoint=True) for k in sizes)
        for _ in range(n)
    ]
    return Federation(run, silos, round, inputs)
