"""Exact sizes of the papers' models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from consilium.report import papers
from fl_core.models import MODELS, SplitModel, build_model, describe
from tests.support.federations import MODEL_SHAPES, schema, small

# name, options, shape, classes, parameters, total with buffers: FedMR table 3 (A.2) and the other counts (A.3)
COUNTS = [
    ("resnet18", {}, (1, 28, 28), 10, 11_172_810, 11_182_430),
    ("resnet18", {}, (3, 32, 32), 10, 11_173_962, 11_183_582),
    ("efficientnet_b0", {}, (3, 64, 64), 8, 4_832_516, 4_874_581),
    ("efficientnet_b0", {"projection": []}, (3, 200, 200), 1000, 5_288_548, 5_330_613),
    ("efficientnet_b0", {"projection": []}, (3, 200, 200), 8, 4_017_796, 4_059_861),
    ("efficientnet_lite0", {}, (3, 224, 224), 1000, 4_652_008, 4_694_073),  # the package's file of ImageNet weights
    ("efficientnet_lite2", {}, (3, 260, 260), 1000, 6_092_072, 6_150_232),  # the same of its package
    # FedGELA's 4,115,152 is the network up to its fixed classifier: Linear(84, 8) adds 680
    ("efficientnet_b0", {"projection": [84]}, (3, 64, 64), 8, 4_115_152 + 680, 4_157_217 + 680),
    ("resnet18", {"projection": [84]}, (3, 32, 32), 10, 11_211_924 + 850, 11_221_544 + 850),
    ("resnet18", {"projection": [512]}, (3, 32, 32), 100, 11_431_488 + 51_300, 11_441_108 + 51_300),
    ("resnet18", {"norm": "group", "head_bias": False}, (3, 64, 64), 200, 11_271_232, 11_271_232),
    ("simple_cnn", {}, (3, 32, 32), 10, 62_006, 62_006),
    ("simple_cnn", {"projection": [84]}, (3, 32, 32), 10, 68_296 + 850, 68_296 + 850),
    ("simple_cnn", {"projection": [84, 256], "head_bias": False}, (3, 32, 32), 30, 97_736, 97_736),
    ("simple_cnn", {"projection": [84, 256]}, (3, 32, 32), 10, 92_626, 92_626),
    ("simple_cnn", {"projection": [84, 256], "head_bias": False}, (1, 28, 28), 78, 92_444, 92_444),
    ("wrn28_10", {}, (3, 32, 32), 100, 36_546_980, 36_564_957),
    ("resnet50", {}, (3, 32, 32), 10, 23_520_842, 23_574_015),
    ("resnet50", {"projection": [84]}, (3, 32, 32), 10, 23_672_468 + 850, 23_725_641 + 850),
    ("resnet50", {"projection": [2048, 256]}, (3, 32, 32), 100, 28_246_948, 28_300_121),
    # FedCD's fine head: three rows per class, no bias
    ("resnet50", {"projection": [2048, 256], "head_bias": False}, (3, 32, 32), 300, 28_298_048, 28_351_221),
    ("conv2_cifar", {}, (3, 32, 32), 10, 797_952, 797_952),
    ("conv2_cifar", {}, (3, 32, 32), 100, 815_232, 815_232),
    ("tfcnn", {}, (3, 32, 32), 10, 66_560, 66_560),
    ("tfcnn", {}, (3, 32, 32), 100, 158_720, 158_720),
    ("vgg8", {}, (3, 32, 32), 10, 3_915_904, 3_915_904),
    ("vgg8", {"norm": "batch"}, (3, 32, 32), 100, 3_964_928, 3_967_877),
    ("vgg11", {}, (3, 32, 32), 10, 9_225_600, 9_225_600),
    ("vgg11", {}, (3, 32, 32), 100, 9_271_680, 9_271_680),
    ("vgg11", {"norm": "batch"}, (3, 32, 32), 10, 9_231_104, 9_236_616),
    ("vgg16", {}, (3, 32, 32), 100, 14_774_336, 14_782_797),
    ("mlp_net", {}, (1, 28, 28), 10, 1_985_920, 1_985_920),
    ("lenet", {}, (1, 28, 28), 10, 9_392, 9_392),
    ("lenet", {"norm": "group"}, (1, 28, 28), 10, 9_392 + 2 * 32, 9_392 + 2 * 32),
    ("lenet", {"norm": "batch"}, (1, 28, 28), 10, 9_392 + 2 * 32, 9_392 + 2 * 32 + 2 * 33),
    ("resnet20", {}, (3, 32, 32), 10, 272_464, 274_053),
    ("resnet56", {}, (3, 32, 32), 10, 855_760, 860_073),
    # LEAF's characters: 80*8 + 4*256*(8+256+2) + 4*256*(256+256+2) + 257*80
    ("char_lstm", {}, (80,), 80, 819_920, 819_920),
    ("digits_mlp", {}, (1, 8, 8), 10, 64 * 65 + 32 * 65 + 10 * 33, 6_570),
    ("digits_linear", {}, (1, 8, 8), 10, 16 * 65 + 10 * 17, 1_210),
    ("digits_linear", {"projection": []}, (1, 8, 8), 10, 10 * 65, 650),
    ("spiral_mlp", {}, (2,), 5, 16 * 3 + 8 * 17 + 4 * 9 + 2 * 5 + 5 * 2, 240),
    ("table_mlp", {}, (17,), 2, 64 * 18 + 32 * 65 + 2 * 33, 3_298),
    ("digits_cnn", {}, (1, 8, 8), 10, 38_378, 38_378),
    ("digits_cnn", {"norm": "none"}, (1, 8, 8), 10, 38_282, 38_282),
]


@pytest.mark.parametrize(("name", "options", "shape", "classes", "parameters", "total"), COUNTS)
def test_exact_parameter_counts(name, options, shape, classes, parameters, total) -> None:
    facts = describe(name, schema(shape, classes), options)
    assert (facts.parameters, facts.total_with_buffers) == (parameters, total)


def test_bodies_have_the_published_sizes() -> None:
    def count(model: SplitModel) -> int:
        return sum(v.numel() for v in model.body.state_dict().values())

    assert count(build_model("resnet18", {}, schema((3, 32, 32)), 0)) == 11_178_452
    assert count(build_model("resnet18", {}, schema((1, 28, 28)), 0)) == 11_177_300
    assert count(build_model("efficientnet_b0", {}, schema((3, 64, 64)), 0)) == 4_049_613
    assert count(build_model("simple_cnn", {}, schema((3, 32, 32)), 0)) == 61_156
    assert count(build_model("resnet50", {}, schema((3, 32, 32)), 0)) == 23_553_525
    group = build_model("resnet18", {"norm": "group"}, schema((3, 64, 64)), 0)
    assert count(group) == 11_168_832


def test_fedcd_extractors_have_the_published_sizes() -> None:
    """All but the head: what FedCD sends beside its fine head."""

    def extractor(name: str, projection: list[int], shape: tuple[int, ...]) -> tuple[int, int]:
        model = build_model(name, {"projection": projection}, schema(shape), 0)
        state = [v for part in (model.body, model.projection) for v in part.state_dict().values()]
        weights = [v for part in (model.body, model.projection) for v in part.parameters()]
        return sum(v.numel() for v in weights), sum(v.numel() for v in state)

    assert extractor("simple_cnn", [84, 256], (3, 32, 32)) == (90_056, 90_056)
    assert extractor("simple_cnn", [84, 256], (1, 28, 28)) == (72_476, 72_476)
    assert extractor("resnet50", [2048, 256], (3, 32, 32)) == (28_221_248, 28_274_421)


@pytest.mark.integration
def test_norm_layers_are_as_many_as_published() -> None:
    counts = {"resnet18": 20, "resnet50": 53, "wrn28_10": 25, "efficientnet_b0": 49, "efficientnet_lite0": 49}
    for name, wanted in counts.items():
        assert sum(isinstance(m, nn.BatchNorm2d) for m in small(name).modules()) == wanted
    convolutions = [m for m in small("wrn28_10").body.modules() if isinstance(m, nn.Conv2d)]
    assert len([m for m in convolutions if m.kernel_size == (3, 3)]) + 3 == 28  # three shortcuts are among the 28
    assert all(m.bias is not None for m in convolutions)


def test_table_3_of_fedmr_with_prototypes() -> None:
    """The sizes of what travels: model with buffers, and with C x d prototypes beside it (A.2, metric C.7)."""
    table = {
        ("resnet18", (1, 28, 28), 10): (11_182_430, 11_187_550),
        ("resnet18", (3, 32, 32), 10): (11_183_582, 11_188_702),
        ("wrn28_10", (3, 32, 32), 100): (36_564_957, 36_628_957),
        ("efficientnet_b0", (3, 64, 64), 8): (4_874_581, 4_879_701),
    }
    for (name, shape, classes), (total, with_prototypes) in table.items():
        facts = describe(name, schema(shape, classes))
        assert facts.total_with_buffers == total
        assert facts.total_with_buffers + classes * facts.feature_dim == with_prototypes


@pytest.mark.integration
def test_counting_draws_nothing_and_agrees_with_a_built_model() -> None:
    before = torch.random.get_rng_state()
    for name in MODEL_SHAPES:
        facts, model = describe(name, schema(MODEL_SHAPES[name])), small(name)
        assert facts.parameters == sum(p.numel() for p in model.parameters())
        assert facts.feature_dim == model.feature_dim
    assert torch.equal(torch.random.get_rng_state(), before)


def test_published_settings_can_be_built() -> None:
    found = {(s.paper, s.model, s.classes): s.facts().total_with_buffers for s in papers.SETTINGS}
    assert found["FedMR", "wrn28_10", 100] == 36_564_957
    assert found["FedMR", "efficientnet_b0", 8] == 4_874_581
    ours = {
        "digits_cnn",
        "digits_linear",
        "efficientnet_lite0",
        "efficientnet_lite2",
        "frozen",
        "digits_mlp",
        "random_features",
        "spiral_mlp",
        "table_mlp",
    }
    assert {s.model for s in papers.SETTINGS} | ours == set(MODELS)
