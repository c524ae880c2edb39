"""The difference of two models' macro AUC on the same images, and its variance, without a model of the scores.

Let c be the classes with at least two images, m_c the number of images of class c and n_c that of all others. Let D be
the difference (first - second) of an image's placements among the images that it is compared with. Then

    difference = 1/C sum_c (A_c(first) - A_c(second))
    h(i) = 1/C ( D_g(i) / m_g + sum_{c != g} D_c(i) / n_c )      g the class of i
    variance = sum_g m_g S_g^2                                   S_g^2 the sample variance of h over the images of g

For two classes, this is the variance of DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988. For more classes, it
takes into account that all areas use the same images. It needs each image's scores, so each hospital computes it. Only
sums over hospitals of n (number of images), n d and n^2 v leave. The mean of the hospitals' differences, weighted by
images, has the variance sum n^2 v / (sum n)^2. No area contains pairs of images of two hospitals.

With L labels at once, each known for some images, an image is on one of the two sides of each label:

    difference = 1/L sum_l (A_l(first) - A_l(second))
    h(i) = 1/L sum_l (D_l(i) - its mean over the side of i) / sqrt(k (k - 1))      k the images on the side of i
    variance = sum_i h(i)^2

For one label, this is the same as above.
"""

from __future__ import annotations

from typing import NamedTuple

from fl_core.tensors import Tensor, torch
from fl_core.types.targets import FOUND, NOT_FOUND, UNKNOWN, is_multi_label

LEAST = 2
"""Minimum number of images of a class; with fewer there is no variance."""


class PairedAuc(NamedTuple):
    """The difference first - second of macro AUC, its variance, and the numbers of images and classes."""

    difference: float
    variance: float
    images: int
    classes: int


def paired_auc(first: Tensor, second: Tensor, labels: Tensor) -> PairedAuc | None:
    """Compare two models' scores (n, C) on images with `labels` (n,) or (n, C); a higher score is a likelier class.

    None if fewer than two classes have two images, if no label was both found in two images and not found in two, or if
    a score is NaN.
    """
    first, second = first.double(), second.double()
    if bool(torch.isnan(first).any()) or bool(torch.isnan(second).any()):
        return None
    if is_multi_label(labels):
        return _of_labels(first, second, labels)
    counts = torch.bincount(labels, minlength=first.shape[1])
    classes = torch.nonzero(counts >= LEAST).flatten().tolist()
    if len(classes) < LEAST:
        return None
    kept = (counts >= LEAST)[labels]
    first, second, labels = first[kept], second[kept], labels[kept]
    influence, difference = torch.zeros(len(labels), dtype=torch.float64), 0.0
    for c in classes:
        mine = labels == c
        m, n = int(mine.sum()), int((~mine).sum())
        above = _placements(first[:, c], mine) - _placements(second[:, c], mine)
        influence += above / torch.where(mine, m, n)
        difference += float(above[mine].mean())
    influence /= len(classes)
    variance = sum(float((labels == c).sum()) * float(influence[labels == c].var(unbiased=True)) for c in classes)
    return PairedAuc(difference / len(classes), variance, len(labels), len(classes))


def _of_labels(first: Tensor, second: Tensor, labels: Tensor) -> PairedAuc | None:
    sizes = torch.stack([(labels == side).sum(0) for side in (FOUND, NOT_FOUND)])
    counted = torch.nonzero((sizes >= LEAST).all(0)).flatten().tolist()
    if not counted:
        return None
    influence, difference = torch.zeros(len(labels), dtype=torch.float64), 0.0
    for label in counted:
        labelled = labels[:, label] != UNKNOWN
        positive = labels[labelled, label] == FOUND
        above = _placements(first[labelled, label], positive) - _placements(second[labelled, label], positive)
        difference += float(above[positive].mean())
        for side in (positive, ~positive):
            k = int(side.sum())
            above[side] = (above[side] - above[side].mean()) / (k * (k - 1)) ** 0.5
        influence[labelled] += above
    images = int((labels[:, counted] != UNKNOWN).any(1).sum())
    return PairedAuc(
        difference / len(counted), float(influence.square().sum()) / len(counted) ** 2, images, len(counted)
    )


def _placements(scores: Tensor, mine: Tensor) -> Tensor:
    """Return the placement of each image; ties count half.

    For an image of the class, it is the share of other images with a lower score; for any other image, the share of
    images of the class with a higher score.
    """
    placements = torch.empty(len(scores), dtype=torch.float64)
    for group, others, sign in ((mine, ~mine, 1.0), (~mine, mine, -1.0)):
        ordered = torch.sort(others_scores := sign * scores[others]).values
        group_scores = sign * scores[group]
        below = torch.searchsorted(ordered, group_scores, right=False) + torch.searchsorted(
            ordered, group_scores, right=True
        )
        placements[group] = below.double() / (2 * len(others_scores))
    return placements
