"""Private states of simulated silos between rounds: in memory, or in files where a hundred models would not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_core.types.values import State


class States(Protocol):
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


class InMemory:
    """States as they are."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._staged: dict[int, State] = {}

    def get(self, silo: int) -> State | None:
        """Return the committed state."""
        return self._states.get(silo)

    def stage(self, silo: int, state: State) -> None:
        """Keep the next state aside."""
        self._staged[silo] = state

    def settle(self, silo: int, commit: bool) -> None:
        """Commit or forget."""
        state = self._staged.pop(silo, None)
        if commit and state is not None:
            self._states[silo] = state


class InFiles:
    """States in a folder, one file per silo and one while it is staged; none stays in memory.

    Guarantees: a state comes back with the same bits.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for old in folder.glob("silo*.safetensors"):  # of another run: its states are none of this one's
            old.unlink()

    def get(self, silo: int) -> State | None:
        """Read the committed state."""
        file = self._file(silo)
        if not file.exists():
            return None
        with safe_open(file, "pt") as f:
            index = json.loads(f.metadata()["index"])
            return {g: {n: f.get_tensor(key) for n, key in names.items()} for g, names in index.items()}

    def stage(self, silo: int, state: State) -> None:
        """Write the next state beside the committed one."""
        index: dict[str, dict[str, str]] = {}
        flat: dict[str, Tensor] = {}
        for group, values in state.items():
            index[group] = {}
            for name, value in values.items():
                index[group][name] = key = str(len(flat))
                flat[key] = value.detach().cpu().clone().contiguous()
        save_file(flat, self._file(silo, "-next"), {"index": json.dumps(index)})

    def settle(self, silo: int, commit: bool) -> None:
        """Put the staged file in place of the committed one, or delete it."""
        staged = self._file(silo, "-next")
        if staged.exists():
            if commit:
                staged.replace(self._file(silo))
            else:
                staged.unlink()

    def _file(self, silo: int, suffix: str = "") -> Path:
        return self._folder / f"silo{silo}{suffix}.safetensors"
