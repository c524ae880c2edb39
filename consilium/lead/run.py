"""A run of a federation: watch it, and get its numbers, its model and its card."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from consilium.lead import listing
from consilium.lead.connection import LeadConnection
from consilium.lead.listing import rendered
from coordinator.lead import accuracy, tables
from coordinator.lead.as_json import detail_json
from coordinator.lead.watcher import Watcher, show_events
from fl_core.errors.extras import requires_extra
from fl_core.kinds import kind_of
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from service_core.audit_log.local_commands import recording
from service_core.console import OUT, in_notebook, pluralize

if TYPE_CHECKING:
    from consilium.model.classifier import Model
    from consilium.report.card import Card
    from consilium.report.export import ExportedFiles

_EVERY_S = 0.25
_WIDTH = 120


class Run:
    """A run of the federation, as in `coordinator show` and `watch`.

        run = lead.run(method="analytic", data="digits")
        run.watch()              # shows each round, and returns when the run has ended
        run.frame                # round, measure, class, value, low, high
        run.model().predict(images)
        run.export("models")     # the model with its signed card

    Properties other than `id` and `name` query the service. `repr` shows its last answer.
    """

    def __init__(self, connection: LeadConnection, info: pb.RunInfo) -> None:
        self._connection, self._info = connection, info

    @property
    def id(self) -> str:
        return self._info.run_id

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def state(self) -> str:
        """One of "waiting", "running", "paused", "finished", "failed" or "aborted"."""
        return self._detail().info.state

    @property
    def reason(self) -> str:
        """Why the run is paused or has failed; "" otherwise."""
        return self._detail().info.reason

    @property
    def manifest(self) -> RunManifest:
        """The run's manifest; its digest is the one that hospitals have."""
        return RunManifest.from_json(self._detail().manifest_json)

    @property
    def digest(self) -> str:
        """Digest of the newest model; equals that of a simulation with the same settings and data."""
        return self._detail().info.model_digest

    @property
    def summary(self) -> Mapping[str, object]:
        """The facts that `coordinator show --json` prints."""
        return detail_json(self._detail())

    @property
    def frame(self) -> Any:  # noqa: ANN401 - pandas has no types of its own
        """One row per round and measure: round, measure, class, value, low, high, as `Simulation.frame`.

        A pandas data frame, or a list of dictionaries if pandas is not installed.
        """
        from consilium.report.curves import COLUMNS, history

        detail = self._detail()
        manifest = RunManifest.from_json(detail.manifest_json)
        measured = manifest.kind.measures
        rows = [
            dict(zip(COLUMNS, row, strict=True)) for row in history(detail.rounds, manifest.schema.classes) if measured
        ]
        try:
            import pandas as pd
        except ImportError:
            return rows
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def watch(self, quiet: bool = False) -> Run:
        """Show the run's progress until it ends, and return the run. A terminal or notebook shows a view, others lines.

        quiet: only wait. Ctrl-C (in a notebook: interrupt) raises KeyboardInterrupt, and the run continues; watch it
        again at any time, also from another process. The returned run may have failed or paused: see `state`.
        """
        try:
            show_events(self._connection.client.watch(self.id), quiet, NotebookWatcher if in_notebook() else Watcher)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the run continues; follow it again with lead[{self.id!r}].watch()") from None
        self._detail()
        return self

    def abort(self) -> Run:
        """Stop the run in any state; closed rounds are kept."""
        self._info = self._connection.client.abort(self.id)
        return self

    def resume(self, quorum: int = 0) -> Run:
        """Resume a paused or failed run after its last closed round. quorum: updates to close a round; 0: as before."""
        self._info = self._connection.client.resume(self.id, quorum)
        return self

    def exclude(self, silo: str, readmit: bool = False) -> Run:
        """Exclude a hospital: rounds no longer wait for it or include it. readmit: include it again."""
        self._info = self._connection.client.exclude(self.id, silo, readmit)
        return self

    def extend(self, hours: float) -> Run:
        """Give all pending hospitals of the open round more time."""
        self._info = self._connection.client.extend(self.id, hours)
        return self

    def model(self) -> Model:
        """Fetch the newest model, ready to classify, as `consilium.load` does for the exported file.

        Raises ConfigError (E-RUN-11) before the first round is closed.
        """
        with requires_extra("report", "models of runs"):
            from consilium.model.classifier import Model
            from consilium.model.predictor import Predictor
            from consilium.report.export import fetched, loaded_model
        with fetched(self._connection.client, self.id) as stored:
            return Model(Predictor(loaded_model(stored)))

    def card(self) -> RunCard:
        """Return the card of the newest model as `export` would write it now, without a signature."""
        with requires_extra("report", "cards"):
            from consilium.report.export import fetched, unsigned_card
        with fetched(self._connection.client, self.id) as stored:
            return RunCard(unsigned_card(stored, self._connection.credentials, self._connection.client.silos().silos))

    def export(
        self,
        folder: str | Path = "models",
        *,
        formats: Sequence[str] = (),
        licence: str = "",
        intended_use: str = "",
        survey: Run | str | None = None,
        temperature: bool = False,
    ) -> ExportedFiles:
        """Write the newest model and its card into a folder, as `coordinator export` does, and return the files.

        formats: also "onnx" or "torch"   licence, intended_use: for the card, in your words   survey: include its
        answers in the card   temperature: let predictions use one estimated from the hospitals' counts
        Adds the same line to the home's audit log as the command.
        """
        with requires_extra("report", "exports"):
            from consilium.report.lead import ExportOptions, export_run
        place, asked = Path(folder), survey.id if isinstance(survey, Run) else survey
        with recording(self._connection.home, "export", {"run": self.id, "out": place}, "Python"):
            wanted = ExportOptions.of(formats, licence, intended_use, asked, temperature)
            files, _ = export_run(self._connection.client, self._connection.home, self.id, place, wanted)
        return files

    def _detail(self) -> pb.RunDetail:
        detail = self._connection.client.show(self.id)
        self._info = detail.info
        return detail

    def __repr__(self) -> str:
        return listing.text([self._sentence()])

    def _repr_html_(self) -> str:
        return listing.html([tables.runs_table([self._info]), *filter(None, self._info.reason.splitlines())])

    def _sentence(self) -> str:
        info = self._info
        rounds = f"{info.closed} of {pluralize(info.rounds, 'round')}"
        newest = accuracy.newest_balanced(info)
        measured = kind_of(info.method, info.rounds).measures and newest.point is not None
        balanced = f", balanced accuracy {accuracy.balanced_text(info)}" if measured else ""
        return f"<run {info.run_id}: {info.method}, {info.state}, {rounds}{balanced}>"


