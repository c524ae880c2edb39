"""The arithmetic of a run: checks updates, sums them, and computes the server's state from the sums."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from coordinator.config.manifest_builder import build_manifest
from coordinator.runs.exchange import Opened, OpenRequest, Place, Rounds, RunService, Setup, Update, Written
from coordinator.worker import opening
from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.aggregation.fixed_point import check_layout
from fl_core.aggregation.flat_blocks import CHECK_WORDS
from fl_core.aggregation.masked_sum import unsigned
from fl_core.aggregation.update_check import DeclaredSize, MeasuredUpdate, UpdateCheck, UpdateNorms, with_undeclared
from fl_core.errors import ProtocolError
from fl_core.rounds.engine import Exchange, Observer, Replies, RoundLoop, reply_of
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import require_expected, round_layout
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import SiloPort
from fl_core.types.records import RoundRecord
from fl_core.types.secagg import BLOCKS, CLASSES, MASKS
from fl_core.types.values import Bundle, Layout, Part, RoundContext, State
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile, open_state, write_state
from service_core.storage.disk import disk_errors
from service_core.storage.object_store import ObjectStore
from service_core.workers.calls import Later

MODEL_LOCK = threading.Lock()
"""Hold it while a model is built: initial weights come from torch's global generator, which all threads share."""
MEASURED = 1000
"""Updates whose measurements are kept until their round takes them."""


