"""A run's computation at the hospital: check the manifest, build its parts, and run the silo's rounds."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from fl_core.aggregation import adaptive_guards
from fl_core.datasets import DataRequest, ImageExamples, SiloDataset
from fl_core.datasets.examples import SPLITS
from fl_core.errors import ConfigError, DataError, FederationError, ProtocolError, RefusedError, SchemaError, StateError
from fl_core.models.split_model import FrozenBody
from fl_core.rounds.manifest import RunManifest, Weights
from fl_core.rounds.memory_need import StepMemory, measure_pass, measure_step
from fl_core.rounds.silo_round import SiloRound, SiloRuntime, require_expected, run_silo_round
from fl_core.tensors import nn, torch
from fl_core.training import memory
from fl_core.training.broken_records import UNREADABLE, EmptyWhereBroken, require_few, unreadable, without
from fl_core.training.frozen_features import with_rows
from fl_core.training.local_data import eval_batch, has_batch_norm
from fl_core.types import tensor_maps
from fl_core.types.columns import difference
from fl_core.types.enums import Coupling, Split, TaskKind
from fl_core.types.interfaces import LocalData, RoundData, Team
from fl_core.types.metric_parts import METRIC_PARTS, METRICS, PERSONAL
from fl_core.types.values import Bundle, Examples, Progress, RoundContext, State, Tensors
from privacy import profiles
from privacy.accounting.release_plan import TEST, TRAIN
from privacy.compiled_run import CompiledRun
from privacy.profiles.base import MadeUpStep
from protos.wire.tasks import TaskKey
from service_core.version import version
from silo.admission.controls import (
    AdmissionRequest,
    DataChangedError,
    DataQuestion,
    HospitalControls,
    RunAccess,
    TaskAccess,
)
from silo.cancellation import CancelledError
from silo.storage.approvals import AwaitingDecisionError
from silo.storage.feature_cache import Block, FeatureCache, FeatureKey, KeptFeatures
from silo.storage.outbox import TrainingResult
from silo.storage.run_data import RunData
from silo.training.data_source import BrokenRecords, DataSource
from silo.training.helpers import Helpers, HelpersRound, undivided
from silo.training.own_evaluation import measure_exactly, own_evaluation

log = logging.getLogger(__name__)

TRIES = 3
"""Attempts per round of a run without privacy, if files break while it reads them."""
RunRound = Callable[[SiloRuntime, State, State | None, LocalData, RoundContext, TaskKind], SiloRound]
"""A silo's whole round: `fl_core.rounds.silo_round.run_silo_round`, or a benchmark's replacement."""


OBJECTS = 4
"""Objects of the model's size on the disk at once: two bases, the update, the staged state."""


