"""Values that all members of a run compute: thresholds, contexts, valid sets, and the seeds to open.

Members are named by their index in the manifest; n, t, m and c are those of `fl_core.types.secagg`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_core import validate
from fl_core.errors import ConfigError, RefusedError
from fl_core.types.secagg import EACH, MIN_MASKED, SECRET, Secagg, answers

VERSION = b"consilium.secagg.v1"
MODEL, CLASSES = 0, 1
BLOCKS = (MODEL, CLASSES)
KINDS = ("census", "train", "evaluate")
_WORDS = {"ring32": "<u4", "ring64": "<u8"}


class SecaggError(RefusedError):
    """A protocol step failed, and nothing is opened. blamed: index of the responsible member, if known."""

    def __init__(self, code: str, message: str, blamed: int | None = None) -> None:
        super().__init__(code, message)
        self.blamed = blamed


def frame(*fields: bytes | str | int) -> bytes:
    """Join the version and the fields, each after its length (4 bytes, big-endian); integers are 8 bytes, big-endian.

    Guarantees: different fields give different bytes.
    """
    raw = [f.to_bytes(8, "big") if isinstance(f, int) else f.encode() if isinstance(f, str) else f for f in fields]
    return b"".join(len(r).to_bytes(4, "big") + r for r in (VERSION, *raw))


def digest(*fields: bytes | str | int) -> bytes:
    return hashlib.sha256(frame(*fields)).digest()


def kdf(secret: bytes, salt: bytes, *fields: bytes | str | int) -> bytes:
    """Derive 32 bytes by HKDF-SHA256 (RFC 5869) with the frame of the fields as its info."""
    return HKDF(hashes.SHA256(), SECRET, salt, frame(*fields)).derive(secret)


class Thresholds(NamedTuple):
    """t: answers that open a sum. m: minimum of uploads in a sum."""

    t: int
    m: int


@dataclass(frozen=True)
class SecaggRun:
    """The terms of a masked run. manifest_digest: 32 bytes. members: names in the manifest's order.

    rounds: training rounds of the run; an evaluation may follow the last one.
    Raises ConfigError (E-CFG-02) unless there are 3 to 240 members, each once, and the terms fit.
    """

    run_id: str
    manifest_digest: bytes
    members: tuple[str, ...]
    rounds: int
    ring: str
    terms: Secagg

    def __post_init__(self) -> None:
        validate.one_of("E-CFG-02", "secagg", tuple(_WORDS), ring=self.ring)
        self.terms.check(len(self.members), 0, self.rounds)
        if len(set(self.members)) != len(self.members):
            raise ConfigError("E-CFG-02", f"expected each silo once, found {list(self.members)}")

    @property
    def dtype(self) -> str:
        """Return NumPy's name of the ring's words: unsigned, little-endian, 4 or 8 bytes."""
        return _WORDS[self.ring]

    def thresholds(self, n: int) -> Thresholds:
        """Compute t and m of a round of n members. Both sides compute them; no message contains them."""
        return Thresholds(answers(n), self.terms.smallest_sum(n))

    def round(
        self, keys_digest: bytes, kind: str, number: int, base_digest: bytes, cohort: Sequence[int] | None = None
    ) -> Round:
        """Describe one task; raises SecaggError (E-RUN-50, E-RUN-51). cohort: indices; None: all members."""
        members = range(len(self.members)) if cohort is None else cohort
        return Round(self, keys_digest, kind, number, base_digest, tuple(sorted(members)))


@dataclass(frozen=True)
class Round:
    """One task of a run. Sides that agree on its fields derive the same context, so that masks cancel.

    keys_digest: K, of all members' keys. base_digest: of the state that the task begins from; for a census it is K.
    cohort: R, ascending. Raises SecaggError: E-RUN-50 for a task outside of the run, E-RUN-51 for an invalid cohort.
    """

    run: SecaggRun
    keys_digest: bytes
    kind: str
    number: int
    base_digest: bytes
    cohort: tuple[int, ...]

    def __post_init__(self) -> None:
        last = {"census": 0, "train": self.run.rounds - 1, "evaluate": self.run.rounds}.get(self.kind, -1)
        if not 0 <= self.number <= last:
            raise SecaggError(
                "E-RUN-50",
                f"expected a task of a run of {self.run.rounds} rounds, found {self.kind!r} of round {self.number}",
            )
        if len(self.base_digest) != SECRET or (self.kind == "census" and self.base_digest != self.keys_digest):
            raise SecaggError("E-RUN-50", f"expected the digest that a task of kind {self.kind} begins from")
        indices = range(len(self.run.members))
        sound = list(self.cohort) == sorted(set(self.cohort)) and all(u in indices for u in self.cohort)
        if not sound or self.n < MIN_MASKED or (self.kind == "census" and self.n != len(indices)):
            raise SecaggError("E-RUN-51", f"expected a cohort of at least {MIN_MASKED} members, found {self.cohort}")

    @property
    def n(self) -> int:
        return len(self.cohort)

    @property
    def title(self) -> str:
        return f"{self.kind} of round {self.number}"

    @property
    def t(self) -> int:
        return self.run.thresholds(self.n).t

    @property
    def m(self) -> int:
        """Return the minimum number of uploads in a sum; for a census all."""
        return self.n if self.kind == "census" else self.run.thresholds(self.n).m

    @property
    def position(self) -> int:
        """Return the position of the task's keys in the chains."""
        return 0 if self.kind == "census" else self.number + 1

    @cached_property
    def context(self) -> bytes:
        run = self.run
        of_run = (run.run_id, run.manifest_digest, self.keys_digest)
        return digest("context", *of_run, self.kind, self.number, self.base_digest)

    def place(self, member: int) -> int:
        """Return a member's row in the tensors of an upload; raises SecaggError (E-RUN-51) outside the cohort."""
        if member not in self.cohort:
            raise SecaggError("E-RUN-51", f"expected a member of the round's cohort, found index {member}")
        return self.cohort.index(member)

    def check_set(self, uploads: Sequence[tuple[int, bytes]]) -> tuple[int, ...]:
        """Return the indices of a set; raises SecaggError (E-RUN-51) unless the round may open it."""
        inside = [u for u, _ in uploads]
        if inside != sorted(set(inside)) or not set(inside) <= set(self.cohort):
            raise SecaggError("E-RUN-51", f"expected members of the cohort, ascending and each once, found {inside}")
        if len(inside) < self.m:
            raise SecaggError(
                "E-RUN-51", f"expected a set of at least {self.m} members, found {len(inside)}: wait for more of them"
            )
        if any(len(sha) != SECRET for _, sha in uploads):
            raise SecaggError("E-RUN-51", f"expected a digest of {SECRET} bytes for every index of the set")
        return tuple(inside)

    def seal_hash(self, uploads: Sequence[tuple[int, bytes]]) -> bytes:
        return digest("seal", self.context, *(field for pair in uploads for field in pair))

    def opened(self, inside: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """List the seeds that are opened, as (block, dealer, slot), ascending.

        For each member of the set: its own seed (slot = dealer) and the seeds that it shares with absent members of the
        cohort. Seeds of class rows are not opened if a member of the run is absent or not drawn, unless the terms open
        them in each round: the difference of two sums over different sets would reveal class counts.
        Guarantees: an absent member's own seed is never opened, nor a seed that two members of the set share.
        """
        absent = tuple(v for v in self.cohort if v not in inside)
        whole = not absent and self.n == len(self.run.members)
        blocks = BLOCKS if whole or self.run.terms.class_sums == EACH else (MODEL,)
        return tuple((b, u, v) for b in blocks for u in inside for v in sorted((u, *absent)))
