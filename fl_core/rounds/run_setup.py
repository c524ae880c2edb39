"""The objects that a run's manifest names, built once: its method, model, guards and round loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from fl_core import rng
from fl_core.aggregation import options as aggregators
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.norm_guard import NormGuard, norms_layout
from fl_core.aggregation.options import Options
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, norms
from fl_core.errors import ProtocolError, StateError
from fl_core.extensions import registry
from fl_core.kinds import RunKind
from fl_core.methods import build_written
from fl_core.models import SplitModel, build_model, pretrained
from fl_core.models.split_model import assemble, on_body
from fl_core.rounds import capabilities, sampling
from fl_core.rounds.engine import Exchange, RoundLoop, Schedule
from fl_core.rounds.layout import closing_layout, derive_layout
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions, OtherModel, RunManifest, StartPoint
from fl_core.rounds.silo_round import SiloRuntime
from fl_core.rounds.torch_need import require_torch
from fl_core.rounds.updates import MaskedUpdates, PlainUpdates, Unmask, updates_of
from fl_core.tensors import nn, torch
from fl_core.training.frozen_features import FeatureBatch, TrainedPart, feature_batches, trained_part
from fl_core.types import tensor_maps
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.interfaces import Guard, Method, SiloPort
from fl_core.types.records import FEATURES, Schema
from fl_core.types.values import Examples, Layout, RoundContext, State, SurveySums, Tensors


class Guards(NamedTuple):
    """The guards of a run. silo: applied to each silo's bundle   incoming: undone on the sum, in reverse order."""

    silo: Sequence[Guard]
    incoming: Sequence[Guard]