def state_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in chain(model.parameters(), model.buffers()))


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A silo's part in a run, with everything that is built once.

    access: the hospital's permission for the run   broadcast: names, shapes and dtypes of the server's messages
    device: of the model   processes: number of processes that share its training steps, if these can be shared.
    """

    run: CompiledRun
    runtime: SiloRuntime
    access: RunAccess
    broadcast: Mapping[str, object]
    device: torch.device
    processes: int = 1

    @property
    def index(self) -> int:
        return self.access.data.index

    @property
    def dataset(self) -> SiloDataset:
        return self.access.data.dataset

    def model_of(self, msg: State) -> State:
        """Return the server's message without the settings of guards."""
        return adaptive_guards.method_state(msg, adaptive_guards.groups(self.runtime.guards))

    def require_room(self, folder: Path) -> None:
        """Raise RefusedError (E-RUN-38) if the free disk or memory is too small. folder: of the run's objects."""
        need = OBJECTS * state_bytes(self.runtime.model)
        if shutil.disk_usage(folder).free < need:
            raise RefusedError(
                "E-RUN-38",
                f"the disk of the silo's home has less than the {memory.mib(need)} of free space that the run's "
                "models, update and state need: free some, or choose a smaller model",
            )
        self.require_memory()

    @cached_property
    def step_memory(self) -> tuple[MadeUpStep, StepMemory]:
        run, manifest = self.run, self.run.manifest
        guard_parts = adaptive_guards.groups(self.runtime.guards)
        msg = adaptive_guards.method_state(run.method.broadcast(run.initial_state()), guard_parts)
        context = _context_of(self, 0, manifest.cohort_size)
        step = run.profile.made_up_step(self.index, context, self.device)
        with _cpu_threads(manifest.threads):
            return step, measure_step(self.runtime, msg, step.opened, context, self.device, run.kind.updates)

    def require_memory(self) -> None:
        """Raise RefusedError (E-RUN-38) if a round does not fit into the free memory.

        In a plain run the message names the largest power of two of examples that would fit; in a private run it does
        not.
        """
        free = memory.free_memory(self.device)
        if free is None:
            return
        if (need := self.body_memory) > free:
            raise RefusedError(
                "E-RUN-38",
                f"the frozen body of {self.run.manifest.model.name} needs about {memory.mib(need)} of free memory on "
                f"{self.device} to process images, and there is less: choose a smaller model or "
                "smaller images",
            )
        rows, step = self.step_memory
        shares_memory = self.processes > 1 and self.device.type == "cpu" and not self.undivided
        sharing = self.processes if shares_memory else 1
        free //= sharing
        if (need := step.need(rows.training, rows.evaluating)) <= free:
            return
        fitting = 0 if self.run.private else step.fitting(free, rows.training, rows.evaluating)
        remedy = "choose a smaller model or smaller images"
        if self.run.private and rows.training > 1:
            least = memory.mib(step.need(1, rows.evaluating))
            remedy = f"set privacy.physical_batch=1, which needs {least}, or a few, or {remedy}"
        elif fitting > 1 or (fitting and not has_batch_norm(self.runtime.model)):
            remedy = self._smaller(fitting)
        raise RefusedError(
            "E-RUN-38",
            f"{self.run.manifest.model.name} with {rows.training} examples at "
            f"once{f' in each of {sharing} processes' if sharing > 1 else ''} needs about {memory.mib(need)} of "
            f"free memory on {self.device}, and there is less: {remedy}",
        )

    @cached_property
    def undivided(self) -> str:
        """Explain why helpers cannot share the run's training steps; empty if they can."""
        step = self.run.profile.made_up_step(self.index, _context_of(self, 0, 0), self.device)
        return undivided(self.run, step.training)

    @cached_property
    def body_digest(self) -> str:
        """Return the digest of the body's weights. Cached: for a large body it takes as long as a round on features."""
        return tensor_maps.digest(tensor_maps.stored_state(self.run.network.body))

    @cached_property
    def body_memory(self) -> int:
        """Return the memory in bytes that a frozen body needs for a batch of examples; 0 without a frozen body."""
        if not self.run.frozen:
            return 0
        shape = self.run.manifest.schema.shape
        with _cpu_threads(self.run.manifest.threads):
            body, threads = self.run.network.body, torch.get_num_threads()
            outside = body.memory(threads) if isinstance(body, FrozenBody) else 0
            return outside + measure_pass(body, shape, self.device).need(0, eval_batch(shape))

    def _smaller(self, fitting: int) -> str:
        method, divided = self.run.method, f"train.micro_batch={fitting}"
        if method.coupling is not Coupling.EXAMPLE:
            return f"train.batch_size={fitting} fits here"
        if has_batch_norm(self.runtime.model):
            return f"train.batch_size={fitting} fits here, or {divided} with a model that has no batch norm"
        return f"{divided} fits here and adds up to the same steps"


