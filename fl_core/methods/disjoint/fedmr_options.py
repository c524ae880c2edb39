"""What FedMR can be set to (fedmr.py), and what follows from it for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.methods.building_blocks import prototypes
from fl_core.methods.fedavg import FedAvg
from fl_core.types.values import Coupling


@dataclass(frozen=True, kw_only=True)
class FedMROptions(FedAvg):
    """Hyper-parameters of FedMR, checked.

    mu1, mu2: weights of L_intra and L_inter, >= 0   eps: added to variances   warmup: rounds in which mu2 grows to
    its value   lite: examples of a batch that L_inter is computed on, 0 for all (the paper's Lite 10, Lite 50)
    prototypes: False is "prototypes off": L_intra alone, nothing else travels
    inter_weighting: "batch" is equation 4; "example" averages each example over its own negatives.
    """

    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = {"prototypes": False}
    mu1: float = 1e-5
    mu2: float = 0.1
    intra: str = "paper"
    inter: str = "own_sample"
    inter_weighting: str = "batch"
    negatives: str = "all"
    no_margin: bool = False
    paper_literal_std: bool = False
    eps: float = 1e-8
    warmup: int = 0
    lite: int = 0
    lite_scope: str = "inter"
    prototypes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least(
            "E-CFG-02", self.name, 0, mu1=self.mu1, mu2=self.mu2, eps=self.eps, warmup=self.warmup, lite=self.lite
        )
        validate.one_of(
            "E-CFG-02",
            self.name,
            intra=(self.intra, ("paper", "code")),
            inter=(self.inter, ("own_sample", "paired_sample")),
            inter_weighting=(self.inter_weighting, ("batch", "example")),
            negatives=(self.negatives, ("all", "observed")),
            lite_scope=(self.lite_scope, ("inter", "both")),
        )
        if self.no_margin and self.inter == "paired_sample":
            raise ConfigError("E-CFG-02", "no_margin pairs nothing: expected inter=own_sample, found paired_sample")

    @property
    def uses_prototypes(self) -> bool:
        """Tell whether prototypes are measured and sent: only when a loss needs them."""
        return self.prototypes and self.mu2 > 0

    @property
    def coupling(self) -> Coupling:
        """Say that the batch is mixed by L_intra, and by L_inter unless its terms depend on one example each."""
        alone = self.inter == "own_sample" and self.inter_weighting == "example"
        return Coupling.BATCH if self.mu1 > 0 or (self.uses_prototypes and not alone) else Coupling.EXAMPLE

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Make L_inter a loss of single examples, on all of a batch.

        Lite draws places of a batch from a stream that all batches share, and its terms grow with the batch: one
        example more would change what every other one adds, in this step and in all later ones.
        """
        mixed = self.uses_prototypes and self.inter == "own_sample" and self.inter_weighting == "batch"
        return {**({"inter_weighting": "example"} if mixed else {}), **({"lite": 0} if self.lite else {})}

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta", prototypes.PROTOTYPES) if self.uses_prototypes else ("delta",)
