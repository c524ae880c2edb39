"""Simulated federations by name: how examples are dealt, and the names of the silos.

| text                 | meaning                                                                       |
|----------------------|-------------------------------------------------------------------------------|
| hospitals6           | six hospitals, no class in two of them                                         |
| p5c2, p10c3, ...     | {r} silos with {c} classes each                                                |
| dirichlet-0.5-10     | 10 silos, class proportions ~ Dir(0.5)                                         |
| iid-10               | 10 equal random shares                                                         |

`@7` after any of them is the partition seed (0 without it): `p10c3@7`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from fl_core import rng
from fl_core.datasets import partition
from fl_core.datasets.partition import Indices, Labels
from fl_core.errors import ConfigError
from fl_core.words import nearest

FORMS = ("hospitals6", "p5c2", "p10c2", "p10c3", "p10c5", "dirichlet-0.5-10", "iid-10")
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


class Dealt(NamedTuple):
    """Positions in the train and in the test labels that one silo gets."""

    train: Indices
    test: Indices


class Dealing(Enum):
    """How examples are dealt."""

    HOSPITALS = "hospitals"
    CLASSES = "classes"
    DIRICHLET = "dirichlet"
    IID = "iid"


@dataclass(frozen=True, slots=True)
class Federated:
    """A way to deal labelled examples to `silos` silos.

    per_silo: classes of each silo (CLASSES)   beta: concentration (DIRICHLET)
    text:     the name it was parsed from, in canonical form

    Guarantees: the train parts are disjoint, and so are the test parts; their union is everything; a silo's test
    part has the classes (for Dirichlet: the proportions) of its train part; the same in every process.
    """

    kind: Dealing
    silos: int
    text: str
    seed: int = 0
    per_silo: int = 0
    beta: float = 0.0

    def deal(self, train: Labels, test: Labels, n_classes: int) -> list[Dealt]:
        """Deal both splits; raises ConfigError (E-CFG-31) when these labels cannot be dealt so."""
        if self.kind is Dealing.IID:
            both = [partition.deal_equally(y, self.silos, self.seed, name) for y, name in _named(train, test)]
        elif self.kind is Dealing.DIRICHLET:
            random = np.random.RandomState(rng.derive(self.seed, "partition", "dirichlet") % 2**32)
            drawn = partition.deal_dirichlet(train, n_classes, self.silos, self.beta, random)
            both = [drawn.parts, partition.deal_like(test, drawn.proportions, random)]
        else:
            if self.kind is Dealing.HOSPITALS:
                held = partition.disjoint_classes(n_classes, self.silos)
            else:
                held = partition.assign_classes(n_classes, self.silos, self.per_silo, self.seed)
            both = [partition.deal_classes(y, held, self.seed, name) for y, name in _named(train, test)]
        return [Dealt(*parts) for parts in zip(*both, strict=True)]


def _named(train: Labels, test: Labels) -> tuple[tuple[Labels, str], tuple[Labels, str]]:
    return (train, "train"), (test, "test")


def parse_federation(text: str) -> Federated:
    """Read a simulated federation's name; raises ConfigError (E-CFG-30) with the valid forms."""
    body, at, seed_text = text.partition("@")
    if (at and not seed_text.isdecimal()) or body != body.strip():
        raise ConfigError("E-CFG-30", f"expected a partition seed like @7 after the federation, found {text!r}")
    seed = int(seed_text or 0)
    tail = f"@{seed}" if seed else ""
    if body == "hospitals6":
        return Federated(Dealing.HOSPITALS, 6, f"{body}{tail}", seed)
    if match := re.fullmatch(r"p(\d+)c(\d+)", body):
        silos, per_silo = int(match[1]), int(match[2])
        return Federated(Dealing.CLASSES, _some(silos, text), f"p{silos}c{per_silo}{tail}", seed, per_silo)
    if match := re.fullmatch(rf"dirichlet-({_NUMBER})-(\d+)", body):
        beta, silos = float(match[1]), int(match[2])
        return Federated(Dealing.DIRICHLET, _some(silos, text), f"dirichlet-{beta:g}-{silos}{tail}", seed, beta=beta)
    if match := re.fullmatch(r"iid-(\d+)", body):
        return Federated(Dealing.IID, _some(int(match[1]), text), f"iid-{int(match[1])}{tail}", seed)
    raise ConfigError("E-CFG-30", f"there is no federation {text!r}: {nearest(body, FORMS)} (any numbers, @SEED)")


def _some(silos: int, text: str) -> int:
    if silos < 1:
        raise ConfigError("E-CFG-31", f"expected at least one silo, found {text!r}: raise the number")
    return silos


def federation_text(config: Mapping[str, object]) -> str:
    """Write a federation's configuration (`configs/federation/*.yaml`) as its name.

    {name: p5c2, partition_seed: 3} -> p5c2@3; {name: dirichlet, beta: 0.5, silos: 10} -> dirichlet-0.5-10;
    {name: iid, silos: 4} -> iid-4; {name: centers, centers: [1, 2]} -> centers-1-2. Raises ConfigError (E-CFG-30).
    Centres have no seed: nothing is dealt. What they may be, `refs.federation` knows.
    """
    name = str(config.get("name", ""))
    if re.fullmatch(r"centers(-\d+)+", name) and set(config) == {"name"}:
        return name
    fields = {"dirichlet": ("beta", "silos"), "iid": ("silos",), "centers": ("centers",)}.get(name, ())
    seeded = () if name == "centers" else ("partition_seed",)
    if strange := sorted(set(config) - {"name", *fields, *seeded}):
        raise ConfigError("E-CFG-30", f"federation {name} has no field {strange[0]!r}: {nearest(strange[0], fields)}")
    values: list[str] = []
    for field in fields:
        value = config.get(field)
        if not isinstance(value, list | tuple | int | float) or isinstance(value, bool) or value in ([], ()):
            raise ConfigError("E-CFG-30", f"federation.{field}: expected a number (centers: a list), found {value!r}")
        values += [str(v) for v in value] if isinstance(value, list | tuple) else [f"{value:g}"]
    seed = config.get("partition_seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError("E-CFG-30", f"federation.partition_seed: expected a whole number from 0, found {seed!r}")
    text = "-".join([name, *values]) + (f"@{seed}" if seed else "")
    return text if name == "centers" else parse_federation(text).text
