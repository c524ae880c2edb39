"""A hospital without torch does what takes no gradient, with the bytes of one that has it, and refuses the rest."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from consilium.research.engines.in_process import SiloShare, local_ports, with_features
from fl_core import datasets
from fl_core.models.frozen import BodyFacts
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions, RunManifest, StartPoint, Weights
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import DataFactory, SiloPort
from fl_core.types.values import RoundContext, State, Tensors
from privacy.compiled_run import CompiledRun
from privacy.release_log import InMemoryReleaseLog
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.codec import BundleFile
from service_core.workers.child import launch, worker_words
from silo.service import launchers
from silo.storage.home import Home
from tests.silo.admission.test_surveys import survey, write_images
from tests.support.caged_hospitals import pid_of
from tests.support.encoders import vit_file
from tests.support.fake_coordinator import Hospital, manifest
from tests.support.hospital import first, rounds_equal, upload
from tests.support.privacy import TRAIN, budgeted, hospital_level, private

pytestmark = pytest.mark.integration

BLOCKED = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('silo.worker', run_name='__main__')"


def on_body(plain: RunManifest, graph: bytes, folder: Path, head: bool = False) -> tuple[RunManifest, Tensors]:
    """Put a run behind a graph; return the manifest, and the weights that it begins with, with a head or without."""
    facts = BodyFacts(hashlib.sha256(graph).hexdigest(), len(graph), 24, 16, 3, "nchw", (0.5,) * 3, (0.25,) * 3)
    options = {"projection": [], "head_bias": True, "body": BodyFacts.write([facts])}
    made = replace(plain, model=NamedOptions("frozen", options), train=replace(plain.train, freeze="features"))
    setup = RunSetup(made)
    layout = derive_layout(
        setup.method,
        setup.new_model(),
        setup.schema,
        plain.personal,
        plain.evaluation.metrics,
        updates=setup.kind.updates,
    )
    made = replace(made, layout=layout)
    tensors = {"body.encoders.0.graph": torch.frombuffer(bytearray(graph), dtype=torch.uint8)}
    if head:
        tensors |= {f"head.{name}": v.detach() for name, v in torch.nn.Linear(24, 10).named_parameters()}
    digest, size = codec.write_weights(tensors, folder / "object")
    start = StartPoint(weights=Weights(digest, size, facts.sha256, "", () if head else ("head",)))
    setup = RunSetup(replace(made, start=start)).with_weights(tensors)
    start = setup.pinned_start(setup.initial_state(), start)
    return replace(made, start=start), tensors


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return vit_file(tmp_path_factory.mktemp("vit")).read_bytes()


Serve = Callable[..., Hospital]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a hospital whose worker cannot import torch."""
    words = [sys.executable, *worker_words("silo.worker")[1:-2], "-c", BLOCKED]
    monkeypatch.setattr(launchers, "launch_here", partial(launch, words))
    started: list[Hospital] = []

    def serve(run: RunManifest, with_torch: bool = False, **settings: object) -> Hospital:
        worker = {} if with_torch else {"run_round": None}
        hospital = Hospital(tmp_path / f"home{len(started)}", manifest(), **worker, **settings)
        started.append(hospital)
        hospital.manifest, hospital.digest = run, hospital.transfer.offer(run.to_json().encode())
        if (tmp_path / "object").exists():
            hospital.transfer.offer((tmp_path / "object").read_bytes())
        hospital.start()
        return hospital

    yield serve
    for hospital in started:
        hospital.end()


def shares() -> list[SiloShare]:
    return [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]


def doors(compiled: CompiledRun) -> list[DataFactory]:
    return [compiled.profile.data_factory(k, InMemoryReleaseLog()) for k in range(3)]


def simulated(run: RunManifest, weights: Tensors) -> tuple[SiloPort, list[State]]:
    """Return the hospital of a simulation, which has torch, and a message for each round, the later ones drawn."""
    compiled = CompiledRun.of(run).with_weights(weights)
    port = local_ports(compiled, with_features(compiled, shares()), doors(compiled))[1]
    first = compiled.method.broadcast(compiled.initial_state())
    drawn = torch.Generator().manual_seed(1)
    head = {name: torch.randn(v.shape, generator=drawn) for name, v in first["w"].items()}
    return port, [first, *[{**first, "w": head}] * 2]


def updates_equal(served: Serve, graph: bytes, folder: Path, plain: RunManifest) -> Hospital:
    """Let the hospital do a whole run behind the graph; each update is that of the simulation, byte by byte."""
    run, weights = on_body(plain, graph, folder)
    hospital = served(run)
    rounds_equal(hospital, *simulated(run, weights))
    return hospital


def test_updates_are_those_of_the_simulation_bit_for_bit(served: Serve, graph: bytes, tmp_path: Path) -> None:
    hospital = updates_equal(served, graph, tmp_path, manifest(method=NamedOptions("analytic", {})))
    maps = Path(f"/proc/{pid_of(hospital)}/maps").read_text()
    assert "libtorch" not in maps
    assert "onnxruntime" in maps


