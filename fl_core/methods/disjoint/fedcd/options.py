"""What FedCD can be set to (fedcd.py), and what follows from it for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.methods.building_blocks import class_level_aggregation as acla
from fl_core.methods.building_blocks import fine_grained
from fl_core.methods.building_blocks.prototypes import PROTOTYPES
from fl_core.methods.fedavg import FedAvg
from fl_core.types.values import Capability, Coupling


@dataclass(frozen=True, kw_only=True)
class FedCDOptions(FedAvg):
    """Hyper-parameters of FedCD, checked.

    fine: M   lam, gamma: weights of gid and bpr   alpha: weight of the own class's other prototypes   tau: temperature
    xi: weight of the other classes in distillation   aggregation: "sum", "mean" or "prob"   distill: "dkd" or "kd"
    acla: "server", "stale", "counts" or "fedavg"   hpc: False takes mean features as prototypes, and mu_t = 1
    importance: how prototypes join a batch: "scaled" to it, "unscaled", "shuffle" (as items of the silo's data) or
    "none" (not at all)   zero_based: mu of the first round is 1   restarts, steps: k-means
    """

    fine: int = 3
    lam: float = 0.1
    gamma: float = 0.1
    alpha: float = 0.1
    tau: float = 1.0
    xi: float = 0.5
    aggregation: str = "sum"
    distill: str = "dkd"
    acla: str = "server"
    hpc: bool = True
    importance: str = "scaled"
    zero_based: bool = False
    restarts: int = 10
    steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least("E-CFG-02", self.name, 1, fine=self.fine, restarts=self.restarts, steps=self.steps)
        validate.at_least("E-CFG-02", self.name, 0, lam=self.lam, gamma=self.gamma, alpha=self.alpha, xi=self.xi)
        validate.positive("E-CFG-02", self.name, tau=self.tau)
        validate.below("E-CFG-02", self.name, 0.5, alpha=self.alpha)
        if self.acla == "two_phase":
            raise ConfigError(
                "E-CFG-02",
                "fedcd.acla: two_phase needs two exchanges in a round, and a round has one: expected "
                "server (the same rule, made by the server) or stale (under secure aggregation)",
            )
        validate.one_of(
            "E-CFG-02",
            self.name,
            acla=(self.acla, acla.MODES),
            aggregation=(self.aggregation, tuple(fine_grained.AGGREGATIONS)),
            distill=(self.distill, ("dkd", "kd")),
            importance=(self.importance, ("scaled", "unscaled", "shuffle", "none")),
        )

    @property
    def unsummed_parts(self) -> frozenset[str]:
        """Let the server see each head where it weighs them."""
        return frozenset({acla.PART}) if self.acla == "server" else frozenset()

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        """Lack privacy of records, and with the published rule also sums that hide silos."""
        each = (
            {Capability.SECURE_AGGREGATION: "set method.acla=stale, which needs sums alone"}
            if self.unsummed_parts
            else {}
        )
        remedy = "it clusters features by many queries and counts examples exactly: take fednh, fedproc or fedmr"
        return {**each, Capability.DIFFERENTIAL_PRIVACY: remedy}

    @property
    def coupling(self) -> Coupling:
        """Say that bpr mixes a batch, and so do importances that ignore its size."""
        return Coupling.BATCH if self.gamma or self.importance in ("unscaled", "shuffle") else Coupling.EXAMPLE

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta", PROTOTYPES) if self.acla == "fedavg" else ("delta", acla.PART, PROTOTYPES)