class Trainer:
    """Runs tasks on one hospital's data.

    prototypes: False if the hospital submits none, in any run   helpers: processes that share its training steps.
    """

    def __init__(
        self,
        silo: str,
        data: DataSource,
        controls: HospitalControls,
        device: torch.device,
        features: FeatureCache,
        prototypes: bool = True,
        run_round: RunRound = run_silo_round,
        helpers: Helpers | None = None,
    ) -> None:
        self._silo, self.helpers = silo, helpers
        self._controls = controls
        self.source = data
        self.device = device
        self._prototypes = prototypes
        self._run_round = run_round
        self._prepared: tuple[str, PreparedRun] | None = None
        self._fitting: PreparedRun | None = None
        self._unreadable: tuple[PreparedRun, frozenset[str]] | None = None
        self._features = features
        self._few: tuple[str, ...] = ()

    def declared_classes(self) -> tuple[str, ...]:
        """Return the classes that the hospital declares; details of errors in its data go only to its own log."""
        with _hide_details(True, ConfigError, RefusedError):
            return self.source.declared_classes

    def data_now(self) -> RunData:
        """Describe the last loaded data, for the run that was prepared last and begins with them."""
        return self.source.run_data()

    def request(self, run_id: str, manifest: RunManifest) -> AdmissionRequest:
        return AdmissionRequest(run_id, manifest, self.declared_classes, self.device, self.data_of)

    def prepare(
        self,
        run_id: str,
        run: CompiledRun,
        fetch_weights: Callable[[Weights], Tensors],
        began: RunData | None = None,
    ) -> PreparedRun:
        """Check that this silo can do its part of an admitted run, and build what it needs.

        fetch_weights: called after all other checks, for runs that start from given weights   began: the data that the
        run began with here, if it has begun.

        Raises RefusedError: E-WIRE-01 on another version of the software, and as `HospitalControls.admit`; ConfigError
        (E-RUN-05) if this silo is no member; DataError if the data cannot be loaded or do not match the run
        (E-DATA-05); ProtocolError (E-WIRE-06) on another layout, or weights that do not fit the model.
        Guarantees: the outcome answers a private run's preflight, which costs no budget. So it follows from the
        manifest and from the hospital's declarations, decisions and registrations. For any manifest, it reveals about
        the records only that they cannot be used (E-RUN-31) or are not the registered ones (E-BUDGET-04).
        """
        policy, manifest = self._controls.policy_digest(), run.manifest
        with _hide_details(run.private, ConfigError, RefusedError):
            self._refresh()
        if self._prepared is not None and (self._prepared[0], self._prepared[1].run.manifest) == (policy, manifest):
            prepared = self._prepared[1]
            if prepared.access.data.version == (self.source.version() if began is None else began.version):
                return prepared
        if not _compatible(manifest.software, version()):
            raise RefusedError(
                "E-WIRE-01", f"the run is of {manifest.software}, and this silo has {version()}: upgrade the older side"
            )
        index = manifest.index(self._silo)
        with _hide_details(run.private, ConfigError):
            self.source.load(DataRequest(manifest.schema.classes, manifest.image_size, manifest.schema.window))
            dataset, data_version = self.source.as_begun(began)
        if dataset.schema != manifest.schema:
            raise _other_schema(manifest, dataset)
        if {**run.own_layout(), **profiles.extra_parts(manifest.privacy), **run.guard_parts} != manifest.layout:
            raise ProtocolError(
                "E-WIRE-06",
                f"the bundle layout of {manifest.method.name} in the manifest differs from the one here: both sides "
                "must run the same version",
            )
        with _hide_details(run.private, ConfigError, RefusedError, SchemaError, DataChangedError):
            size, typed = self.source.nominal_size, self.source.typed
            began_version = "" if began is None else began.version
            question = DataQuestion(index, dataset, data_version, began_version, size, typed, self._prototypes)
            access = self._controls.admit(self.request(run_id, manifest)._replace(data=question)).access
        assert access is not None
        if manifest.start is not None and manifest.start.weights is not None:
            run = run.with_weights(fetch_weights(manifest.start.weights))
        if run.frozen:
            width, (train, test) = run.schema.shape[0], self.source.examples
            declared = run.views(True) * train + test or run.views(True) * self.source.nominal_size
            self._features.require_room(declared, width)
        runtime = run.silo_runtime()
        if dataset.coarse and runtime.masking is not None:  # whether declared or not: see `Member.coarse`
            runtime = replace(runtime, masking=replace(runtime.masking, signs=False))
        runtime.model.to(self.device)
        broadcast = tensor_maps.signature(run.method.broadcast(run.initial_state()))
        runtime, self._few = replace(runtime, withholds=access.floors.parts), ()
        processes = 1 if self.helpers is None else self.helpers.size
        prepared = PreparedRun(run, runtime, access, broadcast, self.device, processes)
        self._prepared = (policy, prepared)
        return prepared

    def _refresh(self) -> None:
        """Forget results computed from data that have changed."""
        if self.source.refresh():
            self._prepared = None
            self._features.forget()

    def data_of(self, run: CompiledRun) -> SiloDataset:
        """Load the current data of a run."""
        self._refresh()
        schema = run.manifest.schema
        return self.source.load(DataRequest(schema.classes, run.manifest.image_size, schema.window))

    def require_memory(self, prepared: PreparedRun) -> None:
        """Raise as `PreparedRun.require_memory`; once per run, since the process keeps the memory of earlier rounds."""
        if self._fitting is not prepared:
            prepared.require_memory()
            self._fitting = prepared

    def check_message(self, prepared: PreparedRun, key: TaskKey, msg: State) -> None:
        """Check the coordinator's message for a task, before the task is admitted.

        Raises ProtocolError: E-WIRE-06 on a malformed message, E-RUN-33 on another start model than the manifest names;
        RefusedError on another clip (E-PRIV-15).
        """
        self._check_broadcast(prepared, msg)
        self._check_start(prepared, key, msg)
        adaptive_guards.guards_for_round(prepared.runtime.guards, msg)

    def train(
        self,
        prepared: PreparedRun,
        access: TaskAccess,
        state: State | None,
        progress: Progress,
        own: nn.Module | None = None,
        broken: BrokenRecords | None = None,
    ) -> TrainingResult:
        """Do one admitted task. progress: called with (steps done, total steps).

        own: a comparison model to measure along with the received one   broken: the records that the run excludes;
        newly unreadable records are added before anything leaves.

        Raises ProtocolError (E-RUN-47) if the update differs from the sums to be taken out; as `TaskAccess.open`;
        StateError (E-RUN-31) for any error in a private run after examples are read.
        Guarantees: the result equals that of a silo in a simulation (`consilium/research/engines`), bit for bit on the
        CPU. If files break during a round without privacy, the round is repeated without them. So a repeated task gives
        the same update, or the one without newly broken records. In a private round, which is charged once, these
        records contribute nothing.
        """
        manifest, broken, key = prepared.run.manifest, broken or BrokenRecords(set()), access.key
        context = _context_of(prepared, key.round, access.cohort)
        with _cpu_threads(manifest.threads):
            if own is not None:
                prepared = replace(prepared, runtime=replace(prepared.runtime, own=own.to(self.device)))
            for left in reversed(range(TRIES)):
                outcome = self._attempt(prepared, access, state, context, progress, broken, left=left)
                if outcome is not None:
                    break
        assert outcome is not None  # the last attempt raises
        if key.kind.trains:  # before an update from the other records leaves
            require_expected(prepared.run.method, outcome.bundle, context.round)
        return TrainingResult(
            bundle=outcome.bundle,
            state=outcome.state,
            evaluation=own_evaluation(manifest.schema.classes, outcome.measured),
            server_tracks_state=prepared.run.method.server_tracks_state,
            unprotected=_unprotected(prepared, outcome.bundle, key.kind),
            fingerprint=prepared.dataset.fingerprint,
        )

    def helpers_of(self, prepared: PreparedRun, kind: TaskKind) -> Helpers | None:
        """Return the helpers if they share the training steps of a task, otherwise None."""
        return self.helpers if self.helpers is not None and kind.trains and not prepared.undivided else None

    def trained_classes(self, prepared: PreparedRun, access: TaskAccess) -> list[int]:
        """Return the positions of the classes that this silo trains and that its release floors do not hide."""
        manifest, dataset = prepared.run.manifest, prepared.dataset
        context = _context_of(prepared, manifest.rounds, len(manifest.members))
        data = access.open(RoundData(dataset.train, dataset.test, manifest.train, context, self.device))
        return torch.nonzero(data.contributes()).flatten().tolist()

    def _attempt(
        self,
        prepared: PreparedRun,
        access: TaskAccess,
        state: State | None,
        context: RoundContext,
        progress: Progress,
        broken: BrokenRecords,
        *,
        left: int,
    ) -> SiloRound | None:
        """Do a round. Return None if it must be repeated: it has no privacy, a file broke, and attempts are left."""
        private = prepared.run.private
        with _hide_details(private):
            train, test = self._examples(prepared, progress, broken)
        sent = self._sent_of(prepared, test)
        opened = RoundData(train, test, prepared.run.manifest.train, context, self.device, progress)
        helpers = self.helpers_of(prepared, access.key.kind)
        data = access.open(replace(opened, test=sent, team=helpers or Team()))
        try:
            with _hide_details(private):
                if helpers is not None:
                    data = helpers.begin(data, _helpers_round(prepared, access, state, context, train))
                done = self._run_round(prepared.runtime, access.message, state, data, context, access.key.kind)
                if (private or sent is not test) and METRICS in done.measured:
                    exact = access.open_for_hospital(replace(opened, progress=None))
                    measured = measure_exactly(prepared.runtime, access.message, exact, context.n_classes)
                    done = done._replace(measured=measured)
                return done
        except DataError as error:
            if private or not left or error.code != UNREADABLE:
                raise
            log.warning("%s: restarting the round, since a file could not be read: %s", access.key, error.message)
            self._unreadable = None
            return None

    def _sent_of(self, prepared: PreparedRun, test: Examples) -> Examples:
        """Return the test examples whose results may leave: without classes that have too few of them."""
        classes = prepared.run.manifest.schema.classes
        floors = prepared.access.floors
        names = floors.too_few(test, classes)
        if names and names != self._few:
            self._few = names
            text = "%s: results withheld for %s: fewer than %d test images (evaluation.min_examples)"
            log.warning(text, prepared.run.manifest.name, ", ".join(names), floors.min_test_images)
        return floors.sent(test, classes)

    def _examples(self, prepared: PreparedRun, progress: Progress, broken: BrokenRecords) -> list[Examples]:
        """Return a run's training and test examples without its broken ones; with a frozen body, their features.

        Raises DataError as `broken_records.require_few`.
        """
        splits, frozen = _splits(prepared), prepared.run.frozen
        kept = [self._features_of(prepared, s, examples, progress) if frozen else None for s, examples in splits]
        if self._unreadable is None or self._unreadable[0] is not prepared:
            self._unreadable = prepared, self._find_unreadable(prepared, kept, progress, broken)
        broken.add(self._unreadable[1])
        usable = list[Examples]()
        for (split, examples), features in zip(splits, kept, strict=True):
            names = _names(prepared, split)
            gone = [i for i, name in enumerate(names) if name in broken.names]
            if features is not None:
                views = prepared.run.views(split is Split.TRAIN)
                usable.append(_of_features(examples, features, gone, views))
                continue
            some = without(examples, gone)
            if prepared.run.private and isinstance(some, ImageExamples):
                intact = [name for name in names if name not in broken.names]
                some = EmptyWhereBroken(some, partial(_notice, broken, intact))
            usable.append(some)
        return usable

    def _find_unreadable(
        self, prepared: PreparedRun, kept: Sequence[KeptFeatures | None], progress: Progress, broken: BrokenRecords
    ) -> frozenset[str]:
        """Return the names of newly unreadable records. With cached features, examine only examples without them."""
        unreadable_names = set[str]()
        for (split, examples), features in zip(_splits(prepared), kept, strict=True):
            names = _names(prepared, split)
            among = range(len(names)) if features is None else features.left_out if names else ()
            positions = [i for i in among if names[i] not in broken.names]
            unreadable_names |= {names[i] for i in unreadable(examples, positions, progress)}
        return frozenset(unreadable_names)

    def _features_of(self, prepared: PreparedRun, split: Split, examples: Examples, progress: Progress) -> KeptFeatures:
        """Return the features of a split, cached or computed."""
        make = partial(self._blocks, prepared.run, split, examples, progress)
        return self._features.get(self._feature_key(prepared, split), len(examples), make)

    def _blocks(self, run: CompiledRun, split: Split, examples: Examples, progress: Progress) -> Iterator[Block]:
        for batch in run.features(examples, self.device, split is Split.TRAIN):
            progress(batch.done, len(examples))
            yield Block(batch.positions.tolist(), batch.rows.flatten(1).numpy())

    def _feature_key(self, prepared: PreparedRun, split: Split) -> FeatureKey:
        manifest = prepared.run.manifest
        maker = {
            "body": prepared.body_digest,
            "model": asdict(manifest.model),
            "extensions": [asdict(extension) for extension in manifest.extensions],
            "shape": manifest.schema.shape,
            "window": manifest.schema.window,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "software": [version(), torch.__version__],
        }
        if isinstance(body := prepared.run.network.body, FrozenBody):
            maker["runtime"] = body.runtime(manifest.schema.shape, self.device)
        if (views := prepared.run.views(split is Split.TRAIN)) > 1:
            maker["views"] = views
        request = DataRequest(manifest.schema.classes, manifest.image_size, manifest.schema.window)
        return FeatureKey(
            origin=str(self.source.reference),
            data=prepared.access.data.version,
            request=repr(request),
            split=split.value,
            maker=json.dumps(maker, sort_keys=True),
        )

    def keeps_state(self, prepared: PreparedRun, key: TaskKey, size: int) -> bool:
        """Tell whether a run's method keeps state at this silo between rounds. size: of the round's cohort."""
        runtime = prepared.runtime
        state = runtime.method.init_silo(runtime.reset_model(), _context_of(prepared, key.round, size))
        return any(len(group) for group in state.values())

    @staticmethod
    def _check_broadcast(prepared: PreparedRun, msg: State) -> None:
        """Raise ProtocolError (E-WIRE-06) on a malformed message, before reading examples.

        A later error could depend on the records.
        """
        received = tensor_maps.signature(prepared.model_of(msg))
        if received != prepared.broadcast:
            different = sorted(
                g for g in {*received, *prepared.broadcast} if received.get(g) != prepared.broadcast.get(g)
            )
            raise ProtocolError(
                "E-WIRE-06",
                f"the coordinator's message does not match the server of {prepared.run.method.name}: it has other "
                f"names, shapes or types in {different[0]!r}. Both sides must run the same version",
            )

    @staticmethod
    def _check_start(prepared: PreparedRun, key: TaskKey, msg: State) -> None:
        """Raise ProtocolError (E-RUN-33) if the first round does not start from the model in the manifest."""
        start = prepared.run.manifest.start
        if start is None or key.round:
            return
        digests = {group: tensor_maps.digest(values) for group, values in prepared.model_of(msg).items()}
        if digests != start.broadcast or digests.get("w") != start.model:
            raise ProtocolError(
                "E-RUN-33",
                f"expected to start from {start}, found the model {digests.get('w', 'none')[:16]} or tensors with it "
                "that the manifest does not name: ask the lead",
            )


