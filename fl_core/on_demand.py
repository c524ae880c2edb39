"""Classes by name, each imported on first access, so that code that needs only the names imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class OnDemand(Mapping[str, T]):
    """Mapping from names to classes. places: `package.module:Class` of each name."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.places[name].partition(":")
        value: T = getattr(import_module(module), attribute)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
