"""A preflight as the desk keeps it: the question, and the way to end the work on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from silo.connection.retry import CancelToken


@dataclass(frozen=True, slots=True)
class Check:
    """A preflight of one run under one manifest. key: the first task of the run, which it comes before."""

    key: TaskKey
    asked: pb.Preflight
    stop: CancelToken = field(default_factory=CancelToken)

    @classmethod
    def of(cls, asked: pb.Preflight) -> Check:
        """Take a question; raises ProtocolError (E-WIRE-06) when it names no run."""
        return cls(TaskKey.of(pb.RoundRef(run_id=asked.run_id, kind=pb.TRAIN)), asked)

    def answer(self, code: str = "", reason: str = "") -> pb.SiloMessage:
        """Write the answer: ready, or with a code why not; it names the manifest, for which alone it holds."""
        about = {"run_id": self.asked.run_id, "manifest_digest": self.asked.manifest_digest}
        answer = pb.PreflightAnswer(**about, ready=not code, code=code, reason=reason)
        return pb.SiloMessage(preflight=answer)
