"""How a run's updates are sent and summed: each readable by the coordinator, or only sums under masks.

`PlainUpdates` and `MaskedUpdates` contain all differences of the two kinds of run, on both sides and in a simulation;
`updates_of` chooses one for a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from fl_core.aggregation import coordinatewise
from fl_core.aggregation import options as aggregators
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.contributor_floor import ContributorFloor
from fl_core.aggregation.coordinatewise import CoordinatewiseSum
from fl_core.aggregation.fixed_point import RING64_BOUND
from fl_core.aggregation.flat_blocks import FlatLayout
from fl_core.aggregation.masked_sum import MaskedSum
from fl_core.aggregation.norm_guard import NORMS, NormGuard, blocks_of
from fl_core.aggregation.options import Options
from fl_core.aggregation.round_sum import NormClippedSum, NormHistory, RoundSum
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, with_undeclared
from fl_core.errors import ConfigError
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import Masking, class_rows, require_expected, round_layout
from fl_core.tensors import Tensor, torch
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability, TaskKind, Weighing
from fl_core.types.interfaces import Method
from fl_core.types.metric_parts import METRICS
from fl_core.types.secagg import EACH, MASKS, READ_ALONE, Secagg, masking_bytes, masking_shapes
from fl_core.types.values import Bundle, Layout, PartRule, PartSpec, RoundContext, State

Sizes = Mapping[str, DeclaredSize]
Counts = Mapping[str, tuple[float, float]]
"""Training and test examples, by silo."""
Unmask = Callable[[int, TaskKind, Mapping[str, Tensor], Collection[str], Collection[str]], None]
"""As `fl_core.aggregation.masked_sum.Unmask`, for a round's number and kind."""


# ---- a round's sum ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainSums:
    """Sums of updates that are read one by one. aggregator: combines them   unsummed: `Method.unsummed_parts`."""

    aggregator: Options = aggregators.NormClipped()  # noqa: RUF009
    unsummed: Collection[str] = ()
    census: ClassVar[bool] = False

    def of_round(
        self,
        check: UpdateCheck,
        history: NormHistory,
        msg: State,
        context: RoundContext,  # noqa: ARG002
        kind: TaskKind,  # noqa: ARG002
    ) -> RoundSum:
        sums, aggregator = Aggregator(check.layout, check.grid, frozenset(self.unsummed)), self.aggregator
        if isinstance(aggregator, aggregators.Mean):
            return RoundSum(sums, check)
        if isinstance(aggregator, aggregators.NormClipped):
            return NormClippedSum(sums, check, aggregator, history, msg.get("w", {}).get("head.bias"))
        return CoordinatewiseSum(sums, check, aggregator)

    def needed(self, quorum: int, cohort: int, unchanged: bool) -> int:  # noqa: ARG002
        """Return how many updates close a round. unchanged: two rounds may have the same broadcast."""
        return quorum

    def fingerprint(self, method: Method, update: Bundle, round: int) -> str:
        """Return a digest of an update's contribution, for a later withdrawal, if any; raises as `require_expected`."""
        require_expected(method, update, round)
        return method.fingerprint(update) or ""


@dataclass(frozen=True, slots=True)
class MaskedSums:
    """Sums of masked updates.

    layouts: of each kind of round   everybody: the members of the run   least: updates in the smallest sum that is
    opened, for a cohort
    each: as `MaskedSum`   census: hospitals are counted for each class before round 0   unmask: None in a simulation,
    whose updates have no masks.
    """

    layouts: Mapping[TaskKind, FlatLayout]
    everybody: Sequence[str]
    least: Callable[[int], int]
    each: bool = False
    census: bool = False
    unmask: Unmask | None = None

    def of_round(
        self,
        check: UpdateCheck,
        history: NormHistory,  # noqa: ARG002
        msg: State,  # noqa: ARG002
        context: RoundContext,
        kind: TaskKind,
    ) -> RoundSum:
        unmask = partial(self.unmask, context.round, kind) if self.unmask else None
        # A drawn cohort is not all members: its class sums would reveal the hospitals that were not drawn.
        return MaskedSum(self.layouts[kind], check, self.everybody, unmask, self.each)

    def needed(self, quorum: int, cohort: int, unchanged: bool) -> int:
        """Return how many updates close a round. unchanged: as in `PlainSums`; its sum is opened for one set."""
        return cohort if unchanged else max(quorum, self.least(cohort))

    def fingerprint(self, method: Method, update: Bundle, round: int) -> str:  # noqa: ARG002
        return ""


