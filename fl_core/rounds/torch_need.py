"""Decides whether a run needs torch, and which runs a machine can compute. Imports neither torch nor onnxruntime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.errors import RefusedError
from fl_core.errors.extras import installed

if TYPE_CHECKING:
    from fl_core.rounds.manifest import RunManifest

INSTALL_TORCH, INSTALL_ONNX = "pip install 'consilium-fl[torch]'", "pip install 'consilium-fl[body]'"
SURVEYS = "surveys"
BEHIND_BODIES = "runs of method=analytic and evaluations of method=analytic or fedavg, with model=frozen"
"""Runs that need no torch, unless they use an extension or a privacy profile other than dp_record."""


def torch_need(manifest: RunManifest) -> str:
    """Name the part of a run that needs torch; empty if none does."""
    method, model, privacy = manifest.method.name, manifest.model.name, manifest.privacy.name
    if manifest.extensions:
        return f"the code {manifest.extensions[0]}"
    if privacy not in ("none", "dp_record"):
        return f"privacy={privacy}"
    if manifest.kind.program:
        return ""
    if method not in (("analytic",) if manifest.kind.trains else ("analytic", "fedavg")):
        return f"{'training by ' if manifest.kind.trains else ''}method={method}"
    return "" if model == "frozen" else f"model={model}"


def require_torch(manifest: RunManifest) -> None:
    """Raise RefusedError (E-RUN-14) if the run needs torch and this machine has none; imports no code of the run."""
    if installed("torch") or not (need := torch_need(manifest)):
        return
    raise RefusedError(
        "E-RUN-14",
        f"expected {SURVEYS}, or {BEHIND_BODIES}, since torch is not installed here, found {need}: {INSTALL_TORCH} "
        "there, or leave this hospital out",
    )


def abilities() -> tuple[str, dict[str, str]]:
    """Describe the runs that this machine can compute; return also, by missing ability, the command to install it."""
    torch, onnx = installed("torch"), installed("onnxruntime")
    missing = {} if torch else {"training": INSTALL_TORCH}
    if not onnx:
        missing["bodies in ONNX files (model=frozen)"] = INSTALL_ONNX
    if torch:
        return "every kind of run", missing
    return f"without torch: {SURVEYS}{f', {BEHIND_BODIES}' if onnx else ''}", missing
