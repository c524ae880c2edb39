"""WRN-28-10. Zagoruyko and Komodakis (2016), in the form whose size FedMR reports: every convolution has a bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fl_core import validate
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema

STEM, WIDTHS, BLOCKS = 16, (160, 320, 640), 4


class WideBlock(nn.Module):
    """conv(relu(bn(dropout(conv(relu(bn(x))))))) + shortcut(x); the second convolution has the stride."""

    def __init__(self, before: int, after: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, after, 3, padding=1), nn.Dropout(dropout)),
            *(nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, stride, padding=1)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.path(x) + self.shortcut(x)
        return out


@dataclass(frozen=True, slots=True)
class WideResNet2810(HeadOptions):
    """WRN-28-10: 36,546,980 parameters with 3 channels and 100 classes, feature 640.

    Convolutions 28 with bias, widths 160/320/640, last BatchNorm of momentum 0.9. dropout: inside every block.
    """

    dropout: float = 0.3

    def build(self, schema: Schema) -> SplitModel:
        validate.between("E-CFG-02", "wrn28_10", 0, 0.99, dropout=self.dropout)
        channels, _ = image_shape("wrn28_10", schema, channels={1, 3}, sizes=range(8, 1025))
        layers: list[nn.Module] = [nn.Conv2d(channels, STEM, 3, padding=1)]
        before = STEM
        for stage, after in enumerate(WIDTHS):
            for block in range(BLOCKS):
                layers.append(WideBlock(before, after, 2 if stage and not block else 1, self.dropout))
                before = after
        layers += [nn.BatchNorm2d(before, momentum=0.9), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        body = kaiming(nn.Sequential(*layers))
        return self.complete(body, before, schema)
