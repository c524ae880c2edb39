"""Log a run to TensorBoard and MLflow: the same values as the displays, and none of a single hospital.

The step of a value is the number of training rounds before it. A noisy value is logged with the ends of its 95 %
interval (`.../low`, `.../high`). A value hidden by noise is not logged; a tag states the reason.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from coordinator.lead import accuracy
from fl_core.errors import ConfigError, UnavailableError
from fl_core.errors.extras import require
from privacy.accounting import measures
from privacy.accounting.measures import EvaluationResult
from privacy.accounting.uncertainty import NOTHING, Estimate
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import ERR, printable

KINDS = ("tensorboard:DIR", "mlflow:URI")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
_EXPERIMENT, _RUN_TAG = "consilium", "consilium.run"
_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""By default, MLflow sends telemetry and waits minutes for an unreachable server."""


class Tracker(Protocol):
    """A destination for a run's numbers."""

    def log(self, step: int, values: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Write the numbers of one round; raises UnavailableError (E-NET-01) if the tracker does not accept them."""
        ...

    def end(self, state: str) -> None:
        """Close the run in the tracker; raises as `log`."""
        ...


def open_tracker(where: str, run: str, about: Mapping[str, str]) -> Tracker:
    """Open a tracker for a run. where: `tensorboard:DIR` or `mlflow:URI`   about: parameters of the run to display.

    Raises ConfigError: E-CFG-02 on another form, E-CFG-08 without the package; UnavailableError (E-NET-01) if the
    server does not answer.
    """
    kind, place = parsed(where)
    if not _RUN_ID.fullmatch(run):  # it becomes a folder's name
        raise ConfigError(
            "E-CFG-02",
            f"expected a run's id of lower-case letters, digits and hyphens, found {run[:80]!r}: correct it",
        )
    return _TensorBoard(Path(place) / run) if kind == "tensorboard" else _MlFlow(place, run, about)


def parsed(where: str) -> tuple[str, str]:
    """Split into a tracker's kind and place; raises ConfigError (E-CFG-02) on another form."""
    kind, _, place = where.partition(":")
    if kind not in ("tensorboard", "mlflow") or not place:
        raise ConfigError("E-CFG-02", f"expected --tracker {' or '.join(KINDS)}, found {where!r}: correct it")
    return kind, place


def values_of(info: pb.RoundInfo) -> tuple[dict[str, float], dict[str, str]]:
    """Return a closed round's measures of the global and personal models, and tags for withheld measures."""
    return values_from(len(info.included), accuracy.result_of(info))


def values_from(updates: int, result: EvaluationResult) -> tuple[dict[str, float], dict[str, str]]:
    values: dict[str, float] = {"updates": float(updates)}
    withheld: dict[str, str] = {}
    for measure in measures.of_model():
        _add(values, withheld, measure.name, measure.estimate(result))
    for name, score in measures.personal_json(result.personal, result.withheld).items():
        if isinstance(score, float):
            values[f"personal/{name}"] = score
    return values, withheld


def _add(values: dict[str, float], withheld: dict[str, str], name: str, found: Estimate) -> None:
    if found == NOTHING:
        return
    if found.withheld or found.point is None:
        withheld[f"withheld.{name}"] = found.withheld or "no value"
        return
    values[name] = found.point
    if not found.exact and found.low is not None and found.high is not None:
        values |= {f"{name}/low": found.low, f"{name}/high": found.high}


class RunTrackers:
    """The trackers of one run. A tracker that fails is removed with a warning; the others continue."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        warn: Callable[[str], object],
        remedy: str = "run `coordinator watch` again with --tracker",
    ) -> None:
        self._trackers = list(trackers)
        self._warn, self._remedy = warn, remedy

    def note(self, info: pb.RoundInfo) -> None:
        """Write a closed round."""
        self.log(info.round, *values_of(info))

    def log(self, step: int, values: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Write numbers. step: training rounds of the measured model."""
        self._each(lambda tracker: tracker.log(step, values, tags))

    def end(self, state: str) -> None:
        self._each(lambda tracker: tracker.end(state))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                do(tracker)
            except (UnavailableError, OSError) as error:
                self._trackers.remove(tracker)
                self._warn(f"{error}; logging to it has stopped: {self._remedy}")


def tracking_of(where: Sequence[str], info: pb.RunInfo) -> RunTrackers:
    """Open the trackers of `coordinator watch`; raises as `open_tracker`."""
    about = {"name": info.name, "method": info.method, "data": info.data, "manifest": info.manifest_digest}
    opened = [open_tracker(one, info.run_id, about) for one in where]
    return RunTrackers(opened, lambda text: ERR.print(text, soft_wrap=True))


def _library(name: str) -> Any:  # noqa: ANN401
    return require(name, "trackers", "--tracker")


class _TensorBoard:
    """TensorBoard event files in the run's own folder."""

    def __init__(self, folder: Path) -> None:
        self._event: Any = _library("tensorboard.compat.proto.event_pb2")
        self._summary: Any = _library("tensorboard.compat.proto.summary_pb2")
        writer: Any = _library("tensorboard.summary.writer.event_file_writer")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = writer.EventFileWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                "E-CFG-02", f"expected a writable folder at {folder}, found {error.strerror}: choose another folder"
            ) from error

    def log(self, step: int, values: Mapping[str, float], tags: Mapping[str, str]) -> None:
        del tags  # TensorBoard shows no text next to curves
        entries = [self._summary.Summary.Value(tag=name, simple_value=v) for name, v in sorted(values.items())]
        event = self._event.Event(wall_time=time.time(), step=step, summary=self._summary.Summary(value=entries))
        self._writer.add_event(event)
        self._writer.flush()

    def end(self, state: str) -> None:
        del state
        self._writer.close()


