"""Whether a hospital can do its whole part of a run: budget, memory and disk, checked before round 0.

Nothing is read of any record, charged or released.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

from torch import nn

from fl_core.errors import RefusedError
from fl_core.training.memory import mib
from silo.training.trainer import PreparedRun

OBJECTS = 4
"""Of a model's size on the disk at once: two bases, the update, the staged state."""


def require(prepared: PreparedRun, folder: Path) -> None:
    """Raise RefusedError unless the whole run fits here: E-BUDGET-01, E-BUDGET-02 or E-RUN-38.

    folder: where objects lie.
    """
    _budget(prepared)
    _disk(prepared.runtime.model, folder)
    prepared.require_memory()


def _budget(prepared: PreparedRun) -> None:
    ledger, profile = prepared.ledger, prepared.run.profile
    if ledger is not None:
        first = ledger.cached("class counts") is None
        ledger.require(profile.charges(prepared.index, prepared.submits, first))


def _disk(model: nn.Module, folder: Path) -> None:
    need = OBJECTS * state_bytes(model)
    if shutil.disk_usage(folder).free < need:
        raise RefusedError(
            "E-RUN-38",
            f"expected {mib(need)} of free disk for the run's bases, update and state, found less: free some where "
            "the silo's home lies, or choose a smaller model",
        )


def state_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in chain(model.parameters(), model.buffers()))
