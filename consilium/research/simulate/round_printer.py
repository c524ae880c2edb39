"""Print one line per round of a simulation on stderr."""

from __future__ import annotations

import sys

from coordinator.lead import tables
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.records import RoundRecord
from fl_core.types.values import State
from privacy import profiles
from privacy.accounting.measures import EvaluationResult
from service_core.console import ERR, in_notebook, wrap_parts


class RoundPrinter(Observer):
    """Prints one line per round on stderr, two on a narrow terminal. Stdout is reserved for the result."""

    def __init__(self, manifest: RunManifest) -> None:
        self._noise = profiles.result_noise(manifest)
        self._first, self._measures = True, manifest.kind.measures

    def counted(self, coverage: ClassCoverage) -> None:
        for sentence in coverage.sentences():
            ERR.print(f"! {sentence}" if coverage.left_out else sentence, style="bold" if coverage.left_out else None)

    def closed(self, record: RoundRecord, server: State) -> None:  # noqa: ARG002
        """Print the accuracy of the model from before the round, if the run measures one."""
        if not self._measures:
            return
        trained = record.kind.trains
        if self._first and trained and record.round:
            ERR.print(f"continues after round {record.round}, from the latest checkpoint")
        self._first = False
        when = f"before round {record.round + 1:>3}" if trained else f"after round  {record.round:>3}"
        parts = tables.measured_parts(EvaluationResult.of(record, self._noise))
        for line in wrap_parts([when, *parts, *tables.changed_parts([record])], ERR.width):
            ERR.print(line)


def is_watched() -> bool:
    """Return whether stderr is shown live: in a terminal or a notebook."""
    return sys.stderr.isatty() or in_notebook()
