"""One federation in this process: the coordinator's service and hospitals' services over mutual TLS on loopback.

Nothing in it is a stand-in. Hospitals `join` with data and a configuration as users have them, or `come` with what a
test injects. That goes in where the services let it: the data of a hospital, the
arithmetic of its rounds (where it lies, refuses or waits), and the clock by which open rounds wait.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from consilium.research.engines.in_process import SiloShare
from coordinator.config.manifest_builder import build_manifest
from coordinator.worker.work import MODEL_LOCK
from fl_core import datasets
from fl_core.datasets import ANY, DataRequest, SiloDataset
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import SiloRound, run_silo_round
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.consilium.v1 import federation_pb2 as pb
from service_core.version import version
from silo.connection.transfer import RetryPolicy
from silo.events import SiloEvent
from silo.identity.identity import SiloIdentity
from silo.service.service import Service
from silo.settings import SiloSettings
from silo.storage.home import Home
from silo.training.data_source import DataSource
from silo.training.trainer import RunRound
from tests.support import federations, until
from tests.support.coordinator import FAST, Settings, World, channel, enrolled, online, running
from tests.support.federations import NAMES, SCHEMA, shares
from tests.support.services import service

PATIENCE = RetryPolicy(idle_s=5.0, backoff_s=0.01, backoff_cap_s=0.1, tries=3)
COLLECTION = "records"
DELTA = 1e-5


class GivenData(DataSource):
    """A share in memory in the place of data that are loaded; it is called digits, as the sessions declare it."""

    def __init__(self, name: str, share: SiloShare) -> None:
        super().__init__("digits/p3c4/0")
        self._given = SiloDataset(SCHEMA, share.train, share.test, "digits/p3c4/0", f"{name:0<64}".encode().hex()[:64])

    def load(self, request: DataRequest = ANY) -> SiloDataset:
        self._last = (request, self._given)
        self._published = SCHEMA.classes
        return self._given


@dataclass(frozen=True)
class GivenSettings(SiloSettings):
    """Settings of a hospital whose data are a share."""

    share: SiloShare | None = None

    def source(self) -> DataSource:
        assert self.share is not None
        return GivenData(self.home.path.name, self.share)


@dataclass
class Script:
    """What a hospital does otherwise than the software would, round by round.

    alter: changes a bundle before it is packed   refuse: says why a round is refused, or ""; code: of the refusal
    wait: holds a round back for as long as it is true; a service that is stopped meanwhile stops
    """

    alter: Callable[[int, TaskKind, Bundle], Bundle] | None = None
    refuse: Callable[[int, TaskKind], str] = lambda round, kind: ""
    code: str = "E-RUN-14"
    wait: Callable[[int], bool] = lambda round: False
    begun: list[tuple[int, TaskKind]] = field(default_factory=list)

    def __call__(self, runtime, msg, state, data, context, kind) -> SiloRound:  # type: ignore[no-untyped-def]
        if why := self.refuse(context.round, kind):
            raise RefusedError(self.code, why)
        self.begun.append((context.round, kind))
        pause = threading.Event()
        while self.wait(context.round):
            data._data._progress(0, 1)  # behind what the policy withholds; ends a round that is given up
            pause.wait(0.005)
        done = run_silo_round(runtime, msg, state, data, context, kind)
        return done if self.alter is None else done._replace(bundle=self.alter(context.round, kind, done.bundle))


SHARES = dict(zip((*NAMES, "west"), [*shares(), shares()[0]], strict=True))
"""North holds the classes a and b, east b and c, south c and d, west a and b again."""


def manifest(*given: object, **more: object) -> RunManifest:
    """Freeze a run over the three hospitals that their services take part in: of this version."""
    return replace(federations.manifest(*given, **more), software=version())  # type: ignore[arg-type]


@dataclass
class Hospital:
    """One hospital: its home, its data, and the service while it runs."""

    world: World
    home: Home
    data: str
    notices: list[SiloEvent] = field(default_factory=list)
    service: Service | None = None
    run_round: RunRound | None = run_silo_round
    retry_policy: RetryPolicy = PATIENCE
    settings: Callable[..., SiloSettings] = SiloSettings
    script: Script = field(default_factory=Script)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.home.ledger)

    def policy(self, text: str) -> None:
        self.home.policy.write_text(text)

    def budget(self, epsilon: float, split: str = "train") -> None:
        self.ledger.set_budget(f"{COLLECTION}/{split}", epsilon, DELTA, "dpo", "test")

    def entries(self) -> list[tuple[str, str]]:
        """List (entry, state) of every collection."""
        ledger = self.ledger
        return [(entry, state) for c in ledger.collections() for entry, state, _ in ledger.entries(c)]

    def start(self) -> None:
        own = SiloIdentity(self.home.path).current_credentials
        place = self.settings(self.home, self.data, device="cpu")
        over = lambda: channel(self.world.port, own())  # noqa: E731
        self.service = service(place, self.notices, self.retry_policy, over, self.run_round)
        self.service.start()

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def told(self, event: str) -> list[str]:
        return [n.text for n in self.notices if n.event == event]

    def over(self, event: str, run_id: str) -> list[tuple[int, str]]:
        """List (round, kind) of the notices of one kind about a run; round -1 where it is about no round."""
        found = [n.facts for n in self.notices if n.event == event and n.facts.get("run") == run_id]
        return [(int(f.get("round", -1) or 0), str(f.get("kind", ""))) for f in found]

    def closes(self, run_id: str) -> dict[int, tuple[bool, str]]:
        """Read what it was told of each closed round: whether its update is in, and why not or what was cut of it."""
        said = [n.facts for n in self.notices if n.event in ("judged", "closed") and n.facts["run"] == run_id]
        reasons = {int(f["round"] or 0): str(f["reason"]) for f in said if "reason" in f}
        return {(t := int(f["round"] or 0)): (bool(f["included"]), reasons.get(t, "")) for f in said}


class Federation:
    """The coordinator, and the hospitals that have come; one that has left may come again, with all that it kept."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hospitals: dict[str, Hospital] = {}
        self.here: set[str] = set()

    def come(self, *names: str, **script: object) -> None:
        """Start hospitals, by default all three; each follows a script (see `Script`)."""
        for name in names or NAMES:
            known = self.hospitals.get(name)
            if known is None:
                folder = self.world.home.parent / "hospitals" / name
                home = Home(Path(shutil.copytree(self.world.homes[name], folder)))
                home.policy.write_text('[evaluation]\nsend = "clinical"\n')
                known = self.hospitals[name] = Hospital(self.world, home, "")
            known.script = known.run_round = Script(**script)  # type: ignore[arg-type]
            known.settings = lambda home, data, name=name, **more: GivenSettings(home, data, share=SHARES[name], **more)
            known.start()
            self.here.add(name)

    def join(
        self, *names: str, data: str = "digits/p4c5", policy: str | None = None, validation_only: bool = False
    ) -> None:
        """Let hospitals enrol and start, each with the next part of a division of data."""
        for name in names:
            home = enrolled(self.world, name, self.world.home.parent / name, validation_only)
            self.hospitals[name] = Hospital(self.world, home, f"{data}/{len(self.hospitals)}")
            if policy is not None:
                self.hospitals[name].policy(policy)
            self.hospitals[name].start()
        self.online(*names)

    def online(self, *names: str) -> None:
        """Wait until these hospitals have a session."""
        for name in names:
            until(online(self.world, name), name)

    def leave(self, *names: str) -> None:
        for name in names or tuple(self.here):
            self.hospitals[name].stop()
            self.here.discard(name)

    def __getitem__(self, name: str) -> Hospital:
        return self.hospitals[name]

    def included(self, run_id: str) -> list[tuple[str, ...]]:
        """List of each closed round who is in it."""
        assert self.world.server is not None
        return [row.record.included for row in self.world.server.store.runs.rounds(run_id)]

    def told(self, event: str, run_id: str) -> None:
        """Wait until every hospital that is here has told of this about a run."""
        until(lambda: all(self[n].over(event, run_id) for n in self.here), f"{event} of {run_id} at {self.here}", 60)


