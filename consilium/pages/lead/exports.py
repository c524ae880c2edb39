"""Downloads of the lead's page: models, cards, and a run's rounds as CSV. Also reads the answers to surveys."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from consilium.web.site import Download
from coordinator.lead import accuracy, tables
from coordinator.lead.client import LeadClient
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.errors import FederationError, StateError
from privacy.accounting import measures
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import kind_word
from service_core.console import printable

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
Clock = Callable[[], float]
_DIGEST = re.compile(r"[0-9a-f]{1,64}")
_KEPT = 3
_AGAIN_S = 30.0
"""Time after which a failed read of a survey's answers is tried again, since the coordinator may be back."""
_PATIENCE_S = 3.0
"""Longest wait of a page for a survey's answers. If they take longer, it shows them later."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A file that `coordinator export` writes. form: the --format that it needs, "" if always written."""

    ending: str
    media_type: str = "application/octet-stream"
    form: str = ""


_KINDS = {
    "model.safetensors": _Kind("safetensors"),
    "card.md": _Kind("md", "text/markdown"),
    "model.onnx": _Kind("onnx", form="onnx"),
}


class Exporter:
    """Exports models and reads surveys like the commands, and caches the newest. The first use loads torch.

    home: of the coordinator, with the lead's certificate   connect: creates a client for the lead.
    """

    def __init__(self, home: Path, connect: Callable[[], LeadClient], clock: Clock = time.monotonic) -> None:
        self._home, self._connect = home, connect
        self._folder = TemporaryDirectory(prefix="consilium-page-")
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str, str], Path] = {}
        self._reader, self._surveys = ThreadPoolExecutor(1), threading.Lock()
        self._reading: dict[tuple[str, str], Future[SurveyAnswers]] = {}
        self._clock, self._failed = clock, dict[tuple[str, str], float]()
        self.surveys_read = 0
        """Number of finished reads of surveys, including failed ones."""

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()

    def answers(self, info: pb.RunInfo) -> SurveyAnswers | str:
        """Return the answers to a finished survey, or a text why there are none yet. Waits at most three seconds."""
        with self._surveys:
            key = (info.run_id, info.model_digest)
            if key not in self._reading or self._clock() - self._failed.get(key, math.inf) > _AGAIN_S:
                self._failed.pop(key, None)
                self._reading[key] = self._reader.submit(self._read, info)
                self._reading[key].add_done_callback(self._count)
                for old in list(self._reading)[:-_KEPT]:
                    self._reading.pop(old).cancel()
                    self._failed.pop(old, None)
            reading = self._reading[key]
        try:
            return reading.result(_PATIENCE_S)
        except (TimeoutError, CancelledError):
            return "Reading the answers. They will appear here."
        except FederationError as error:
            self._failed.setdefault(key, self._clock())
            return str(error)

    def _count(self, _: Future[SurveyAnswers]) -> None:
        self.surveys_read += 1

    def _read(self, info: pb.RunInfo) -> SurveyAnswers:
        from coordinator.lead.surveys import fetched

        _require_model(info)
        with closing(self._connect()) as client:
            return fetched(client, client.show(info.run_id))

    def export(self, info: pb.RunInfo, form: str = "") -> Path:
        """Return the folder with a run's model and card; raises as `coordinator export`. form: a further format."""
        from consilium.report.lead import export

        _require_model(info)
        key = (info.run_id, info.model_digest, form)
        with self._lock:
            if key not in self._made:
                out = Path(self._folder.name) / "-".join(key)
                export(info.run_id, out, [form] if form else None, home=self._home)
                self._made[key] = out
            for old in list(self._made)[:-_KEPT]:
                shutil.rmtree(self._made.pop(old))
            return self._made[key]


def _require_model(info: pb.RunInfo) -> None:
    if not (RUN_ID.fullmatch(info.run_id) and _DIGEST.fullmatch(info.model_digest)):
        raise StateError("E-RUN-11", "the run has no model yet: wait for the first round")


def rounds_csv(detail: pb.RunDetail) -> bytes:
    """Return a run's rounds as CSV, one row each. Numbers hidden by noise are empty; others have an interval."""
    classes = max((len(r.examples) for r in detail.rounds), default=0)
    head = ["round", "kind"]
    head += [f"{measure.name}{end}" for measure in measures.MEASURES for end in ("", " low", " high")]
    head += ["took part", "missing", "cut", "rows cut", "without a bound", "bytes up", "seconds"]
    head += [f"class {k} {word}" for k in range(classes) for word in ("right", "of")]
    rows = []
    for r in detail.rounds:
        row: list[object] = [tables.round_text(r.round, r.kind), kind_word(r.kind)]
        for value in (measure.estimate(accuracy.result_of(r)) for measure in measures.MEASURES):
            row += [value.point, value.low, value.high]
        row += [", ".join(r.included), *("; ".join(map(": ".join, sorted(m.items()))) for m in (r.missing, r.cut))]
        row += [r.cut_rows, r.unbounded]
        row += [sum(a.bytes for a in r.arrivals), r.closed_unix - r.opened_unix if r.closed_unix else None]
        row += [number for pair in zip(r.correct, r.examples, strict=False) for number in pair]
        rows.append(row)
    return csv_bytes(head, rows)


def download(id: str, exporter: Exporter, run: pb.RunInfo | None, detail: pb.RunDetail | None) -> Download | None:
    """Return the file with an id RUN/WHAT; None if there is none. run, detail: of this run."""
    what = id.partition("/")[2]
    if run is None:
        return None
    if what == "rounds.csv" and detail is not None:
        return Download(f"{run.run_id}.csv", "text/csv; charset=utf-8", rounds_csv(detail))
    if what not in _KINDS or not run.model_object:
        return None
    kind = _KINDS[what]
    name = f"{run.run_id}.{kind.ending}"
    return Download(name, kind.media_type, exporter.export(run, kind.form) / name)


# ---- rows for a spreadsheet ------------------------------------------------------------------------------------------

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_bytes(head: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Write rows as CSV in UTF-8. Texts that a spreadsheet would read as a formula get a leading apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    for row in (head, *rows):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue().encode("utf-8")


def _cell(value: object) -> object:
    if isinstance(value, int | float):
        return value
    text = "" if value is None else str(value)
    return printable(f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(_FORMULA) else text)
