"""The benchmark of a round measures what it says: real processes, and byte counts that can be computed beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.round_trip.__main__ import compared
from benchmarks.round_trip.models import RESNET18, workload
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import GLOBAL_PARTS
from fl_core.types.values import Part
from protos.wire.codec import pack_bundle, pack_state

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "silos",
    "params",
    "params_sent",
    "rounds",
    "starts",
    "bytes_up",
    "bytes_down",
    "run_bytes_up",
    "run_bytes_down",
    "round_seconds",
    "bare_stream_seconds",
    "line_seconds",
    "delay_ms",
    "ratio",
    "coordinator_peak_mib",
    "round_seconds_each",
    "warm_up_seconds_each",
    "bare_stream_seconds_each",
    "coordinator_cpu_seconds",
    "silos_cpu_seconds",
    "bare_cpu_seconds",
}


@pytest.mark.slow
def test_a_small_round_trip_counts_the_bytes_of_its_messages() -> None:
    words = [sys.executable, "-m", "benchmarks.round_trip", "--silos", "2", "--params", "50000", "--rounds", "13"]
    done = subprocess.run(
        [*words, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == KEYS
    assert (found["silos"], found["rounds"], found["starts"]) == (2, 13, 2)
    assert abs(found["params"] - 50_000) < 100

    manifest = manifest_from(
        compose_spec([*workload(50_000).overrides, "rounds=15", "method=fedavg"]), ["hospital0", "hospital1"]
    )
    state = RunSetup.of(manifest).initial_state()
    parts = {
        name: Part({key: torch.zeros(s) for key, s in spec.shapes.items()}, torch.zeros(spec.weight_shape))
        for name, spec in manifest.layout.items()
    }
    up, down = len(pack_bundle(parts)), len(pack_state(state))
    assert (found["bytes_up"], found["bytes_down"]) == (up, down)
    closing = len(pack_bundle({name: parts[name] for name in GLOBAL_PARTS}))
    rounds = 3 + 12 + 3 + 1  # of two starts, with those that warm up
    assert found["run_bytes_up"] == 2 * (rounds * up + 2 * closing)
    broadcasts = 2 * (rounds + 2) * down  # with the closing evaluations; beside them each silo reads the manifest
    assert 0 < found["run_bytes_down"] - broadcasts < 2 * 2 * 20_000
    assert (len(found["round_seconds_each"]), len(found["warm_up_seconds_each"])) == (13, 4)
    assert all(s > 0 for s in (*found["round_seconds_each"], *found["bare_stream_seconds_each"]))


def test_several_numbers_of_silos_are_compared_by_their_peaks() -> None:
    found = [{"silos": k, "coordinator_peak_mib": peak} for k, peak in ((3, 900.0), (12, 941.5), (6, 910.0))]
    assert compared(found) == {"measured": found, "peak_difference_mib": 41.5}


@pytest.mark.parametrize("wanted", [38_378, 50_000, 300_000])
def test_a_workload_is_as_large_as_one_layer_allows(wanted: int) -> None:
    chosen = workload(wanted)
    assert abs(chosen.params - wanted) <= 75 / 2  # one more unit of the projection: 64 + 1 weights in, 10 out


def test_the_counters_of_batch_norm_do_not_travel() -> None:
    chosen = workload(RESNET18)
    assert (chosen.params, chosen.sent) == (RESNET18, RESNET18 - 20)