def _helpers_round(
    prepared: PreparedRun, access: TaskAccess, state: State | None, context: RoundContext, train: Examples
) -> HelpersRound:
    """Describe a round to helpers, without guards and masks of the update: only the first process applies these."""
    run, runtime = prepared.run, prepared.runtime
    message = {group: dict(values) for group, values in prepared.model_of(access.message).items()}
    layout = {part: spec for part, spec in runtime.layout.items() if part not in run.guard_parts}
    return HelpersRound(
        replace(runtime, layout=layout, guards=(), masking=None, withholds=frozenset(), own=None),
        message,
        state,
        run.manifest.train,
        context,
        access.key.kind,
        run.manifest.threads,
        run.profile.private_form,
        train.groups is not None,
    )


def _context_of(prepared: PreparedRun, round: int, cohort: int) -> RoundContext:
    manifest, index = prepared.run.manifest, prepared.index
    context = RoundContext(len(manifest.members), len(manifest.schema.classes), manifest.rounds, round, cohort)
    return context.for_silo(index, manifest.seed, prepared.access.submits, manifest.masked_units(index))


def _splits(prepared: PreparedRun) -> list[tuple[Split, Examples]]:
    return list(zip(SPLITS, (prepared.dataset.train, prepared.dataset.test), strict=True))


