"""FedROD's two predictors on one body, and the network that writes the private one from a silo's class shares."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import rng
from fl_core.methods.losses.logit_adjustment import balanced_softmax
from fl_core.methods.personal.shared_body import freeze_norms
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.values import Losses, LossFn, Tensors


class TwoHeads(nn.Module):
    """A model with a private head beside its own: logits (B, C) are g_G + g_P. It shares the model's modules."""

    def __init__(self, model: SplitModel, private: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.private = private.to(next(model.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of both heads together (B, C)."""
        z = self.model.features(x)
        logits: Tensor = self.model.head(z) + self.private(z)
        return logits


class Generated(nn.Module):
    """A head that a network nu makes: W = nu(a) (d, C), logits z W, from the shares a (C,) of a silo's classes.

    nu is Linear(C, hidden)-ReLU-Linear(hidden, d C), both with bias; FedNH's code takes hidden = d.
    """

    def __init__(self, n_classes: int, feature_dim: int, hidden: int, shares: Tensor) -> None:
        super().__init__()
        self.nu = nn.Sequential(nn.Linear(n_classes, hidden), nn.ReLU(), nn.Linear(hidden, feature_dim * n_classes))
        self.register_buffer("shares", shares, persistent=False)
        self._shape = (feature_dim, n_classes)

    def weight(self) -> Tensor:
        """Make the head (d, C) that nu gives now."""
        made: Tensor = self.nu(self.get_buffer("shares"))
        return made.view(self._shape)

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        return z @ self.weight()


def new_nu(model: SplitModel, hidden: int) -> dict[str, Tensor]:
    """Draw nu's initial weights from a stream that the model's own initial weights name."""
    with rng.torch_scope(int(tensor_maps.digest(tensor_maps.copy_state(model))[:15], 16), "hypernetwork"):
        made = Generated(model.n_classes, model.feature_dim, hidden, torch.zeros(model.n_classes))
    return tensor_maps.copy_state(made.nu)


def linear(values: Tensors) -> nn.Linear:
    """Build a linear layer of given weights: weight (C, d) and, where the head has one, bias (C,)."""
    classes, d = values["weight"].shape
    layer = nn.Linear(d, classes, bias="bias" in values, device="meta").to_empty(device="cpu")
    tensor_maps.load_state(layer, values)
    return layer


def shares_of(counts: Tensor) -> Tensor:
    """Divide class counts (C,) by their sum; counts below 0, which noise can make, count as 0."""
    positive = counts.clamp(min=0.0)
    return positive / positive.sum().clamp(min=1.0)


def private_loss(z: Tensor, g: Tensor, y: Tensor, private: nn.Module) -> Tensor:
    """Return CE(stopgrad(g) + private(stopgrad(z)), y) per example (B,): a gradient for the private head alone."""
    logits: Tensor = g.detach() + private(z.detach())
    return cross_entropy(logits, y, reduction="none")


def generic_loss(counts: Tensor, gamma: float) -> LossFn:
    """Make L_G, the balanced softmax of the generic head, for a `TwoHeads`; counts: (C,)."""

    def loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(balanced_softmax(_parts(both).model(x), y, counts, gamma))

    return loss


def both_losses(counts: Tensor, gamma: float) -> LossFn:
    """Make L_G + L_P on the same z and g_G; neither has a gradient for the other's parameters."""

    def loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
        parts = _parts(both)
        z = parts.model.features(x)
        g: Tensor = parts.model.head(z)
        return Losses(balanced_softmax(g, y, counts, gamma) + private_loss(z, g, y, parts.private))

    return loss


def frozen_loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
    """Return L_P on a frozen body, whose BatchNorm keeps its statistics."""
    freeze_norms(both)
    parts = _parts(both)
    with torch.no_grad():
        z = parts.model.features(x)
        g: Tensor = parts.model.head(z)
    return Losses(private_loss(z, g, y, parts.private))


def is_private(name: str) -> bool:
    """Tell whether a parameter of `TwoHeads` belongs to the private head."""
    return name.startswith("private.")


def is_generic(name: str) -> bool:
    """Tell whether a parameter of `TwoHeads` belongs to the body or the generic head."""
    return not is_private(name)


def _parts(both: nn.Module) -> TwoHeads:
    return cast(TwoHeads, both)  # or a per-example wrapper, which passes its attributes on
