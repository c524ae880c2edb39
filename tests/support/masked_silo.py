"""Silos of masked runs: a script around the real service's part in them, and masked runs for them."""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from consilium.research.engines.in_process import SiloShare
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.secagg import Secagg
from fl_core.types.values import Bundle
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.tasks import TaskKey, contribution_id
from service_core.pki.roster import SignedRoster
from service_core.storage import digests
from silo.identity.identity import SiloIdentity
from silo.service.secagg import SecaggMember
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.storage.tasks import LocalEvaluation, OutboxEntry
from silo.worker.masks import RunMasks, TaskMasks
from tests.support.coordinator import World, fetch, ready
from tests.support.federations import NAMES, manifest, shares
from tests.support.hospital import Entry as Sent
from tests.support.hospital import Memory, ScriptedSilo

FOUR = (*NAMES, "west")


def shares_of(names: Sequence[str]) -> dict[str, SiloShare]:
    return dict(zip(names, [*shares(0), *shares(1)], strict=False))


def masked(names: Sequence[str] = NAMES, terms: Secagg = Secagg(1), **more: object) -> RunManifest:  # noqa: B008
    """Freeze a run under masks, on ring64, in which every silo counts by the examples that it has."""
    plain = manifest(names=names, **more)  # type: ignore[arg-type]
    units = [len(share.train) for share in shares_of(names).values()]
    members = tuple(replace(m, units=u) for m, u in zip(plain.members, units, strict=True))
    return replace(plain, members=members, secagg=terms, aggregator=NamedOptions("mean"))


@dataclass
class MaskedMemory(Memory):
    """What a hospital's disk would hold, and its home; outlives the silo object."""

    home: Home | None = None
    agreed: dict[str, RunManifest] = field(default_factory=dict)
    confirmed: dict[TaskKey, set[bytes]] = field(default_factory=dict)


Says = Callable[[pb.SiloMessage], Sequence[pb.SiloMessage]]
Covered = Callable[[TaskKey, TaskMasks, Bundle], Bundle]


class MaskedSilo(ScriptedSilo):
    """A scripted silo whose keys, masks, confirmations and answers are those of the real service, with a say in them.

    says: what is sent in the place of a message about a set, or of the answer to a preflight   cover: masks an update.
    """

    memory: MaskedMemory

    def __init__(
        self,
        world: World,
        name: str,
        memory: MaskedMemory | None = None,
        *,
        says: Says = lambda message: [message],
        cover: Covered = lambda key, masks, update: masks.cover(update),
        **script: object,
    ) -> None:
        memory = memory or MaskedMemory()
        if memory.home is None:
            place = Path(tempfile.mkdtemp(dir=world.home.parent)) / name
            memory.home = Home(Path(shutil.copytree(world.homes[name], place)))
        self._says, self._cover = says, cover
        self._out, self._seal = queue.Queue[pb.SiloMessage | None](), b""
        self._store, self._identity = SiloStore(memory.home.database), SiloIdentity(memory.home.path)
        self._member = SecaggMember(self._store, self._identity, lambda: 0, self._say, lambda _: None, self._pin)
        super().__init__(world, name, shares_of(FOUR)[name], memory, **script)  # type: ignore[arg-type]

    def stop(self) -> None:
        super().stop()
        self._store.close_database()

    def _say(self, message: pb.SiloMessage) -> None:
        if message.HasField("secagg_confirm"):
            self.memory.confirmed.setdefault(TaskKey.of(message.secagg_confirm), set()).add(self._seal)
        for said in self._says(message):
            self._out.put(said)

    def _pin(self, raw: bytes) -> None:
        if raw:
            self._identity.update_roster(SignedRoster.unpack(raw), asked_at=0)

    def _take(self, message: pb.CoordinatorMessage, out: queue.Queue[pb.SiloMessage | None]) -> None:
        self._out = out
        kind = message.WhichOneof("body")
        if kind == "preflight":
            asked = message.preflight
            self._pin(asked.signed_roster)
            agreed = self.memory.agreed.setdefault(asked.run_id, self._manifest(asked.manifest_digest))
            answer = ready(asked)
            answer.preflight.secagg_entry.CopyFrom(self._member.entry(asked.run_id, agreed))
            self._say(answer)
        elif kind == "secagg_seal":
            self._seal = message.secagg_seal.SerializeToString(deterministic=True)
            self._member.seal(message.secagg_seal)
        elif kind == "secagg_open":
            self._member.open(message.secagg_open)
        else:
            super()._take(message, out)
            if kind == "welcome":
                self._pin(message.welcome.signed_roster)
            elif kind == "offer":
                self._member.note_offer(message.offer)
            elif kind == "round_closed":
                self._store.close(TaskKey.of(message.round_closed), message.round_closed.included)

    def _manifest(self, digest: str) -> RunManifest:
        with tempfile.TemporaryDirectory() as folder, self._connected(rpc.TransferStub) as stub:
            return RunManifest.from_json(fetch(stub, digest, Path(folder)).read_text())

    def _train(self, stub: rpc.TransferStub, key: TaskKey, offer: pb.Offer) -> Sent:
        run = CompiledRun.of(self.memory.agreed[key.run_id])
        with tempfile.TemporaryDirectory() as folder:
            get = lambda digest: fetch(stub, digest, Path(folder))  # noqa: E731
            masks = RunMasks(self._store, self._identity).begin(offer, run.manifest, get, lambda _: None)
        self._alter = lambda key, update: self._cover(key, masks, update)
        made = super()._train(stub, key, offer)
        name = contribution_id(key.run_id, key.round, key.kind, self.name, offer.base_digest)
        sent = digests.digest(made.data)
        entry = OutboxEntry(key, offer.manifest_digest, offer.base_digest, name, sent, len(made.data))
        self._store.stage(entry, LocalEvaluation((), (), ()))
        return made
