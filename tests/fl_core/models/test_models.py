"""The models: one shape for all, equal weights from equal seeds, published forms, clear refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_core.errors import ConfigError
from fl_core.models import SplitModel, build_model, describe
from fl_core.types import tensor_maps
from fl_core.types.records import Schema
from tests.support.federations import MODEL_SHAPES, schema, small


def test_resnet18_with_group_norm_has_no_buffers_and_512_features() -> None:
    model = small("resnet18", norm="group", groups=2)
    assert not list(model.buffers())
    assert not model.has_batch_norm
    assert model.feature_dim == 512
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {2}
    assert small("resnet18").has_batch_norm


@pytest.mark.integration
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_forward_is_head_of_features(name: str) -> None:
    model = small(name).eval()
    x = torch.rand(3, *MODEL_SHAPES[name])
    kept = x.clone()
    z = model.features(x)
    assert z.shape == (3, model.feature_dim) == (3, describe(name, schema(MODEL_SHAPES[name])).feature_dim)
    assert torch.equal(model(x), model.head(z))
    assert model(x).shape == (3, model.n_classes) == (3, 10)
    assert torch.equal(x, kept)
    assert torch.isfinite(z).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_equal_seeds_give_equal_weights(name: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = tensor_maps.copy_state(small(name, seed=3))
    torch.rand(7)
    again, other = tensor_maps.copy_state(small(name, seed=3)), tensor_maps.copy_state(small(name, seed=4))
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    assert any(not torch.equal(v, other[k]) for k, v in first.items())
    torch.random.set_rng_state(before)
    small(name)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in MODEL_SHAPES]
    + [("efficientnet_b0", {"stochastic_depth": 0.0}), ("efficientnet_b0", {"norm": "group"})],
)
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_no_module_works_in_place_on_its_input(name: str, options: dict[str, object]) -> None:
    model = small(name, **options).train()
    x = torch.rand(4, *MODEL_SHAPES[name])

    def keep(module: nn.Module, given: tuple[torch.Tensor, ...], made: torch.Tensor | tuple) -> None:
        made = made[0] if isinstance(made, tuple) else made
        kept.append((module, given[0], given[0]._version, made, made._version))

    kept: list[tuple[nn.Module, torch.Tensor, int, torch.Tensor, int]] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(keep)
            module.register_full_backward_hook(lambda *_: None)  # fails on an in-place change of a hooked output
    model(x).square().sum().backward()
    changed = [m for m, given, v, made, w in kept if given._version != v or made._version != w]
    assert kept
    assert not changed
    assert all(p.grad is not None for p in model.parameters())


def test_a_resnet_block_is_the_published_sum() -> None:
    """Against a second composition from torch's functions, in float64."""
    model = small("resnet18").double().eval()
    block = model.body[5]  # first block of the second stage: stride 2, with a shortcut
    x = torch.rand(2, 64, 8, 8, dtype=torch.float64)
    f = nn.functional

    def norm(v: torch.Tensor, bn: nn.BatchNorm2d) -> torch.Tensor:
        return f.batch_norm(v, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-5)

    y = f.relu(norm(f.conv2d(x, block.first[0].weight, stride=2, padding=1), block.first[1]))
    y = norm(f.conv2d(y, block.second[0].weight, padding=1), block.second[1])
    y = f.relu(y + norm(f.conv2d(x, block.shortcut[0].weight, stride=2), block.shortcut[1]))
    assert torch.allclose(block(x), y, atol=1e-12)


def test_efficientnet_takes_any_side_from_32() -> None:
    model = build_model("efficientnet_b0", {}, schema((3, 32, 32), 8), 0).eval()
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 8)
    assert model(torch.rand(1, 3, 75, 75)).shape == (1, 8)


