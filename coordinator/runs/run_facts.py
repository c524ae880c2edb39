"""The facts of a run's method and privacy that are shown. They are stored with the run, so that showing builds nothing.

As a program, it computes the facts of manifests (a JSON list on its input), for runs of versions that stored none.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from coordinator.storage.records import StoredRun
from coordinator.storage.runs import RunStore
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import ClassCoverage
from privacy.accounting.uncertainty import UNKNOWN, EvaluationNoise, RunNoise

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DerivedFacts:
    """Facts that follow from a manifest; the defaults are for a manifest that this version cannot read.

    exchanges: after how many rounds a closed form is solved; 0 for other methods   aggregator: under the run's privacy
    private: updates are noisy   masked: masks hide single updates   counts_classes: hospitals are counted for each
    class before round 1   least: hospitals that a class needs to be trained   sums_of: updates in the smallest sum that
    is read; 0 if each update is read   noise: of the shown results; its `counts` and `rows` are empty.
    """

    exchanges: int = 0
    aggregator: str = ""
    private: bool = False
    masked: bool = False
    counts_classes: bool = False
    least: int = 1
    sums_of: int = 0
    noise: RunNoise = UNKNOWN

    @classmethod
    def of(cls, run: StoredRun) -> DerivedFacts:
        return cls.from_dict(run.facts or {}) if is_known(run) else computed(run.manifest)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DerivedFacts:
        simple = {name: raw[name] for name in _SIMPLE}
        evaluation = raw["evaluation"] and EvaluationNoise(**raw["evaluation"])
        return cls(**simple, noise=RunNoise(evaluation, frozenset(raw["scores"])))

    def to_dict(self) -> dict[str, Any]:
        noise, simple = self.noise, {name: getattr(self, name) for name in _SIMPLE}
        return {**simple, "evaluation": noise.evaluation and asdict(noise.evaluation), "scores": sorted(noise.scores)}

    def coverage(
        self, classes: Sequence[str], hospitals: Sequence[int], *, partial: bool = False, why: str = ""
    ) -> ClassCoverage:
        """Return the class coverage, as `RunSetup.coverage`."""
        return ClassCoverage(tuple(classes), tuple(hospitals), partial, self.least, self.masked, why)


CANDIDATES = "right"
"""The tensor in layouts of runs of version 0.1.0 that chose lambda in one more exchange."""
_SIMPLE = tuple(field.name for field in fields(DerivedFacts) if field.name != "noise")


def is_known(run: StoredRun) -> bool:
    """Tell whether all facts of a run are stored."""
    return run.facts is not None and set(_SIMPLE) <= run.facts.keys()


@lru_cache(maxsize=1024)
def computed(manifest: str) -> DerivedFacts:
    """Compute the facts of a manifest (JSON); loads torch if this version can read the manifest."""
    try:
        read = RunManifest.from_json(manifest)
        from privacy.compiled_run import CompiledRun

        run = CompiledRun(read)
        chose = any(CANDIDATES in spec.shapes for spec in read.layout.values())
        facts = DerivedFacts(
            run.method.exchanges + chose,
            private=run.private,
            masked=run.masked,
            counts_classes=run.counts_classes,
            least=1 if run.updates.floor is None else run.updates.floor.least,
            sums_of=run.updates.sums_of,
            noise=run.profile.noise(),
        )
    except (FederationError, ValueError):  # of another version: its runs are listed anyway
        return DerivedFacts()
    try:
        return replace(facts, aggregator=run.aggregator.name)
    except FederationError:
        return facts


def complete(runs: RunStore) -> None:
    """Store the facts of runs that have none; a child process computes them, so that this one does not load torch."""
    if not (missing := [run for run in runs.all() if not is_known(run)]):
        return
    manifests, program = json.dumps([run.manifest for run in missing]), [sys.executable, "-P", "-m", __name__]
    try:
        ended = subprocess.run(program, input=manifests, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
        for run, facts in zip(missing, json.loads(ended.stdout), strict=True):
            if facts != DerivedFacts().to_dict():  # else with an extension, or in a later version
                runs.note_facts(run.id, facts)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("facts of %d earlier runs are computed when they are shown: %s", len(missing), error)


if __name__ == "__main__":
    print(json.dumps([computed(manifest).to_dict() for manifest in json.load(sys.stdin)]))