def _names(prepared: PreparedRun, split: Split) -> list[str]:
    """Return the names of a split's records in files, in the order of its examples; empty for other data."""
    return [record.name for record in prepared.dataset.records if record.split == split.value]


def _notice(broken: BrokenRecords, names: Sequence[str], positions: Sequence[int]) -> None:
    broken.add({names[i] for i in positions})


def _of_features(examples: Examples, kept: KeptFeatures, gone: Sequence[int], views: int) -> Examples:
    """Return examples as their features, without excluded examples (gone) and those without features."""
    require_few(len(gone), len(examples))
    available = torch.ones(len(examples), dtype=torch.bool)
    available[list(kept.left_out)] = False
    rows, positions = torch.from_numpy(kept.rows).reshape(len(kept.rows), views, -1), torch.nonzero(available).flatten()
    available[list(gone)] = False
    still = available[positions]
    return with_rows(examples, positions[still], rows, None if bool(still.all()) else torch.nonzero(still).flatten())


def _unprotected(prepared: PreparedRun, bundle: Bundle, kind: TaskKind) -> tuple[str, ...]:
    """Name the splits whose records the bundle, or a masked sum with it, reveals without differential privacy."""
    parts = prepared.run.updates.parts(kind, bundle)
    measured = METRIC_PARTS & parts - prepared.runtime.withholds
    splits = ({TRAIN} if not kind.ends_run or PERSONAL in parts else set()) | ({TEST} if measured else set())
    return tuple(sorted(splits - prepared.run.profile.protected))


