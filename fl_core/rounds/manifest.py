"""The run manifest: all terms that are agreed before round 0. Both sides refuse to continue if digests differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple

from blake3 import blake3

from fl_core import validate
from fl_core.aggregation import options as aggregators
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import ConversionError, Option, parse_json, rename, shown, structure
from fl_core.errors import ConfigError, ProtocolError
from fl_core.extensions.registry import Extension
from fl_core.kinds import RunKind, kind_of
from fl_core.rounds import sampling
from fl_core.types.clinical import BASIC, CLINICAL, MAX_CLASSES, METRICS_KINDS
from fl_core.types.records import FEATURES, Schema, TrainConfig
from fl_core.types.secagg import Secagg
from fl_core.types.values import Layout, PartSpec
from fl_core.validate import Count, between, bounded, one_of

FORMAT = 1
PATIENCE_S = 60.0
MAX_ROUNDS, MAX_THREADS, MAX_NAME_CHARS = 100_000, 1024, 200
MAX_WEIGHTS_BYTES, MAX_SOURCE_CHARS = 2 << 30, 200
REFUSE, RESTART = "refuse", "restart"
LOST_STATE = (REFUSE, RESTART)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN_ID, _NAMED = re.compile(r"[a-z0-9][a-z0-9-]{0,79}"), 80
_ABSENT: Mapping[str, object] = {
    "lead": "",
    "private_form": {},
    "lost_state": REFUSE,
    "patience_s": PATIENCE_S,
    "start": None,
    "extensions": (),
    "secagg": None,
}
_EVALUATION: Mapping[str, tuple[str, object]] = {
    "metrics": ("metrics", BASIC),
    "by_hospital": ("by_hospital", False),
    "beside": ("own", ""),
    "other": ("other", None),
}
"""The terms of evaluations: the manifest's key for each, and the value that is left out."""
rename(PartSpec, shapes="tensors", weight_shape="weight")


@dataclass(frozen=True, slots=True)
class NamedOptions:
    """A named entry of a registry (method, model, privacy profile) with its options."""

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunMember:
    """One silo of the run: its name, and whether it was drawn to submit prototypes.

    units: its declared number of records (or groups) in a private or masked run, which determines rates and weights;
    otherwise 0. labels: digest of its label dictionary; empty without one, or if undeclared. coarse: the dictionary has
    coarse labels; its test records then do not show the classes that it trains on.
    """

    name: str
    prototypes: bool = True
    units: int = 0
    labels: str = ""
    coarse: bool = False

    def facts(self) -> dict[str, object]:
        """Return the fields for JSON, without later ones at their default."""
        return {k: v for k, v in asdict(self).items() if v or k not in ("labels", "coarse")}


class Dictionary(NamedTuple):
    """A silo's declaration of its label dictionary; fields as in `RunMember`."""

    labels: str = ""
    coarse: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights trained elsewhere, as the start of a run's model.

    object, size: digest (BLAKE3) and bytes of the object that contains them under the model's own names
    file: SHA-256 of the lead's file   source: its origin; both as stated by the lead
    fresh: modules of the model that are not in it, and begin with the weights of the run's seed.
    """

    object: str
    size: int
    file: str
    source: str = ""
    fresh: tuple[str, ...] = ()

    def __str__(self) -> str:
        source = f" ({self.source!r}, as the lead states)" if self.source else ""
        return f"pretrained weights {self.object[:16]} of a file with SHA-256 {self.file[:16]}{source}"

    def require_possible(self) -> None:
        """Raise ConfigError (E-CFG-02) on impossible digests, size or text."""
        for name, digest in (("object", self.object), ("file", self.file)):
            if not _DIGEST.fullmatch(digest):
                raise ConfigError(
                    "E-CFG-02", f"expected weights.{name} of 64 hex digits, found {shown(digest)}: pass the file again"
                )
        validate.between("E-CFG-02", "weights", 1, MAX_WEIGHTS_BYTES, size=self.size)
        if len(self.source) > MAX_SOURCE_CHARS or not self.source.isprintable():
            raise ConfigError(
                "E-CFG-02",
                f"expected a source of at most {MAX_SOURCE_CHARS} visible characters on one line, found "
                f"{shown(self.source)}: shorten it",
            )


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The start of a run without fresh weights: the end of another run (the parent), or a file.

    run, rounds: the parent's id, and its closed rounds; empty and 0 without a parent
    model: digest of the first round's model, as the coordinator shows it
    broadcast: digest of each group of tensors in the first broadcast, which silos check
    private: whether all training of this model was under differential privacy
    weights: of the model before round 0 of this run, or of its first ancestor: from these and the seed, silos compute
    the tensors that are never sent to them.
    """

    run: str = ""
    rounds: int = 0
    model: str = ""
    broadcast: Mapping[str, str] = field(default_factory=dict)
    private: bool = False
    weights: Weights | None = None

    def __str__(self) -> str:
        if not self.run:
            return str(self.weights)
        trained = "" if self.private else ", trained without differential privacy"
        return f"{self.run} after round {self.rounds} (model {self.model[:16]}{trained})"


