"""Whether a hospital can do its whole part of a run: budget, memory and disk, checked before round 0.

Nothing is read of any record, charged or released; what is said of a shortage follows from the manifest alone.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from fl_core.errors import RefusedError
from fl_core.training.memory import free_memory, mib
from silo.training.trainer import PreparedRun

COPIES = 4
"""Of a model while it is trained: itself, what was received, its gradient, the optimizer's memory or the update."""
OBJECTS = 4
"""Of a model's size on the disk at once: two bases, the update, the staged state."""


def require(prepared: PreparedRun, folder: Path, device: torch.device) -> None:
    """Raise RefusedError unless the whole run fits here: E-BUDGET-01, E-BUDGET-02 or E-RUN-38.

    folder: where objects lie; device: where models are trained.
    """
    _budget(prepared)
    _disk(prepared.runtime.model, folder)
    _memory(prepared, device)


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


def _memory(prepared: PreparedRun, device: torch.device) -> None:
    free, model = free_memory(device), prepared.runtime.model
    rows = prepared.run.profile.examples_at_once(prepared.index)
    need = training_bytes(model, rows)
    if free is None or need <= free:
        return
    remedy = "choose a smaller model"
    if rows > 1:
        remedy = f"set privacy.physical_batch=1, which needs {mib(training_bytes(model, 1))}, or a few, or {remedy}"
    raise RefusedError("E-RUN-38", f"expected about {mib(need)} of free memory on {device}, found less: {remedy}")


def state_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in chain(model.parameters(), model.buffers()))


def training_bytes(model: nn.Module, at_once: int) -> int:
    """Estimate the bytes that training takes: copies of the model, and `at_once` examples' gradients."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return COPIES * state_bytes(model) + at_once * gradients