# ---- the updates of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlainUpdates:
    """Unmasked updates: the coordinator checks and bounds each one."""

    manifest: RunManifest
    method: Method

    hidden: ClassVar[bool] = False
    """Whether masks hide single updates."""
    reading: ClassVar[str] = READ_ALONE
    """Description of who reads the updates."""
    floor: ClassVar[ContributorFloor | None] = None
    """Leaves out rows of classes that few hospitals have; None if any number is enough."""
    class_rows: ClassVar[frozenset[str]] = frozenset()
    """Parts of sums whose rows reveal single classes, except evaluation results."""
    sums_of: ClassVar[int] = 0
    """Updates in the smallest sum that is read; 0 if each update is read by itself."""
    extra_bytes: ClassVar[int] = 0
    """Bytes of an update besides its numbers, with which members open sums."""
    covered: ClassVar[Mapping[TaskKind, Layout]] = {}
    """The layouts of masked uploads, by kind of round; empty if updates can be read."""
    counts: ClassVar[bool] = True
    """Whether hospitals are counted per class before round 0, if the run may use records for this."""
    counts_in_preflight: ClassVar[bool] = True
    """Whether silos state their classes in the preflight; otherwise a separate round, the census, counts them."""

    def require_supported(self) -> None:
        """Raise ConfigError (E-CFG-08) if the method needs more than sums."""

    def require_rule(self, rule: Options) -> None:
        """Raise ConfigError (E-CFG-08) on an aggregation rule that does not fit the updates."""
        if not isinstance(rule, aggregators.Mean | aggregators.NormClipped):
            coordinatewise.check_supported(self.method, self.manifest.layout, rule.name)

    def require_quorum(self, quorum: int) -> None:
        """Raise ConfigError (E-CFG-02) on a quorum with which no round could close."""

    def aggregator(self, limits: Options) -> Options:
        """Return the aggregation of a round's updates."""
        return limits

    def bound(self, limits: Options) -> NormGuard | None:
        """Return a silo's bound on its own update, if the run bounds updates and only the silo can."""
        del limits
        return None

    def dtypes(self, guarded: bool) -> frozenset[torch.dtype]:
        """Return the dtypes in silos' bundles: floats; also integers if guards use the fixed-point grid."""
        plain = frozenset({torch.float32, torch.float64} if self.method.exact else {torch.float32})
        return plain | {torch.int32, torch.int64} if guarded else plain

    def one_set_content(self, model: State) -> str:
        """Return the digest of a model whose sums are opened for only one set; empty if no sums are opened."""
        del model
        return ""

    def parts(self, kind: TaskKind, update: Bundle) -> frozenset[str]:
        """Return the parts of an update, or of the sum that contains it."""
        del kind
        return frozenset(update)

    @property
    def rules(self) -> Mapping[str, PartRule]:
        """The rules of the parts of an update."""
        return self.method.part_rules

    def sizes(self, declared: Sizes) -> Sizes:
        """Return the sizes that updates are checked against. declared: by the silos, none in a simulation."""
        return declared

    def known_sizes(self, stated: Counts) -> Counts:
        """Return the stored sizes of members. stated: by themselves (training, test examples)."""
        return stated

    def masking(self, check: UpdateCheck, signs: bool, private: bool) -> Masking | None:
        """Create the last step before an update is sent; None without masks."""
        del check, signs, private
        return None

    def sums(self, aggregator: Options, unmask: Unmask | None) -> PlainSums | MaskedSums:
        """Create the sums of rounds. unmask: as in `MaskedSums`."""
        del unmask
        return PlainSums(aggregator, self.method.unsummed_parts)


