"""Whole rounds of methods that keep a model, or a part of one, at each silo; in the manner of `rounds`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.oracles import rounds
from tests.oracles.rounds import Silo, Silos, Weights, averaged, ce, descend, features, logits

HEAD, BODY = (rounds.W, rounds.b), (rounds.P, rounds.p)


def part(w: Weights, names: tuple[str, ...]) -> Weights:
    return {name: w[name] for name in names}


def only(
    w: Weights, moving: tuple[str, ...], silo: Silo, batches: list[Tensor], loss: rounds.Loss | None = None
) -> Weights:
    """Train some weights; the others take no step."""
    still = {name: value for name, value in w.items() if name not in moving}
    found = descend(part(w, moving), silo, batches, lambda now, x, y: (loss or ce)({**still, **now}, x, y))
    return {**still, **found}


def local(start: Weights, silos: Silos) -> list[Weights]:
    models = [start for _ in silos]
    for t in range(len(silos[0].batches)):
        models = [descend(w, s, s.batches[t][0], ce) for w, s in zip(models, silos, strict=True)]
    return models


def fedper(start: Weights, silos: Silos, alternate: bool = False) -> tuple[Weights, list[Weights]]:
    """Arivazhagan et al. 2019, algorithms 1 and 2; alternate: FedRep (Collins et al. 2021, algorithm 1), head first."""
    body, heads = part(start, BODY), [part(start, HEAD) for _ in silos]
    for t in range(len(silos[0].batches)):
        trained = []
        for s, head in zip(silos, heads, strict=True):
            w = {**body, **head}
            if alternate:
                w = only(w, HEAD, s, s.batches[t][0])
                trained.append(only(w, BODY, s, s.batches[t][1]))
            else:
                trained.append(descend(w, s, s.batches[t][0], ce))
        heads = [part(w, HEAD) for w in trained]
        body = part(averaged(trained, [s.n for s in silos]), BODY)
    return body, heads


def fedbabu(start: Weights, silos: Silos) -> Weights:
    """Oh, Kim and Yun 2022, algorithm 1: bodies under the initial head."""
    w = start
    for t in range(len(silos[0].batches)):
        trained = [only(w, BODY, s, s.batches[t][0]) for s in silos]
        w = {**averaged(trained, [s.n for s in silos]), **part(start, HEAD)}
    return part(w, BODY)


def ditto(start: Weights, silos: Silos, pull: float) -> tuple[Weights, list[Weights]]:
    """Li et al. 2021, algorithm 1: FedAvg, and v_k pulled to the model that the round received."""
    w, own = start, [start for _ in silos]
    for t in range(len(silos[0].batches)):

        def loss(now: Weights, x: Tensor, y: Tensor, w: Weights = w) -> Tensor:
            return ce(now, x, y) + pull / 2 * sum((now[k] - w[k]).square().sum() for k in w)

        own = [descend(v, s, s.batches[t][1], loss) for v, s in zip(own, silos, strict=True)]
        w = averaged([descend(w, s, s.batches[t][0], ce) for s in silos], [s.n for s in silos])
    return w, own


def fedproto(start: Weights, silos: Silos, pull: float) -> tuple[Tensor, list[Weights]]:
    """Tan et al. 2022, algorithm 1: nothing but prototypes is averaged."""
    models, g = [start for _ in silos], torch.full((rounds.CLASSES, start[rounds.P].shape[0]), math.nan)
    for t in range(len(silos[0].batches)):

        def loss(now: Weights, x: Tensor, y: Tensor, g: Tensor = g, t: int = t) -> Tensor:
            z = features(now, x)
            return ce(now, x, y) + (pull * (z - g[y]).square().mean() if t else 0.0)

        models = [descend(w, s, s.batches[t][0], loss) for w, s in zip(models, silos, strict=True)]
        g = rounds.class_means(models, silos, g)
    return g, models


def taught(silo: Silo, teacher: Weights | None, lam: float, tau: float) -> rounds.Loss:
    """(1 - lam) CE + lam tau^2 KL(teacher || student) at temperature tau; CE without a teacher."""

    def loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        if teacher is None:
            return ce(w, x, y)
        q, now = (logits(teacher, x) / tau).softmax(1), (logits(w, x) / tau).log_softmax(1)
        return (1 - lam) * ce(w, x, y) + lam * tau**2 * (q * (q.log() - now)).sum(1).mean()

    return loss


def inherited(old: Weights | None, new: Weights, n: int, expected: int, macro: float = 0.9) -> Weights:
    """theta_p <- mu theta_p + (1 - mu) theta, mu = macro (n - 1) / expected, at most 1."""
    if old is None:
        return new
    mu = min(1.0, macro * (n - 1) / expected)
    return {k: mu * old[k] + (1 - mu) * new[k] for k in new}


def fedphp(start: Weights, silos: Silos, lam: float, tau: float) -> tuple[Weights, list[Weights]]:
    """Li et al. 2021 (FedPHP); silos count alike; all silos are asked in all rounds."""
    w, own, T = start, [None] * len(silos), len(silos[0].batches)
    for t in range(T):
        trained = [
            descend(w, s, s.batches[t][0], taught(s, teacher, lam, tau)) for s, teacher in zip(silos, own, strict=True)
        ]
        own = [inherited(old, new, t + 1, T) for old, new in zip(own, trained, strict=True)]  # type: ignore[misc]
        w = averaged(trained, [1.0] * len(silos))
    return w, own  # type: ignore[return-value]


def map_(start: Weights, silos: Silos, alpha: float, lam: float, tau: float) -> tuple[Weights, list[Weights]]:
    """MAP (Li et al. 2024), algorithm 1: a restricted stage that is sent, a taught stage that is inherited."""
    w, own, T = start, [None] * len(silos), len(silos[0].batches)
    for t in range(T):
        sent, kept = [], []
        for s, teacher in zip(silos, own, strict=True):
            a = torch.where(s.counts > 0, 1.0, alpha)
            first = descend(w, s, s.batches[t][0], lambda now, x, y, a=a: cross_entropy(a * logits(now, x), y))
            sent.append(first)
            kept.append(descend(first, s, s.batches[t][1], taught(s, teacher, lam, tau)))
        own = [inherited(old, new, t + 1, T) for old, new in zip(own, kept, strict=True)]  # type: ignore[misc]
        w = averaged(sent, [1.0] * len(silos))
    return w, own  # type: ignore[return-value]


def fedrod(start: Weights, silos: Silos) -> tuple[Weights, list[Weights]]:
    """Chen and Chao 2022, equations 6 to 9, both heads stepped on each batch; the private one by plain SGD.

    Of body and generic head the balanced softmax, log n_c added, missing classes out of its sum. Returns the averaged
    model and each silo's private head {weight, bias}, which begins as the generic one.
    """
    w, private = start, [{"Q": start[rounds.W], "q": start[rounds.b]} for _ in silos]
    for t in range(len(silos[0].batches)):
        trained = []
        for k, s in enumerate(silos):
            prior = s.counts.log()

            def loss(now: Weights, x: Tensor, y: Tensor, prior: Tensor = prior) -> Tensor:
                z = features(now, x)
                generic = z @ now[rounds.W].T + now[rounds.b]
                both = generic.detach() + z.detach() @ now["Q"].T + now["q"]
                return cross_entropy(generic + prior, y) + cross_entropy(both, y)

            found = descend({**w, **private[k]}, s, s.batches[t][0], loss, plain=("Q", "q"))
            private[k] = {name: found.pop(name) for name in ("Q", "q")}
            trained.append(found)
        w = averaged(trained, [s.n for s in silos])
    return w, private


def fedloge(start: Weights, silos: Silos, frame: Tensor) -> tuple[Weights, list[Weights]]:
    """Xiao et al. 2024: the body under a fixed frame, an averaged and a private head on features that stand still."""
    w, private = start, [{"Q": start[rounds.W], "q": start[rounds.b]} for _ in silos]

    def loss(now: Weights, x: Tensor, y: Tensor) -> Tensor:
        z = features(now, x)
        own = cross_entropy(z.detach() @ now["Q"].T + now["q"], y)
        return cross_entropy(z @ frame.T, y) + cross_entropy(z.detach() @ now[rounds.W].T + now[rounds.b], y) + own

    for t in range(len(silos[0].batches)):
        trained = []
        for k, s in enumerate(silos):
            found = descend({**w, **private[k]}, s, s.batches[t][0], loss)
            private[k] = {name: found.pop(name) for name in ("Q", "q")}
            trained.append(found)
        w = averaged(trained, [s.n for s in silos])
    return w, private
