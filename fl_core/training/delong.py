"""Two models on the same images: the difference of their macro AUC and its variance, without a model of the scores.

With the classes c that have two images or more, m_c images of each and n_c others, and D = (first - second) of the
placements of an image i among those that it is ordered against,

    difference = 1/C sum_c (A_c(first) - A_c(second))
    h(i) = 1/C ( D_g(i) / m_g + sum_{c != g} D_c(i) / n_c )      g the class of i
    variance = sum_g m_g S_g^2                                   S_g^2 the sample variance of h over the images of g

which of two classes is that of DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988; of more it counts that the same
images are in all areas. It needs each image's scores, so it is computed where the images are. What leaves is summed
over hospitals: of each n (its images), n d and n^2 v, so that the mean of the hospitals' differences, weighted by
images, has the variance sum n^2 v / (sum n)^2. Pairs of images of two hospitals are in no area.

Of L labels at once, each known of some images, an image may be on either side of each:

    difference = 1/L sum_l (A_l(first) - A_l(second))
    h(i) = 1/L sum_l (D_l(i) - its mean over the side of i) / sqrt(k (k - 1))      k the images on the side of i
    variance = sum_i h(i)^2

which of one label is the same.
"""

from __future__ import annotations

from typing import NamedTuple

from fl_core.tensors import Tensor, torch
from fl_core.types.targets import FOUND, NOT_FOUND, UNKNOWN, is_multi_label

LEAST = 2
"""Images of a class: fewer have no variance."""


class PairedAuc(NamedTuple):
    """The difference first - second of macro AUC, its variance, and on how many images of how many classes."""

    difference: float
    variance: float
    images: int
    classes: int


def paired_auc(first: Tensor, second: Tensor, labels: Tensor) -> PairedAuc | None:
    """Compare two models' scores (n, C), of each class the higher the likelier, on images of `labels` (n,) or (n, C).

    None where fewer than two classes have two images, no label was found in two and not found in two, or a score is
    NaN.
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
    """Return of each image of a class the share of others below it, and of each other the share of the class above it.

    Ties count half.
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
