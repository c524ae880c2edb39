"""2 x 2 max pooling that is fast on a CPU where no gradients are needed, as in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class MaxPool2(nn.MaxPool2d):
    """(B, C, H, W) -> (B, C, H // 2, W // 2), the largest number of each 2 x 2 block.

    Guarantees: the numbers are those of `nn.MaxPool2d(2)`, whichever way they are computed.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        # torch's loop over blocks on a CPU is not vectorised. With gradients, ties would share theirs in `maximum`.
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
            return functional.max_pool2d(x, 2)
        height, width = (side // 2 * 2 for side in x.shape[-2:])
        rows = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
        return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])