class _MlFlow:
    """An MLflow run, found by a tag with our run's id."""

    def __init__(self, uri: str, run: str, about: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        if parts.username or parts.password:
            raise ConfigError(
                "E-CFG-02",
                "expected no password in --tracker, found one, which other users of this machine can read: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        self._uri = uri
        self._client: Any = self._call(lambda: _library("mlflow.tracking").MlflowClient(tracking_uri=uri))
        self._id = self._call(lambda: self._begin(run, about))

    def _begin(self, run: str, about: Mapping[str, str]) -> str:
        client = self._client
        experiment = client.get_experiment_by_name(_EXPERIMENT)
        number = self._new_experiment() if experiment is None else experiment.experiment_id
        runs = client.search_runs([number], f"tags.`{_RUN_TAG}` = '{run}'", max_results=1)
        if runs:
            return str(runs[0].info.run_id)
        made = client.create_run(number, tags={_RUN_TAG: run}, run_name=run)
        for name, value in about.items():
            client.log_param(made.info.run_id, name, printable(value)[:500])
        return str(made.info.run_id)

    def _new_experiment(self) -> Any:  # noqa: ANN401
        try:
            return self._client.create_experiment(_EXPERIMENT)
        except Exception:  # another run of a sweep created it meanwhile, or the next call fails again
            experiment = self._client.get_experiment_by_name(_EXPERIMENT)
            if experiment is None:
                raise
            return experiment.experiment_id

    def log(self, step: int, values: Mapping[str, float], tags: Mapping[str, str]) -> None:
        def send() -> None:
            for name, value in sorted(values.items()):
                self._client.log_metric(self._id, name, value, step=step)
            for name, text in tags.items():
                self._client.set_tag(self._id, name, printable(text)[:500])

        self._call(send)

    def end(self, state: str) -> None:
        status = {"finished": "FINISHED", "aborted": "KILLED"}.get(state, "FAILED")
        self._call(lambda: self._client.set_terminated(self._id, status))

    def _call(self, do: Any) -> Any:  # noqa: ANN401
        try:
            return do()
        except ConfigError:
            raise
        except Exception as error:  # MLflow raises its own errors, those of requests and those of its stores
            cause = printable(str(error).split("\n")[0])[:200]
            raise UnavailableError(
                "E-NET-01",
                f"expected MLflow at {printable(self._uri)[:200]}, found {type(error).__name__}: {cause}. Check the "
                "address and the server",
            ) from error