@dataclass(frozen=True, slots=True)
class RunCard:
    """The card of a run's model. facts: all of its numbers. `str` and notebooks show it as Markdown."""

    facts: Card

    @property
    def markdown(self) -> str:
        from consilium.report import documents

        return documents.markdown(self.facts)

    def __str__(self) -> str:
        return self.markdown

    def _repr_markdown_(self) -> str:
        return self.markdown


class NotebookWatcher(Watcher):
    """Shows a run in one output of the cell; warnings and refusals stay as separate lines."""

    def __init__(self) -> None:
        super().__init__()
        self._live = _CellOutput(self._display)


class _CellOutput:
    """A notebook output that is updated at most four times a second. Its last content stays."""

    console: Console = OUT

    def __init__(self, view: Callable[[], RenderableType]) -> None:
        self._view = view
        self._handle: Any = None
        self._painted = 0.0

    def start(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(self._html()), display_id=True)  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        if time.monotonic() - self._painted >= _EVERY_S:
            self._paint()

    def stop(self) -> None:
        self._paint()

    def _paint(self) -> None:
        from IPython.display import HTML

        self._painted = time.monotonic()
        self._handle.update(HTML(self._html()))  # type: ignore[no-untyped-call]

    def _html(self) -> str:
        return f"<pre>{escape(rendered([self._view()], _WIDTH))}</pre>"
