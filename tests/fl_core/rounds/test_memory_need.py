"""The memory that a run takes at least, counted before anything of it is there."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.converter import Option
from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError
from fl_core.methods import METHODS, build_method
from fl_core.models import MODELS, build_model, describe
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.memory_need import StepMemory, require_memory
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import memory
from fl_core.types.records import Schema, TrainConfig
from privacy.compiled_run import CompiledRun
from tests.support.federations import METHOD_OPTIONS, MODEL_SHAPES, SCHEMA, manifest, measured, schema

pytestmark = pytest.mark.integration

LARGE = 10**9
PLAIN = TrainConfig()
FEDAVG = NamedOptions("fedavg")
ATTACKS: list[tuple[str, dict[str, Option], str, dict[str, Option]]] = [
    ("digits_linear", {"projection": [LARGE]}, "fedavg", {}),
    ("digits_linear", {"projection": [LARGE] * 16}, "fedavg", {}),
    ("digits_linear", {"projection": [2**62]}, "fedavg", {}),
    ("digits_linear", {"projection": [1] * 1_000_000}, "fedavg", {}),
    ("digits_linear", {"projection": [-1]}, "fedavg", {}),
    ("digits_linear", {"projection": [0]}, "fedavg", {}),
    ("digits_cnn", {}, "creff", {"features": LARGE}),
    ("digits_cnn", {}, "fedcd", {"fine": LARGE}),
    ("digits_cnn", {}, "fedgen", {"hidden": LARGE}),
    ("digits_cnn", {}, "fedgen", {"noise": LARGE}),
    ("digits_cnn", {}, "fedgen", {"made": LARGE}),
    ("digits_cnn", {}, "fedrod", {"variant": "hyper", "hidden": LARGE}),
]


@pytest.fixture
def resident() -> object:
    me = psutil.Process()
    return lambda: me.memory_info().rss


@pytest.mark.fault(
    "a coordinator",
    "names a model or a method with 10^9 rows",
    "refused within a second (E-RUN-38 or E-CFG-02), without being built",
)
@pytest.mark.parametrize(("model", "options", "method", "own"), ATTACKS)
def test_what_nobody_has_memory_for_is_refused_at_once_and_takes_none(resident, model, options, method, own) -> None:
    describe("digits_linear", SCHEMA)  # what the first call imports is not looked at
    before, begun = resident(), time.process_time()
    with pytest.raises(FederationError, match=r"E-RUN-38|E-CFG-02"):
        require_memory(NamedOptions(method, own), NamedOptions(model, options), SCHEMA, PLAIN)
    assert time.process_time() - begun < 1.0
    assert resident() - before < 64 << 20


def test_every_builder_of_a_model_refuses_it_unbuilt(resident) -> None:
    before = resident()
    for options in ({"projection": [LARGE]}, {"projection": [2**62]}):
        with pytest.raises(FederationError, match=r"E-RUN-38|E-CFG-02"):
            build_model("digits_linear", options, SCHEMA, 0)
    assert resident() - before < 64 << 20


@pytest.mark.parametrize("width", ["NaN", "-Infinity", "1e400", "-1", "[[1]]", '"9"', "1.5"])
def test_a_manifest_with_a_width_that_is_none_is_refused_when_it_is_read_or_counted(width: str) -> None:
    raw = json.loads(manifest().to_json()) | {"model": {"name": "digits_linear", "options": {"projection": "W"}}}

    def take() -> None:
        found = RunManifest.from_json(json.dumps(raw).replace('"W"', f"[{width}]"))
        require_memory(found.method, found.model, found.schema, found.train)

    with pytest.raises((ProtocolError, ConfigError), match=r"E-WIRE-06|E-CFG-02"):
        take()


def test_a_submission_is_refused_with_what_it_needs_what_is_free_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = compose_spec(["data=digits", "model=digits_linear", f"model.projection=[{LARGE}]"])
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 << 20)
    with pytest.raises(RefusedError) as refused:
        manifest_from(spec, ["a", "b"])
    text = str(refused.value)
    assert text.startswith("E-RUN-38: expected at least ")
    assert "MiB of free memory on cpu for digits_linear with 75,000,000,010 parameters, trained by fedavg" in text
    assert "found 100 MiB: choose a smaller model" in text
    # weights, gradients, momentum, received, sent: five times 4 bytes for each of 75,000,000,010 parameters
    assert f"at least {-(-5 * 4 * 75_000_000_010 // 2**20)} MiB" in text


@pytest.mark.parametrize(
    ("train", "copies"),
    [(replace(PLAIN, momentum=0.0), 4), (PLAIN, 5), (replace(PLAIN, optimizer="adam"), 6)],
)
def test_the_bound_counts_weights_gradients_the_optimizer_and_what_travels(
    monkeypatch: pytest.MonkeyPatch, train: TrainConfig, copies: int
) -> None:
    need = copies * describe("digits_linear", SCHEMA).state_bytes
    for free, refused in ((need, False), (need - 1, True)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        if refused:
            with pytest.raises(RefusedError, match="E-RUN-38"):
                require_memory(FEDAVG, NamedOptions("digits_linear"), SCHEMA, train)
        else:
            require_memory(FEDAVG, NamedOptions("digits_linear"), SCHEMA, train)


def test_on_a_gpu_training_and_travelling_are_held_against_different_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    size, gpu = describe("digits_linear", SCHEMA).state_bytes, torch.device("cuda", 0)
    for on_gpu, on_cpu, where in ((3 * size, 2 * size - 1, "cpu"), (3 * size - 1, 2 * size, "cuda:0")):
        free = {"cuda": on_gpu, "cpu": on_cpu}
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free[device.type])
        with pytest.raises(RefusedError, match=f"E-RUN-38.* on {where} "):
            require_memory(FEDAVG, NamedOptions("digits_linear"), SCHEMA, PLAIN, gpu)
    monkeypatch.setattr(memory, "free_memory", lambda device: {"cuda": 3, "cpu": 2}[device.type] * size)
    require_memory(FEDAVG, NamedOptions("digits_linear"), SCHEMA, PLAIN, gpu)


@pytest.mark.parametrize("name", ["digits_cnn", "simple_cnn", "resnet20", "char_lstm", "spiral_mlp"])
def test_what_is_counted_is_what_is_built(name: str) -> None:
    of = schema(MODEL_SHAPES[name])
    built = build_model(name, {}, of, 0).state_dict().values()
    assert describe(name, of).state_bytes == sum(v.numel() * v.element_size() for v in built)
    assert name in MODELS


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_method_counts_more_of_its_own_than_it_makes_or_gives_less_than_nothing(method: str) -> None:
    own = build_method(method, METHOD_OPTIONS.get(method, {})).own_numbers(10, 32)
    assert 0 <= own <= 10 * 32 * 8 * 33  # of small options: a lower bound stays small


def test_what_is_counted_follows_torchs_own_dtype_whichever_came_first() -> None:
    of, kinds = Schema((1, 8, 8), ("x", "y", "z")), (torch.float64, torch.float32, torch.float64)
    found = list[int]()
    try:
        for kind in kinds:
            torch.set_default_dtype(kind)
            found.append(describe("digits_linear", of).state_bytes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0] == found[2] == 2 * found[1]


def test_counting_reads_no_file_of_weights(tmp_path: Path) -> None:
    options: dict[str, Option] = {"weights": str(tmp_path / "none.pth"), "norm": "frozen"}
    assert describe("efficientnet_b0", schema((3, 64, 64)), options).parameters > 4_000_000


def test_a_label_space_that_makes_the_head_too_large_is_refused(resident) -> None:
    many = Schema(SCHEMA.shape, tuple(map(str, range(100_000))))
    before = resident()
    with pytest.raises(RefusedError, match="E-RUN-38"):
        require_memory(NamedOptions("fednh"), NamedOptions("digits_cnn", {"projection": [64]}), many, PLAIN)
    assert resident() - before < 64 << 20


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_step_of_every_method_is_the_same_operations_whatever_the_number_of_examples(method: str) -> None:
    of = replace(manifest(), method=NamedOptions(method, METHOD_OPTIONS.get(method, {})))
    run = RunSetup.of(of)
    layout = derive_layout(run.method, run.new_model(), of.schema, of.personal, of.evaluation.metrics)
    found = measured(CompiledRun.of(replace(of, layout=layout)))
    assert len(found.few) == len(found.more) > 100
    assert found.need(64, 64) <= found.need(512, 64) <= found.need(4096, 64)


def test_an_evaluation_needs_the_memory_of_a_forward_pass_alone() -> None:
    run = CompiledRun.of(manifest())
    trained, evaluated = measured(run), measured(run, trains=False)
    assert not any(evaluated.trained)
    assert evaluated.need(512, 512) < trained.need(512, 512)


def test_the_measure_counts_what_a_forward_pass_keeps_for_the_backward_one() -> None:
    wide = manifest_from(
        compose_spec(["data=digits", "model=digits_linear", "model.projection=[65536]", "train.momentum=0"]), ["a", "b"]
    )
    step, (weights, classes) = measured(CompiledRun.of(wide)), (65536 * 65 * 4, 10)
    fixed, each = step.need(0, 0), (step.need(2048, 1) - step.need(1024, 1)) / 1024
    assert 2 * weights < fixed < 24 * weights
    assert 2 * 65536 * 4 <= each < 2 * 4 * 65536 * 4
    assert classes == len(wide.schema.classes)


def test_the_measure_ends_before_it_takes_the_memory_itself(resident, monkeypatch: pytest.MonkeyPatch) -> None:
    large = manifest_from(
        compose_spec(["data=folder", "data.classes=[a,b]", "data.image_size=112", "model.stem=cifar"]), ["a", "b"]
    )
    run, before = CompiledRun.of(large), resident()
    monkeypatch.setattr(memory, "free_memory", lambda _: 150 << 20)
    with pytest.raises(RefusedError, match=r"E-RUN-38.* step of 4 examples"):
        measured(run)
    assert resident() - before < 300 << 20


def test_what_fits_is_the_largest_power_of_two_below_the_batch() -> None:
    step = StepMemory(memory.CPU, (20, 0), (40, 0), (True, False))  # ten bytes each, twice for what torch adds
    assert step.need(8, 1) == 160
    assert [step.fitting(free, 8, 1) for free in (0, 19, 20, 79, 80, 159, 160)] == [0, 0, 1, 2, 4, 4, 4]
    assert step.fitting(1000, 7, 1) == 4
    uneven = StepMemory(memory.CPU, (20,), (40, 0), (True,))
    assert uneven.need(8, 1) == 160