@pytest.mark.parametrize("options", [{"class_weights": "balanced"}, {"head": "ncm"}, {"ridge": 0.1}])
def test_so_they_are_with_other_options(served: Serve, graph: bytes, tmp_path: Path, options: dict) -> None:
    updates_equal(served, graph, tmp_path, manifest(method=NamedOptions("analytic", options)))


def test_clinical_counts_are_the_same(served: Serve, graph: bytes, tmp_path: Path) -> None:
    """The sum of confidences is the only number that is not counted."""
    plain = manifest(method=NamedOptions("analytic", {}), evaluation=EvaluationTerms(metrics="clinical"))
    run, weights = on_body(plain, graph, tmp_path)
    (Home(tmp_path / "home0").make()).policy.write_text('[evaluation]\nsend = "clinical"\n')
    hospital, (port, messages) = served(run), simulated(run, weights)
    hospital.offer(2, pb.EVALUATE, messages[-1])
    hospital.sent()
    wanted = port.round(messages[-1], RoundContext(3, 10, 2, 2, 3), TaskKind.EVALUATE)
    (tmp_path / "update").write_bytes(upload(hospital))
    update = BundleFile(tmp_path / "update")
    assert set(update) == set(wanted) == {"metrics", "clinical"}
    for part, total in ((part, wanted[part].total) for part in wanted):
        for name, value in total.items():
            rtol = 1e-6 if name == "confidence" else 0.0
            torch.testing.assert_close(update[part].total[name], value, atol=0.0, rtol=rtol)
    assert float(wanted["clinical"].weight) > 100


def test_a_private_run_releases_with_the_noise_of_the_simulation(served: Serve, graph: bytes, tmp_path: Path) -> None:
    ledger = budgeted(tmp_path / "home0")
    updates_equal(served, graph, tmp_path, private("analytic", {"release": "centred"}))
    assert {state for _, state, _ in ledger.entries(TRAIN)} == {"SPENT"}


def test_a_personal_head_is_as_often_right(served: Serve, graph: bytes, tmp_path: Path) -> None:
    """It is solved at the hospital, from sums in which its own are a third; what leaves is its accuracy."""
    options = {"personal_head": True, "head": "ridge", "ridge": 0.01}
    run, weights = on_body(manifest(method=NamedOptions("analytic", options), personal=True), graph, tmp_path)
    port, messages = simulated(run, weights)
    sums = port.round(messages[0], RoundContext(3, 10, 2, 0, 3), TaskKind.TRAIN)
    added = {"a": sums["moments"].total["a"], "b": sums["classes"].total["b"], "n": sums["classes"].weight.double()}
    message = {**messages[-1], "sums": {name: 3 * value for name, value in added.items()}}
    updates = []
    for with_torch in (False, True):
        hospital = served(run, with_torch=with_torch)
        hospital.offer(2, pb.EVALUATE, message)
        hospital.sent()
        updates.append(upload(hospital))
    assert updates[0] == updates[1]
    (tmp_path / "update").write_bytes(updates[0])
    assert float(BundleFile(tmp_path / "update")["personal"].total["pa"]) > 0.5


def test_the_model_of_another_method_is_measured(served: Serve, graph: bytes, tmp_path: Path) -> None:
    """A head that fedavg trained elsewhere, in a run without rounds."""
    plain = manifest(method=NamedOptions("fedavg", {}), rounds=0)
    run, weights = on_body(plain, graph, tmp_path, head=True)
    hospital, (port, messages) = served(run), simulated(run, weights)
    hospital.offer(0, pb.EVALUATE, messages[0])
    hospital.sent()
    wanted = port.round(messages[0], RoundContext(3, 10, 0, 0, 3), TaskKind.EVALUATE)
    assert upload(hospital) == codec.pack_bundle(wanted)


def test_a_survey_is_answered(served: Serve, tmp_path: Path) -> None:
    """Questions about files and their pixels, as a hospital with torch answers them."""
    data, run = write_images(tmp_path / "images", range(40)), survey("classes", "images", "sizes", "intensity")
    answers = []
    for with_torch in (False, True):
        hospital = served(run, with_torch=with_torch, data=data)
        hospital.run_id = run.name
        first(hospital)
        answers.append(upload(hospital))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: manifest(), "training by method=fedavg"),
        (lambda: manifest(method=NamedOptions("fedrod", {}), layout={}), "training by method=fedrod"),
        (lambda: manifest(method=NamedOptions("analytic", {}), model=NamedOptions("random_features", {}), layout={}),
         "model=random_features"),
        (lambda: private(), "training by method=fedavg"),
        (lambda: hospital_level(), "privacy=dp_silo_small"),
    ],
)  # fmt: skip
def test_what_takes_torch_is_refused_by_name_before_anything_is_read(
    served: Serve, made: Callable[[], RunManifest], named: str
) -> None:
    hospital = served(made())
    hospital.offer(0, pb.TRAIN, {"w": {}})
    refusal = hospital.refused()
    assert refusal.code == "E-RUN-14"
    assert f"found {named}: pip install 'consilium-fl[torch]'" in refusal.reason
    assert not list(hospital.folder.rglob("*.rows"))
    assert "training" not in hospital.events()
