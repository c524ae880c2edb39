"""A caller's own network as a model of ours: any module whose answer is that of its last linear layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.models.split_model import SplitModel
from fl_core.types.records import Schema

Make = Callable[[Schema], nn.Module]


def split(model: nn.Module, schema: Schema) -> SplitModel:
    """Divide a network (B, *shape) -> (B, C) into a body and its head, the `nn.Linear` that is called last.

    The module is taken over: in-place layers are made out-of-place. A SplitModel is what it is. Raises ConfigError
    (E-CFG-08) where the network does not take these examples, or its answer is not that of such a layer, with one
    output per class.
    """
    if isinstance(model, SplitModel):
        return model
    classes = len(schema.classes)
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    if isinstance(model, nn.Linear):  # on the pixels
        model = nn.Sequential(nn.Flatten(), model)
    answer, head = _probe(model, schema)
    if head is None or head.out_features != classes:
        last = "no such layer" if head is None else f"one of {head.out_features} outputs"
        raise _wrong(model, f"a last nn.Linear of {classes} outputs for {classes} classes", last)
    (place,) = (name for name, module in model.named_modules() if module is head)
    outer, _, name = place.rpartition(".")
    setattr(model.get_submodule(outer), name, nn.Identity())
    divided = SplitModel(model, nn.Identity(), head, head.in_features, classes)
    if not answer.is_meta and not torch.equal(_probe(divided, schema)[0], answer):
        raise _wrong(model, f"the answer of its last nn.Linear, {place!r}", "another one")
    return divided


def _probe(model: nn.Module, schema: Schema) -> tuple[Tensor, nn.Linear | None]:
    """Ask a network in evaluation mode about two made-up examples; return its answer and the last linear layer called.

    On the device where its weights are, which may be none (`meta`).
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = torch.linspace(-1, 1, 2 * math.prod(schema.shape), device=device).reshape(2, *schema.shape)
    called, training = list[nn.Linear](), model.training

    def note(module: nn.Module, *_: object) -> None:
        called.append(cast(nn.Linear, module))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        with torch.no_grad():
            logits = model.eval()(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        wanted = f"a network that takes examples of shape {tuple(schema.shape)}"
        raise _wrong(model, wanted, f"{type(error).__name__}: {error}") from error
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        answer = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise _wrong(model, "logits (B, C) as its answer", answer)
    return logits, called[-1] if called else None


def _wrong(model: nn.Module, expected: str, actual: str) -> ConfigError:
    text = " ".join(actual.split())[:300]
    return ConfigError("E-CFG-08", f"model: expected of {type(model).__name__} {expected}, found {text}: change it")


def options_of(make: Make) -> type:
    """Return a class of options, of which there are none, that builds what `make` returns for the run's examples."""

    @dataclass(frozen=True)
    class OwnModel:
        def build(self, schema: Schema) -> SplitModel:
            network = make(schema)
            if not isinstance(network, nn.Module):
                raise ConfigError(
                    "E-CFG-02", f"model: expected an nn.Module from the function, found {type(network).__name__}"
                )
            return split(network, schema)

    return OwnModel


def maker(model: nn.Module | type[nn.Module] | Make) -> Make:
    """Return what makes a network: a copy of a module with its weights, a class's fresh one, or a function's."""
    if isinstance(model, nn.Module):
        return lambda _: copy.deepcopy(model)
    if isinstance(model, type):
        return lambda _: model()
    return model
