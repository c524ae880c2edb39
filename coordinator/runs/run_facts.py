"""What is shown of a run's method and privacy. It is stored with the run: nothing is built to show it.

As a program, it computes the facts of manifests (a JSON list on its input), for runs of versions that stored none.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from coordinator.storage.records import StoredRun
from coordinator.storage.runs import RunStore
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.uncertainty import UNKNOWN, EvaluationNoise, RunNoise

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that follow from a manifest; by default those of one that this version cannot read.

    exchanges: after how many rounds a closed form is solved; 0 for other methods   aggregator: under the run's privacy
    noise: which results are noisy; of shown ones alone, without counts and rows.
    """

    exchanges: int = 0
    aggregator: str = ""
    noise: RunNoise = UNKNOWN

    @classmethod
    def of(cls, run: StoredRun) -> RunFacts:
        return computed(run.manifest) if run.facts is None else cls.from_dict(run.facts)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RunFacts:
        evaluation = raw["evaluation"] and EvaluationNoise(**raw["evaluation"])
        return cls(raw["exchanges"], raw["aggregator"], RunNoise(evaluation, frozenset(raw["scores"])))

    def to_dict(self) -> dict[str, Any]:
        noise = self.noise
        evaluation = noise.evaluation and asdict(noise.evaluation)
        facts = {"exchanges": self.exchanges, "aggregator": self.aggregator}
        return {**facts, "evaluation": evaluation, "scores": sorted(noise.scores)}


@lru_cache(maxsize=1024)
def computed(manifest: str) -> RunFacts:
    """Compute the facts of a manifest (JSON): torch is loaded, unless this version cannot read it."""
    try:
        read = RunManifest.from_json(manifest)
        from privacy.compiled_run import CompiledRun

        run = CompiledRun(read)
        facts = RunFacts(run.method.exchanges, noise=run.profile.noise())
    except (FederationError, ValueError):  # of another version: its runs are listed anyway
        return RunFacts()
    try:
        return RunFacts(facts.exchanges, run.aggregator.name, facts.noise)
    except FederationError:
        return facts


def complete(runs: RunStore) -> None:
    """Store the facts of runs that have none, computed by a process that ends: torch would stay in this one."""
    if not (missing := [run for run in runs.all() if run.facts is None]):
        return
    manifests, program = json.dumps([run.manifest for run in missing]), [sys.executable, "-P", "-m", __name__]
    try:
        ended = subprocess.run(program, input=manifests, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
        for run, facts in zip(missing, json.loads(ended.stdout), strict=True):
            if facts != RunFacts().to_dict():  # else with an extension, or in a later version
                runs.note_facts(run.id, facts)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("facts of %d earlier runs are computed when they are shown: %s", len(missing), error)


if __name__ == "__main__":
    print(json.dumps([computed(manifest).to_dict() for manifest in json.load(sys.stdin)]))