@dataclass(frozen=True, slots=True)
class OtherModel:
    """The last model of another run, evaluated together with this run's model on the same images.

    method, model, seed: of that run; from these, silos compute the tensors that are never sent   object, size: digest
    (BLAKE3) and bytes of its broadcast.
    """

    method: NamedOptions
    model: NamedOptions
    seed: int
    object: str
    size: int

    def __str__(self) -> str:
        return f"{self.method.name}, {self.model.name}, object {self.object[:16]}"

    def require_possible(self) -> None:
        """Raise ConfigError (E-CFG-02) on an impossible digest or size."""
        if not _DIGEST.fullmatch(self.object):
            raise ConfigError(
                "E-CFG-02", f"expected other.object of 64 hex digits, found {shown(self.object)}: ask the lead"
            )
        validate.between("E-CFG-02", "other", 1, MAX_WEIGHTS_BYTES, size=self.size)


@dataclass(frozen=True, slots=True)
class EvaluationTerms:
    """The contents of a run's evaluations, before each round and at the end; some runs evaluate only at the end.

    metrics: one of METRICS_KINDS   by_hospital: ask hospitals to show their own part of the closing evaluation under
    their names
    beside: a run whose models are evaluated together with this run's last model; empty: none. For method=local these
    are the models that hospitals keep; for any other method its last model, in `other`.
    """

    metrics: Annotated[str, bounded(one_of, METRICS_KINDS)] = BASIC
    by_hospital: bool = False
    beside: str = ""
    other: OtherModel | None = None

    @staticmethod
    def nested(raw: object) -> object:
        """Collect these terms under the key `evaluation` of a manifest; raises ConversionError if that key exists.

        In JSON they are among the other keys, as in earlier versions, so that digests stay the same.
        """
        if not isinstance(raw, Mapping):
            return raw
        if "evaluation" in raw:
            raise ConversionError("manifest", "there is no key 'evaluation'", unknown=True)
        flat = {key for key, _ in _EVALUATION.values()}
        terms = {name: raw[key] for name, (key, _) in _EVALUATION.items() if key in raw}
        return {key: value for key, value in raw.items() if key not in flat} | {"evaluation": terms}

    @staticmethod
    def flat(raw: Mapping[str, object]) -> dict[str, object]:
        """Return these terms as keys of a manifest. raw: the terms as plain values."""
        return {key: raw[name] for name, (key, default) in _EVALUATION.items() if raw[name] != default}

    def check(self, run: RunManifest) -> None:
        """Raise ConfigError (E-CFG-02, E-CFG-08) on terms that do not fit a run."""
        validate.declared("E-CFG-02", "", self)
        if self.metrics == CLINICAL and len(run.schema.classes) > MAX_CLASSES:
            raise ConfigError(
                "E-CFG-02",
                f"expected at most {MAX_CLASSES} classes with metrics={CLINICAL}, whose numbers grow with their "
                f"square, found {len(run.schema.classes)}: set metrics={BASIC}",
            )
        exact = run.privacy.name == "none" and run.train.freeze != FEATURES
        if self.beside and not (exact and _RUN_ID.fullmatch(self.beside)):
            raise ConfigError(
                "E-CFG-08",
                "expected own=RUN with the id of a run, without privacy and without a frozen body, found "
                f"own={self.beside[:_NAMED]}, privacy={run.privacy.name} and train.freeze={run.train.freeze}: leave "
                "own out",
            )
        if self.other is not None:
            if not self.beside:
                raise ConfigError("E-CFG-02", "other also needs own=RUN: name that model's run")
            self.other.require_possible()
        if self.by_hospital and run.privacy.name != "none":
            raise ConfigError(
                "E-CFG-08",
                f"expected privacy=none with by_hospital=true, found privacy={run.privacy.name}: leave by_hospital "
                "out, or start the run without privacy",
            )