@contextmanager
def federation(home: Path, names: Sequence[str] = NAMES, settings: Settings = FAST) -> Iterator[Federation]:
    """Run a coordinator; its hospitals are enrolled and come when they are called."""
    with running(home, names, settings) as world, _ended(Federation(world)) as made:
        yield made


def _built(spec: str, roster: list[pb.SiloInfo]) -> RunManifest:
    with MODEL_LOCK:  # runs are computed by threads of this process
        return build_manifest(spec, roster)


@contextmanager
def hospitals(folder: Path, *names: str, **more: str) -> Iterator[Federation]:
    """Run a coordinator that composes runs as in earnest; hospitals join it, these at once (see `Federation.join`)."""
    world = World.create(folder / "coordinator", ())
    world.compose = _built  # type: ignore[method-assign]
    world.start()
    with _ended(Federation(world)) as made:
        made.join(*names, **more)
        yield made


@contextmanager
def budgeted(
    folder: Path, data: Mapping[str, str], epsilon: float = 100.0, *, composes: bool = False
) -> Iterator[tuple[World, dict[str, Hospital]]]:
    """Run a coordinator; hospitals (name: data) with registered records and a budget do not run yet.

    composes: runs are composed as in earnest, from the words of a lead.
    """
    world = World.create(folder / "coordinator", ())
    if composes:
        world.compose = _built  # type: ignore[method-assign]
    world.start()
    with _ended(Federation(world)) as made:
        for name, reference in data.items():
            made.hospitals[name] = site = Hospital(world, enrolled(world, name, folder / name), reference)
            site.policy('[privacy]\nrng = "test"\n')
            register(site.ledger, datasets.load(reference), COLLECTION)
            site.budget(epsilon)
            site.budget(epsilon, "test")
        yield world, made.hospitals


@contextmanager
def _ended(made: Federation) -> Iterator[Federation]:
    """Stop in the end every hospital that is there by then, and the coordinator."""
    try:
        yield made
    finally:
        for hospital in made.hospitals.values():
            hospital.stop()
        made.world.stop()