@dataclass(frozen=True, eq=False)
class RunSetup:
    """A manifest and the objects that it names, built on demand and cached.

    It ignores the privacy profile: services use `privacy.compiled_run.CompiledRun`. weights: those of the manifest's
    start, set by `with_weights`; without them, nothing that depends on them can be built.
    """

    manifest: RunManifest
    weights: Tensors | None = None

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """Compile a manifest with a known method.

        Raises ConfigError: E-CFG-01, E-CFG-02, E-CFG-08 if the loaded version of an extension is not the manifest's;
        RefusedError as `require_torch`.
        """
        require_torch(manifest)
        registry.require_same(manifest.method.name, manifest.model.name, manifest.extensions)
        run = cls(manifest)
        run.require_supported()
        _ = run.aggregator
        return run

    @cached_property
    def method(self) -> Method:
        return build_written(self.manifest.method.name, self.manifest.method.options)

    @cached_property
    def kind(self) -> RunKind:
        return self.manifest.kind

    @property
    def question(self) -> SurveySums | None:
        """The survey's questions, if the run is one."""
        return self.kind.question(self.method, len(self.manifest.schema.classes))

    @cached_property
    def guards(self) -> Guards:
        return self._with_masked(Guards((), (FixedPoint(self.manifest.grid),)))

    def _with_masked(self, guards: Guards) -> Guards:
        """Add the guards of a masked run. On a sum, the norm guard is undone last, once numbers are off the grid."""
        floor = () if self.updates.floor is None else (self.updates.floor,)
        bound = () if self.norm_guard is None else (self.norm_guard,)
        return Guards((*guards.silo, *floor, *bound), (*bound, *guards.incoming, *floor))

    def with_weights(self, weights: Tensors) -> Self:
        """Return the run with the weights that its start names.

        Raises ProtocolError (E-WIRE-06) unless they fit the model and lack exactly the modules in the manifest.
        """
        run = copy.copy(self)
        run.__dict__.update(weights=weights, network=copy.deepcopy(self.network))
        run.__dict__.pop("_trained", None)
        if unfit := pretrained.problem(weights, run.network):
            raise ProtocolError("E-WIRE-06", f"expected weights of {self.manifest.model.name}, found {unfit}")
        start, fresh = self.manifest.start, pretrained.fresh_modules(weights, run.network)
        if start is None or start.weights is None or start.weights.fresh != fresh:
            raise ProtocolError(
                "E-WIRE-06",
                f"weights are missing for {len(fresh)} tensors that the manifest does not list as new "
                f"({', '.join(fresh[:3])}): ask the lead",
            )
        tensor_maps.load_state(run.network, weights)
        if not pretrained.answers_numbers(run.network, self.manifest.schema.shape):
            raise ProtocolError(
                "E-WIRE-06",
                "the model returns NaN or infinity: ask the lead",
            )
        return run

    def for_comparison(self, other: OtherModel) -> Self:
        """Return a run on the same data with another run's method and model, neither trained nor sent.

        Raises as `of`.
        """
        untrained = replace(self.manifest, rounds=0, cohort=0, quorum=0, personal=False, start=None, secagg=None)
        mean = NamedOptions(aggregators.Mean.name)
        summed = replace(untrained, evaluation=EvaluationTerms(), aggregator=mean)
        return self.of(replace(summed, method=other.method, model=other.model, seed=other.seed))

    @cached_property
    def network(self) -> SplitModel:
        """The whole model with its initial weights; read-only."""
        return self._drawn()

    def drop_model(self) -> None:
        """Free the memory of the initial model, which is drawn again at its next use. Given weights stay."""
        if self.weights is None:  # given weights could not be drawn again
            self.__dict__.pop("network", None)
            self.__dict__.pop("_trained", None)

    def _drawn(self) -> SplitModel:
        manifest = self.manifest
        if self.kind.program:  # no model is trained, sent or measured
            with rng.torch_scope(manifest.seed, "model"):
                return assemble(nn.Identity(), 1, (), len(manifest.schema.classes), head_bias=True)
        return build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)

    def _trained_of(self, network: SplitModel) -> TrainedPart:
        manifest = self.manifest
        return trained_part(network, manifest.schema, manifest.train, manifest.model.name)

    @cached_property
    def _trained(self) -> TrainedPart:
        return self._trained_of(self.network)

    @property
    def model(self) -> nn.Module:
        """The trained model with its initial weights; read-only: the whole model, or the part after a frozen body."""
        return self._trained.model

    @property
    def schema(self) -> Schema:
        """The schema of the training examples: the manifest's, or that of a frozen body's features."""
        return self._trained.schema

    @property
    def frozen(self) -> bool:
        """Whether examples are features of the start model's frozen body."""
        return self.manifest.train.freeze == FEATURES

    def features(self, examples: Examples, device: torch.device, train: bool) -> Iterator[FeatureBatch]:
        """Compute the features of a run with a frozen body; raises as `frozen_features.feature_batches`."""
        self._require_weights()
        return feature_batches(self.network.body, examples, device, self.views(train))

    def views(self, train: bool) -> int:
        """Return the number of stored views per example: for training the schedule's, otherwise 1."""
        return self.manifest.train.views if train else 1

    def sent_model(self, msg: State) -> nn.Module:
        """Build the global model of a broadcast, at a silo without state.

        Raises ProtocolError: E-WIRE-06 on other tensors than this method sends, E-WIRE-05 on NaN or infinity.
        """
        if tensor_maps.signature(msg) != tensor_maps.signature(self.method.broadcast(self.initial_state())):
            raise ProtocolError(
                "E-WIRE-06",
                f"expected the tensors that the server of {self.method.name} sends for {self.manifest.model.name}, "
                "found other names, shapes or types: ask the lead",
            )
        if not all(tensor_maps.all_finite(values) for values in msg.values()):
            raise ProtocolError("E-WIRE-05", "the second model contains NaN or infinity: ask the lead")
        return self.method.global_model(self.new_model(), msg)

    def classifier(self, server: State) -> nn.Module:
        """Build the global model of a server state, for unprocessed examples; raises as `Method.global_model`."""
        classifier = self.method.global_model(self.new_model(), self.method.broadcast(server))
        if not self.frozen:
            return classifier
        self._require_weights()
        return on_body(copy.deepcopy(self.network.body).cpu(), classifier)

    def exported(self, server: State) -> Tensors:
        """Return the tensors of an exported model: `Method.exported`, and those of a frozen body."""
        exported = self.method.exported(server)
        if not self.frozen:
            return exported
        self._require_weights()
        return {
            **tensor_maps.select(tensor_maps.stored_state(self.network), lambda n: n.startswith("body.")),
            **exported,
        }

    def own_layout(self) -> Layout:
        """Derive the layout of updates from the manifest, without additions of a profile or masks."""
        manifest, classes = self.manifest, len(self.manifest.schema.classes)
        hidden = self.updates.hidden
        return derive_layout(
            self.method,
            self.new_model(),
            self.schema,
            manifest.personal,
            manifest.evaluation.metrics,
            updates=self.kind.updates,
            closing=closing_layout(classes, manifest.evaluation, hidden),
        )

    def new_model(self) -> nn.Module:
        """Copy the model with its initial weights, since training and dry runs change their model."""
        return copy.deepcopy(self.model)

    @cached_property
    def training_rounds(self) -> list[list[int]]:
        """The rounds in which each silo trains, in the manifest's order; cohorts follow from the seed."""
        manifest = self.manifest
        rounds = [list[int]() for _ in manifest.members]
        for t in range(manifest.rounds):
            for k in sampling.sample_cohort(manifest.seed, t, len(rounds), manifest.cohort):
                rounds[k].append(t)
        return rounds

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes in silos' bundles."""
        return self.updates.dtypes(bool(self.guards.silo))

    def silo_runtime(self) -> SiloRuntime:
        """Create a silo's runtime; raises as `capabilities.check_batches`."""
        self._require_weights()
        capabilities.check_batches(self.method, self.model, self.manifest.train)
        initial = {
            name: v.detach() for name, v in tensor_maps.named_tensors(self.model).items() if v.is_floating_point()
        }
        masking = self.updates.masking(self.update_check(), self.signs, self.private)
        return SiloRuntime(
            self.method, self.new_model(), self.manifest.layout, self.guards.silo, initial, masking=masking
        )

    @property
    def private(self) -> bool:
        """Whether updates are noisy."""
        return False

    @cached_property
    def updates(self) -> PlainUpdates | MaskedUpdates:
        """The way updates are sent and summed: all differences between runs with and without masks."""
        return updates_of(self.manifest, self.method)

    @property
    def masked(self) -> bool:
        """Whether masks hide single updates."""
        return self.updates.hidden

    def require_supported(self) -> None:
        """Raise ConfigError (E-CFG-08) if the method needs more than the sums of the run's updates."""
        self.updates.require_supported()
        _ = self.limits

    @cached_property
    def norm_guard(self) -> NormGuard | None:
        """The guard with which a silo bounds its own update, if the run bounds updates under masks."""
        return self.updates.bound(self.limits)

    @property
    def guard_parts(self) -> Layout:
        """The layout of the parts that guards add to updates."""
        return {} if self.norm_guard is None else norms_layout(self.norm_guard.blocks)

    @property
    def counts_classes(self) -> bool:
        """Whether the hospitals per class are counted from records before round 1."""
        return self.kind.trains and self.updates.counts and not self.private

    def coverage(self, hospitals: Sequence[int], *, partial: bool = False, why: str = "") -> ClassCoverage:
        """Return the class coverage. hospitals: (C,), as counted; empty: unknown."""
        least = 1 if self.updates.floor is None else self.updates.floor.least
        names = tuple(self.manifest.schema.classes)
        return ClassCoverage(names, tuple(hospitals), partial, least, self.updates.hidden, why)

    @property
    def signs(self) -> bool:
        """Whether updates that lower the score of their own classes are refused."""
        return isinstance(self.limits, aggregators.NormClipped) and self.limits.signs

    @property
    def aggregator(self) -> Options:
        """The aggregator of a round's updates; under masks always a mean; raises as `limits`."""
        return self.updates.aggregator(self.limits)

    @cached_property
    def limits(self) -> Options:
        """The aggregation and bounds of updates; under masks applied by each silo.

        Raises ConfigError (E-CFG-08) if it does not fit the method or masks.
        """
        chosen = self.manifest.aggregator
        limits = aggregators.read_written(chosen.name, chosen.options)
        self.updates.require_rule(limits)
        if isinstance(limits, aggregators.NormClipped) and not self.method.even_norms:
            return replace(limits, refuse_above=math.inf)
        return limits

    def update_check(self, sizes: Mapping[str, DeclaredSize] | None = None) -> UpdateCheck:
        """Create the check of single updates.

        sizes: declared by silos; None in a simulation. A masked run uses those of the manifest.
        """
        manifest = self.manifest
        return UpdateCheck(
            layout=manifest.layout,
            grid=manifest.grid,
            rules=self.updates.rules,
            train=manifest.train,
            sizes=self.updates.sizes(sizes or {}),
            signs=self.method.bias_follows_classes and not manifest.schema.multi_label,
            multi_label=manifest.schema.multi_label,
            coarse=frozenset(member.name for member in manifest.members if member.coarse),
        )

    def round_loop(
        self,
        ports: Sequence[SiloPort],
        parallel: int,
        sizes: Mapping[str, DeclaredSize] | None = None,
        exchange: Exchange | None = None,
        unmask: Unmask | None = None,
    ) -> RoundLoop:
        """Create this run's round loop. unmask: removes the masks from its sums; None if updates have none."""
        manifest, check = self.manifest, self.update_check(sizes)
        schedule = Schedule(
            manifest.rounds, manifest.seed, len(manifest.schema.classes), manifest.cohort, manifest.quorum, self.kind
        )
        return RoundLoop(
            self.method,
            schedule,
            check,
            self.guards.incoming,
            ports,
            parallel,
            self.updates.sums(self.aggregator, unmask),
            exchange,
            self.initial_norms() if isinstance(self.aggregator, aggregators.NormClipped) else {},
        )

    def initial_norms(self) -> dict[str, float]:
        """Return the norms of the weights drawn with the seed, by block of updates of such tensors.

        A part that is not "delta" contains gradients: it may be longer by the inverse of the learning rate.
        """
        drawn = self._trained if self.weights is None else self._trained_of(self._drawn())  # with weights or without
        tensors, lengths = tensor_maps.named_tensors(drawn.model), dict[str, float]()
        for part, spec in self.manifest.layout.items():
            if not spec.weight_shape:
                named = {key: tensors[key].detach() for key in spec.shapes if key in tensors}
                scale = 1.0 if part == "delta" else max(1.0, 1.0 / self.manifest.train.lr)
                lengths |= {block: scale * norm for block, norm in norms(part, named).items()}
        return lengths

    def initial_state(self) -> State:
        """Create the server state of round 0; equal manifests give equal bytes."""
        self._require_weights()
        manifest = self.manifest
        context = RoundContext(len(manifest.members), len(manifest.schema.classes), manifest.rounds)
        return self.method.init_server(self.new_model(), context)

    def pinned_start(self, state: State, start: StartPoint) -> StartPoint:
        """Complete a start with digests of the state of round 0 and of its broadcast."""
        sent = {group: tensor_maps.digest(values) for group, values in self.method.broadcast(state).items()}
        return replace(start, model=tensor_maps.digest(state["w"]), broadcast=sent)

    def _require_weights(self) -> None:
        start = self.manifest.start
        if start is not None and start.weights is not None and self.weights is None:
            raise StateError("E-STATE-22", f"{start.weights} is not here yet: fetch the object first")
