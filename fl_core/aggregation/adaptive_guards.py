"""Guards with a public setting that follows the releases of earlier rounds.

The setting is a group of the server's state, so it is checkpointed and broadcast with the model. The silos' guards
answer in the bundle's part of the same name. Methods see neither the group nor the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_core.errors import StateError
from fl_core.types.interfaces import Guard
from fl_core.types.values import Bundle, State, Tensors


def groups(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset(g.group for g in guards if g.group)


def method_state(state: Mapping[str, Tensors], names: frozenset[str]) -> State:
    """Return the groups that a method may see: all except those of guards."""
    return {name: value for name, value in state.items() if name not in names}


def guards_for_round(guards: Sequence[Guard], msg: State) -> list[Guard]:
    return [g.with_setting(msg.get(g.group)) for g in guards]


def current_settings(guards: Sequence[Guard], server: State, round: int) -> State:
    """Return the settings of a round: those in the server's state, or in round 0 the initial ones.

    Raises StateError (E-STATE-22) if the state of a later round lacks one: a setting is never started anew.
    """
    settings: dict[str, Tensors] = {}
    for guard in guards:
        if not (first := guard.initial_setting()):
            continue
        if guard.group not in server and round > 0:
            raise StateError(
                "E-STATE-22", f"expected the setting {guard.group!r} of round {round} in the state, found {[*server]}"
            )
        settings[guard.group] = server.get(guard.group, first)
    return settings


def next_settings(guards: Sequence[Guard], now: State, total: Bundle) -> State:
    return {
        g.group: g.next_setting(now[g.group], total[g.group]) if g.group in total else now[g.group]
        for g in guards
        if g.group in now
    }
