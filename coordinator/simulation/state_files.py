"""Private states of simulated silos in files, where a hundred models would not fit in memory."""

from __future__ import annotations

from pathlib import Path

from fl_core.types.values import State
from protos.wire.codec import read_state, write_state


class FileStateStore:
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
        return read_state(file) if file.exists() else None

    def stage(self, silo: int, state: State) -> None:
        """Write the next state beside the committed one."""
        write_state(state, self._file(silo, "-next"))

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
