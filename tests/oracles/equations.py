"""Slow answers that are obviously right, for the tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Vector = Sequence[float]


def slow_intra(
    z: Tensor, y: Tensor, *, code: bool = False, literal_std: bool = False, eps: float = 1e-8, mean: bool = False
) -> Tensor:
    """FedMR's L_intra class by class, with the d x d matrices; mean: of their squared entries, in place of the sum."""
    total, classes, examples = z.sum() * 0, 0, 0
    for c in y.unique().tolist():
        x = z[y == c]
        n, d = x.shape
        if n < 2:
            continue
        zh = (x - x.mean(0)) / (x.var(0, unbiased=True) + eps).sqrt()
        product = zh.T @ zh
        classes, examples = classes + 1, examples + n
        if code:
            total = total + sum(product[i, j] ** 2 for i in range(d) for j in range(d) if i != j) / (d * (d - 1))
        else:
            m = product / (n - 1) * (n / (n - 1) if literal_std else 1.0)
            total = total + (m.square().mean() if mean else m.square().sum())
    return total / max(1, examples if code else classes)


def slow_inter(
    z: Tensor, y: Tensor, g: Tensor, known: list[bool], negatives: list[bool], no_margin: bool = False
) -> Tensor:
    """FedMR's L_inter pair by pair, `own_sample`."""
    pairs = []
    for i in y.unique().tolist():
        for j in range(len(g)):
            if j == i or not (known[i] and known[j] and negatives[j]):
                continue
            own = (z[y == i] - g[i]).norm(dim=1)
            pairs.append(own.mean() if no_margin else (own - (z[y == i] - g[j]).norm(dim=1)).clamp_min(0).mean())
    return torch.stack(pairs).mean() if pairs else z.sum() * 0


def slow_inter_paired(z: Tensor, y: Tensor, g: Tensor, known: list[bool], negatives: list[bool]) -> Tensor:
    """FedMR's L_inter pair by pair as printed: sample n of class i beside sample n of class j."""
    pairs = []
    for i in y.unique().tolist():
        for j in y.unique().tolist():
            if j == i or not (known[i] and known[j] and negatives[j]):
                continue
            mine, theirs = (z[y == i] - g[i]).norm(dim=1), (z[y == j] - g[j]).norm(dim=1)
            m = min(len(mine), len(theirs))
            pairs.append((mine[:m] - theirs[:m]).clamp_min(0).mean())
    return torch.stack(pairs).mean() if pairs else z.sum() * 0


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(a: Vector) -> list[float]:
    return [x / math.sqrt(dot(a, a)) for x in a]


