"""Files of a model that classify without this project: ONNX by onnxruntime, and a program of plain torch."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from consilium.model import portable
from consilium.report.export import export_model
from consilium.report.facts import Statement
from consilium.report.lead import export
from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.datasets.image_files import IMAGENET_MEAN, IMAGENET_STD
from fl_core.datasets.preprocessing import normalisation
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from tests.support.cards import lead
from tests.support.federations import manifest, shares


def trained(method: str = "fedavg") -> tuple[RunManifest, State]:
    run = manifest(method, {}, rounds=1)
    return run, simulate(RunSetup.of(run), shares(), RoundHistory())


def test_images_in_0_1_are_normalised_as_hospitals_do() -> None:
    run, state = trained()
    plain, inside = (
        portable.classifier(CompiledRun(run), state),
        portable.classifier(CompiledRun(replace(run, data="folder")), state),
    )
    assert (normalisation("folder"), normalisation("digits")) == (
        (IMAGENET_MEAN, IMAGENET_STD),
        ((), ()),
    )
    x = torch.rand(2, *run.schema.shape)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    if run.schema.shape[0] == 3:
        assert torch.equal(inside(x), plain((x - mean) / std))
    assert not plain.training


def test_an_unknown_format_a_missing_package_and_a_method_without_a_model_are_said_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*safetensors, onnx, torch, found 'tflite'"):
        export("latest", formats=["tflite"], home=tmp_path)
    with pytest.raises(ConfigError, match="E-CFG-08"):
        portable.classifier(CompiledRun(manifest("local", {})), {"w": {}})
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name == "onnxscript":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*pip install 'consilium-fl\[model\]'"):
        export("latest", formats=["onnx"], home=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedgela", "fednh"])
def test_files_classify_as_the_evaluated_model_does_by_the_lines_of_the_card(tmp_path: Path, method: str) -> None:
    import onnx
    import onnxruntime

    run, state = trained(method)
    write_state(state, tmp_path / "state")
    info = pb.RunInfo(
        run_id="r1",
        method=method,
        model_digest=tensor_maps.digest(state["w"]),
        manifest_digest=run.digest(),
        model_object="a" * 64,
    )
    detail = pb.RunDetail(info=info, manifest_json=run.to_json())
    own, said = lead(tmp_path / "lead"), Statement(licence="CC BY 4.0")
    _, card, files, *_ = export_model(detail, tmp_path / "state", tmp_path, own, said, formats=["onnx", "torch"])
    assert [f.name for f in files] == ["r1.onnx", "r1.pt2"]
    network = portable.classifier(CompiledRun(run), state)
    session = onnxruntime.InferenceSession(str(files[0]))
    program = torch.export.load(files[1]).module()
    for number in (1, 2, 17):
        images = torch.rand(number, *run.schema.shape)
        with torch.no_grad():
            wanted = network(images).numpy()
            assert np.allclose(program(images).numpy(), wanted, atol=1e-4)
        assert np.allclose(session.run(["logits"], {"images": images.numpy()})[0], wanted, atol=1e-4)
    found = {p.key: p.value for p in onnx.load(files[0]).metadata_props}
    assert json.loads(found["consilium.classes"]) == list(run.schema.classes)
    assert (found["consilium.licence"], found["consilium.manifest_digest"]) == ("CC BY 4.0", run.digest())
    programs = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert [len(text.splitlines()) for text in programs] == [5, 5]
    for text in programs:
        text += "\nimport sys\nassert not {'coordinator', 'fl_core', 'protos', 'privacy'} & set(sys.modules)\n"
        done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert all(repr(name)[1:-1] in run.schema.classes for name in re.findall(r"'([^']*)'", done.stdout))
