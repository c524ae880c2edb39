"""Graphs from a coordinator are read in the hospital's worker, in its cage, and refused there by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_core.models.frozen import BodyFacts
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, StartPoint, Weights
from fl_core.rounds.run_setup import RunSetup
from protos.wire import codec
from tests.support.encoders import model_of, node, vit_file, whole
from tests.support.fake_coordinator import Hospital, manifest

pytestmark = pytest.mark.integration


def run_of(graph: bytes, folder: Path) -> tuple[RunManifest, bytes]:
    """A run of two rounds on a graph, and the object that it begins with."""
    facts = BodyFacts(hashlib.sha256(graph).hexdigest(), len(graph), 24, 16, 3, "nchw", (0.5,) * 3, (0.5,) * 3)
    options = {"projection": [], "head_bias": True, "body": BodyFacts.write([facts])}
    plain = manifest()
    made = replace(plain, model=NamedOptions("frozen", options), train=replace(plain.train, freeze="features"))
    setup = RunSetup(made)
    made = replace(made, layout=derive_layout(setup.method, setup.new_model(), setup.schema))
    tensors = {"body.encoders.0.graph": torch.frombuffer(bytearray(graph), dtype=torch.uint8)}
    digest, size = codec.write_weights(tensors, folder / "object")
    weights = Weights(digest, size, facts.sha256, "", ("head",))
    setup = RunSetup(made)
    start = setup.pinned_start(setup.initial_state(), StartPoint(weights=weights))
    return replace(made, start=start), (folder / "object").read_bytes()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[object]:
    """Start a hospital, whose worker is a process, for a run on a graph."""
    started: list[Hospital] = []

    def serve(graph: bytes) -> Hospital:
        run, data = run_of(graph, tmp_path)
        hospital = Hospital(tmp_path / "home", replace(run, start=None), run_round=None)
        started.append(hospital)
        hospital.digest = hospital.transfer.offer(run.to_json().encode())
        assert hospital.transfer.offer(data) == run.start.weights.object
        hospital.start()
        return hospital

    yield serve
    for hospital in started:
        hospital.end()


def test_a_hospital_trains_behind_a_graph_in_its_cage(served, tmp_path: Path) -> None:
    hospital = served(vit_file(tmp_path).read_bytes())
    hospital.train()
    kept = list((tmp_path / "home").rglob("*.rows"))
    assert len(kept) == 2
    assert b"CPUExecutionProvider" in kept[0].read_bytes()


HOSTILE = {
    "a loop": ([node("Loop", "x", "y")], "'Loop'"),
    "a custom operator": ([node("F", "x", "y", domain="evil")], "'evil'"),
    "a bomb": (
        [
            node("ConstantOfShape", "n", "b"),
            node("ReduceSum", "b", "r", keepdims=0),
            node("Add", "x r", "z"),
            node("Flatten", "z", "y"),
        ],
        "MiB of memory",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_graph_that_a_coordinator_slipped_in_is_refused_by_name(served, what: str) -> None:
    nodes, said = HOSTILE[what]
    hospital = served(model_of(nodes, [whole("n", 6 << 30)]).SerializeToString())
    hospital.offer()
    refusal = hospital.refused()
    assert refusal.code == "E-WIRE-06"
    assert said in refusal.reason
