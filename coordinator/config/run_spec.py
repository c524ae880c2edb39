"""What the lead asks for: a run before anybody has agreed to it. Plain data, no Hydra."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields

from fl_core.errors import ConfigError
from fl_core.types.records import TrainConfig


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A composed configuration. The mappings of the groups hold `name` and the options of that choice."""

    method: Mapping[str, object]
    model: Mapping[str, object]
    data: Mapping[str, object]
    federation: Mapping[str, object]
    privacy: Mapping[str, object]
    train: TrainConfig
    name: str | None = None
    rounds: int = 20
    seed: int = 0
    cohort: int = 0
    quorum: int = 0
    deadline_s: float = 86400.0
    prototype_share: float = 1.0
    threads: int = 0
    personal: bool = False
    silos: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """Write the spec as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read what `to_json` wrote; raises ConfigError (E-CFG-45) on anything else."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError("E-CFG-45", f"expected a run's configuration as JSON, found: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError("E-CFG-45", f"expected a run's configuration, found {type(raw).__name__}")
        return cls.from_mapping(raw)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> RunSpec:
        """Check a mapping; raises ConfigError (E-CFG-45) that names the unknown key and the nearest valid one."""
        refuse_unknown(raw, [f.name for f in fields(cls)], "the configuration")
        train = raw.get("train")
        if not isinstance(train, Mapping):
            raise ConfigError("E-CFG-45", f"expected the training schedule under `train`, found {train!r}")
        refuse_unknown(train, [f.name for f in fields(TrainConfig)], "train")
        silos = raw.get("silos")
        if silos is not None and not (isinstance(silos, list | tuple) and all(isinstance(s, str) for s in silos)):
            raise ConfigError("E-CFG-45", f"expected silos=[name,name,...] or null, found {silos!r}")
        spec = cls(
            method=_group(raw, "method"),
            model=_group(raw, "model"),
            data=_group(raw, "data"),
            federation=_group(raw, "federation"),
            privacy=_group(raw, "privacy"),
            train=TrainConfig(
                lr=_float(train, "lr"),
                momentum=_float(train, "momentum"),
                weight_decay=_float(train, "weight_decay"),
                batch_size=_int(train, "batch_size"),
                epochs=_int(train, "epochs"),
                lr_decay=_float(train, "lr_decay"),
                max_steps=_int(train, "max_steps"),
                clip_norm=_float(train, "clip_norm"),
                augment=_bool(train, "augment"),
                optimizer=str(train.get("optimizer", "sgd")),
                nesterov=_bool(train, "nesterov"),
                amp=str(train.get("amp", "off")),
                channels_last=_bool(train, "channels_last"),
            ),
            name=None if raw.get("name") is None else str(raw["name"]),
            rounds=_int(raw, "rounds"),
            seed=_int(raw, "seed"),
            cohort=_int(raw, "cohort"),
            quorum=_int(raw, "quorum"),
            deadline_s=_float(raw, "deadline_s"),
            prototype_share=_float(raw, "prototype_share"),
            threads=_int(raw, "threads"),
            personal=_bool(raw, "personal"),
            silos=None if silos is None else tuple(silos),
        )
        spec._check_ranges()
        return spec

    def _check_ranges(self) -> None:
        lowest: Mapping[str, tuple[float, float]] = {
            "rounds": (self.rounds, 1),
            "cohort": (self.cohort, 0),
            "quorum": (self.quorum, 0),
            "threads": (self.threads, 0),
            "train.batch_size": (self.train.batch_size, 1),
            "train.epochs": (self.train.epochs, 1),
            "train.max_steps": (self.train.max_steps, 0),
            "train.momentum": (self.train.momentum, 0),
            "train.weight_decay": (self.train.weight_decay, 0),
        }
        for key, (value, low) in lowest.items():
            if value < low:
                raise ConfigError("E-CFG-41", f"expected {key} >= {low}, found {key}={value}")
        for key, value in (("train.lr", self.train.lr), ("deadline_s", self.deadline_s)):
            if not value > 0:
                raise ConfigError("E-CFG-41", f"expected {key} > 0, found {key}={value}")
        if self.train.momentum >= 1:
            raise ConfigError("E-CFG-41", f"expected train.momentum < 1, found {self.train.momentum}")


def refuse_unknown(raw: Mapping[str, object], valid: Collection[str], where: str) -> None:
    """Raise ConfigError (E-CFG-45) on a key that does not exist, with the nearest one that does."""
    for key in raw:
        if key not in valid:
            near = difflib.get_close_matches(str(key), list(valid), 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(sorted(valid))}"
            raise ConfigError("E-CFG-45", f"{where} has no key {key!r}{hint}")


def _group(raw: Mapping[str, object], key: str) -> Mapping[str, object]:
    group = raw.get(key)
    if not isinstance(group, Mapping) or not isinstance(group.get("name"), str):
        raise ConfigError("E-CFG-45", f"expected {key}=NAME, found {group!r}")
    return {str(k): v for k, v in group.items()}


def _float(raw: Mapping[str, object], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ConfigError("E-CFG-41", f"expected a number for {key}, found {value!r}")


def _int(raw: Mapping[str, object], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ConfigError("E-CFG-41", f"expected a whole number for {key}, found {value!r}")


def _bool(raw: Mapping[str, object], key: str) -> bool:
    value = raw.get(key)
    if isinstance(value, bool):
        return value
    raise ConfigError("E-CFG-41", f"expected true or false for {key}, found {value!r}")
