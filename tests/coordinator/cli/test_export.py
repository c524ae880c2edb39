"""An exported file holds all that it takes to classify as the evaluated model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from coordinator.cli.export import export_model
from fl_core.errors import StateError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import RoundHistory, simulate
from fl_core.types import tensor_maps
from fl_core.types.values import State
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from tests.support.federations import SCHEMA, manifest, same, shares

METHODS = {
    "fedavg": ("fedavg", {}),
    "fedgela": ("fedgela", {"logit_scale": 12.0}),
    "fedgela_la": ("fedgela", {"etf": False}),
    "fednh": ("fednh", {}),
    "fedcd": ("fedcd", {"acla": "stale"}),
    "fednh_fixed_scale": ("fednh", {"fix_scaling": 30.0}),
}


def exported(tmp_path: Path, name: str, options: dict[str, object]) -> tuple[State, Path]:
    run = manifest(name, options, rounds=1)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    stored = tmp_path / "state"
    write_state(final, stored)
    info = pb.RunInfo(
        run_id="r1", method=name, model_digest=tensor_maps.digest(final["w"]), manifest_digest=run.digest()
    )
    detail = pb.RunDetail(info=info, manifest_json=run.to_json())
    return final, export_model(detail, stored, tmp_path)[0]


@pytest.mark.parametrize("case", METHODS)
def test_a_file_alone_classifies_as_the_evaluated_model(tmp_path: Path, case: str) -> None:
    name, options = METHODS[case]
    final, file = exported(tmp_path, name, options)
    method, x = build_method(name, options), torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    evaluated = method.global_model(build_model("digits_cnn", {}, SCHEMA, 0), method.broadcast(final)).eval()
    tensors = load_file(file)
    assert same(tensors, tensor_maps.copy_state(evaluated))
    blank = method.global_model(build_model("digits_cnn", {}, SCHEMA, 1), method.broadcast(final)).eval()
    with torch.no_grad():
        for v in blank.state_dict().values():
            v.zero_()
    tensor_maps.load_state(blank, tensors)
    assert torch.equal(blank(x), evaluated(x))


def test_a_file_names_the_options_of_its_method(tmp_path: Path) -> None:
    _, file = exported(tmp_path, "fedgela", {"logit_scale": 12.0})
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["consilium"])
    assert facts["method_options"] == {"logit_scale": 12.0}
    assert facts["model_options"] == {}


def test_another_state_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    run = manifest("fedavg", rounds=1)
    stored = tmp_path / "state"
    write_state(simulate(RunSetup.of(run), shares(), RoundHistory()), stored)
    detail = pb.RunDetail(info=pb.RunInfo(run_id="r1", model_digest="0" * 64), manifest_json=run.to_json())
    with pytest.raises(StateError) as caught:
        export_model(detail, stored, tmp_path)
    assert caught.value.code == "E-STATE-22"
