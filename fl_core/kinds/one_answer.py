"""The program of a kind of run in which every hospital answers once, without training; answers are summed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import Traits
from fl_core.tensors import Tensor, nn
from fl_core.types.enums import Capability, Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, PartRule, RoundContext, State, Tensors

HOSPITALS = "hospitals"
"""The tensor with the number of hospitals that answered, next to the sum of their answers."""


@dataclass(frozen=True, kw_only=True)
class OneAnswer(Traits):
    """A run of one round whose update is one part, the answer, named like the kind. No model is sent or kept.

    A subclass defines the form of an answer (`blank`) and how a hospital computes it from its records (`answer`). Sums
    are exact.
    """

    has_global_model: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.declared("E-CFG-02", self.name, self)

    @abstractmethod
    def blank(self, n_classes: int) -> Tensors:
        """Return an answer of zeros."""

    @abstractmethod
    def answer(self, data: LocalData, context: RoundContext) -> Tensors:
        """Compute this hospital's answer, with the names and shapes of `blank`."""

    @property
    def apart(self) -> bool:
        """Whether each hospital's answer is kept separately, in the order of the members; not under masks."""
        return False

    @property
    def sends(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def exchanges(self) -> int:
        return 1

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({self.name} if self.apart else ())

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        return {self.name: PartRule(Weighing.ONCE)}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        alone = {Capability.SECURE_AGGREGATION: "masks allow only sums: set method.by_hospital=false"}
        return {**super().unsupported, **(alone if self.apart else {})}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        lead = (context.n_silos,) if self.apart else ()
        blank = self.blank(context.n_classes)
        empty = {name: value.new_zeros((*lead, *value.shape)) for name, value in blank.items()}
        return {"w": {}, self.name: {**empty, HOSPITALS: next(iter(blank.values())).new_zeros(lead)}}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {}

    def broadcast(self, server: State) -> State:  # noqa: ARG002
        return {"w": {}}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:  # noqa: ARG002
        answer = self.blank(context.n_classes) if context.round else self.answer(data, context)
        return LocalResult({self.name: Part(answer, next(iter(answer.values())).new_ones(()))}, silo)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        part = total[self.name]
        if context.round or not bool((part.weight > 0).any()):
            return server
        answers: dict[str, Tensor] = {name: value.double() for name, value in part.total.items()}
        return {**server, self.name: {**answers, HOSPITALS: part.weight.double()}}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:  # noqa: ARG002
        raise _no_model(self.name)

    def exported(self, server: State) -> Tensors:  # noqa: ARG002
        raise _no_model(self.name)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        raise _no_model(self.name)


def _no_model(kind: str) -> ConfigError:
    return ConfigError(
        "E-CFG-08", f"expected a run that trains a model, found a {kind}, which returns answers: read them instead"
    )
