"""The log of a hospital's releases; each one is logged before it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fl_core.tensors import Tensor, torch
from privacy.accounting.release_plan import Release


class ReleaseLog(Protocol):
    """The releases of one member of a run: in memory for simulations, in the ledger at a hospital."""

    def cached(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return a release that is made once per data version; None if it was not made yet."""
        ...

    def cache(self, purpose: str, value: Tensor) -> None: ...

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:
        """Reserve the releases of one task, or refuse them. Reserved releases count as spent at once."""
        ...


class InMemoryReleaseLog:
    """Admits every release and remembers it."""

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self.cached_releases: dict[str, Tensor] = {}

    def cached(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
        release = self.cached_releases.get(purpose)
        return None if release is None else release.to(dtype)

    def cache(self, purpose: str, value: Tensor) -> None:
        self.cached_releases[purpose] = value

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:  # noqa: ARG002
        self.releases += releases


def by_collection(releases: Iterable[Release]) -> dict[str, list[Release]]:
    sorted_releases: dict[str, list[Release]] = {}
    for release in releases:
        sorted_releases.setdefault(release.collection, []).append(release)
    return sorted_releases
