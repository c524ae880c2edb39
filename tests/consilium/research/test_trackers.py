"""Curves in TensorBoard and MLflow: the numbers of the displays, read back; nothing that noise hides."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from consilium.research import trackers
from coordinator.lead import accuracy
from fl_core.errors import ConfigError, UnavailableError
from privacy.accounting.measures import ACCURACY
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until


def closed(number: int, right: float = 3.0, **more: object) -> pb.RoundInfo:
    return pb.RoundInfo(round=number, kind=pb.TRAIN, correct=[right, 1.0], examples=[4.0, 4.0], included=["a"], **more)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_event_files_have_each_round_at_its_number(tmp_path: Path) -> None:
    tracking = trackers.RunTrackers([trackers.open_tracker(f"tensorboard:{tmp_path}", "run-1", {})], pytest.fail)
    for number in range(3):
        tracking.note(closed(number, float(number)))
    tracking.end("finished")
    found = read(tmp_path / "run-1")
    assert [step for step, _ in found["accuracy"]] == [0, 1, 2]
    assert [v for _, v in found["accuracy"]] == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    assert [v for _, v in found["balanced_accuracy"]] == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    assert "accuracy/low" not in found


def test_noisy_numbers_come_with_their_interval_and_hidden_ones_not_at_all() -> None:
    info = pb.RoundInfo(correct=[900.0, 500.0], examples=[1000.0, 1000.0], noise=pb.Noise(std=2.0, draws=1))
    values, _ = trackers.values_of(info)
    shown = ACCURACY.estimate(accuracy.result_of(info))
    assert (values["accuracy"], values["accuracy/low"], values["accuracy/high"]) == (shown.point, shown.low, shown.high)
    assert values["accuracy/low"] < values["accuracy"] < values["accuracy/high"]
    hidden = pb.RoundInfo(correct=[9.0, 5.0], examples=[10.0, 10.0], noise=pb.Noise(std=float("inf"), draws=1))
    values, tags = trackers.values_of(hidden)
    assert ACCURACY.estimate(accuracy.result_of(hidden)).withheld
    assert set(values) == {"updates"}
    assert set(tags) == {"withheld.accuracy", "withheld.balanced_accuracy"}
    scores = pb.RoundInfo(correct=[1.0], examples=[2.0], personal={"pa": 0.5, "pa_std": 0.1}, withheld=["pa"])
    assert not any(name.startswith("personal/pa") for name in trackers.values_of(scores)[0])
    assert trackers.values_of(pb.RoundInfo())[0] == {"updates": 0.0}


def test_a_tracker_that_is_none_a_missing_package_and_a_password_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("wandb:x", "tensorboard", "tensorboard:", "mlflow:", ""):
        with pytest.raises(ConfigError, match=r"E-CFG-02.*tensorboard:DIR or mlflow:URI"):
            trackers.open_tracker(where, "run-1", {})
    for run in ("../x", "", "a/b", "A"):
        with pytest.raises(ConfigError, match="E-CFG-02"):
            trackers.open_tracker("tensorboard:x", run, {})
    with pytest.raises(ConfigError, match=r"E-CFG-02.*no password"):
        trackers.open_tracker("mlflow:http://me:secret@127.0.0.1:1", "run-1", {})

    def without(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", without)
    for where in ("tensorboard:x", "mlflow:http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match=r"E-CFG-08.*pip install 'consilium-fl\[trackers\]'"):
            trackers.open_tracker(where, "run-1", {})


def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    class ServiceUnreachable:
        def log(self, *_: object) -> None:
            raise UnavailableError("E-NET-01", "away")

        def end(self, state: str) -> None:
            raise AssertionError(state)

    told: list[str] = []
    good = trackers.open_tracker(f"tensorboard:{tmp_path}", "run-1", {})
    tracking = trackers.RunTrackers([ServiceUnreachable(), good], told.append)
    for number in range(2):
        tracking.note(closed(number))
    tracking.end("finished")
    assert len(told) == 1
    assert "E-NET-01: away" in told[0]
    assert len(read(tmp_path / "run-1")["accuracy"]) == 2


@pytest.mark.slow
def test_a_real_mlflow_server_has_the_run_once_however_often_it_is_followed(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path)]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=quiet, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:

        def answers() -> bool:
            assert server.poll() is None
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(answers, "MLflow's server")
        for _ in range(2):
            tracker = trackers.open_tracker(f"mlflow:{uri}", "run-1", {"method": "fedmr", "name": "a\x1b[2J"})
            tracking = trackers.RunTrackers([tracker], pytest.fail)
            for number in range(2):
                tracking.note(closed(number))
            tracking.end("finished")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        (found,) = client.search_runs([client.get_experiment_by_name("consilium").experiment_id])
        assert (found.info.status, found.data.tags["consilium.run"]) == ("FINISHED", "run-1")
        assert found.data.params == {"method": "fedmr", "name": r"a\x1b[2J"}
        assert {m.step for m in client.get_metric_history(found.info.run_id, "accuracy")} == {0, 1}
        assert found.data.metrics["accuracy"] == pytest.approx(0.5)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    with pytest.raises(UnavailableError, match=r"E-NET-01: expected MLflow at http://127.0.0.1"):
        trackers.open_tracker(f"mlflow:{uri}", "run-1", {})
