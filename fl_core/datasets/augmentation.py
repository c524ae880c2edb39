"""Augmentation from one generator: the same generator state gives the same images, in any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_core.tensors import Tensor, torch

Border = Literal["mirror", "black"]


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Bounds of an image's augmentation; every draw is uniform and per image.

    Attributes:
        mirror: flip left-right with probability 1/2
        upend: flip top-bottom with probability 1/2
        rotate: degrees, in [-rotate, rotate]
        scale: factor in [1 - scale, 1 + scale]
        shift: share of the side, in [-shift, shift]
        brightness: added, in [-brightness, brightness]
        contrast: factor in [1 - contrast, 1 + contrast] about the image's mean
        crop: pixels of padding on each side, from which a window of the image's size is cut out at random
        border: padding of `crop`, "mirror" or "black"; rotation, scale and shift always mirror pixels
    """

    mirror: bool = False
    upend: bool = False
    rotate: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    crop: int = 0
    border: Border = "mirror"


# A flipped digit is another sign or none, so digits only move: a pixel and ten degrees.
DIGITS = Augmentation(rotate=10.0, shift=0.125)
# Of FLamby's training transform for Fed-ISIC2019: flips, rotation, scale, brightness and contrast (its shear of 0.1
# degrees and its coarse dropout are left out; the random crop is `ImageTransform.margin`).
LESIONS = Augmentation(mirror=True, upend=True, rotate=50.0, scale=0.07, brightness=0.15, contrast=0.1)
# What the CIFAR papers do: mirror, and shift by an eighth of the side.
PHOTOS = Augmentation(mirror=True, shift=0.125)
# CIFAR10 as in FedMR; CIFAR100 as in FedMR and FedGELA; TinyImageNet as in FedNH.
CIFAR10 = Augmentation(mirror=True, crop=4)
CIFAR100 = Augmentation(mirror=True, rotate=15.0, crop=4, border="black")
TINY = Augmentation(mirror=True, crop=4, border="black")


def augmented(x: Tensor, how: Augmentation, generator: torch.Generator) -> Tensor:
    """Return new images (B, C, H, W) in [0, 1], drawn from `generator`; `x` is not changed.

    generator: on the CPU for any device of `x`, so that all devices transform images alike.
    Guarantees: equal generator states give equal images, on another device within float noise; all-zero bounds give the
    same images.
    """
    n = len(x)
    if n == 0:
        return x
    draw = (torch.rand(n, 8, generator=generator) * 2 - 1).to(x.device)  # (B, 8) in [-1, 1)
    x = _crop(x, how, generator) if how.crop else x
    out = _move(x, how, draw) if (how.rotate or how.scale or how.shift) else x
    for wanted, column, axis in ((how.mirror, 0, -1), (how.upend, 1, -2)):
        if wanted:
            out = torch.where((draw[:, column] < 0).view(-1, 1, 1, 1), out.flip(axis), out)
    if how.brightness or how.contrast:
        factor = (1 + how.contrast * draw[:, 6]).view(-1, 1, 1, 1)
        added = (how.brightness * draw[:, 7]).view(-1, 1, 1, 1)
        mean = out.mean((1, 2, 3), keepdim=True)
        out = ((out - mean) * factor + mean + added).clamp(0, 1)
    return out


def _crop(x: Tensor, how: Augmentation, generator: torch.Generator) -> Tensor:
    pad = [how.crop] * 4
    wide = torch.nn.functional.pad(x, pad, mode="reflect" if how.border == "mirror" else "constant")
    corner = torch.randint(0, 2 * how.crop + 1, (len(x), 2), generator=generator).to(x.device)
    rows = corner[:, :1] + torch.arange(x.shape[-2], device=x.device)  # (B, H)
    columns = corner[:, 1:] + torch.arange(x.shape[-1], device=x.device)  # (B, W)
    image = torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(x.shape[1], device=x.device).view(1, -1, 1, 1)
    return wide[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _move(x: Tensor, how: Augmentation, draw: Tensor) -> Tensor:
    """Rotate, scale and shift each image in one bilinear resampling."""
    angle = torch.deg2rad(how.rotate * draw[:, 2])
    zoom = 1 / (1 + how.scale * draw[:, 3])
    cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
    moved = 2 * how.shift * draw[:, 4:6]  # the grid is 2 wide
    top = torch.stack([cos, -sin, moved[:, 0]], 1)
    bottom = torch.stack([sin, cos, moved[:, 1]], 1)
    theta = torch.stack([top, bottom], 1)  # (B, 2, 3)
    grid = torch.nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
