"""The messages between the sides, in plain types; senders map them to their wire format.

Members and slots are indices in the manifest. A message is checked by its receiver, not when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import ProtocolError
from fl_core.types.secagg import masking_shapes
from privacy.secagg.terms import Round, SecaggError, frame

CHECK_WORDS = 4
"""Words of value 1 before each block (`fl_core.aggregation.flat_blocks`). If the masks cancel, each of their sums is
the number of uploads."""
Words = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MaskedUpload:
    """A silo's upload: five tensors, in this order.

    commitments[block] and packages have a row per member of the round's cohort, ascending: the commitment to the seed
    shared with this member (in the silo's own row: to its own seed), and the package for this member. The blocks are
    masked words of the ring, check words first.
    """

    salt: Bytes
    commitments: Bytes
    packages: Bytes
    model: Words
    classes: Words

    @staticmethod
    def tensors(round: Round, model: int, classes: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return NumPy's type and the shape of every tensor, in order; model, classes: words without check words."""
        words = round.run.dtype
        plain = {name: ("|u1", shape) for name, shape in masking_shapes(round.n).items()}
        return {**plain, "model": (words, (model + CHECK_WORDS,)), "classes": (words, (classes + CHECK_WORDS,))}

    def check(self, round: Round, model: int, classes: int) -> None:
        """Raise ProtocolError (E-WIRE-06) unless every tensor has the type and the shape that the round prescribes."""
        for name, expected in self.tensors(round, model, classes).items():
            array = getattr(self, name)
            if (actual := (array.dtype.str, array.shape)) != expected:
                raise ProtocolError("E-WIRE-06", f"masked update: expected {name!r} as {expected}, found {actual}")

    def commitment(self, round: Round, block: int, member: int) -> bytes:
        return bytes(self.commitments[block, round.place(member)])


@dataclass(frozen=True, slots=True)
class Seal:
    """The one set of a round: (index, digest of its upload), ascending; the coordinator signs `message`."""

    run_id: str
    kind: str
    round: int
    base_digest: bytes
    keys_digest: bytes
    uploads: tuple[tuple[int, bytes], ...]
    signature: bytes = b""

    CONTEXT: ClassVar[str] = "consilium secagg seal v1"

    def message(self, round: Round) -> bytes:
        """Return the bytes that the coordinator's key signs under `CONTEXT`."""
        return frame("seal signature", self.run_id, round.seal_hash(self.uploads))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A member's signature, by its key of the run, over the hash of a seal."""

    run_id: str
    kind: str
    round: int
    seal_hash: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Opening:
    """A request for a member's answer.

    confirmations: (index, signature)   packages: (index, salt, package for this member) of each upload in the set.
    """

    run_id: str
    kind: str
    round: int
    seal_hash: bytes
    confirmations: tuple[tuple[int, bytes], ...]
    packages: tuple[tuple[int, bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class RevealedShares:
    """A member's answer: (block, dealer, slot, share of 33 bytes), in the order of `Round.opened`."""

    run_id: str
    kind: str
    round: int
    seal_hash: bytes
    shares: tuple[tuple[int, int, int, bytes], ...]


Message = Confirmation | Opening | RevealedShares


def check_about(message: Message, round: Round, seal_hash: bytes, sender: int | None = None) -> None:
    """Raise SecaggError (E-RUN-50) unless a message is about this task and this seal."""
    task = (message.run_id, message.kind, message.round, message.seal_hash)
    if task != (round.run.run_id, round.kind, round.number, seal_hash):
        raise SecaggError(
            "E-RUN-50",
            f"expected a message about {round.kind} of round {round.number} and its sealed set, found one about "
            f"{message.kind!r} of round {message.round} or about another set: nothing was opened",
            sender,
        )
