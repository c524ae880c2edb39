"""FedGen's options, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fl_core import validate
from fl_core.methods.building_blocks.feature_generator import GeneratorConfig
from fl_core.methods.fedavg import FedAvg
from fl_core.types.values import Capability

HEADS, GENERATOR, LABELS = "heads", "generator", "labels"


def coefficient(start: float, t: int) -> float:
    """Return max(1e-4, start 0.98^t), and 0 for a term that is switched off."""
    return max(1e-4, start * 0.98**t) if start else 0.0


@dataclass(frozen=True, kw_only=True)
class FedGenOptions(FedAvg):
    """mode: "plain" or "secagg"   alpha, beta: a_0 and b_0   made: B_g   noise, hidden: sizes of the generator.

    noise_kind: "normal", or "uniform" as released   steps, lr, weight_decay: Adam of the generator, lr falls by 0.98
    diversity: strength of that term   draws: "example" draws noise for each example of a batch, as published; "class"
    draws B_g times per class and round, and an example's term is the mean over those of its class.
    """

    name: ClassVar[str] = "fedgen"
    mode: str = "plain"
    alpha: float = 10.0
    beta: float = 10.0
    made: int = 32
    noise: int = 32
    noise_kind: str = "normal"
    hidden: int = 256
    steps: int = 50
    lr: float = 3e-4
    weight_decay: float = 1e-2
    diversity: float = 1.0
    draws: str = "example"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.one_of(
            "E-CFG-02",
            self.name,
            mode=(self.mode, ("plain", "secagg")),
            noise_kind=(self.noise_kind, ("normal", "uniform")),
            draws=(self.draws, ("example", "class")),
        )
        validate.at_least(
            "E-CFG-02",
            self.name,
            0,
            alpha=self.alpha,
            beta=self.beta,
            lr=self.lr,
            weight_decay=self.weight_decay,
            diversity=self.diversity,
            steps=self.steps,
        )
        validate.at_least("E-CFG-02", self.name, 1, noise=self.noise, hidden=self.hidden)
        validate.at_least("E-CFG-02", self.name, 2, made=self.made)  # the generator's BatchNorm needs two

    @property
    def unsummed_parts(self) -> frozenset[str]:
        """Name the classifiers, which the plain mode's server must see one by one."""
        return frozenset({HEADS}) if self.mode == "plain" else frozenset()

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Draw noise per class: drawn place by place, it would move with every example more or less."""
        return {"draws": "class"} if self.draws == "example" and self.beta else {}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        """Say also that the published form sees single classifiers."""
        remedy = "the server sees each silo's classifier: set mode=secagg"
        return {**super().unsupported, **({Capability.SECURE_AGGREGATION: remedy} if self.mode == "plain" else {})}

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta", HEADS) if self.mode == "plain" else ("delta", GENERATOR, LABELS)

    def course(self, t: int) -> GeneratorConfig:
        """Say how the generator is trained in round t."""
        rate = self.lr * 0.98**t
        return GeneratorConfig(
            self.steps, rate, self.weight_decay, self.made, self.noise, self.noise_kind, self.diversity
        )