class RunWork:
    """Opens runs, then computes for one. `check` may be called by any thread, also during `run`.

    service: the service that it calls while it runs rounds.
    """

    manifest: RunManifest
    _compiled: CompiledRun
    _sizes: Mapping[str, DeclaredSize]

    def __init__(self, place: Place) -> None:
        self.service: RunService | None = None
        self.extensions: Sequence[str] = ()
        self._place = place
        self._lock = threading.Lock()
        self._measured: dict[str, UpdateNorms] = {}

    # ---- before a run ----------------------------------------------------------------------------------------------

    def build(self, spec: str, silos: Sequence[str]) -> str:
        """Freeze a lead's configuration as a manifest. silos: messages SiloInfo in hex; raises as `build_manifest`."""
        with MODEL_LOCK:
            return build_manifest(spec, [pb.SiloInfo.FromString(bytes.fromhex(silo)) for silo in silos]).to_json()

    def open(self, asked: OpenRequest) -> Opened:
        """Open a run; raises as `opening.opened`."""
        with MODEL_LOCK:
            return opening.opened(asked, ObjectStore(Path(self._place.objects), sharded=True), self.written)

    def require_quorum(self, manifest: str, quorum: int) -> None:
        """Raise as `opening.require_quorum`."""
        opening.require_quorum(RunManifest.from_json(manifest), quorum)

    def take(self, setup: Setup) -> None:
        """Set the run to compute for; raises as `CompiledRun.of`."""
        self.__dict__.pop("checks", None)
        self._measured.clear()
        self.manifest = RunManifest.from_json(setup.manifest)
        sizes = {name: DeclaredSize(train or math.inf, test or math.inf) for name, train, test in setup.sizes}
        self._sizes = with_undeclared(sizes)
        with MODEL_LOCK:
            self._compiled = CompiledRun.of(self.manifest)

    @property
    def lives(self) -> bool:
        return True

    def settle(self) -> None:
        """Do nothing: its calls to the service run in the caller's thread."""

    def end(self) -> None:
        """Do nothing: its work ends with the caller's thread."""

    # ---- updates ---------------------------------------------------------------------------------------------------

    def check(self, update: Update) -> None:
        """Raise ProtocolError (E-WIRE-05, E-WIRE-06, E-RUN-43, E-RUN-47) unless an update is valid for its round."""
        run, kind = self._compiled, TaskKind(update.kind)
        bundle = self.bundle(Path(update.path))
        if covered := run.updates.covered:
            _check_masked(bundle, covered[kind])
            return
        measured = self.checks[kind].check(bundle, update.silo)
        if kind.trains:
            require_expected(run.method, bundle, update.round)
        with self._lock:
            while len(self._measured) >= MEASURED:
                del self._measured[next(iter(self._measured))]
            self._measured[update.id] = measured

    def measured(self, update_id: str) -> UpdateNorms | None:
        """Return an update's measurements from its check, once; None if they are no longer kept."""
        with self._lock:
            return self._measured.pop(update_id, None)

    @cached_property
    def checks(self) -> Mapping[TaskKind, UpdateCheck]:
        with MODEL_LOCK:
            check = self._compiled.update_check(self._sizes)
        return {kind: check.of(round_layout(self._compiled.method, check.layout, kind)) for kind in TaskKind}

    def bundle(self, file: Path) -> BundleFile:
        """Open an update; raises as `checked`."""
        return checked(BundleFile(file), self._compiled.dtypes)

    def classes_in(self, update: BundleFile) -> frozenset[str] | None:
        """Return the classes that an update trains; None if it counts none, or masks hide them."""
        return None if self._compiled.masked else classes_in(update, self.manifest)

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def initial(self) -> Written:
        """Write the server's state of round 0."""
        with MODEL_LOCK:
            state = self._compiled.initial_state()
            self._compiled.drop_model()
        return self.written(state)

    def census(self, quorum: int) -> list[float]:
        """Hold the census; return how many hospitals each class has. Raises as `RoundLoop.census`."""
        rounds = _Rounds(self)
        counted: list[float] = rounds.loop(quorum).census(rounds)[HOSPITALS].tolist()
        return counted

    def run(self, left: Rounds) -> None:
        """Run the remaining rounds; raises as `RoundLoop.run`."""
        state = open_state(Path(left.state))
        rounds = _Rounds(self, state)
        if left.counted is not None:
            state = {**state, HOSPITALS: {HOSPITALS: torch.tensor(left.counted, dtype=torch.float64)}}
        rounds.loop(left.quorum).run(state, rounds, start=left.start, closed=left.closed)

    def written(self, state: State) -> Written:
        """Write a state into a file for the service; raises UnavailableError (E-STATE-63) if the disk is full."""
        path = Path(f"{self._place.written}{secrets.token_hex(8)}.part")
        with disk_errors(path):
            return Written(str(path), *write_state(state, path))

    def round_loop(self, ports: Sequence[SiloPort], exchange: Exchange) -> RoundLoop:
        """Create the run's round loop."""
        unmask = self._unmask if self._compiled.masked else None
        with MODEL_LOCK:
            loop = self._compiled.round_loop(ports, 1, self._sizes, exchange, unmask)
            self._compiled.drop_model()
        return loop

    def _unmask(
        self,
        number: int,
        kind: TaskKind,
        sums: Mapping[str, Tensor],
        members: Collection[str],
        blocks: Collection[str],
    ) -> None:
        """Remove the masks from a round's sums (`fl_core.rounds.updates.Unmask`); raises as `RunService.unmask`."""
        assert self.service is not None
        self.service.unmask(number, kind, members, blocks).unmask([unsigned(sums[block]) for block in BLOCKS])
        if kind.census:
            self.service.counted(sums[CLASSES][CHECK_WORDS:].tolist())


