"""A lead's configuration of a run, before it is frozen. Plain data, no Hydra."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from fl_core import validate
from fl_core.aggregation import options as aggregators
from fl_core.converter import ConversionError, parse_json, shown, structure
from fl_core.errors import ConfigError
from fl_core.kinds import RunKind, kind_of
from fl_core.rounds.manifest import LOST_STATE, PATIENCE_S, REFUSE, Weights
from fl_core.types.clinical import METRICS_KINDS
from fl_core.types.records import TrainConfig
from fl_core.types.secagg import CLASS_SUMS, COMPLETE, MAX_MASKED
from fl_core.validate import Count, Positive, PositiveOrInfinite, between, bounded, one_of

AUTO = "auto"
WEIGHTS = ("weights_file", "weights_source", "weights")
"""Fields that are no keys of their own, and are left out of the JSON if they are empty."""


OFF, ON = "off", "on"
MASKING = (AUTO, ON, OFF)


@dataclass(frozen=True, slots=True)
class SecaggSpec:
    """Whether masks hide single updates, and their terms; a configuration without it has no masks.

    Attributes:
        name: "on", "off", or "auto": on with three hospitals or more, and an error if masks are impossible then
        ring: of the sum, "ring32" or "ring64", whose words are twice as long and need no bounds; "auto": ring32 unless
            the method needs the other
        min_contributors: minimum of hospitals in the sums of a class's rows; 1: any number; 0, as 0.1.0 wrote: 1
        class_sums, collusion, min_sum: see `fl_core.types.secagg.Secagg`
    """

    name: Annotated[str, bounded(one_of, MASKING)] = OFF
    ring: Literal["auto", "ring32", "ring64"] = "auto"
    min_contributors: Annotated[int, bounded(between, 0, MAX_MASKED)] = 1
    class_sums: Annotated[str, bounded(one_of, CLASS_SUMS)] = COMPLETE
    collusion: Annotated[int, bounded(between, 0, MAX_MASKED)] = 1
    min_sum: Annotated[int, bounded(between, 0, MAX_MASKED)] = 0

    def __post_init__(self) -> None:
        validate.declared("E-CFG-02", "secagg", self)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A composed configuration. The mappings of the groups have `name` and the options of that choice.

    Attributes:
        name: shown instead of a generated one
        cohort: silos per round, 0 for all
        quorum: silos that must deliver before a round closes, 0 for two thirds of the cohort
        deadline_s: seconds after which a round closes with the quorum, or the run pauses
        patience_s: minimum seconds for which every connected silo is awaited
        prototype_share: share of the silos that submit prototypes, 0 for none
        threads: CPU threads of local training, 0 for the machine's own number
        rounds: of training; 0 measures the start model, without training
        personal: also measure personal models (PA, PM, fairness), after every round's training
        by_hospital: ask hospitals to show their own part of the closing evaluation; as `EvaluationTerms.by_hospital`
        own: the run whose local models are measured as well; as `EvaluationTerms.beside`
        lost_state: refuse or restart, see `RunManifest`
        silos: the roster, by name; None for every enrolled silo whose data fits
        aggregator: how a round's updates are aggregated
        secagg: whether masks hide single updates
        metrics: of evaluations, "basic" or "clinical"; "auto" is clinical if the run's classes, silos and privacy
            allow it
        weights_file, weights_source: `model.weights` and `model.weights_source`, a file of the lead and its origin,
            until `coordinator.config.weights` has read it
        weights: its contents, by digest

    Raises ConfigError (E-CFG-02, E-CFG-01) on a number out of range or a group without a name.
    """

    method: Mapping[str, object]
    model: Mapping[str, object]
    data: Mapping[str, object]
    federation: Mapping[str, object]
    privacy: Mapping[str, object]
    train: TrainConfig
    name: str | None = None
    rounds: Count = 20
    seed: int = 0
    cohort: Count = 0
    quorum: Count = 0
    deadline_s: PositiveOrInfinite = 86400.0
    patience_s: Positive = PATIENCE_S
    prototype_share: float = 1.0
    threads: Count = 0
    personal: bool = False
    by_hospital: bool = False
    own: str = ""
    lost_state: Annotated[str, bounded(one_of, LOST_STATE)] = REFUSE
    metrics: Annotated[str, bounded(one_of, (AUTO, *METRICS_KINDS))] = AUTO
    silos: tuple[str, ...] | None = None
    aggregator: Mapping[str, object] = field(default_factory=lambda: {"name": aggregators.DEFAULT})
    secagg: SecaggSpec = field(default_factory=SecaggSpec)
    weights_file: str = ""
    weights_source: str = ""
    weights: Weights | None = None

    @property
    def kind(self) -> RunKind:
        return kind_of(str(self.method["name"]), self.rounds)

    def to_json(self) -> str:
        raw = asdict(self) | {"train": self.train.facts()}
        for name in WEIGHTS:
            if not raw[name]:
                del raw[name]
        if not self.by_hospital:  # an older coordinator knows no such results either
            del raw["by_hospital"]
        if not self.own:
            del raw["own"]
        if self.secagg == SecaggSpec():  # an older coordinator knows no masks
            del raw["secagg"]
        return json.dumps(raw, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read the output of `to_json`; raises ConfigError as `from_mapping`."""
        try:
            return cls.from_mapping(parse_json(text))
        except ConversionError as error:
            raise ConfigError("E-CFG-01", f"the configuration: {error}") from error

    @classmethod
    def from_mapping(cls, raw: object) -> RunSpec:
        """Check plain values; raises ConfigError: E-CFG-01 on an unknown key, E-CFG-02 on missing or invalid values."""
        try:
            return structure(cls, raw, "")
        except ConversionError as error:
            raise ConfigError("E-CFG-01" if error.unknown else "E-CFG-02", str(error)) from error

    def __post_init__(self) -> None:
        for group in ("method", "model", "data", "federation", "privacy", "aggregator"):
            chosen = getattr(self, group)
            if not isinstance(chosen.get("name"), str):
                raise ConfigError("E-CFG-01", f"expected {group}=NAME, found {shown(chosen)}")
        validate.declared("E-CFG-02", "", self)
        self.train.check()
