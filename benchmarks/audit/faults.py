"""Faults that are put into the private doors on purpose: an audit that sees none of them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from privacy import entropy, example
from privacy.course import Course
from privacy.entropy import SeededNoise
from privacy.gradients import Gradients, PerUnit, clipped, per_unit
from privacy.terms import Terms

OPEN = 1e12


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Put something else in the place of a function for a while."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def halved_noise() -> AbstractContextManager[None]:
    """Half of the noise that the ledger is charged for."""
    honest = Course.std.fget
    return replaced(Course, "std", property(lambda course: honest(course) / 2))


def small_sensitivity() -> AbstractContextManager[None]:
    """Take the clip for the sensitivity: what a unit does to its microbatch is forgotten."""
    return replaced(Terms, "sensitivity", lambda terms, coupled: terms.clip)  # noqa: ARG005


class _Open:
    """Sums gradients without a bound."""

    def __init__(self, engine: PerUnit) -> None:
        self._engine = engine

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:  # noqa: ARG002
        """Sum gradients as they are."""
        return self._engine.clipped_sum(losses, units, OPEN, in_all)


@contextmanager
def missing_clip() -> Iterator[None]:
    """No bound on any gradient."""

    @contextmanager
    def engine(*given: object, **named: object) -> Iterator[_Open]:
        with per_unit(*given, **named) as found:  # type: ignore[arg-type]
            yield _Open(found)

    with ExitStack() as stack:
        stack.enter_context(replaced(example, "per_unit", engine))
        unbounded = lambda loss, params, clip: clipped(loss, params, OPEN)  # noqa: E731, ARG005
        stack.enter_context(replaced(example, "clipped", unbounded))
        yield


def dealt_by_place() -> AbstractContextManager[None]:
    """Microbatches by place in the sample, two by two: one unit in front moves all the others on."""
    dealt = lambda noise, units, groups, *about: (torch.arange(len(units)) // 2).clamp(max=groups - 1)  # noqa: E731, ARG005
    return replaced(entropy, "labels", dealt)


class Missing(SeededNoise):
    """Noise that is none."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:  # noqa: ARG002
        """Return zeros."""
        return torch.zeros(shape, dtype=torch.long)


class Repeated(SeededNoise):
    """Noise whose seed is used again: every step has the same."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        """Draw from a generator that starts anew."""
        return SeededNoise(7, "repeated").discrete_gaussian(shape, sigma)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,
    "halved noise": halved_noise,
    "small sensitivity": small_sensitivity,
    "missing clip": missing_clip,
    "dealt by place": dealt_by_place,
}
"""Faults of the doors by name."""