@dataclass(frozen=True, eq=False)
class MaskedUpdates:
    """Masked updates: each silo checks and bounds its own, and the coordinator reads only sums.

    Attributes as in `PlainUpdates`.
    """

    manifest: RunManifest
    method: Method
    terms: Secagg

    hidden: ClassVar[bool] = True
    counts_in_preflight: ClassVar[bool] = False

    @cached_property
    def layouts(self) -> Mapping[TaskKind, FlatLayout]:
        """The layouts of the updates of each kind of round."""
        layout, rules, classes = self.manifest.layout, self.method.part_rules, len(self.manifest.schema.classes)
        return {
            kind: FlatLayout(round_layout(self.method, layout, kind), self.manifest.grid, rules, classes)
            for kind in TaskKind
        }

    @cached_property
    def class_rows(self) -> frozenset[str]:
        return class_rows(self.layouts[TaskKind.TRAIN])

    @cached_property
    def floor(self) -> ContributorFloor | None:
        terms, members = self.terms, self.manifest.members
        if terms.min_contributors == 1 or not self.class_rows:
            return None
        least = terms.least_holders(len(members), self.manifest.cohort_size)
        return ContributorFloor(self.class_rows, len(self.manifest.schema.classes), least)

    @property
    def reading(self) -> str:
        return f"updates leave under masks, and the coordinator reads only sums over at least {self.sums_of}"

    @property
    def sums_of(self) -> int:
        return self.terms.smallest_sum(self.manifest.cohort_size)

    @property
    def extra_bytes(self) -> int:
        return masking_bytes(self.manifest.cohort_size)

    @property
    def counts(self) -> bool:
        return self.terms.census or self.floor is not None

    def require_supported(self) -> None:
        capabilities.check_supported(self.method, {Capability.SECURE_AGGREGATION})
        if self.manifest.evaluation.by_hospital:
            raise ConfigError(
                "E-CFG-08",
                "masks allow only sums, so by_hospital=true needs secagg=off: leave by_hospital out, or start the "
                "run without masks",
            )
        if self.method.unsummed_parts:
            raise ConfigError(
                "E-CFG-08",
                f"method {self.method.name} cannot be used with secure aggregation: its server needs each "
                f"hospital's {', '.join(sorted(self.method.unsummed_parts))} separately; set secagg=off, or choose "
                "another method",
            )

    def require_rule(self, rule: Options) -> None:
        if not isinstance(rule, aggregators.Mean | aggregators.NormClipped):
            raise ConfigError(
                "E-CFG-08",
                f"expected aggregator=norm_clipped or mean under masks, which allow only a sum, found {rule.name}: "
                "set one of them, or secagg=off",
            )

    def require_quorum(self, quorum: int) -> None:
        self.terms.require_quorum(quorum, self.manifest.cohort_size)

    def aggregator(self, limits: Options) -> Options:  # noqa: ARG002
        return aggregators.Mean()

    def bound(self, limits: Options) -> NormGuard | None:
        if not isinstance(limits, aggregators.NormClipped):
            return None
        layout = self.manifest.layout
        blocks, tensors = blocks_of(layout, self.method.part_rules), dict[str, int]()
        for block, keys in blocks.items():
            tensors[block] = sum(math.prod(layout[part].shapes[key]) for part, key in keys)
        return NormGuard(limits, blocks, tensors, self.manifest.grid) if blocks else None

    def dtypes(self, guarded: bool) -> frozenset[torch.dtype]:  # noqa: ARG002
        """Return ring words, and bytes for the additional tensors."""
        return frozenset({torch.int32 if self.manifest.grid.ring == "ring32" else torch.int64, torch.uint8})

    @property
    def covered(self) -> Mapping[TaskKind, Layout]:
        """Two blocks, and the data with which members help to remove the masks."""
        members, drawn = len(self.manifest.members), self.manifest.cohort_size
        cohorts = {kind: kind.drawn(drawn) or members for kind in TaskKind}
        return {k: {**self.layouts[k].blocks, MASKS: PartSpec(masking_shapes(n), ())} for k, n in cohorts.items()}

    def one_set_content(self, model: State) -> str:
        return tensor_maps.digest(
            {f"{group}/{name}": v for group, values in model.items() for name, v in values.items()}
        )

    def parts(self, kind: TaskKind, update: Bundle) -> frozenset[str]:  # noqa: ARG002
        return frozenset(self.layouts[kind].layout)

    @property
    def rules(self) -> Mapping[str, PartRule]:
        return {**self.method.part_rules, NORMS: PartRule(Weighing.ONCE)}

    def sizes(self, declared: Sizes) -> Sizes:  # noqa: ARG002
        """Return the largest counts of members, by name, in the manifest's order.

        An undeclared size counts as the largest; test examples as much as the grid can represent.
        """
        grid = self.manifest.grid
        test = grid.bounds.get(grid.segment(METRICS, None), RING64_BOUND)
        return with_undeclared({m.name: DeclaredSize(m.units or math.inf, test) for m in self.manifest.members})

    def known_sizes(self, stated: Counts) -> Counts:  # noqa: ARG002
        """Return the members' sizes in the manifest; no others are known."""
        return {m.name: (float(m.units), 0.0) for m in self.manifest.members}

    def masking(self, check: UpdateCheck, signs: bool, private: bool) -> Masking | None:
        return Masking(check, self.layouts, bool(self.class_rows), signs, private)

    def sums(self, aggregator: Options, unmask: Unmask | None) -> PlainSums | MaskedSums:  # noqa: ARG002
        everybody = [member.name for member in self.manifest.members]
        each, census = self.terms.class_sums == EACH, self.floor is not None
        return MaskedSums(self.layouts, everybody, self.terms.smallest_sum, each, census, unmask)


def updates_of(manifest: RunManifest, method: Method) -> PlainUpdates | MaskedUpdates:
    """Return how the updates of a run are sent and summed."""
    terms = manifest.secagg
    return PlainUpdates(manifest, method) if terms is None else MaskedUpdates(manifest, method, terms)
