"""The terms of masked runs, and the numbers that both sides derive from them. Imports no torch.

A round has n members; t = ceil(2n/3) answers open its sum; a sum contains at least m updates. Opening two different
sets in one round would need t signatures for each. Since 2t > n + c, an honest silo would have to sign both, unless
more than c silos collude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.validate import between, bounded, one_of

MIN_MASKED, MAX_MASKED = 3, 240
"""Range of the number of members in a masked run. With two, each can compute the other's update from the sum; with
more than 240, packages exceed a message."""
MAX_ROUNDS = 10_000
"""Most rounds of a masked run. If a coordinator names the last round first, a hospital steps its keys this often."""
MODEL, CLASSES = "model", "classes"
BLOCKS = (MODEL, CLASSES)
"""The blocks of a masked update (`fl_core.aggregation.flat_blocks`)."""
MASKS = "masks"
"""The part of a masked update besides its blocks: data with which other members help to unmask a sum."""
SECRET, SHARE, TAG = 32, 33, 16
"""Bytes of a seed, a digest, a salt and a public key; of a share; of the overhead of an encrypted package."""
READ_ALONE = "the coordinator reads this hospital's update by itself"
COMPLETE, EACH = "complete", "each"
CLASS_SUMS = (COMPLETE, EACH)


def answers(cohort: int) -> int:
    """Return t, the number of a round's members that must answer to open its sum."""
    return -(-2 * cohort // 3)


def tolerated_colluders(cohort: int) -> int:
    """Return c, the number of members that may collude with the coordinator; 1 of three members: they have one set."""
    return 1 if cohort == MIN_MASKED else 2 * answers(cohort) - cohort - 1


def read_alone(silos: int) -> str:
    """Describe who reads single updates in a run without masks, and why it has none. silos: number of hospitals."""
    few = f"; masks need {MIN_MASKED} hospitals, and {silos} {'takes' if silos == 1 else 'take'} part"
    return f"no masks: the coordinator reads each hospital's update by itself{few if silos < MIN_MASKED else ''}"


def masking_shapes(cohort: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the bytes in a masked update besides its two blocks, the same for every silo.

    salt: of the packages' keys   commitments: per block and member, to a seed   packages: for each member, shares of
    all seeds of both blocks.
    """
    package = 2 * SHARE * cohort + TAG
    return {"salt": (SECRET,), "commitments": (2, cohort, SECRET), "packages": (cohort, package)}


def masking_bytes(cohort: int) -> int:
    return sum(math.prod(shape) for shape in masking_shapes(cohort).values())


@dataclass(frozen=True, slots=True)
class Secagg:
    """The terms of a masked run. The minimum of updates in a sum follows from the number of members.

    min_contributors: minimum number of hospitals in the sums of a class's rows; 1: no minimum
    class_sums: whether sums per class are opened in every round, or only in rounds with an update from every member:
    the difference of two sums over different sets can be one hospital's update
    collusion: number of hospitals whose noise does not count, if noise is shared
    min_sum: minimum of updates in a sum, if larger than the one from the number of members; a round of fewer members
    then needs all of them
    census: whether hospitals per class are counted before round 1, even without effect; False in runs of 0.1.0
    """

    min_contributors: Annotated[int, bounded(between, 1, MAX_MASKED)] = 1
    class_sums: Annotated[str, bounded(one_of, CLASS_SUMS)] = COMPLETE
    collusion: Annotated[int, bounded(between, 0, MAX_MASKED)] = 1
    min_sum: Annotated[int, bounded(between, 0, MAX_MASKED)] = 0
    census: bool = False

    def check(self, members: int, cohort: int, rounds: int) -> None:
        """Raise ConfigError (E-CFG-02) if the terms are impossible for these numbers. cohort: of a round; 0: all."""
        validate.declared("E-CFG-02", "secagg", self)
        drawn = cohort or members
        if not MIN_MASKED <= members <= MAX_MASKED or drawn < MIN_MASKED:
            raise ConfigError(
                "E-CFG-02",
                f"expected {MIN_MASKED} to {MAX_MASKED} hospitals in each masked round, because with two hospitals "
                f"each could compute the other's update, found {members} and a cohort of {drawn}: add hospitals, or "
                "set secagg=off",
            )
        if rounds > MAX_ROUNDS:
            raise ConfigError(
                "E-CFG-02",
                f"expected at most {MAX_ROUNDS} rounds under masks, found {rounds}: ask for fewer, or set secagg=off",
            )
        if self.min_contributors > members:
            raise ConfigError(
                "E-CFG-02",
                f"expected secagg.min_contributors of at most {members} hospitals, found {self.min_contributors}",
            )
        if self.min_sum > members:
            raise ConfigError(
                "E-CFG-02", f"expected secagg.min_sum of at most {members} hospitals, found {self.min_sum}: lower it"
            )
        most = tolerated_colluders(drawn)
        if self.collusion > most:
            raise ConfigError(
                "E-CFG-02",
                f"expected secagg.collusion of at most {most} with {drawn} hospitals in a round, found "
                f"{self.collusion}: with more, colluding hospitals could open two sums of one round",
            )
        if drawn < members and self.class_sums == COMPLETE:
            raise ConfigError(
                "E-CFG-02",
                "secagg.class_sums=complete opens sums per class only over all hospitals, so it needs cohort=0, "
                f"found cohort={cohort}: leave cohort out, or set secagg.class_sums=each, with which the difference "
                "of two rounds may reveal one hospital's counts",
            )

    def least_holders(self, members: int, cohort: int) -> int:
        """Return the number of hospitals that a class needs for its rows to leave: at least min_contributors.

        If rows are opened in every round, it adds the number of members that may be absent from a sum.
        """
        return self.min_contributors + (members - self.smallest_sum(cohort) if self.class_sums == EACH else 0)

    def smallest_sum(self, cohort: int) -> int:
        """Return the minimum of updates in a sum."""
        return max(MIN_MASKED, answers(cohort), min(self.min_sum, cohort))

    def require_quorum(self, quorum: int, cohort: int) -> None:
        """Raise ConfigError (E-CFG-02) if no round could close with this quorum; 0: the run's quorum."""
        least = self.smallest_sum(cohort)
        if 0 < quorum < least:
            raise ConfigError(
                "E-CFG-02",
                f"expected quorum=0 or a quorum of at least {least}, found {quorum}: under masks, no sum of fewer "
                f"than {least} of {cohort} hospitals is opened. Raise the quorum, or set secagg=off",
            )