REFUSED = [
    ("resnet8", {}, (3, 32, 32), "E-CFG-01", "did you mean 'resnet18'"),
    ("resnet18", {"norms": "group"}, (3, 32, 32), "E-CFG-01", "did you mean 'norm'"),
    ("resnet18", {"norm": "grup"}, (3, 32, 32), "E-CFG-02", "did you mean 'group'"),
    ("resnet18", {"norm": 3}, (3, 32, 32), "E-CFG-02", "expected text"),
    ("resnet18", {"groups": 3}, (3, 32, 32), "E-CFG-02", "divisor of 64"),
    ("resnet18", {"groups": 0}, (3, 32, 32), "E-CFG-02", "divisor of 64"),
    ("resnet18", {"groups": True}, (3, 32, 32), "E-CFG-02", "expected a whole number"),
    ("resnet18", {"head_bias": "no"}, (3, 32, 32), "E-CFG-02", "expected true or false"),
    ("resnet18", {"projection": [0]}, (3, 32, 32), "E-CFG-02", ">= 1"),
    ("resnet18", {"projection": 84}, (3, 32, 32), "E-CFG-02", "expected a list"),
    ("efficientnet_b0", {"dropout": 1.5}, (3, 64, 64), "E-CFG-02", "0 to 0.99"),
    ("digits_cnn", {"norm": "layer"}, (1, 8, 8), "E-CFG-02", "'group', 'none', 'batch'"),
    ("digits_cnn", {}, (3, 8, 8), "E-CFG-23", "1 channel"),
    ("digits_cnn", {}, (1, 28, 28), "E-CFG-23", "side of 8 pixels"),
    ("simple_cnn", {}, (3, 64, 64), "E-CFG-23", "28 or 32"),
    ("simple_cnn", {}, (3, 28, 32), "E-CFG-23", "square"),
    ("resnet18", {}, (3, 4, 4), "E-CFG-23", "8 to 1024"),
    ("resnet18", {}, (20,), "E-CFG-23", r"found \(20,\)"),
    ("efficientnet_b0", {}, (1, 64, 64), "E-CFG-23", "3 channel"),
    ("vgg8", {}, (3, 28, 28), "E-CFG-23", "side of 32"),
    ("vgg11", {"norm": "group"}, (3, 32, 32), "E-CFG-02", "vgg11.norm"),
    ("resnet20", {"groups": 3}, (3, 32, 32), "E-CFG-02", "divisor of 16"),
    ("wrn28_10", {"dropout": 1.0}, (3, 32, 32), "E-CFG-02", "wrn28_10.dropout"),
    ("conv2_cifar", {}, (1, 32, 32), "E-CFG-23", "3 channel"),
    ("lenet", {}, (1, 64, 64), "E-CFG-23", "28 or 32"),
    ("mlp_net", {}, (3, 28, 28), "E-CFG-23", "1 channel"),
    ("digits_mlp", {}, (1, 28, 28), "E-CFG-23", "side of 8"),
    ("char_lstm", {}, (3, 32, 32), "E-CFG-23", "sequences"),
    ("spiral_mlp", {}, (3,), "E-CFG-23", "points of 2"),
    ("spiral_mlp", {"width": 0}, (2,), "E-CFG-02", "at least 1"),
    ("table_mlp", {}, (3, 32, 32), "E-CFG-23", "rows of numbers"),
    ("table_mlp", {"hidden": []}, (3,), "E-CFG-02", "1 to 16 widths"),
    ("table_mlp", {"hidden": [1 << 40]}, (3,), "E-CFG-02", "from 1 to 4096"),
    ("efficientnet_b0", {}, (3, 16, 16), "E-CFG-23", "32 to 2048"),
]


@pytest.mark.parametrize(("name", "options", "shape", "code", "match"), REFUSED)
def test_what_cannot_be_built_is_refused(name, options, shape, code, match) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        build_model(name, options, schema(shape), seed=0)
    assert caught.value.code == code


def test_a_model_that_does_not_take_the_examples_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match="models for these examples: ") as caught:
        describe("simple_cnn", Schema((3, 50, 50), ("a", "b")))
    named = caught.value.message.rpartition("examples: ")[2].split(", ")
    assert "resnet18" in named
    assert not {"simple_cnn", "digits_cnn", "char_lstm"} & set(named)
    for name in named:
        describe(name, Schema((3, 50, 50), ("a", "b")))


def test_one_class_is_no_classification() -> None:
    with pytest.raises(ConfigError, match="at least 2 classes"):
        build_model("digits_cnn", {}, schema((1, 8, 8), 1), seed=0)


def test_an_integer_is_taken_where_a_number_is_asked() -> None:
    assert describe("efficientnet_b0", schema((3, 32, 32)), {"dropout": 0}).feature_dim == 640


