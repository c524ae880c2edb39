"""A hospital's doors in a private run: plan, reserve, open; and the books in which releases are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fl_core.errors import ConfigError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.types.values import Examples, Progress, RoundContext, TrainConfig
from privacy.accounting.record_config import Terms
from privacy.accounting.release_plan import Course, Release, Spend
from privacy.noise.sources import Noise, SecureNoise, SeededNoise

if TYPE_CHECKING:
    from privacy.dp_sgd.private_data import PrivateData


class Book(Protocol):
    """Where a hospital writes down what it releases."""

    def counts(self) -> dict[str, Tensor]:
        """Return what was released once and for all, by purpose; the doors add to it."""
        ...

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:
        """Set the releases of one task aside, or refuse them; they count from here on."""
        ...


class SimulatedBook:
    """A book in memory, for simulations: it admits everything and keeps the record."""

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self._counts: dict[str, Tensor] = {}

    def counts(self) -> dict[str, Tensor]:
        """Return what was released once and for all."""
        return self._counts

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:  # noqa: ARG002
        """Write the releases down."""
        self.releases += releases


def course_of(manifest: RunManifest, index: int) -> Course:
    """Plan the part of one member in a private run; raises ConfigError (E-PRIV-17) when its size was not declared."""
    member, terms = manifest.members[index], Terms.of(manifest.privacy.options)
    if member.units < 1:
        raise ConfigError(
            "E-PRIV-17",
            f"expected a declared size of {member.name} in a private run, found none: silo serve --nominal-size N",
        )
    method = build_method(manifest.method.name, manifest.method.options)
    model = build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)
    schema, personal = manifest.schema, manifest.personal
    return Course.of(terms, manifest.train, manifest.rounds, member.units, method, model, schema, personal)


class PrivateDoors:
    """Opens `PrivateData` for one member of a private run, round by round.

    Guarantees: the releases of a round are in the book before any example is read.
    """

    def __init__(self, manifest: RunManifest, index: int, book: Book) -> None:
        self.course = course_of(manifest, index)
        self._rounds = manifest.rounds
        self._book = book

    def __call__(
        self,
        train: Examples,
        test: Examples,
        config: TrainConfig,
        context: RoundContext,
        *,
        device: torch.device | None = None,
        progress: Progress | None = None,
        public: Examples | None = None,
    ) -> PrivateData:
        """Reserve what the round will release and open the examples; raises what the book refuses with."""
        from privacy.dp_sgd.private_data import PrivateData

        counts = self._book.counts()
        training = context.round < self._rounds
        anew, shared = "class counts" not in counts, public is not None and len(public) > 0
        planned = self.course.releases(context.round, training, context.prototypes, anew, shared)
        self._book.reserve(context.round, training, planned)
        return PrivateData(
            train,
            test,
            config,
            context,
            self.course,
            Spend(planned),
            self._noise(context),
            device=device,
            counts=counts,
            public=public,
            progress=progress,
        )

    def _noise(self, context: RoundContext) -> Noise:
        if self.course.terms.rng == "secure":
            return SecureNoise()
        return SeededNoise(context.seed, "round", context.round, "silo", context.silo, "privacy")


def spent(releases: Sequence[Release]) -> Mapping[str, list[Release]]:
    """Sort releases by the collection of records that they are charged to."""
    found: dict[str, list[Release]] = {}
    for release in releases:
        found.setdefault(release.collection, []).append(release)
    return found
