"""An evaluation: the start model is measured at the hospitals, without rounds and without training."""

from __future__ import annotations

from fl_core.errors import ConfigError
from fl_core.kinds.base import ManifestFacts, RunKind


class EvaluationRun(RunKind):
    """A run without rounds."""

    name = "evaluation"
    updates = False
    measures = True
    goes_on = "of the model of"

    def recognises(self, method: str, rounds: int) -> bool:  # noqa: ARG002
        return rounds == 0

    def length(self, rounds: int) -> str:  # noqa: ARG002
        return "an evaluation, without training"

    def check(self, manifest: ManifestFacts) -> None:
        if manifest.personal or manifest.privacy.name != "none":
            raise ConfigError(
                "E-CFG-08",
                "expected personal=false and privacy=none in an evaluation without training (rounds=0), found "
                f"personal={str(manifest.personal).lower()} and privacy={manifest.privacy.name}: a private run "
                "evaluates its last model itself",
            )

    def check_start(self, manifest: ManifestFacts) -> None:
        start = manifest.start
        fresh = () if start is None or start.run or start.weights is None else start.weights.fresh
        if start is None or fresh:
            what = f"one without weights of {', '.join(fresh[:3])}, or for other classes" if fresh else "none"
            raise ConfigError(
                "E-CFG-02",
                f"rounds=0 only evaluates a complete model, found {what}: name a run (coordinator evaluate RUN), or "
                "a file with the complete model (model.weights=FILE)",
            )