def mean(rows: Sequence[Vector]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def softmax(logits: Vector) -> list[float]:
    return [math.exp(g) / sum(math.exp(other) for other in logits) for g in logits]


def slow_ce(logits: Vector, y: int) -> float:
    return -math.log(softmax(logits)[y])


def slow_scaling(counts: Vector, alpha: float, soft: bool) -> list[float]:
    """FedRS's a_c, as printed or as the authors' code has it."""
    if soft:
        return [alpha + (1 - alpha) * n / max(counts) for n in counts]
    return [1.0 if n > 0 else alpha for n in counts]


def slow_restricted(w: Sequence[Vector], h: Vector, y: int, a: Vector) -> tuple[float, list[list[float]]]:
    """FedRS's loss of one example, and its gradient by the rows of the head: a_c (p_c - [y = c]) h."""
    scaled = [factor * dot(row, h) for factor, row in zip(a, w, strict=True)]
    p = softmax(scaled)
    return slow_ce(scaled, y), [[a[c] * (p[c] - (c == y)) * x for x in h] for c in range(len(w))]


def slow_frame(basis: Sequence[Vector]) -> list[list[float]]:
    """FedGELA's M = sqrt(C/(C-1)) U (I - 11^T/C), class by class; basis: the columns of U."""
    size = len(basis)
    return [[math.sqrt(size / (size - 1)) * (u - m) for u, m in zip(b, mean(basis), strict=True)] for b in basis]


def slow_adapted_ce(z: Vector, y: int, frame: Sequence[Vector], counts: Vector, scale: float) -> float:
    """FedGELA's loss of one example: CE of s h^T M diag(phi), phi_c = C n_c / n."""
    phi = [len(counts) * n / sum(counts) for n in counts]
    return slow_ce([scale * phi[c] * dot(unit(z), frame[c]) for c in range(len(frame))], y)


def slow_prototype_step(w: Vector, silos: Sequence[tuple[float, Sequence[Vector]]], rho: float) -> list[float]:
    """FedNH's equations 3 and 4 for one class; silos: their counts, and the features of these examples."""
    reported = [(n, unit(mean([unit(z) for z in rows]))) for n, rows in silos if n > 0]
    if not reported:
        return list(w)
    total = sum(n for n, _ in reported)
    a = unit([sum(n * m[i] for n, m in reported) / total for i in range(len(w))])
    return unit([rho * old + (1 - rho) * new for old, new in zip(w, a, strict=True)])


def slow_kd(o: Vector, o_p: Vector, tau: float) -> float:
    """FedPHP's tau^2 KL(teacher at tau || student at tau) of one example."""
    p, q = softmax([v / tau for v in o_p]), softmax([v / tau for v in o])
    return tau**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def slow_inherited(models: Vector, expected: float, macro: float = 0.9) -> list[float]:
    """FedPHP's private model, of one number, after each round that its silo took part in."""
    path, private = list[float](), 0.0
    for n, model in enumerate(models, start=1):
        mu = min(max(macro * (n - 1) / expected, 0.0), 1.0)
        private = mu * private + (1 - mu) * model
        path.append(private)
    return path


def slow_hpc(z: Vector, prototypes: Sequence[Sequence[Vector]], c: int, m: int, alpha: float, tau: float) -> float:
    """FedCD's contrast of an example of fine class m of class c; prototypes by class."""
    psi = [[math.exp(dot(unit(z), unit(p)) / tau) for p in rows] for rows in prototypes]
    same = sum(v for i, v in enumerate(psi[c]) if i != m)
    other = sum(v for k, row in enumerate(psi) if k != c for v in row)
    return -math.log(psi[c][m] / (psi[c][m] + alpha * same + (1 - alpha) * other))


def slow_dkd(teacher: Vector, student: Vector, y: int, xi: float) -> float:
    """FedCD's distillation: KL of (own class, rest), and xi times that of the other classes among themselves."""
    t, s = softmax(teacher), softmax(student)

    def kl(a: Vector, b: Vector) -> float:
        return sum(p * math.log(p / q) for p, q in zip(a, b, strict=True))

    own = kl([t[y], 1 - t[y]], [s[y], 1 - s[y]])
    rest = [[p / (1 - probabilities[y]) for k, p in enumerate(probabilities) if k != y] for probabilities in (t, s)]
    return own + xi * kl(*rest)


def slow_class_scores(z: Vector, phi: Sequence[Vector], fine: int) -> list[float]:
    """FedCD's z phi Wagg: the sum over each class's fine logits."""
    return [sum(dot(z, row) for row in phi[c * fine : (c + 1) * fine]) for c in range(len(phi) // fine)]


def slow_bpr(z: Sequence[Vector], y: Sequence[int], phi: Sequence[Vector], fine: int) -> float:
    """FedCD's regulariser: the loss of each class's mean feature under the global head, averaged over classes."""
    means = {c: mean([row for row, label in zip(z, y, strict=True) if label == c]) for c in sorted(set(y))}
    return sum(slow_ce(slow_class_scores(m, phi, fine), c) for c, m in means.items()) / len(means)


def slow_class_level_mean(heads: Sequence[Sequence[Vector]], prototypes: Sequence[Vector]) -> list[list[float]]:
    """FedCD's head: each fine class's rows weighed by exp of the share that their head gives its own prototype."""
    merged = []
    for j, p in enumerate(prototypes):
        weight = [math.exp(softmax([dot(p, row) for row in head])[j]) for head in heads]
        rows = [head[j] for head in heads]
        merged.append([dot(weight, column) / sum(weight) for column in zip(*rows, strict=True)])
    return merged


def slow_class_sums(vectors: Tensor, y: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """Sum vectors per class, one example at a time."""
    total, count = torch.zeros(n_classes, vectors.shape[1]), torch.zeros(n_classes)
    for v, c in zip(vectors, y.tolist(), strict=True):
        total[c] += v
        count[c] += 1
    return total, count


def slow_lower_median(values: list[float]) -> float:
    """Take away the smallest and the largest until one is left, or the lower of two."""
    left = sorted(values)
    while len(left) > 2:
        left = left[1:-1]
    return left[0]


def slow_trimmed_mean(values: list[float], left_out: int) -> float:
    """Sort, leave out at both ends, take the mean."""
    kept = sorted(values)[left_out : len(values) - left_out]
    return sum(kept) / len(kept)


def slow_geometric_median(points: list[list[float]], weights: list[float], steps: int, nu: float) -> list[float]:
    """Weiszfeld's steps from the weighed mean, point by point."""
    shares = [w / sum(weights) for w in weights]
    for _ in range(steps):
        middle = [sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in range(len(points[0]))]
        closer = [
            w / max(sum((a - b) ** 2 for a, b in zip(p, middle, strict=True)) ** 0.5, nu)
            for w, p in zip(weights, points, strict=True)
        ]
        shares = [c / sum(closer) for c in closer]
    return [sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in range(len(points[0]))]


def units(values: list[float], bits: int) -> int:
    """Sum the integers nearest to v * 2^bits with Python's exact integers (ties to even)."""
    return sum(round(v * 2**bits) for v in values)


def slow_vacant_kl(f: Vector, g: Vector, counts: Vector) -> float:
    """FedVLS's distillation of one example: KL between the two softmaxes over the classes without an example."""
    vacant = [c for c, n in enumerate(counts) if n <= 0]
    if not vacant:
        return 0.0
    student, teacher = softmax([f[c] for c in vacant]), softmax([g[c] for c in vacant])
    return sum(p * math.log(p / q) for p, q in zip(teacher, student, strict=True))


def slow_suppression(f: Sequence[Vector], y: Sequence[int], counts: Vector) -> float:
    """FedVLS's logit suppression of a batch, class by class and example by example."""
    total = 0.0
    for c, n in enumerate(counts):
        if n <= 0:
            continue
        share = n / sum(m for m in counts if m > 0)
        lowered = [math.exp(row[c]) / (len(counts) * share) if y[i] != c else 1.0 for i, row in enumerate(f)]
        total += share * math.log(sum(lowered) / len(lowered))
    return total


def slow_prior_ce(f: Vector, y: int, counts: Vector, gamma: float) -> float:
    """Cross entropy after gamma log(share) was added to each logit: of the classes that have one, unless gamma = 0."""
    weights = [(n / sum(counts)) ** gamma if gamma else 1.0 for n in counts]
    return -math.log(weights[y] * math.exp(f[y]) / sum(w * math.exp(g) for w, g in zip(weights, f, strict=True)))


def slow_vls(
    f: Sequence[Vector],
    g: Sequence[Vector],
    y: Sequence[int],
    counts: Vector,
    weights: tuple[float, float, float],
    single: bool,
) -> float:
    """FedVLS's objective of a batch; weights: lam, mu, gamma   single: suppression of every example alone."""
    lam, mu, gamma = weights
    rows = range(len(f))
    terms = [slow_prior_ce(f[i], y[i], counts, gamma) + lam * slow_vacant_kl(f[i], g[i], counts) for i in rows]
    if single:
        lowered = mean([[slow_suppression([f[i]], [y[i]], counts)] for i in rows])[0]
    else:
        lowered = slow_suppression(f, y, counts)
    return sum(terms) / len(terms) + mu * lowered


def slow_personal_logits(
    z: Vector, averaged: tuple[Sequence[Vector], Vector], private: tuple[Sequence[Vector], Vector], held: Sequence[bool]
) -> list[float]:
    """FedLoGe's personal logits: the averaged head's rows times the private ones' lengths, plus the private head."""
    found = []
    for c, there in enumerate(held):
        length = math.sqrt(dot(private[0][c], private[0][c]))
        own = dot(private[0][c], z) + private[1][c]
        found.append(length * dot(averaged[0][c], z) + averaged[1][c] + own if there else -math.inf)
    return found


def slow_class_covariance(means: Sequence[Vector], counts: Vector) -> list[list[float]]:
    """FedCOF's covariance of one class from its means at the silos that have it, and their counts: two at least."""
    total, size = sum(counts), len(means[0])
    centre = [sum(n * m[i] for n, m in zip(counts, means, strict=True)) / total for i in range(size)]
    found = [[0.0] * size for _ in range(size)]
    for n, m in zip(counts, means, strict=True):
        for i in range(size):
            for j in range(size):
                found[i][j] += n * (m[i] - centre[i]) * (m[j] - centre[j]) / (len(means) - 1)
    return found


def slow_delong(first: Vector, second: Vector, labels: Sequence[int]) -> tuple[float, float]:
    """Return AUC(first) - AUC(second) of two classes and the variance of DeLong et al. (1988), by double loops."""

    def psi(x: float, y: float) -> float:
        return 1.0 if y < x else 0.5 if y == x else 0.0

    ones, zeros = [i for i, y in enumerate(labels) if y], [i for i, y in enumerate(labels) if not y]
    rows = [sum(psi(first[i], first[j]) - psi(second[i], second[j]) for j in zeros) / len(zeros) for i in ones]
    columns = [sum(psi(first[i], first[j]) - psi(second[i], second[j]) for i in ones) / len(ones) for j in zeros]
    variance = 0.0
    for values in (rows, columns):
        centre = sum(values) / len(values)
        variance += sum((v - centre) ** 2 for v in values) / (len(values) - 1) / len(values)
    return sum(rows) / len(rows), variance


def slow_gcv(z: np.ndarray, target: np.ndarray, weights: np.ndarray, ridge: float) -> float:
    """Return the generalised cross-validation error of standardised ridge from records, by their hat matrix (n, n).

    z: (n, d)   target: (n, C)   weights: (n,), of the squared errors: the mean leverage is a mean over them.
    """
    n, root = len(z), np.sqrt(weights)[:, None]
    mean = weights @ z / weights.sum()
    scaled = (z - mean) / np.sqrt(weights @ (z - mean) ** 2 / weights.sum())
    rows = np.concatenate((scaled, np.ones((n, 1))), axis=1) * root
    penalty = np.diag([ridge * weights.sum()] * z.shape[1] + [0.0])
    hat = rows @ np.linalg.inv(rows.T @ rows + penalty) @ rows.T
    residuals = target * root - hat @ (target * root)
    effective = weights.sum() ** 2 / (weights**2).sum()
    left = 1 - np.trace(hat) / effective
    return float((residuals**2).sum() / n / left**2) if left > 0 else float("inf")
