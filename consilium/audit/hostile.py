"""Attacks by a coordinator that chooses the model, knows all records but one, and reads every bit of an update.

Each attack takes one private step many times, with and without the target record, and scores the releases. The scores
give a lower bound on epsilon (epsilon_bounds.py), which is compared with the ledger's.

| attack | uses | stopped by |
|---|---|---|
| overflow, layer norm, prototype | numbers that are not finite only for one record | such a unit adds zero (grid.py) |
| low bits | the last bits of floating-point noise | rounded sums and integer noise (grid.py) |
| augmentation, dropout | random draws that one more record shifts for all others | secret draws (draws.py) |
| batch shape | kernels that add in another order if one record makes a batch longer | one shape (class_sums.py) |
| each kind of layer, worst record | a clip that omits a layer, too little noise | the mechanism itself |
| moments, class of one | a sum of products without a bound, with too little noise | the mechanism (moments.py) |
| centred release | both exchanges of `analytic`, with one record as far from the mean as allowed | the same |
| underflow (`runner.dishonest`) | gradients and clips so small that their squares vanish | ranges (ranges.py) |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from consilium.audit.step_checks import ZeroNoise
from consilium.audit.target import ListedExamples
from consilium.audit.worlds import Attack
from fl_core import rng
from fl_core.datasets.augmentation import LESIONS
from fl_core.datasets.examples import TensorExamples
from fl_core.methods import build_method
from fl_core.methods.disjoint.analytic import Analytic
from fl_core.models.split_model import assemble
from fl_core.types.values import ClassSums, Losses, MomentSums

_HALF_A_BIT = 2.0**-25
"""Half of the last bit of a float32 just below 1."""


def attacks(only: str | None = None) -> list[Attack]:
    made: Mapping[str, Callable[[], Attack]] = {
        "overflow": _overflow,
        "layer norm": _layer_norm,
        "prototype": _prototype,
        "low bits": _low_bits,
        "augmentation": _augmentation,
        "dropout": _dropout,
        "batch shape": _batch_shape,
        "convolution": lambda: _layer("convolution", nn.Conv2d(1, 2, 3, padding=1, bias=False)),
        "linear": lambda: _layer("linear", nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False))),
        "normalisation": lambda: _layer("normalisation", nn.GroupNorm(1, 1)),
        "worst record": _worst_record,
        "moments": lambda: _moments("moments", 2.0, trials=300),
        "class of one": lambda: _moments("class of one", 2.0, trials=3000),
        "centred release": _centred_release,
    }
    return [make() for name, make in made.items() if only in (None, name)]


# ---- numbers that are not finite only for one record -----------------------------------------------------------------


def _odd(release: Tensor) -> float:
    return float(not bool(torch.isfinite(release).all()))


def _bright(n: int, bright: int) -> TensorExamples:
    x = torch.rand(n, 1, 8, 8, generator=rng.stream(0, "audit", "lit")) * 0.5
    x[:, 0, 0, 0] = 0.0
    x[n - bright :, 0, 0, 0] = 1.0 if bright else 0.0
    return TensorExamples(x, torch.arange(n) % 4)


def _overflow() -> Attack:
    """Scale the weights of one pixel to 3e38, so that logits overflow for the record that has it."""

    def model() -> nn.Module:
        first, last = nn.Linear(64, 8), nn.Linear(8, 4)
        with torch.no_grad():
            first.weight[:, 0], last.weight[:] = 3e38, 10.0
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)

    return Attack("overflow", model, _bright(4, 0), _bright(5, 1), score=_odd)


def _layer_norm() -> Attack:
    """Make the variance of a normalised layer overflow for the record that has the pixel."""

    def model() -> nn.Module:
        first = nn.Linear(64, 8)
        with torch.no_grad():
            first.weight[0, 0] = 1e30
        return nn.Sequential(nn.Flatten(), first, nn.LayerNorm(8), nn.Linear(8, 4))

    return Attack("layer norm", model, _bright(4, 0), _bright(5, 1), score=_odd)


def _prototype() -> Attack:
    """Make the feature of one record overflow in a release of class sums."""

    def vectors(x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
        return torch.exp(1e4 * x.flatten(1)[:, :1])

    return Attack("prototype", nn.Identity, _bright(4, 0), _bright(5, 1), score=_odd, query=ClassSums(vectors, 4))


# ---- the last bits ---------------------------------------------------------------------------------------------------


def _low_bits(numbers: int = 50_000) -> Attack:
    """Let one record move many weights by the same amount, and look at weights where noise nearly cancels it.

    A float that is the difference of two larger floats has zeros in its last bits.
    """
    x = torch.zeros(5, numbers)
    x[4] = 1.0
    moved = 1 / numbers**0.5
    unit = 2.0 ** (np.floor(np.log2(moved)) - 23)  # the last bit of a float32 of that size

    def score(release: Tensor) -> float:
        near = release[release.abs() < moved / 4].double() / unit
        return float((near == near.round()).double().mean()) if len(near) else 0.5

    def model() -> nn.Module:
        made = nn.Linear(numbers, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    worlds = [ListedExamples(v, torch.zeros(len(v), dtype=torch.long)) for v in (x[:4], x)]
    return Attack("low bits", model, worlds[0], worlds[1], score=score, loss=_output, trials=150)


def _output(model: nn.Module, x: Tensor, y: Tensor) -> Losses:  # noqa: ARG001
    return Losses(model(x).flatten(1).sum(1))


# ---- random draws that one more record shifts ------------------------------------------------------------------------


def _images(n: int, extra: bool) -> TensorExamples:
    x = (torch.rand(n + 1, 1, 8, 8, generator=rng.stream(0, "audit", "images")) > 0.5).float()
    y = torch.arange(n + 1) % 4
    return TensorExamples(x, y, how=LESIONS) if extra else TensorExamples(x[1:], y[1:], how=LESIONS)


def _augmentation() -> Attack:
    """Insert a record before others, in case augmentation is drawn by position."""
    return Attack("augmentation", _network, _images(150, False), _images(150, True), augment=True, trials=400)


def _dropout() -> Attack:
    """Insert a record before others, in case dropout is drawn by position."""
    return Attack("dropout", lambda: _network(0.5), _images(150, False), _images(150, True), trials=400)


def _network(dropout: float = 0.0) -> nn.Module:
    """Build a network whose features change with every pixel."""
    first = nn.Linear(64, 64)
    with torch.no_grad():
        first.weight *= 20
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 4))


# ---- kernels of another shape ----------------------------------------------------------------------------------------


def _batch_shape(n_known: int = 3, width: int = 256, units: int = 64, tries: int = 200) -> Attack:
    """Make two hidden units equal on all known records except for rounding, and magnify their difference.

    Searches for weights for which the difference changes between batches of 3 and 4 on this machine. If kernels round
    equally in both shapes, there are none, and the attack finds nothing.
    """
    draw = rng.stream(0, "audit", "shape")
    x = torch.rand(n_known + 1, width, generator=draw)
    best, chosen = -1, (torch.zeros(units, width), 0, 0)
    for _ in range(tries):
        w = torch.randn(units, width, generator=draw)
        off = x[:n_known].double() @ w.T.double() - 1.0  # to 1 for all records and units
        w -= torch.linalg.lstsq(x[:n_known].double(), off).solution.T.float()
        few, many = (nn.functional.linear(rows, w)[:n_known] for rows in (x[:n_known], x))
        few, many = (v.unsqueeze(2) - v.unsqueeze(1) > _HALF_A_BIT for v in (few, many))
        turned = (few & ~many).sum(0)
        if int(turned.max()) > best:
            best, chosen = int(turned.max()), (w, *divmod(int(turned.argmax()), units))

    def model() -> nn.Module:
        first, loud, last = nn.Linear(width, units, bias=False), nn.Linear(units, 1), nn.Linear(1, 4, bias=False)
        with torch.no_grad():
            first.weight[:], loud.weight[:], last.weight[:] = chosen[0], 0.0, 0.0
            loud.weight[0, chosen[1]], loud.weight[0, chosen[2]], loud.bias[:] = 1e10, -1e10, -1e10 * _HALF_A_BIT
        return nn.Sequential(first, loud, nn.Tanh(), last)

    y = torch.zeros(n_known + 1, dtype=torch.long)
    return Attack(
        "batch shape", model, ListedExamples(x[:n_known], y[:n_known]), ListedExamples(x, y), noise=5.0, trials=600
    )


# ---- the mechanism itself --------------------------------------------------------------------------------------------


def _layer(name: str, layer: nn.Module) -> Attack:
    """Give one record a huge gradient in a layer of one kind."""
    x = torch.zeros(5, 1, 8, 8)
    x[4] = torch.rand(1, 8, 8, generator=rng.stream(0, "audit", "layer")) * 100
    worlds = [ListedExamples(v, torch.zeros(len(v), dtype=torch.long)) for v in (x[:4], x)]
    return Attack(name, lambda: layer, worlds[0], worlds[1], noise=2.0, loss=_output)


def _worst_record() -> Attack:
    """Let one record push one weight as far as its clip allows."""
    x = torch.zeros(5, 1)
    x[4] = 1e3
    worlds = [ListedExamples(v, torch.zeros(len(v), dtype=torch.long)) for v in (x[:4], x)]
    return Attack(
        "worst record", lambda: nn.Linear(1, 1, bias=False), worlds[0], worlds[1], noise=2.0, loss=_output, trials=3000
    )


def _moments(name: str, noise: float, trials: int) -> Attack:
    """Look for the only record of a class, with the largest allowed norm, in a release of second moments."""
    x, y = torch.zeros(5, 3), torch.tensor([0, 0, 0, 0, 3])
    x[4] = 1e3
    worlds = [ListedExamples(x[:n], y[:n]) for n in (4, 5)]
    query = MomentSums(lambda rows, _: torch.cat((rows, 0 * rows[:, :1] + 0.25), dim=1).double(), 4, 4, 0.25)
    return Attack(name, nn.Identity, worlds[0], worlds[1], noise=noise, query=query, trials=trials)


def _centred_release(noise: float = 1.0, known: int = 400, trials: int = 600) -> Attack:
    """Look for the only record of a class, opposite to all others, in a released mean and moments centred about it.

    It moves the mean's sum by 1 and the moments by sqrt(2), the most that a record can. An attacker who knows the other
    records can compute both sums for either world, the second about the released mean, and scores by likelihood.
    """
    x, y = -torch.ones(known + 1, 1), torch.zeros(known + 1, dtype=torch.long)
    x[known], y[known] = 1e3, 3
    method = build_method("analytic", {"release": "centred", "head": "ridge"})
    assert isinstance(method, Analytic)
    attack = Attack(
        "centred release",
        lambda: assemble(nn.Identity(), 1, (), 4, head_bias=True),
        ListedExamples(x[:known], y[:known]),
        ListedExamples(x, y),
        noise=noise,
        method=method,
        trials=trials,
    )
    of_sums = torch.cat([torch.tensor([1.0, 2.0, 1.0]).double(), torch.ones(4 * 2).double(), torch.zeros(1).double()])
    precision = torch.cat([of_sums * attack.shares[0], of_sums * attack.shares[1] / 2, torch.zeros(1).double()])

    def score(release: Tensor) -> float:
        silent, mean = ZeroNoise(torch.zeros(0)), release[-1:]
        without, with_record = (attack.released(world, silent, mean) for world in (False, True))
        return float(((release - without) * (with_record - without) * precision).sum())

    return replace(attack, score=score)