@dataclass(frozen=True, slots=True)
class RunManifest:
    """The description of a run. Two manifests with equal digests are the same run, up to its id.

    Attributes:
        rounds: number of training rounds T
        cohort: silos per round; 0: all
        quorum: silos that must deliver; 0: two thirds of the cohort
        deadline_s: seconds after which a round closes with its quorum, or pauses the run below it
        patience_s: minimum seconds for which every connected silo is awaited (`closing.ClosingRule`)
        threads: CPU threads of local training; 0: the machine's own number. It decides the last bit of sums
        personal: whether personal models are measured after every round's training
        lead: the lead that submitted the run, from the certificate; empty in a simulation
        private_form: submitted values of the method's options that its private form replaced; empty if none
        lost_state: what a silo does if it has lost its state between rounds (SCAFFOLD's control variate, a personal
            model): refuse the round, or restart from the beginning and report it
        start: the run or weights that this run starts from; None: fresh weights
        extensions: the extensions that method and model come from
        secagg: the terms of masks; None: updates are sent without masks
    """

    name: str
    method: NamedOptions
    model: NamedOptions
    data: str
    schema: Schema
    train: TrainConfig
    rounds: Annotated[int, bounded(between, 0, MAX_ROUNDS)]
    seed: int
    members: tuple[RunMember, ...]
    layout: Layout
    grid: FixedPointFormat
    privacy: NamedOptions
    cohort: Count = 0
    quorum: Count = 0
    deadline_s: float = 86400.0
    threads: Annotated[int, bounded(between, 0, MAX_THREADS)] = 0
    image_size: int | None = None
    personal: bool = False
    software: str = ""
    lead: str = ""
    private_form: Mapping[str, Option] = field(default_factory=dict)
    patience_s: float = PATIENCE_S
    lost_state: str = REFUSE
    aggregator: NamedOptions = NamedOptions(aggregators.DEFAULT)
    start: StartPoint | None = None
    evaluation: EvaluationTerms = EvaluationTerms()
    extensions: tuple[Extension, ...] = ()
    secagg: Secagg | None = None
    format: int = FORMAT

    @property
    def kind(self) -> RunKind:
        """The kind of the run: training, evaluation, or a program such as a survey."""
        return kind_of(self.method.name, self.rounds)

    def to_json(self) -> str:
        """Write canonical JSON: sorted keys, no spaces; equal manifests give equal text."""
        layout = {name: {"tensors": spec.shapes, "weight": spec.weight_shape} for name, spec in self.layout.items()}
        raw = asdict(self) | {"layout": layout, "train": self.train.facts()}
        raw["members"] = [member.facts() for member in self.members]
        raw |= EvaluationTerms.flat(raw.pop("evaluation"))
        for name, default in _ABSENT.items():  # runs without one keep the digest that they had before it existed
            if raw[name] == default:
                del raw[name]
        for name, default in (("columns", ()), ("window", None), ("multi_label", False)):
            if raw["schema"][name] == default:
                del raw["schema"][name]
        if not raw.get("secagg", {}).get("census", True):
            del raw["secagg"]["census"]
        if self.aggregator == NamedOptions(aggregators.DEFAULT):
            del raw["aggregator"]
        if self.start is not None and self.start.weights is None:
            del raw["start"]["weights"]
        return json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self) -> str:
        """Return the BLAKE3 of the canonical JSON, in hex: the name of the object that it is sent as."""
        return blake3(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> RunManifest:
        """Read a manifest of unknown origin.

        Raises ProtocolError: E-WIRE-01 on one of another format, E-WIRE-06 on unknown or missing fields and values of
        a wrong type. Ranges are checked by `require_possible` and the privacy profile.
        """
        try:
            raw = parse_json(text)
            if isinstance(raw, Mapping) and raw.get("format") != FORMAT:
                raise ProtocolError(
                    "E-WIRE-01",
                    f"expected a manifest of format {FORMAT}, found {shown(raw.get('format'))}: upgrade this side",
                )
            return structure(cls, EvaluationTerms.nested(raw), "manifest")
        except ConversionError as error:
            raise ProtocolError("E-WIRE-06", f"{error}: one side must be upgraded or repaired") from error

    def require_possible(self) -> None:
        """Raise ConfigError (E-CFG-02) on impossible numbers, in any manifest.

        A number of rounds too large for a message would break every list of runs; a process that starts a million
        threads is killed by the system.
        """
        validate.declared("E-CFG-02", "", self)
        self.train.check()
        self.grid.check(len(self.members))
        if self.secagg is not None:
            self.secagg.check(len(self.members), self.cohort, self.rounds)
        for member in self.members:
            if member.labels and not _DIGEST.fullmatch(member.labels):
                raise ConfigError(
                    "E-CFG-02",
                    f"expected a digest of {member.name}'s label dictionary in 64 hex digits, found "
                    f"{shown(member.labels)}: ask that hospital",
                )
        self.evaluation.check(self)
        self.kind.check(self)
        if len(self.name) > MAX_NAME_CHARS:
            raise ConfigError(
                "E-CFG-02",
                f"expected name=... of at most {MAX_NAME_CHARS} characters, found {len(self.name)}: shorten",
            )
        if self.start is not None and self.start.weights is not None:
            self.start.weights.require_possible()

    def index(self, silo: str) -> int:
        """Return a member's index in the roster; raises ConfigError (E-RUN-05) for any other name."""
        for k, member in enumerate(self.members):
            if member.name == silo:
                return k
        raise ConfigError("E-RUN-05", f"expected one of {[m.name for m in self.members]}, found {silo!r}")

    @property
    def cohort_size(self) -> int:
        """The number of silos in a training round."""
        return self.cohort or len(self.members)

    def masked_units(self, k: int) -> int:
        """Return a member's units in a masked run, 1 if it declares none; 0 in a run without masks."""
        return 0 if self.secagg is None else max(1, self.members[k].units)


def make_members(
    names: Sequence[str],
    seed: int,
    prototype_share: float,
    units: Sequence[int] | None = None,
    dictionaries: Mapping[str, Dictionary] | None = None,
) -> tuple[RunMember, ...]:
    """Freeze a roster, with the silos that submit prototypes drawn from the seed.

    units: declared sizes, if any   dictionaries: declared label dictionaries, by silo.
    """
    if len(set(names)) != len(names) or not names:
        raise ConfigError("E-CFG-02", f"expected at least one silo and each once, found {list(names)}")
    drawn = sampling.prototype_submitters(seed, names, prototype_share)
    sizes = [0] * len(names) if units is None else units
    of_silo = dictionaries or {}
    return tuple(RunMember(*m, *of_silo.get(m[0], ())) for m in zip(names, drawn, sizes, strict=True))