def _other_schema(manifest: RunManifest, dataset: SiloDataset) -> DataError:
    run, local = manifest.schema, dataset.schema
    if differ := difference(run.columns, local.columns):
        return SchemaError(
            "E-DATA-05",
            f"the columns of run {manifest.name!r} differ from this hospital's schema: {differ}. Agree on one "
            "schema, or serve the run's data",
        )
    if run.multi_label != local.multi_label:
        mismatch = f"expected {run.kind} for run {manifest.name!r}, found {local.kind} in this hospital's schema"
        return SchemaError("E-DATA-05", f"{mismatch}: agree on one, or serve the data that the run is about")
    return DataError(
        "E-DATA-05",
        f"expected examples of shape {run.shape} and classes {run.classes} for run {manifest.name!r}, found "
        f"{local.shape} and {local.classes} in {dataset.origin}: serve the data that the run is about",
    )


def _compatible(theirs: str, ours: str) -> bool:
    """Tell whether two versions differ at most in the patch level; an empty `theirs` fits any version."""
    return not theirs or theirs.rpartition(".")[0] == ours.rpartition(".")[0]


@contextmanager
def _hide_details(private: bool, *disclosed: type[FederationError]) -> Iterator[None]:
    """Replace an error of a private run by StateError (E-RUN-31) with its text; `disclosed` errors pass unchanged.

    Only the code and its fixed explanation are sent (`silo.service.task_queue`); the text stays here.
    """
    try:
        yield
    except Exception as error:
        if not private or isinstance(error, (AwaitingDecisionError, CancelledError, *disclosed)):
            raise
        log.exception("a task of a private run failed")
        raise StateError("E-RUN-31", f"the task failed at this silo: {type(error).__name__}: {error}") from error


@contextmanager
def _cpu_threads(number: int) -> Iterator[None]:
    """Run with the manifest's number of CPU threads, which affects the last bit of sums; 0 keeps the default."""
    before = torch.get_num_threads()
    try:
        if number:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
