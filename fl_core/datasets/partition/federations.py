"""Simulated federations by name: how examples are partitioned among silos.

| text                 | meaning                                                                                  |
|----------------------|------------------------------------------------------------------------------------------|
| hospitals6           | six hospitals, no class in two of them                                                    |
| p5c2, p10c3, ...     | {r} silos with {c} classes each (FedMR, FedGELA); p10c3-double partitions everything twice  |
| dirichlet-0.5-10     | 10 silos, class proportions ~ Dir(0.5) (MOON); variants -two, -swap, -once, see below       |
| iid-10               | 10 equal random shares                                                                    |
| persilo-0.5-100      | each silo's own classes ~ Dir(0.5) (FedRepo's "dirichlet"), a fifth held out               |
| label-2-100          | 2 slots of permuted classes per silo (FedRepo's "label"), a fifth held out                 |
| map-100              | 2 to C random classes per silo (MAP), a fifth held out                                     |
| users-50             | 50 of the people who wrote the examples (LEAF)                                            |

`@7` after any of them is the partition seed (0 without it): `p10c3@7`. Variants of dirichlet: `-two` draws until each
silo has two classes (FedNH), `-swap` is FedNH's code (three draws, then as it is), `-once` is FedGELA's (one draw).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from fl_core import rng
from fl_core.datasets.partition import by_class, by_client
from fl_core.datasets.partition.by_class import Indices, Labels
from fl_core.errors import ConfigError
from fl_core.extensions import registry, user_partition
from fl_core.extensions.user_partition import OwnPartition
from fl_core.suggest import suggest

FORMS = (
    *("hospitals6", "p5c2", "p10c2", "p10c3", "p10c5", "dirichlet-0.5-10", "iid-10"),
    *("dirichlet-0.3-100-two", "persilo-0.5-100", "label-2-100", "map-100", "users-50"),
)
VARIANTS = ("two", "swap", "once")
_MAX_CHARS = 4096
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_NOBODY: Indices = np.empty(0, np.int64)


class SiloIndices(NamedTuple):
    """Positions in the train and in the test labels that one silo gets.

    held_out: positions in the train labels that the silo keeps as its own test, in place of test labels
    """

    train: Indices
    test: Indices
    held_out: Indices = _NOBODY


class PartitionKind(Enum):
    """How examples are partitioned."""

    HOSPITALS = "hospitals"
    CLASSES = "classes"
    DIRICHLET = "dirichlet"
    IID = "iid"
    PER_SILO = "persilo"
    LABEL = "label"
    MAP = "map"
    USERS = "users"
    OWN = "own"


HELD_OUT = frozenset({PartitionKind.PER_SILO, PartitionKind.LABEL, PartitionKind.MAP})


@dataclass(frozen=True, slots=True)
class Partitioner:
    """A partition of labelled examples among `silos` silos.

    Attributes:
        per_silo: classes of each silo (CLASSES), slots (LABEL)
        beta: concentration (DIRICHLET, PER_SILO)
        variant: "double" (CLASSES), or one of VARIANTS (DIRICHLET)
        text: the name it was parsed from, in canonical form
        own: the loaded partition (OWN)

    Guarantees: the same in every process; train parts are disjoint (except for "double"), and so are test parts. Their
    union is everything, except for USERS (a sample of them) and where a fifth is held out (rounding leaves out a
    few examples). A silo's test part has the classes (for Dirichlet: the proportions) of its train part.
    """

    kind: PartitionKind
    silos: int
    text: str
    seed: int = 0
    per_silo: int = 0
    beta: float = 0.0
    variant: str = ""
    custom: OwnPartition | None = None

    def partition(
        self, train: Labels, test: Labels, n_classes: int, users: tuple[Labels, Labels] | None = None
    ) -> list[SiloIndices]:
        """Partition both splits; raises ConfigError (E-CFG-08) if these labels cannot be partitioned in this way.

        users: the user of each example of train and test, by number; only USERS needs it.
        """
        if self.custom is not None:
            shares = self.custom.partition(train, test, n_classes, self.seed)
            parts = user_partition.checked(self.text, shares, self.silos, (train, test), n_classes, self.seed)
            return [SiloIndices(*pair) for pair in parts]
        if self.kind in HELD_OUT:
            kept = [by_client.hold_out(p, self.seed, k) for k, p in enumerate(self._per_silo(train, n_classes))]
            return [SiloIndices(train, _NOBODY, held_out) for train, held_out in kept]
        if self.kind is PartitionKind.USERS:
            return self._by_user(users)
        if self.kind is PartitionKind.IID:
            both = [by_class.partition_equally(y, self.silos, self.seed, name) for y, name in _named(train, test)]
        elif self.kind is PartitionKind.DIRICHLET:
            both = self._dirichlet(train, test, n_classes)
        else:
            if self.kind is PartitionKind.HOSPITALS:
                assigned = by_class.disjoint_classes(n_classes, self.silos)
            else:
                assigned = by_class.assign_classes(n_classes, self.silos, self.per_silo, self.seed)
            both = [
                by_class.partition_by_class(
                    y, assigned, self.seed, name, double=self.variant == "double" and name == "train"
                )
                for y, name in _named(train, test)
            ]
        return [SiloIndices(*parts) for parts in zip(*both, strict=True)]

    def _dirichlet(self, train: Labels, test: Labels, n_classes: int) -> list[list[Indices]]:
        random = np.random.RandomState(rng.derive(self.seed, "partition", "dirichlet") % 2**32)
        min_classes = 2 if self.variant in ("two", "swap") else 1
        tries = {"swap": 3, "once": 1}.get(self.variant)
        drawn = by_class.partition_dirichlet(
            *(train, n_classes, self.silos, self.beta, random),
            min_classes=min_classes,
            tries=tries,
            accept=tries is not None,
            swap=self.variant == "swap",
        )
        return [drawn.parts, by_class.partition_like(test, drawn.proportions, random)]

    def _per_silo(self, train: Labels, n_classes: int) -> list[Indices]:
        if self.kind is PartitionKind.LABEL:
            return by_client.partition_slots(train, n_classes, self.silos, self.per_silo, self.seed)
        if self.kind is PartitionKind.MAP:
            return by_client.partition_map(train, n_classes, self.silos, self.seed)
        return by_client.partition_per_silo(train, n_classes, self.silos, self.beta, self.seed)

    def _by_user(self, users: tuple[Labels, Labels] | None) -> list[SiloIndices]:
        """Draw so many of the users with examples in both splits, in their order."""
        if users is None:
            raise ConfigError("E-CFG-08", f"{self.text}: expected data with users (femnist, shakespeare), found none")
        both = np.intersect1d(users[0], users[1])
        if len(both) < self.silos:
            raise ConfigError(
                "E-CFG-08", f"{self.text}: expected {self.silos} users, found {len(both)}: ask for fewer silos"
            )
        chosen = np.sort(rng.numpy_stream(self.seed, "partition", "users").permutation(both)[: self.silos])
        return [SiloIndices(np.flatnonzero(users[0] == u), np.flatnonzero(users[1] == u)) for u in chosen]


def _named(train: Labels, test: Labels) -> tuple[tuple[Labels, str], tuple[Labels, str]]:
    return (train, "train"), (test, "test")


def parse_federation(text: str) -> Partitioner:
    """Read a simulated federation's name; raises ConfigError (E-CFG-01) with the valid forms."""
    require_short(text)
    body, at, seed_text = text.partition("@")
    if (at and not seed_text.isdecimal()) or body != body.strip():
        raise ConfigError("E-CFG-01", f"expected a partition seed like @7 after the federation, found {text!r}")
    seed = int(seed_text or 0)
    tail = f"@{seed}" if seed else ""
    if custom := user_partition.parse_partition(body):
        return Partitioner(PartitionKind.OWN, custom[0].silos, f"{custom[1]}{tail}", seed, custom=custom[0])
    if body == "hospitals6":
        return Partitioner(PartitionKind.HOSPITALS, 6, f"{body}{tail}", seed)
    if match := re.fullmatch(r"p(\d+)c(\d+)(?:-(double))?", body):
        silos, per_silo, double = int(match[1]), int(match[2]), match[3] or ""
        name = f"p{silos}c{per_silo}{'-double' if double else ''}{tail}"
        return Partitioner(PartitionKind.CLASSES, _checked_silos(silos, text), name, seed, per_silo, variant=double)
    if match := re.fullmatch(rf"(dirichlet|persilo)-({_NUMBER})-(\d+)(?:-({'|'.join(VARIANTS)}))?", body):
        kind, beta, silos, variant = PartitionKind(match[1]), float(match[2]), int(match[3]), match[4] or ""
        if kind is PartitionKind.DIRICHLET or not variant:
            name = f"{match[1]}-{beta:g}-{silos}{f'-{variant}' if variant else ''}{tail}"
            return Partitioner(kind, _checked_silos(silos, text), name, seed, beta=beta, variant=variant)
    if match := re.fullmatch(r"label-(\d+)-(\d+)", body):
        per_silo, silos = int(match[1]), int(match[2])
        return Partitioner(
            PartitionKind.LABEL, _checked_silos(silos, text), f"label-{per_silo}-{silos}{tail}", seed, per_silo
        )
    if match := re.fullmatch(r"(iid|map|users)-(\d+)", body):
        silos = int(match[2])
        return Partitioner(PartitionKind(match[1]), _checked_silos(silos, text), f"{match[1]}-{silos}{tail}", seed)
    raise ConfigError("E-CFG-01", f"there is no federation {text!r}: {suggest(body, FORMS)} (any numbers, @SEED)")


