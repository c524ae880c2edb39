"""Whole rounds of methods, from their papers' equations: slow, on one small network, in float64, apart from fl_core.

A silo has examples x (n, 1, 8, 8), y (n,) and, for each round, the batches of each pass over them (positions). The
network is N(x) -> z = P N(x) + p -> logits z W^T + b, N(x) being pixels at mean 0 and variance 1 in each image. Every
function begins with the network's weights and returns all that the server, and what the silos, have after the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

Weights = dict[str, Tensor]
Loss = Callable[[Weights, Tensor, Tensor], Tensor]
P, p, W, b = "projection.0.weight", "projection.0.bias", "head.weight", "head.bias"
LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-3
CLASSES = 4


@dataclass
class Silo:
    """One silo's examples, and its batches by round and pass."""

    x: Tensor
    y: Tensor
    batches: list[list[list[Tensor]]] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def counts(self) -> Tensor:
        return torch.tensor([float((self.y == c).sum()) for c in range(CLASSES)])


Silos = Sequence[Silo]


def features(w: Weights, x: Tensor) -> Tensor:
    h = x.flatten(1)
    h = (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    return h @ w[P].T + w[p]


def logits(w: Weights, x: Tensor) -> Tensor:
    return features(w, x) @ w[W].T + w[b]


def descend(
    start: Weights,
    silo: Silo,
    batches: Sequence[Tensor],
    loss: Loss,
    *,
    shift: Mapping[str, Tensor] | None = None,
    plain: Sequence[str] = (),
    momentum: float = MOMENTUM,
) -> Weights:
    """Take a step of SGD on each batch: v <- m v + (gradient + decay w + shift), w <- w - lr v; v = 0 at the start.

    plain: weights that have neither momentum nor decay
    """
    w = {name: value.clone().requires_grad_() for name, value in start.items()}
    v = {name: torch.zeros_like(value) for name, value in start.items()}
    for batch in batches:
        found = torch.autograd.grad(loss(w, silo.x[batch], silo.y[batch]), list(w.values()), allow_unused=True)
        for (name, value), g in zip(list(w.items()), found, strict=True):
            if g is None:
                continue
            move = g + (shift[name] if shift is not None else 0.0)
            if name not in plain:
                move = move + DECAY * value.detach()
            v[name] = move if name in plain else momentum * v[name] + move
            w[name] = (value.detach() - LR * v[name]).requires_grad_()
    return {name: value.detach() for name, value in w.items()}


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    return sum((weight / total * value for value, weight in zip(values, weights, strict=True)), torch.zeros(()))


def averaged(trained: Sequence[Weights], weights: Sequence[float]) -> Weights:
    return {name: mean([w[name] for w in trained], weights) for name in trained[0]}


def rounds_of(start: Weights, silos: Silos, loss_of: Callable[[Weights, Silo, int], Loss], uniform: bool) -> Weights:
    """FedAvg with a loss of its own, made of the received weights and the silo."""
    w = start
    for t in range(len(silos[0].batches)):
        trained = [descend(w, s, s.batches[t][0], loss_of(w, s, t)) for s in silos]
        w = averaged(trained, [1.0 if uniform else float(s.n) for s in silos])
    return w


def ce(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits(w, x), y)


def fedavg(start: Weights, silos: Silos) -> Weights:
    return rounds_of(start, silos, lambda *_: ce, uniform=False)


def fedprox(start: Weights, silos: Silos, mu: float) -> Weights:
    """Li et al. 2020, equation 2: CE + mu/2 ||w - w^t||^2."""

    def loss_of(received: Weights, _: Silo, __: int) -> Loss:
        return lambda w, x, y: ce(w, x, y) + mu / 2 * sum((w[k] - v).square().sum() for k, v in received.items())

    return rounds_of(start, silos, loss_of, uniform=False)


def fedlc(start: Weights, silos: Silos, tau: float) -> Weights:
    """Zhang et al. 2022, equation 8: logits less tau n_c^(-1/4); classes that a silo lacks are not in its sum."""

    def loss_of(_: Weights, silo: Silo, __: int) -> Loss:
        held = silo.counts > 0
        margin = torch.where(held, tau * silo.counts.clamp(min=1.0) ** -0.25, torch.inf)
        return lambda w, x, y: cross_entropy(logits(w, x) - margin, y)

    return rounds_of(start, silos, loss_of, uniform=False)


def fedrs(start: Weights, silos: Silos, alpha: float) -> Weights:
    """Li and Zhan 2021, equations 6 and 7: logits of missing classes times alpha; silos count alike."""

    def loss_of(_: Weights, silo: Silo, __: int) -> Loss:
        a = torch.where(silo.counts > 0, 1.0, alpha)
        return lambda w, x, y: cross_entropy(a * logits(w, x), y)

    return rounds_of(start, silos, loss_of, uniform=True)


def moon(start: Weights, silos: Silos, mu: float, tau: float) -> Weights:
    """Li, He and Song 2021, equations 3 and 4; a silo's first round has no last model and no contrast."""
    w, last = start, dict[int, Weights]()
    for t in range(len(silos[0].batches)):
        trained = []
        for k, s in enumerate(silos):
            own = last.get(k)

            def loss(now: Weights, x: Tensor, y: Tensor, own: Weights | None = own, w: Weights = w) -> Tensor:
                found = ce(now, x, y)
                if own is None:
                    return found
                z, pull, push = features(now, x), features(w, x), features(own, x)
                near = torch.exp(torch.cosine_similarity(z, pull, dim=1) / tau)
                far = torch.exp(torch.cosine_similarity(z, push, dim=1) / tau)
                return found + mu * (-torch.log(near / (near + far))).mean()

            trained.append(descend(w, s, s.batches[t][0], loss))
        last = dict(enumerate(trained))
        w = averaged(trained, [s.n for s in silos])
    return w


def reach(steps: int, momentum: float = MOMENTUM) -> float:
    """How far K steps reach at a constant gradient, in steps without momentum: sum_i (1 - m^(K - i)) / (1 - m)."""
    return sum((1 - momentum ** (steps - i)) / (1 - momentum) for i in range(steps))


def scaffold(start: Weights, silos: Silos, least: int = 0) -> tuple[Weights, Weights, list[Weights]]:
    """Karimireddy et al. 2020, algorithm 1, option II, without momentum; c is the mean of the c_k by sizes.

    least: what the steps of a round count as at least
    """
    w, zero = start, {k: torch.zeros_like(v) for k, v in start.items()}
    c, own = zero, [zero for _ in silos]
    sizes = [float(s.n) for s in silos]
    for t in range(len(silos[0].batches)):
        trained, after = [], []
        for s, mine in zip(silos, own, strict=True):
            shift = {k: c[k] - mine[k] for k in c}
            found = descend(w, s, s.batches[t][0], ce, shift=shift, momentum=0.0)
            steps = max(len(s.batches[t][0]), least)
            trained.append(found)
            after.append({k: mine[k] - c[k] + (w[k] - found[k]) / (LR * steps) for k in c})
        w, own = averaged(trained, sizes), after
        c = averaged(own, sizes)
    return w, c, own


def fednova(start: Weights, silos: Silos) -> Weights:
    """Wang et al. 2020, equations 6 and 7 with the momentum's a_i: tau_eff times the mean of normalised differences.

    Weight decay is part of the gradient there, so that it does not change how far steps reach.
    """
    w, sizes = start, [float(s.n) for s in silos]
    for t in range(len(silos[0].batches)):
        lengths = [reach(len(s.batches[t][0])) for s in silos]
        trained = [descend(w, s, s.batches[t][0], ce) for s in silos]
        d = [{k: (f[k] - w[k]) / a for k in w} for f, a in zip(trained, lengths, strict=True)]
        tau = sum(n * a for n, a in zip(sizes, lengths, strict=True)) / sum(sizes)
        w = {k: w[k] + tau * mean([x[k] for x in d], sizes) for k in w}
    return w


def feddyn(start: Weights, silos: Silos, alpha: float) -> tuple[Weights, Weights]:
    """Acar et al. 2021, algorithm 1, linear terms g_k: min CE - <g_k, w> + alpha_k/2 ||w - cloud||^2.

    alpha_k = alpha over the silo's size by the mean size, once sizes are known: from the second round on. Returns the
    cloud's model and the average of the last round.
    """
    cloud, zero = start, {k: torch.zeros_like(v) for k, v in start.items()}
    drift, gap, n = [zero for _ in silos], zero, len(silos)
    average = start
    size = sum(s.n for s in silos) / n
    for t in range(len(silos[0].batches)):
        trained = []
        for k, s in enumerate(silos):
            strength = alpha / (s.n / size if t else 1.0)
            g = {name: -strength * drift[k][name] for name in cloud}

            def loss(
                now: Weights,
                x: Tensor,
                y: Tensor,
                g: Weights = g,
                cloud: Weights = cloud,
                a: float = strength,
            ) -> Tensor:
                linear = sum((g[name] * now[name]).sum() for name in now)
                near = sum((now[name] - cloud[name]).square().sum() for name in now)
                return ce(now, x, y) - linear + a / 2 * near

            trained.append(descend(cloud, s, s.batches[t][0], loss))
        drift = [{m: d[m] + f[m] - cloud[m] for m in d} for d, f in zip(drift, trained, strict=True)]
        average = averaged(trained, [1.0] * n)
        gap = {m: gap[m] + sum(f[m] - cloud[m] for f in trained) / n for m in gap}
        cloud = {m: average[m] + gap[m] for m in average}
    return cloud, average


def intra(z: Tensor, y: Tensor, form: str, eps: float = 1e-8) -> Tensor:
    """FedMR, equation 3, class by class by its d x d matrix; "mean": over d^2; "code": as the authors' program."""
    terms, examples, d = list[Tensor](), 0, z.shape[1]
    for c in y.unique().tolist():
        rows = z[y == c]
        n = len(rows)
        if n < 2:
            continue
        examples += n
        zh = (rows - rows.mean(0)) / (rows.var(0) + eps).sqrt()
        if form == "code":
            M = zh.T @ zh
            terms.append((M.square().sum() - M.diagonal().square().sum()) / (d * (d - 1)))
        else:
            terms.append((zh.T @ zh / (n - 1)).square().sum())
    if not terms:
        return z.sum() * 0
    if form == "code":
        return sum(terms, torch.zeros(())) / examples
    return sum(terms, torch.zeros(())) / len(terms) / (d * d if form == "mean" else 1)


def inter(z: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """FedMR, equation 4: each example of class i against every other known prototype j."""
    terms = []
    for i in y.unique().tolist():
        for j in range(len(g)):
            if j == i or g[i].isnan().any() or g[j].isnan().any():
                continue
            gap = [(v - g[i]).norm() - (v - g[j]).norm() for v in z[y == i]]
            terms.append(torch.stack([v.clamp(min=0) for v in gap]).mean())
    return torch.stack(terms).mean() if terms else z.sum() * 0


def fedmr(start: Weights, silos: Silos, form: str, mu1: float, mu2: float) -> tuple[Weights, Tensor]:
    """Fan et al. 2023, equation 5 and algorithm 1; prototypes are NaN before anybody has sent any."""
    w, g = start, torch.full((CLASSES, start[P].shape[0]), math.nan)
    for t in range(len(silos[0].batches)):

        def loss(now: Weights, x: Tensor, y: Tensor, g: Tensor = g) -> Tensor:
            z = features(now, x)
            found = cross_entropy(z @ now[W].T + now[b], y)
            return found + mu1 * intra(z, y, form) + (mu2 * inter(z, y, g) if mu2 else 0.0)

        trained = [descend(w, s, s.batches[t][0], loss) for s in silos]
        g = class_means(trained, silos, g)
        w = averaged(trained, [s.n for s in silos])
    return w, g


def contrast(z: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """FedProc, equation 6: -log softmax of cosines at the own class, over classes that have a prototype."""
    there = [c for c in range(CLASSES) if not g[c].isnan().any()]
    terms = []
    for v, c in zip(z, y.tolist(), strict=True):
        if c not in there:
            terms.append(v.sum() * 0)
            continue
        cosines = torch.stack([v @ g[j] / (v.norm() * g[j].norm()) for j in there])
        terms.append(-cosines.log_softmax(0)[there.index(c)])
    return torch.stack(terms).mean()


def class_means(trained: Sequence[Weights], silos: Silos, g: Tensor) -> Tensor:
    """Prototypes: the mean feature of all silos' examples of a class under their own models; others stay."""
    g = g.clone()
    for c in range(CLASSES):
        held = [features(f, s.x[s.y == c]) for f, s in zip(trained, silos, strict=True) if bool((s.y == c).any())]
        if held:
            g[c] = torch.cat(held).mean(0)
    return g


def fedproc(start: Weights, silos: Silos, rounds: int) -> tuple[Weights, Tensor]:
    """Mu et al. 2023, equations 7 to 9: a times the contrast and 1 - a times CE, a = 1 - t/T; CE in the first round."""
    w, g = start, torch.full((CLASSES, start[P].shape[0]), math.nan)
    for t in range(len(silos[0].batches)):
        a = 1 - t / rounds if t else 0.0

        def loss(now: Weights, x: Tensor, y: Tensor, g: Tensor = g, a: float = a) -> Tensor:
            return (1 - a) * ce(now, x, y) + (a * contrast(features(now, x), y, g) if a else 0.0)

        trained = [descend(w, s, s.batches[t][0], loss) for s in silos]
        g = class_means(trained, silos, g)
        w = averaged(trained, [s.n for s in silos])
    return w, g


def fedvls(start: Weights, silos: Silos, lam: float, mu: float) -> Weights:
    """Guo et al. 2025: calibrated CE, the received model's view of vacant classes, and the log-mean-exp suppression."""

    def loss_of(received: Weights, silo: Silo, _: int) -> Loss:
        pi = silo.counts / silo.n
        vacant = [c for c in range(CLASSES) if pi[c] == 0]

        def loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
            f, g = logits(w, x), logits(received, x)
            found = cross_entropy(f + silo.counts.log(), y)
            q, taught = g[:, vacant].softmax(1), f[:, vacant].log_softmax(1)
            found = found + lam * (q * (q.log() - taught)).sum(1).mean()
            for c in range(CLASSES):
                if pi[c] > 0:
                    away = torch.where(y == c, 0.0, f[:, c] - (CLASSES * pi[c]).log())
                    found = found + mu * pi[c] * away.exp().mean().log()
            return found

        return loss

    return rounds_of(start, silos, loss_of, uniform=False)


def feddc(start: Weights, silos: Silos, alpha: float) -> tuple[Weights, Weights]:
    """Gao et al. 2022, equations 4 to 8, variates as released. Returns the cloud's model and the mean of w_k.

    alpha_k = alpha / omega_k, omega_k the silo's size over the mean one, known from the second round on.
    """
    cloud, zero = start, {k: torch.zeros_like(v) for k, v in start.items()}
    n = len(silos)
    h, c_own, c, size = [zero] * n, [zero] * n, zero, sum(s.n for s in silos) / n
    average = start
    for t in range(len(silos[0].batches)):
        trained, after = [], []
        for k, s in enumerate(silos):
            omega = s.n / size if t else 1.0

            def loss(
                now: Weights,
                x: Tensor,
                y: Tensor,
                a: float = alpha / omega,
                h: Weights = h[k],
                cloud: Weights = cloud,
                push: Weights = {m: c[m] / omega - c_own[k][m] for m in c},  # noqa: B006
            ) -> Tensor:
                near = sum((now[m] + h[m] - cloud[m]).square().sum() for m in now)
                return ce(now, x, y) + a / 2 * near + sum((now[m] * push[m]).sum() for m in now)

            batches = s.batches[t][0]
            found = descend(cloud, s, batches, loss)
            length = LR * reach(len(batches))
            trained.append(found)
            after.append({m: c_own[k][m] - c[m] / omega - (found[m] - cloud[m]) / length for m in c})
        h = [{m: d[m] + f[m] - cloud[m] for m in d} for d, f in zip(h, trained, strict=True)]
        c_own = after
        c = {m: sum(s.n / size * v[m] for s, v in zip(silos, c_own, strict=True)) / n for m in c}
        average = averaged(trained, [1.0] * n)
        cloud = {m: average[m] + sum(d[m] for d in h) / n for m in average}
    return cloud, average


def unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True)


def fedgela(start: Weights, silos: Silos, frame: Tensor, scale: float) -> Weights:
    """Fan, Yao et al. 2023, equations 4 and 5: CE(phi_k scale <h, w_c>), h of length 1, phi_k = C n_k^c / n_k."""

    def loss_of(_: Weights, silo: Silo, __: int) -> Loss:
        phi = CLASSES * silo.counts / silo.n
        return lambda w, x, y: cross_entropy(phi * scale * (unit(features(w, x)) @ frame.T), y)

    return rounds_of(start, silos, loss_of, uniform=False)


def fednh(start: Weights, silos: Silos, rows: Tensor, scale: float, rho: float) -> tuple[Weights, Tensor, Tensor]:
    """Dai et al. 2023, equations 2 to 4: a trained scale before unit features; prototypes turn by rho.

    Silos count alike.
    """
    w = {**start, "s": torch.tensor([scale])}
    for t in range(len(silos[0].batches)):

        def loss(now: Weights, x: Tensor, y: Tensor, rows: Tensor = rows) -> Tensor:
            return cross_entropy(now["s"] * (unit(features(now, x)) @ rows.T), y)

        trained = [descend(w, s, s.batches[t][0], loss) for s in silos]
        turned = []
        for c in range(CLASSES):
            a = torch.zeros_like(rows[c])
            for f, s in zip(trained, silos, strict=True):
                if len(own := s.x[s.y == c]):
                    mu = unit(features(f, own)).sum(0)
                    a = a + len(own) * mu / mu.norm()
            moved = rho * rows[c] + (1 - rho) * a / a.norm()
            turned.append(moved / moved.norm())
        rows = torch.stack(turned)
        w = averaged(trained, [1.0] * len(silos))
    return {k: v for k, v in w.items() if k != "s"}, w["s"], rows


# ---- FedGen: Zhu, Hong and Zhou 2021, equations 4 to 7, and Adam as Kingma and Ba 2015 print it ----


@dataclass
class GeneratorOptions:
    alpha: float
    beta: float
    made: int
    steps: int
    lr: float
    decay: float


def generated(v: Weights, y: Tensor, e: Tensor, running: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """G(y, e) and the pre-activations; running: mean and variance in place of the batch's own."""
    h = torch.cat([e, torch.eye(CLASSES)[y]], 1) @ v["first.weight"].T + v["first.bias"]
    at, var = (h.mean(0), h.var(0, correction=0)) if running is None else running
    n = (h - at) / (var + 1e-5).sqrt() * v["norm.weight"] + v["norm.bias"]
    return n.clamp(min=0) @ v["last.weight"].T + v["last.bias"], h


def fedgen(
    start: Weights,
    generator: Weights,
    silos: Silos,
    given: GeneratorOptions,
    draw: Callable[[int, int | None], tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor]]],
) -> tuple[Weights, Weights]:
    """The server sees every head and all counts. draw(t, silo): labels of those that exist and noise (n, size).

    silo: None for the server's own draws. From the second round on heads learn generated features and are steered.
    """
    w, v = start, {k: x.clone() for k, x in generator.items()}
    trainable = [k for k in v if "running" not in k and "num" not in k]
    first, second = ({k: torch.zeros_like(v[k]) for k in trainable} for _ in range(2))
    taken = 0
    known = torch.zeros(CLASSES)
    for t in range(len(silos[0].batches)):
        trained = []
        for k, s in enumerate(silos):
            labels, noise = draw(t, k)
            a, c = (max(1e-4, x * 0.98**t) if t else 0.0 for x in (given.alpha, given.beta))

            def made(y: Tensor, noise: Callable[[int], Tensor] = noise, v: Weights = v) -> Tensor:
                return generated(v, y, noise(len(y)), (v["norm.running_mean"], v["norm.running_var"]))[0].detach()

            def loss(
                now: Weights,
                x: Tensor,
                y: Tensor,
                a: float = a,
                c: float = c,
                made: Callable[[Tensor], Tensor] = made,
                labels: Callable[[Tensor], Tensor] = labels,
                known: Tensor = known,
                batch: int = 5,
            ) -> Tensor:
                g = logits(now, x)
                found = cross_entropy(g, y)
                if c:
                    q = (made(y) @ now[W].T + now[b]).log_softmax(1).detach()
                    found = found + c * kl_div(g.log_softmax(1), q, reduction="batchmean", log_target=True)
                if a:
                    fake = labels(known)
                    found = found + given.made / batch * a * cross_entropy(made(fake) @ now[W].T + now[b], fake)
                return found

            trained.append(descend(w, s, s.batches[t][0], loss))
        counts = torch.stack([s.counts for s in silos])
        known, share = counts.sum(0), counts / counts.sum(0)
        labels, noise = draw(t, None)
        rate = given.lr * 0.98**t
        for _ in range(given.steps):
            y = labels(known)
            e = noise(given.made)
            live = {k: v[k].clone().requires_grad_() for k in trainable}
            z, h = generated({**v, **live}, y, e)
            total = torch.zeros(())
            for f, own in zip(trained, share, strict=True):
                total = total + (own[y] * cross_entropy(z @ f[W].T + f[b], y, reduction="none")).mean()
            apart = (e[:, None] - e[None]).square().mean(2) * (z[:, None] - z[None]).abs().mean(2)
            total = total + torch.exp(-apart.mean())
            taken += 1
            for k, g in zip(trainable, torch.autograd.grad(total, list(live.values())), strict=True):
                slope = g + given.decay * v[k]
                first[k] = 0.9 * first[k] + 0.1 * slope
                second[k] = 0.999 * second[k] + 0.001 * slope.square()
                up, down = first[k] / (1 - 0.9**taken), (second[k] / (1 - 0.999**taken)).sqrt() + 1e-8
                v[k] = v[k] - rate * up / down
            v["norm.running_mean"] = 0.9 * v["norm.running_mean"] + 0.1 * h.detach().mean(0)
            v["norm.running_var"] = 0.9 * v["norm.running_var"] + 0.1 * h.detach().var(0)
        w = averaged(trained, [s.n for s in silos])
    return w, v


# ---- CReFF: Shang et al. 2022, equations 4 to 8 ----


def class_slopes(w: Tensor, bias: Tensor, z: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """The gradient of the mean CE of features z of class c in a linear head."""
    w, bias = w.detach().requires_grad_(), bias.detach().requires_grad_()
    loss = cross_entropy(z @ w.T + bias, torch.full((len(z),), c))
    first, second = torch.autograd.grad(loss, (w, bias), create_graph=True)
    return first, second


def creff(
    start: Weights,
    silos: Silos,
    made: Tensor,
    *,
    steps: int,
    rate: float,
    epochs: int,
    psi_rate: float,
    draw: Callable[[int], tuple[tuple[Tensor, Tensor], list[list[Tensor]]]],
) -> tuple[Weights, Tensor, tuple[Tensor, Tensor]]:
    """Match the features made (C, m, d) to the silos' mean gradients, then train a fresh head on them.

    draw(t): the head's start and the batches of each of its epochs (positions among all C m features)
    """
    w, psi = start, (start[W], start[b])
    for t in range(len(silos[0].batches)):
        wanted = []
        for c in range(CLASSES):
            own = [class_slopes(*psi, features(w, s.x[s.y == c]), c) for s in silos if bool((s.y == c).any())]
            wanted.append([torch.stack([g[i] for g in own]).mean(0).detach() for i in (0, 1)])
        for _ in range(steps):
            z = made.clone().requires_grad_()
            gap = torch.zeros(())
            for c in range(CLASSES):
                (A, a), (B, other) = class_slopes(*psi, z[c], c), wanted[c]
                rows = [*zip(A, B, strict=True), (a, other)]
                gap = gap + sum(1 - (x @ y) / (x.norm() * y.norm() + 1e-6) for x, y in rows)
            made = made - rate * torch.autograd.grad(gap, z)[0]
        (Q, q), order = draw(t)
        flat, y = made.flatten(0, 1), torch.arange(CLASSES).repeat_interleave(made.shape[1])
        for batches in order[:epochs]:
            for batch in batches:
                Q, q = Q.detach().requires_grad_(), q.detach().requires_grad_()
                slopes = torch.autograd.grad(cross_entropy(flat[batch] @ Q.T + q, y[batch]), (Q, q))
                Q, q = Q - psi_rate * slopes[0], q - psi_rate * slopes[1]
        w = averaged([descend(w, s, s.batches[t][0], ce) for s in silos], [s.n for s in silos])
        psi = (Q.detach(), q.detach())
    return w, made, psi


# ---- FedCD: Long et al. 2023 ----


@dataclass
class FedcdOptions:
    fine: int
    lam: float
    gamma: float
    alpha: float
    tau: float
    xi: float


def fedcd_server(
    heads: Sequence[Tensor], prototypes: Sequence[Tensor], counts: Sequence[Tensor], head: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge prototypes (CM, d) by the examples that they stand for, then heads, row by row, by what each recognises.

    A fine class that nobody holds, now or before (a prototype of zeros), keeps its row and prototype.
    """
    merged_prototypes, merged_head = before.clone(), head.clone()
    for j in range(len(head)):
        if total := float(sum(n[j] for n in counts)):
            merged_prototypes[j] = sum(n[j] * q[j] for n, q in zip(counts, prototypes, strict=True)) / total
    for j in range(len(head)):
        if not merged_prototypes[j].any():
            continue
        scores = [float((phi @ merged_prototypes[j]).softmax(0)[j]) for phi in heads]
        v = torch.tensor(scores).exp()
        merged_head[j] = sum(x * phi[j] for x, phi in zip(v / v.sum(), heads, strict=True))
    return merged_head, merged_prototypes


def fedcd_silo(
    start: Weights,
    phi: Tensor,
    points: Tensor,
    stand_for: Tensor,
    silo: Silo,
    batches: Sequence[Tensor],
    mu: float,
    given: FedcdOptions,
) -> Weights:
    """Train body, fine head "phi" and prototypes "P" (CM, d) of one silo, where all its classes have prototypes.

    points: of zeros where nobody has that fine class   stand_for: the examples of each, 0 where none is appended.
    Equations 2 to 10: the mean over the silo's examples and the prototypes, each with the examples that it stands for.
    """
    own, M = {**start, "phi": phi, "P": points}, given.fine
    joined, known = float(silo.n + stand_for.sum()), [bool(q.any()) for q in points]

    def class_logits(z: Tensor, head: Tensor) -> Tensor:
        return (z @ head.T).reshape(len(z), CLASSES, M).sum(2)

    def each(w: Weights, z: Tensor, y: Tensor, fine: Tensor) -> Tensor:
        found = class_logits(z, w["phi"])
        total = mu * cross_entropy(found, y, reduction="none")
        rows = []
        for v, c, t in zip(z, y.tolist(), fine.tolist(), strict=True):
            cosines = [v @ q / (v.norm() * q.norm()) if there else None for q, there in zip(w["P"], known, strict=True)]
            psi = torch.stack([v.sum() * 0 if x is None else torch.exp(x / given.tau) for x in cosines])
            same = sum(psi[j] for j in range(c * M, c * M + M) if j != t)
            other = sum(psi[j] for j in range(CLASSES * M) if j // M != c)
            rows.append(-torch.log(psi[t] / (psi[t] + given.alpha * same + (1 - given.alpha) * other)))
        total = total + (1 - mu) * torch.stack(rows)
        teacher, student = class_logits(z.detach() if z.requires_grad else z, phi).detach().softmax(1), found.softmax(1)
        for i, c in enumerate(y.tolist()):
            t, s = teacher[i], student[i]
            rest = [j for j in range(CLASSES) if j != c]
            near = t[c] * (t[c] / s[c]).log() + (1 - t[c]) * ((1 - t[c]) / (1 - s[c])).log()
            q, r = t[rest] / t[rest].sum(), s[rest] / s[rest].sum()
            lift = torch.zeros(len(y))
            lift[i] = given.lam
            total = total + lift * (near + given.xi * (q * (q / r).log()).sum())
        return total

    def loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        z = features(w, x)
        fine = []
        for v, c in zip(z.detach(), y.tolist(), strict=True):
            near = {j: float(v @ points[j] / points[j].norm()) for j in range(c * M, c * M + M) if known[j]}
            fine.append(max(near, key=lambda j: near[j]))
        found = silo.n / joined * each(w, z, y, torch.tensor(fine)).mean()
        if stand_for.any():
            there = stand_for.nonzero().flatten()
            rows = each(w, points[there], there // M, there)
            found = found + (rows * stand_for[there]).sum() / joined
        means = torch.stack([z[y == c].mean(0) for c in y.unique().tolist()])
        return found + given.gamma * cross_entropy(class_logits(means, phi), y.unique())

    return descend(own, silo, batches, loss)
