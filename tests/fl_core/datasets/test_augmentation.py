"""Random crops after padding: whole pixels, inside the padded image, decided by the generator alone."""

from __future__ import annotations

import pytest
import torch

from fl_core.datasets.augmentation import CIFAR10, CIFAR100, TINY, Augmentation, augmented


@pytest.mark.parametrize("border", ["mirror", "black"])
def test_a_crop_is_a_window_of_the_padded_image(border: str) -> None:
    x = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    out = augmented(x, Augmentation(crop=2, border=border), torch.Generator().manual_seed(7))
    wide = torch.nn.functional.pad(x, [2] * 4, mode="reflect" if border == "mirror" else "constant")
    found = set()
    for image, big in zip(out, wide, strict=True):
        at = [(r, c) for r in range(5) for c in range(5) if torch.equal(image, big[:, r : r + 8, c : c + 8])]
        assert at
        found.add(at[0])
    assert len(found) > 15  # of 25 corners
    again = augmented(x, Augmentation(crop=2, border=border), torch.Generator().manual_seed(7))
    assert torch.equal(out, again)


def test_the_papers_augmentations() -> None:
    assert (CIFAR10.crop, CIFAR10.border, CIFAR10.mirror, CIFAR10.rotate) == (4, "mirror", True, 0)
    assert (CIFAR100.crop, CIFAR100.border, CIFAR100.mirror, CIFAR100.rotate) == (4, "black", True, 15)
    assert (TINY.crop, TINY.border, TINY.mirror, TINY.rotate) == (4, "black", True, 0)
