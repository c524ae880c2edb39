"""Private states of simulated silos between rounds."""

from __future__ import annotations

from typing import Protocol

from fl_core.types.values import State


class StateStore(Protocol):
    """A place for each silo's state, and for the next one until its round is closed."""

    def get(self, silo: int) -> State | None:
        """Return the state that was last committed; None before the first."""
        ...

    def stage(self, silo: int, state: State) -> None:
        """Keep the next state aside, in place of one that was staged before."""
        ...

    def settle(self, silo: int, commit: bool) -> None:
        """Commit what is staged, or forget it; nothing happens where nothing is."""
        ...


class MemoryStateStore:
    """States as they are."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._staged: dict[int, State] = {}

    def get(self, silo: int) -> State | None:
        return self._states.get(silo)

    def stage(self, silo: int, state: State) -> None:
        self._staged[silo] = state

    def settle(self, silo: int, commit: bool) -> None:
        state = self._staged.pop(silo, None)
        if commit and state is not None:
            self._states[silo] = state


class PassedState:
    """One silo's state, passed in before a round and read back after it: the caller keeps it."""

    before: State | None = None
    after: State | None = None

    def get(self, silo: int) -> State | None:  # noqa: ARG002
        return self.before

    def stage(self, silo: int, state: State) -> None:  # noqa: ARG002
        self.after = state

    def settle(self, silo: int, commit: bool) -> None:  # noqa: ARG002
        raise AssertionError("rounds are settled by the caller")
