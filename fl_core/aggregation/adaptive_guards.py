"""Guards whose public setting follows what earlier rounds released.

The setting is a group of the server's state. So it is checkpointed with the model and broadcast with it, and what the
silos' guards send back is a part of the bundle of the same name; no method sees either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_core.errors import StateError
from fl_core.types.interfaces import Guard
from fl_core.types.values import Bundle, State, Tensors


def groups(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset(g.group for g in guards if g.group)


def method_state(state: Mapping[str, Tensors], names: frozenset[str]) -> State:
    """Return the groups that a method may see: those of guards are left out."""
    return {name: value for name, value in state.items() if name not in names}


def guards_for_round(guards: Sequence[Guard], msg: State) -> list[Guard]:
    return [g.with_setting(msg.get(g.group)) for g in guards]


def current_settings(guards: Sequence[Guard], server: State, round: int) -> State:
    """Return the settings of a round: those in the server's state, in round 0 those to start from.

    Raises StateError (E-STATE-22) when a later round's state has lost one: it never starts over.
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
