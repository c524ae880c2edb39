"""What a private run opens to a hospital's examples, and what each turn of it costs.

Under silo-level privacy the doors are plain: everything is bounded and noised on its way out, by the guard of
central.py. What is charged is the guard's release, to two budgets at once. All data of a hospital, there or not, move a
clipped vector by C: a Gaussian release of noise z on the hospital. One record moves it from one place in the ball of
radius C to another, by at most 2 C: a release of noise z / 2 on the collection of records that was read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fl_core.rounds.manifest import RunManifest
from fl_core.training.local_data import PlainData
from fl_core.types.interfaces import Doors
from fl_core.types.values import Examples, Progress, RoundContext, TrainConfig
from privacy.accounting.accountant import Mechanism
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN, Release
from privacy.dp_sgd.data_opener import Book, PrivateDoors
from privacy.profiles import SILO_LEVEL
from privacy.silo_dp.mechanism import SiloLevel, coordinates, silo_level


def silo_releases(guard: SiloLevel, train: bool) -> list[Release]:
    """List what one round of a run with silo-level privacy releases: update, its bit, evaluation."""
    terms, made = guard.terms, list[tuple[str, str, Mechanism]]()
    train = train and coordinates(guard.layout) > 0  # a method may send nothing
    if train:
        made.append(("update", TRAIN, Mechanism(guard.noise)))
    if train and terms.adaptive:
        made.append(("clip bit", TRAIN, terms.bit))
    if terms.test_data == "private":
        made.append(("evaluation", TEST, Mechanism(terms.metric_noise)))
    whole = [Release(purpose, HOSPITAL, m) for purpose, _, m in made]
    return whole + [Release(purpose, read, replace(m, noise=m.noise / 2)) for purpose, read, m in made]


class SiloLevelDoors:
    """Opens `PlainData` for one member of a run with silo-level privacy, round by round.

    Guarantees: the releases of a round are in the book before any example is read; of its steps, whose number follows
    from the number of records, no progress is told.
    """

    def __init__(self, manifest: RunManifest, book: Book) -> None:
        self.guard = silo_level(manifest)
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
    ) -> PlainData:
        """Reserve what the round will release and open the examples; raises what the book refuses with."""
        round = context.round
        training = round < self._rounds
        self._book.reserve(round, training, silo_releases(self.guard, training))

        def silent(done: int, total: int) -> None:  # noqa: ARG001
            if progress is not None:
                progress(0, 0)

        return PlainData(train, test, config, context, device, silent, public)


def doors_of(manifest: RunManifest, index: int, book: Book) -> Doors:
    """Make the doors of one member of a private run, over its book."""
    return (
        SiloLevelDoors(manifest, book) if manifest.privacy.name == SILO_LEVEL else PrivateDoors(manifest, index, book)
    )
