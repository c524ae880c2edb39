"""What a classifier answers on features that a generator has made up (fedgen.py)."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from fl_core.methods.building_blocks.feature_generator import Generator
from fl_core.methods.building_blocks.prototypes import features_of
from fl_core.types import tensor_maps


def classifier(model: nn.Module) -> dict[str, Tensor]:
    """Copy the head: weight (C, d) and bias (C,), zeros where it has none."""
    named = {name: v.cpu() for name, v in tensor_maps.copy_state(features_of(model).head).items()}
    return {"bias": torch.zeros(len(named["weight"])), **named}


def of(model: nn.Module, z: Tensor) -> Tensor:
    """Return the head's logits (..., C) of features (..., d), past the hooks that gradients of examples need."""
    head = dict(features_of(model).head.named_parameters())
    return linear(z.to(head["weight"]), head["weight"], head.get("bias"))


def held(made: Generator, e: Tensor, per_class: int) -> Tensor:
    """Make features (C, n, d) of n noise vectors per class, from noise e (C n, noise)."""
    device = next(made.parameters()).device
    y = torch.arange(made.n_classes, device=device).repeat_interleave(per_class)
    with torch.no_grad():
        z: Tensor = made(y, e.to(device))
    return z.view(made.n_classes, per_class, -1)


def mean(model: nn.Module, z: Tensor) -> Tensor:
    """Return the log of the mean answer per class (C, C) on features z (C, n, d).

    KL from it has the mean gradient of KL from each single answer: what one draw per example estimates.
    """
    return log_softmax(of(model, z), 2).logsumexp(1) - log(z.shape[1])