def reference_resnet(model: SplitModel, x: torch.Tensor) -> torch.Tensor:
    """The bottleneck network again, written out with torch's functions over the same weights."""
    f = nn.functional
    bn = lambda v, m: f.batch_norm(v, m.running_mean, m.running_var, m.weight, m.bias)  # noqa: E731
    stem, norm = model.body[0], model.body[1]
    v = f.relu(bn(f.conv2d(x, stem.weight, padding=1), norm))
    for k, block in enumerate(b for b in model.body if hasattr(b, "third")):
        stride = 2 if k in (3, 7, 13) else 1
        y = f.relu(bn(f.conv2d(v, block.first[0].weight), block.first[1]))
        y = f.relu(bn(f.conv2d(y, block.second[0].weight, stride=stride, padding=1), block.second[1]))
        y = bn(f.conv2d(y, block.third[0].weight), block.third[1])
        if k in (0, 3, 7, 13):
            v = bn(f.conv2d(v, block.shortcut[0].weight, stride=stride), block.shortcut[1])
        v = f.relu(y + v)
    return v.mean((2, 3))


def test_resnet50_is_the_published_network() -> None:
    model = small("resnet50").double().eval()
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(model.body(x), reference_resnet(model, x), atol=1e-10)
    assert model.body(x).shape == (2, 2048)


def test_a_wide_block_is_the_published_sum() -> None:
    model = small("wrn28_10").double().eval()
    block = model.body[5]  # first block of the second stage
    f = nn.functional
    x = torch.rand(2, 160, 8, 8, dtype=torch.float64)
    bn = lambda v, m: f.batch_norm(v, m.running_mean, m.running_var, m.weight, m.bias)  # noqa: E731
    norm1, _, conv1, drop, norm2, _, conv2 = block.path
    y = f.conv2d(f.relu(bn(x, norm1)), conv1.weight, conv1.bias, padding=1)
    y = f.conv2d(f.relu(bn(y, norm2)), conv2.weight, conv2.bias, stride=2, padding=1)
    y = y + f.conv2d(x, block.shortcut.weight, block.shortcut.bias, stride=2)
    assert torch.allclose(block(x), y, atol=1e-12)
    assert drop.p == 0.3
    assert model.body[-4].momentum == 0.9


def test_the_lstm_reads_characters_in_order_and_its_last_output_alone() -> None:
    """Against torch's single cell, stepped by hand."""
    model = small("char_lstm").double().eval()
    body = model.body
    x = torch.randint(0, 10, (3, 12), generator=torch.Generator().manual_seed(0))
    state = [(torch.zeros(3, 256, dtype=torch.float64), torch.zeros(3, 256, dtype=torch.float64)) for _ in range(2)]
    cells = [nn.LSTMCell(8, 256).double(), nn.LSTMCell(256, 256).double()]
    for k, cell in enumerate(cells):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, kind).data.copy_(getattr(body.lstm, f"{kind}_l{k}"))
    for t in range(12):
        state[0] = cells[0](body.embedding(x[:, t]), state[0])
        state[1] = cells[1](state[0][0], state[1])
    assert torch.allclose(model.features(x.float()), state[1][0], atol=1e-12)
    assert not torch.allclose(model.features(x.flip(1).float()), state[1][0], atol=1e-3)


def test_spiral_features_are_linear_in_the_last_layer_and_have_its_width() -> None:
    model = build_model("spiral_mlp", {"width": 3}, schema((2,), 5), 0)
    assert model.feature_dim == 3
    assert (model.features(torch.randn(200, 2) * 5) < 0).any()  # no ReLU before the head


def test_mlp_net_begins_with_small_weights() -> None:
    hidden = [m for m in small("mlp_net").body if isinstance(m, nn.Linear)]
    assert [round(m.weight.std().item(), 3) for m in hidden] == [0.01] * 3
    assert all(not m.bias.any() for m in hidden)


def test_digits_cnn_norms() -> None:
    assert small("digits_cnn", norm="batch").has_batch_norm
    assert not small("digits_cnn").has_batch_norm
    assert not list(small("digits_cnn").buffers())
    assert not any(isinstance(m, nn.GroupNorm) for m in small("digits_cnn", norm="none").modules())


def test_digits_cnn_learns() -> None:
    """A real fit, not only shapes: ten epochs over 300 real digits, then 1,000 digits it has not seen."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x[:1300] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(y[:1300])
    model = small("digits_cnn")
    step = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for _ in range(10):
        for index in torch.arange(300).split(50):
            step.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            step.step()
    right = model(x).argmax(1) == y
    assert right[:300].float().mean() > 0.95
    assert right[300:].float().mean() > 0.80
