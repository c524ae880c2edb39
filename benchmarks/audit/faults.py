"""Faults that are put into private training on purpose: an audit that sees none of them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl_core import rng
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleasePlan
from privacy.mechanisms.noise import grid, sources
from privacy.mechanisms.noise.sources import NoiseSource, SeededNoise
from privacy.mechanisms.record import class_sums, moments, per_sample_gradients, private_data
from privacy.mechanisms.record.draws import Draws
from privacy.mechanisms.record.per_sample_gradients import ClippedGradientEngine, Gradients, clipped, per_unit
from privacy.mechanisms.record.private_data import DpSgdLocalData

OPEN = 1e12


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Put something else in the place of a function for a while; raises KeyError where there is none of that name."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def halved_noise() -> AbstractContextManager[None]:
    """Half of the noise that the ledger is charged for."""
    honest = ReleasePlan.std.fget
    return replaced(ReleasePlan, "std", property(lambda plan: honest(plan) / 2))


def small_sensitivity() -> AbstractContextManager[None]:
    """Take the clip for the sensitivity: what a unit does to its microbatch is forgotten."""
    return replaced(RecordDpConfig, "sensitivity", lambda terms, coupled: terms.clip)  # noqa: ARG005


@dataclass
class _ChangedEngine:
    """Sums gradients after a change of the units and the clip."""

    engine: ClippedGradientEngine
    change: Callable[[Tensor, float], tuple[Tensor, float]]

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        return self.engine.clipped_sum(losses, *self.change(units, clip), in_all)


def changed_engine(change: Callable[[Tensor, float], tuple[Tensor, float]]) -> AbstractContextManager[None]:
    @contextmanager
    def engine(*given: object, **named: object) -> Iterator[_ChangedEngine]:
        with per_unit(*given, **named) as honest:  # type: ignore[arg-type]
            yield _ChangedEngine(honest, change)

    return replaced(private_data, "per_unit", engine)


@contextmanager
def missing_clip() -> Iterator[None]:
    """No bound on any gradient."""
    unbounded = lambda loss, params, clip: clipped(loss, params, OPEN)  # noqa: E731, ARG005
    with changed_engine(lambda units, _: (units, OPEN)), replaced(private_data, "clipped", unbounded):
        yield


def dealt_by_place() -> AbstractContextManager[None]:
    """Microbatches by place in the sample, two by two: one unit in front moves all the others on."""
    by_place = lambda noise, units, groups, *about: (torch.arange(len(units)) // 2).clamp(max=groups - 1)  # noqa: E731, ARG005
    return replaced(sources, "random_groups", by_place)


@contextmanager
def finite_check_removed() -> Iterator[None]:
    """Factors and rows as they come: what is not finite is multiplied by 0, which makes it NaN."""

    def factors(squares: Tensor, bound: float) -> Tensor:
        return (bound / squares.double().sqrt()).clamp(max=1.0)

    def weighted_sum(factor: Tensor, rows: Tensor, block: int) -> Tensor:  # noqa: ARG001
        return (factor @ rows.flatten(1).double()).view(rows.shape[1:])

    def weighted(layer: nn.Module, x: Tensor, dy: Tensor, factor: Tensor) -> dict[nn.Parameter, Tensor]:
        inputs, grads = per_sample_gradients._places(layer, x, dy)
        whole = torch.einsum("n,nop->op", factor, grads.mT @ inputs)
        if isinstance(layer, nn.Conv2d):
            whole = whole.view(layer.out_channels, *layer.kernel_size, layer.in_channels).movedim(3, 1)
        sums = {layer.weight: whole}
        if layer.bias is not None:
            sums[layer.bias] = torch.einsum("n,no->o", factor, grads.sum(1))
        return sums

    def add_noise(values: Tensor, g: float, std: float, noise: NoiseSource) -> Tensor:
        return values * g + noise.discrete_gaussian(tuple(values.shape), std / g).double() * g

    def shares(*given: object) -> class_sums.UnitShares:
        return replace(honest(*given), vectors=class_sums._vectors(given[0], given[1], None))

    honest = class_sums.unit_shares
    with ExitStack() as stack:
        for owner, name, value in (
            (grid, "factors", factors),
            (grid, "weighted_sum", weighted_sum),
            (per_sample_gradients, "weighted_gradient", weighted),
            (grid, "rounded", lambda values, g: values / g),
            (grid, "truncated", lambda values, g: values / g),
            (grid, "add_noise", add_noise),
            (class_sums, "unit_shares", shares),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def rounding_removed() -> AbstractContextManager[None]:
    """Gaussian floats on a sum in float32, where integers belong."""

    def released(data: DpSgdLocalData, total: Gradients, params: Sequence[nn.Parameter], divisor: float) -> None:
        generator = torch.Generator().manual_seed(data._noise.seed("floats"))
        for p, s in zip(params, total, strict=True):
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64) * data._plan.std
            p.grad = s.to(p).add_(drawn.to(p)).div_(divisor)

    return replaced(DpSgdLocalData, "_release", released)


@contextmanager
def drawn_by_position() -> Iterator[None]:
    """Augmentation and dropout from the run's public seed, by place in the batch."""

    def read(draws: Draws, index: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return draws._examples.batch(index, rng.stream(0, "augment", step) if draws._augment else None)

    def init(draws: Draws, *given: object) -> None:
        honest(draws, *given)
        draws.unit_by_unit = False

    honest = Draws.__init__

    with (
        replaced(Draws, "read", read),
        replaced(Draws, "scope", lambda draws: rng.torch_scope(0, "dropout")),  # noqa: ARG005
        replaced(Draws, "for_units", lambda draws, index, step: nullcontext()),  # noqa: ARG005
        replaced(Draws, "__init__", init),
    ):
        yield


@contextmanager
def any_shape() -> Iterator[None]:
    """Batches as long as the sample makes them, without padding."""
    trimmed = changed_engine(lambda units, clip: (units[units != per_sample_gradients.PADDING], clip))
    with replaced(private_data, "pad_batch", lambda x, rows: x), trimmed:  # noqa: ARG005
        yield


def clip_without_convolutions() -> AbstractContextManager[None]:
    """Leave convolutions out of the norm that is clipped."""
    honest = per_sample_gradients.grid.square_norms

    def square_norms(samples: Sequence[Tensor]) -> Tensor:
        return honest([s if s.dim() != 5 else s * 0 for s in samples])

    return replaced(per_sample_gradients.grid, "square_norms", square_norms)


def moments_not_clipped() -> AbstractContextManager[None]:
    """Put no bound on the vectors whose products are summed."""
    unbounded = lambda rows, bound: honest(rows, OPEN)  # noqa: E731, ARG005
    honest = grid.contributions
    return replaced(grid, "contributions", unbounded)


def halved_moment_noise() -> AbstractContextManager[None]:
    """Halve the noise that a release of moments is charged for."""
    honest = moments.sensitivity
    return replaced(moments, "sensitivity", lambda query: honest(query) / 2)


class Missing(SeededNoise):
    """Noise that is none."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:  # noqa: ARG002
        return torch.zeros(shape, dtype=torch.long)


class Repeated(SeededNoise):
    """Noise whose seed is used again: every step has the same."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        return SeededNoise(7, "repeated").discrete_gaussian(shape, sigma)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,
    "halved noise": halved_noise,
    "small sensitivity": small_sensitivity,
    "missing clip": missing_clip,
    "dealt by place": dealt_by_place,
    "finite check removed": finite_check_removed,
    "rounding removed": rounding_removed,
    "draws by position": drawn_by_position,
    "any batch shape": any_shape,
    "convolutions not clipped": clip_without_convolutions,
    "moments not clipped": moments_not_clipped,
    "halved noise on moments": halved_moment_noise,
}
"""Faults by name."""