def require_short(text: str) -> None:
    """Raise ConfigError (E-CFG-01) on a text longer than any path: its numbers could be too long to be read."""
    if len(text) > _MAX_CHARS:
        raise ConfigError(
            "E-CFG-01", f"expected a data name of at most {_MAX_CHARS} characters, found {len(text)}: {text[:40]}..."
        )


def _checked_silos(silos: int, text: str) -> int:
    if silos < 1:
        raise ConfigError("E-CFG-08", f"expected at least one silo, found {text!r}: raise the number")
    return silos


_FIELDS = {
    "dirichlet": ("beta", "silos", "variant"),
    "persilo": ("beta", "silos"),
    "label": ("slots", "silos"),
    **dict.fromkeys(("iid", "map", "users"), ("silos",)),
    "centers": ("centers",),
}
_OPTIONAL = frozenset({"variant"})


def federation_text(config: Mapping[str, object]) -> str:
    """Write a federation's configuration (`configs/federation/*.yaml`) as its name.

    {name: p5c2, partition_seed: 3} -> p5c2@3; {name: dirichlet, beta: 0.5, silos: 10} -> dirichlet-0.5-10;
    {name: iid, silos: 4} -> iid-4; {name: centers, centers: [1, 2]} -> centers-1-2. Raises ConfigError (E-CFG-01).
    Centres have no seed: nothing is drawn. `references.federation` checks which centres there are.
    """
    name = str(config.get("name", ""))
    if re.fullmatch(r"centers(-\d+)+", name) and set(config) == {"name"}:
        return name
    if registry.is_reference(name):
        return _custom_partition_text(name, config)
    fields = _FIELDS.get(name, ())
    seeded = () if name == "centers" else ("partition_seed",)
    if unknown := sorted(set(config) - {"name", *fields, *seeded}):
        raise ConfigError("E-CFG-01", f"federation {name} has no field {unknown[0]!r}: {suggest(unknown[0], fields)}")
    values = [written for field in fields for written in _written(field, config.get(field))]
    seed = _seed(config)
    text = "-".join([name, *values]) + (f"@{seed}" if seed else "")
    return text if name == "centers" or re.fullmatch(r"clients\d+", name) else parse_federation(text).text


def _custom_partition_text(name: str, config: Mapping[str, object]) -> str:
    """Write the configuration of a loaded partition; raises ConfigError (E-CFG-01, E-CFG-02)."""
    options = {key: value for key, value in config.items() if key not in ("name", "partition_seed")}
    seed = _seed(config)
    return parse_federation(f"{user_partition.make_partition(name, options)[1]}{f'@{seed}' if seed else ''}").text


def _seed(config: Mapping[str, object]) -> int:
    seed = config.get("partition_seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError("E-CFG-01", f"federation.partition_seed: expected a whole number from 0, found {seed!r}")
    return seed


def _written(field: str, value: object) -> list[str]:
    if field in _OPTIONAL and (value is None or value in VARIANTS):
        return [] if value is None else [str(value)]
    if not isinstance(value, list | tuple | int | float) or isinstance(value, bool) or value in ([], ()):
        valid = "one of " + ", ".join(VARIANTS) + " or null" if field in _OPTIONAL else "a number (centers: a list)"
        raise ConfigError("E-CFG-01", f"federation.{field}: expected {valid}, found {value!r}")
    return [str(v) for v in value] if isinstance(value, list | tuple) else [f"{value:g}"]
