"""Torch if it is installed; otherwise a NumPy substitute for its part without gradients.

A hospital that sums features, counts records or measures a model needs no gradients, and torch with its libraries takes
ten times the disk space of everything else. So code for such a hospital uses `from fl_core.tensors import torch`. If
torch is installed, that is torch itself. Modules that train import torch by its own name.

array       one tensor, with the types and devices of torch
functions   the functions of the module `torch`
layers      `torch.nn`: linear layers, read in evaluations
generator   torch's random numbers, to the last bit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
    from torch import nn as nn

    TORCH: bool
else:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # an installed torch that is broken is not replaced
            raise
        from fl_core.tensors import functions as torch

    Tensor, nn = torch.Tensor, torch.nn
    TORCH = torch.__name__ == "torch"

__all__ = ["TORCH", "Tensor", "nn", "torch"]
