"""Keys of tasks in messages, and the ids of contributions."""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

from fl_core.errors import ProtocolError
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import SECRET
from protos.consilium.v1 import federation_pb2 as pb

TO_WIRE: dict[TaskKind, pb.TaskKind.ValueType] = {kind: getattr(pb, kind.name) for kind in TaskKind}
FROM_WIRE = {number: kind for kind, number in TO_WIRE.items()}
_AboutTask = pb.Offer | pb.RoundClosed | pb.RoundRef | pb.Receipt | pb.SecaggSeal | pb.SecaggOpen
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def kind_word(number: int) -> str:
    """Name a kind of task of a message, for machines; raises ValueError on one that there is not."""
    return pb.TaskKind.Name(number).lower()  # type: ignore[arg-type]


class TaskKey(NamedTuple):
    """The name of a task: a silo makes at most one update for it."""

    run_id: str
    round: int
    kind: TaskKind

    @classmethod
    def of(cls, message: _AboutTask) -> TaskKey:
        """Read a message's run, round and kind; raises ProtocolError (E-WIRE-06) when they are none."""
        if message.kind not in FROM_WIRE or not _RUN.fullmatch(message.run_id):
            raise ProtocolError(
                "E-WIRE-06", f"expected a run, a round and a kind, found {message.run_id[:80]!r} and {message.kind}"
            )
        return cls(message.run_id, message.round, FROM_WIRE[message.kind])

    @classmethod
    def census(cls, run_id: str) -> TaskKey:
        """Name the census of a run, before its first round."""
        return cls(run_id, 0, TaskKind.CENSUS)

    @property
    def wire_kind(self) -> pb.TaskKind.ValueType:
        return TO_WIRE[self.kind]

    @property
    def ref(self) -> pb.RoundRef:
        return pb.RoundRef(run_id=self.run_id, round=self.round, kind=self.wire_kind)

    def __str__(self) -> str:
        return f"{self.run_id} {self.kind.label(self.round)}"


def contribution_id(run_id: str, round: int, kind: TaskKind, silo: str, base_digest: str) -> str:
    """Return SHA-256(run, round, kind, silo, base model) in hex: the name of the update that a silo may send."""
    raw = json.dumps([run_id, round, kind.value, silo, base_digest], separators=(",", ":"))
    return hashlib.sha256(b"contribution|" + raw.encode()).hexdigest()


def digest_of(text: str) -> bytes:
    """Read a digest; raises ProtocolError (E-WIRE-06)."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != SECRET:
        raise ProtocolError("E-WIRE-06", f"expected a digest of {2 * SECRET} hexadecimal digits, found {text[:80]!r}")
    return digest