class _Rounds(Observer):
    """Reports the rounds of a run to the service. stored: the state that the service stored last."""

    def __init__(self, work: RunWork, stored: State | None = None) -> None:
        assert work.service is not None
        self.work, self.service, self._stored = work, work.service, stored
        self._needed: Callable[[int], int] = lambda cohort: cohort
        self._sent = -1
        self._classes: dict[str, Collection[str] | None] = {}

    def loop(self, quorum: int) -> RoundLoop:
        """Create the loop of these rounds. quorum: updates that close one; 0: as the manifest says."""
        ports = [_Hospital(member.name, self) for member in self.work.manifest.members]
        loop = self.work.round_loop(ports, self._exchange)
        loop = replace(loop, schedule=replace(loop.schedule, quorum=quorum or loop.schedule.quorum))
        self._needed = loop.needed
        return loop

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._sent = -1
        self.service.opened(context, kind, names, self._needed(len(names)))

    def arrived(self, name: str) -> None:
        self.service.arrived(name, self._classes.pop(name, None))

    def refused(self, name: str, why: str) -> None:
        self.service.refused(name, why)

    def merged(self, server: State) -> State:
        self._written = self.work.written(server)
        self._stored = open_state(Path(self._written.path))
        return self._stored

    def closed(self, record: RoundRecord, server: State) -> None:
        if not record.kind.trains:
            self.service.closed(record, None, tensor_maps.digest(server["w"]))
            return
        self.service.closed(record, self._written, "")

    def ask(self, silo: str, msg: State, context: RoundContext, kind: TaskKind) -> Later[Bundle]:
        """Have the model sent to a silo; return its update once it has arrived. Raises as `RunService.ask`."""
        if not kind.census:
            self._send(msg, context.round)
        sent = self.service.ask(silo, context, kind)
        return Later(sent.event, lambda: self._opened(silo, *sent.read()))

    def _opened(self, silo: str, update_id: str, file: Path) -> Bundle:
        update = self.work.bundle(file)
        self._classes[silo] = self.work.classes_in(update)
        measured = self.work.measured(update_id)
        return update if measured is None else MeasuredUpdate(update, measured)

    def _exchange(self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind) -> Replies:
        """Ask a cohort at once, and yield replies as they arrive; no thread waits for a silo."""
        arrived: SimpleQueue[tuple[str, Callable[[], Bundle]]] = SimpleQueue()

        def note(name: str, read: Callable[[], Bundle], event: Future[object]) -> None:
            del event
            arrived.put((name, read))

        for port in ports:
            reply: Future[Bundle] = Future()
            try:
                later = self.ask(port.name, msg, context, kind)
            except Exception as error:
                reply.set_exception(error)
                later = Later(reply, reply.result)
            later.event.add_done_callback(partial(note, port.name, later.read))
        for _ in ports:
            name, read = arrived.get()
            yield name, reply_of(read)

    def _send(self, msg: State, round: int) -> None:
        """Have a round's message stored, once; no file is needed if it is the state that was stored last."""
        if self._sent != round:
            state = self._stored
            same = state is not None and set(msg) == set(state) and all(msg[group] is state[group] for group in msg)
            self.service.broadcast(round, None if same else self.work.written(msg))
            self._sent = round


@dataclass(frozen=True, slots=True)
class _Hospital:
    """A silo over the network; see `fl_core.types.interfaces.SiloPort`.

    Guarantees: the bundle is the silo's, bit for bit.
    """

    name: str
    rounds: _Rounds

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        return self.rounds.ask(self.name, msg, context, kind).result()

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Do nothing: the stored close is announced to every silo."""


def checked(bundle: BundleFile, allowed: frozenset[torch.dtype]) -> BundleFile:
    """Return an update whose parts have the dtypes that this run's silos send.

    Raises ProtocolError (E-WIRE-06) on other dtypes.
    """
    for name in bundle:
        if not bundle.dtypes(name) <= allowed:
            kinds, sent = (sorted(map(str, dtypes)) for dtypes in (allowed, bundle.dtypes(name)))
            raise ProtocolError("E-WIRE-06", f"part {name!r}: expected number types among {kinds}, found {sent}")
    return bundle


def _check_masked(update: BundleFile, layout: Layout) -> None:
    """Raise ProtocolError (E-WIRE-06) unless an update has its round's shapes; masks hide everything else."""
    check_layout(update, layout)
    for name in layout:
        if (name == MASKS) is not (update.dtypes(name) == {torch.uint8}):
            raise ProtocolError("E-WIRE-06", f"part {name!r} of a masked update: found {update.dtypes(name)}")


def classes_in(update: Mapping[str, Part], manifest: RunManifest) -> frozenset[str] | None:
    """Return the classes that an update trains (noisy counts are not corrected); None if it counts none.

    Uses the weights per class in the run's layout; other shapes are refused elsewhere.
    """
    names, classes = manifest.schema.classes, set[str]()
    for part, spec in manifest.layout.items():
        if spec.weight_shape != (len(names),) or part not in update:
            continue
        weight = update[part].weight
        if tuple(weight.shape) != spec.weight_shape:
            continue
        counts = weight if weight.is_floating_point() else manifest.grid.decode(f"{part}.weight", weight)
        classes.update(name for name, count in zip(names, counts.tolist(), strict=True) if count >= 0.5)
    return frozenset(classes) or None
