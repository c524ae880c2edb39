"""Where a hospital writes down what it releases, before it is released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from privacy.accounting.release_plan import Release


class ReleaseLog(Protocol):
    """The releases of one member of a run: in memory for simulations, in the ledger at a hospital."""

    def kept(self, purpose: str) -> Tensor | None:
        """Return what was released once and for all; None before it was."""
        ...

    def keep(self, purpose: str, value: Tensor) -> None:
        """Keep what was released once and for all."""
        ...

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:
        """Set the releases of one task aside, or refuse them; they count from here on."""
        ...


class InMemoryReleaseLog:
    """Admits everything and keeps the record."""

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self._kept: dict[str, Tensor] = {}

    def kept(self, purpose: str) -> Tensor | None:
        return self._kept.get(purpose)

    def keep(self, purpose: str, value: Tensor) -> None:
        self._kept[purpose] = value

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:  # noqa: ARG002
        self.releases += releases


def by_collection(releases: Iterable[Release]) -> dict[str, list[Release]]:
    """Sort releases by the collection of records that they are charged to."""
    found: dict[str, list[Release]] = {}
    for release in releases:
        found.setdefault(release.collection, []).append(release)
    return found
