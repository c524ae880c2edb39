"""Events at a silo, for people and for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fl_core.errors import FederationError
from protos.wire.tasks import TaskKey

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SiloEvent:
    """An event: its kind (a word), a line for people, and facts for machines."""

    event: str
    text: str
    facts: Mapping[str, Fact]


EmitEvent = Callable[[SiloEvent], None]


def event(event: str, text: str, key: TaskKey | None = None, facts: Mapping[str, Fact] | None = None) -> SiloEvent:
    about: dict[str, Fact] = {}
    if key is not None:
        about = {"run": key.run_id, "round": key.round, "kind": key.kind.value}
    return SiloEvent(event, text, about | dict(facts or {}))


def error_event(error: FederationError) -> SiloEvent:
    return event("trouble", str(error), facts={"code": error.code})
