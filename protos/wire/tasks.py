"""Keys of tasks in messages, and the ids of contributions."""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

from fl_core.errors import ProtocolError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb

TO_WIRE = {TaskKind.TRAIN: pb.TRAIN, TaskKind.EVALUATE: pb.EVALUATE, TaskKind.CENSUS: pb.CENSUS}
FROM_WIRE = {number: kind for kind, number in TO_WIRE.items()}
_AboutTask = pb.Offer | pb.RoundClosed | pb.RoundRef | pb.Receipt | pb.SecaggSeal | pb.SecaggOpen
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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

    @property
    def wire_kind(self) -> pb.TaskKind.ValueType:
        return TO_WIRE[self.kind]

    @property
    def ref(self) -> pb.RoundRef:
        return pb.RoundRef(run_id=self.run_id, round=self.round, kind=self.wire_kind)

    def __str__(self) -> str:
        """Format for people: run, round (counted from 1) and, for an evaluation, that it is one."""
        return f"{self.run_id} {'evaluation' if self.kind is TaskKind.EVALUATE else f'round {self.round + 1}'}"


def contribution_id(run_id: str, round: int, kind: TaskKind, silo: str, base_digest: str) -> str:
    """Return SHA-256(run, round, kind, silo, base model) in hex: the name of the update that a silo may send."""
    raw = json.dumps([run_id, round, kind.value, silo, base_digest], separators=(",", ":"))
    return hashlib.sha256(b"contribution|" + raw.encode()).hexdigest()
