"""Guards that are steered: their public setting follows what earlier rounds released.

The setting is a group of the server's state. So it is checkpointed with the model and broadcast with it, and what the
silos' guards answer travels in the bundle as a part of the same name; no method sees either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from fl_core.errors import StateError
from fl_core.types.interfaces import Guard
from fl_core.types.values import Bundle, Part, State, Tensors


@runtime_checkable
class Steered(Guard, Protocol):
    """A guard with a public setting; group: the name of its group and of its part."""

    group: str

    def start(self) -> Tensors:
        """Make the setting of round 0; empty where the plan states that nothing is steered."""
        ...

    def at(self, setting: Tensors | None) -> Guard:
        """Make the guard of a round; raises RefusedError on a setting, or a lack of one, that the plan is silent on."""
        ...

    def follow(self, setting: Tensors, answered: Part) -> Tensors:
        """Make the next round's setting from the sum of what the silos' guards answered."""
        ...


def groups(guards: Iterable[Guard]) -> frozenset[str]:
    """Name the groups and parts that belong to guards."""
    return frozenset(g.group for g in guards if isinstance(g, Steered))


def without(state: Mapping[str, Tensors], names: frozenset[str]) -> State:
    """Leave out what belongs to guards: what a method may see."""
    return {name: value for name, value in state.items() if name not in names}


def told(guards: Sequence[Guard], msg: State) -> list[Guard]:
    """Return the guards of a round from what was broadcast; raises RefusedError as `Steered.at`."""
    return [g.at(msg.get(g.group)) if isinstance(g, Steered) else g for g in guards]


def settings(guards: Sequence[Guard], server: State, round: int) -> State:
    """Return the settings of a round: those in the server's state, in round 0 those to start from.

    Raises StateError (E-STATE-46) when a later round's state has lost one: it is never begun anew.
    """
    found: dict[str, Tensors] = {}
    for guard in guards:
        if not isinstance(guard, Steered) or not (first := guard.start()):
            continue
        if guard.group not in server and round > 0:
            raise StateError(
                "E-STATE-46", f"expected the setting {guard.group!r} of round {round} in the state, found {[*server]}"
            )
        found[guard.group] = server.get(guard.group, first)
    return found


def followed(guards: Sequence[Guard], now: State, total: Bundle) -> State:
    """Return the settings of the next round."""
    return {
        g.group: g.follow(now[g.group], total[g.group]) for g in guards if isinstance(g, Steered) and g.group in now
    }
