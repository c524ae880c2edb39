"""The head and the body of a model, by the names of their tensors: personalised methods keep one and share the other.

The head is the last linear layer; everything before it, buffers included, is the body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fl_core.methods.fedavg import FedAvg
from fl_core.tensors import Tensor, nn
from fl_core.types import tensor_maps
from fl_core.types.values import RoundContext, State, Tensors

_HEAD = "head."


def in_head(name: str) -> bool:
    return name.startswith(_HEAD)


def in_body(name: str) -> bool:
    return not in_head(name)


def copy_tensors(model: nn.Module, keep: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    """Copy the tensors of a model that a silo keeps, to the CPU."""
    return {name: value.cpu() for name, value in tensor_maps.select(tensor_maps.copy_state(model), keep).items()}


def freeze_norms(model: nn.Module) -> None:
    """Put BatchNorm in eval mode, until the next pass: a frozen body keeps its statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


@dataclass(frozen=True, kw_only=True)
class SharedBody(FedAvg):
    """As FedAvg, except that the head does not travel: the global model is the averaged body under the initial head.

    The server keeps the initial head beside the body, for exports.
    """

    def shared(self, name: str) -> bool:
        return in_body(name)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        return {**super().init_server(model, context), "head": copy_tensors(model, in_head)}

    def exported(self, server: State) -> Tensors:
        return {**server["w"], **server["head"]}
