"""Random patch filters against loops over patches, and features that do not know their batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from consilium import simulate
from coordinator.config.hydra_config import compose_simulation, compose_spec
from fl_core.errors import ConfigError
from fl_core.models import build_model, describe
from fl_core.models.random_features import PatchFilters, RandomFeatures
from fl_core.models.split_model import SplitModel
from fl_core.types.records import Schema


def patches(shape: tuple[int, ...], seed: int = 0, **options: object) -> SplitModel:
    model = build_model("random_features", {"kind": "patches", **options}, Schema(shape, ("a", "b")), seed)
    return model.eval()


def slow_features(image: np.ndarray, filters: np.ndarray, grid: int) -> np.ndarray:
    """Patch by patch, part by part."""
    p, (_, height, width) = filters.shape[-1], image.shape
    places = [height - p + 1, width - p + 1]
    response = np.zeros((len(filters), *places))
    for i in range(places[0]):
        for j in range(places[1]):
            patch = image[:, i : i + p, j : j + p]
            for k, w in enumerate(filters):
                response[k, i, j] = (w * (patch - patch.mean())).sum() / np.sqrt(patch.var() + 0.01)
    found = []
    for sign in (1, -1):
        a = 2 * np.maximum(sign * response - 0.5, 0)
        for k in range(len(filters)):
            for i in range(grid):
                for j in range(grid):
                    rows = slice(i * places[0] // grid, -(-(i + 1) * places[0] // grid))
                    columns = slice(j * places[1] // grid, -(-(j + 1) * places[1] // grid))
                    found.append(a[k, rows, columns].mean())
    return np.array(found)


@pytest.mark.parametrize(("shape", "grid"), [((3, 11, 14), 3), ((1, 8, 8), 2)])
def test_features_are_those_of_loops_over_patches(shape: tuple[int, ...], grid: int) -> None:
    model = patches(shape, width=40, grid=grid)
    image = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    wanted = slow_features(image.double().numpy(), model.body.weight.double().numpy(), grid)
    with torch.no_grad():
        found = model.features(image.unsqueeze(0))[0].double().numpy()
    assert found.shape == wanted.shape == (model.feature_dim,)
    assert wanted.any()
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_filters_are_smooth_have_mean_0_and_length_1_and_follow_from_the_seed_alone() -> None:
    one, again, other = (patches((3, 28, 28), seed, width=180).body.weight.double() for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert bool((one.mean((1, 2, 3)).abs() < 1e-7).all())
    assert bool((one.flatten(1).norm(dim=1) - 1).abs().max() < 1e-6)
    beside = torch.corrcoef(torch.stack((one[..., 1:].flatten(), one[..., :-1].flatten())))[0, 1]
    assert 0.4 < float(beside) < 0.8  # two thirds of the numbers that are averaged are the same


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 224, 224)])
def test_an_image_has_the_same_features_in_every_batch_on_any_threads_and_in_any_format(shape: tuple[int, ...]) -> None:
    body = patches(shape, width=360).body
    n = min(body.rows + 7, 60)
    x = torch.rand(n, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.set_num_threads(1)
        whole = body(x)
        assert torch.equal(torch.cat([body(x[k : k + 1]) for k in range(4)]), whole[:4])
        assert torch.equal(body(x.flip(0)).flip(0), whole)
        assert torch.equal(body(x.contiguous(memory_format=torch.channels_last)), whole)
        assert body(x[:0]).shape == (0, whole.shape[1])
        for number in (2, 3):
            torch.set_num_threads(number)
            assert torch.equal(body(x[2:]), whole[2:])


@pytest.mark.parametrize(
    ("shape", "shrink", "patch", "grid"),
    [
        ((1, 3, 3), 1, 3, 1),
        ((1, 8, 8), 1, 3, 3),
        ((1, 16, 16), 1, 4, 3),
        ((1, 28, 28), 1, 6, 3),
        ((3, 32, 32), 1, 6, 3),
        ((3, 64, 64), 2, 6, 3),
        ((2, 40, 100), 1, 6, 3),
        ((3, 224, 224), 7, 6, 3),
    ],
)
def test_patch_and_grid_follow_from_the_size_of_an_image(
    shape: tuple[int, ...], shrink: int, patch: int, grid: int
) -> None:
    model = patches(shape, width=200)
    assert isinstance(model.body, PatchFilters)
    assert (model.body.shrink, model.body.weight.shape[-1], model.body.grid) == (shrink, patch, grid)
    assert model.feature_dim == 2 * (100 // grid**2) * grid**2 <= 200
    facts = describe("random_features", Schema(shape, ("a", "b")), {"kind": "patches", "width": 200})
    assert facts.feature_dim == model.feature_dim
    with torch.no_grad():
        assert bool(torch.isfinite(model.features(torch.zeros(2, *shape))).all())  # the same everywhere


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((5,), {}, r"E-CFG-23.*images.*model\.kind=cosine"),
        ((1, 2, 9), {}, r"E-CFG-23.*2 x 9 pixels.*model\.kind=cosine"),
        ((1, 8, 8), {"patch": 9}, r"E-CFG-23.*at least 9 pixels a side.*change model\.patch"),
        ((1, 8, 8), {"patch": 1}, r"E-CFG-23.*patches of 1: change model\.patch"),
        ((1, 8, 8), {"shrink": 9}, r"E-CFG-23.*blocks of 9"),
        ((1, 8, 8), {"grid": -1}, r"E-CFG-02.*grid"),
        ((1, 28, 28), {"width": 17}, r"E-CFG-02.*model\.width of at least 18"),
    ],
)
def test_what_has_no_patches_is_refused_with_the_remedy(
    shape: tuple[int, ...], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        patches(shape, **options)


def test_a_run_takes_patches_of_images_and_cosines_of_other_examples_unless_it_says_otherwise() -> None:
    for data, kind in (("digits", "patches"), ("cifar10", "patches"), ("isic2019", "patches"), ("spiral", "cosine")):
        assert compose_spec([f"data={data}", "model=random_features"]).model["kind"] == kind
    assert compose_spec(["data=digits", "model=random_features", "model.kind=relu"]).model["kind"] == "relu"


def test_a_private_run_of_images_takes_few_features_unless_it_names_another_number() -> None:
    def width(*words: str) -> object:
        return compose_spec(["method=analytic", *words]).model["width"]

    assert width("data=digits", "privacy=dp_record") == 288
    assert width("data=digits") == width("data=spiral", "privacy=dp_record") == RandomFeatures().width
    assert width("data=digits", "privacy=dp_record", "model.kind=cosine") == RandomFeatures().width
    assert width("data=digits", "privacy=dp_record", "model=random_features", "model.width=512") == 512


def test_analytic_takes_random_features_unless_a_model_its_weights_or_an_experiment_is_named() -> None:
    names = {
        "random_features": ["method=analytic", "data=cifar10"],
        "digits_cnn": ["method=analytic", "data=digits", "model=digits_cnn"],
        "resnet18": ["method=fedavg", "data=cifar10"],
    }
    assert {compose_spec(words).model["name"]: words for words in names.values()} == names
    assert compose_spec(["method=analytic", "data=cifar10", "model.width=90"]).model["width"] == 90
    assert compose_spec(["method=analytic", "data=cifar10", "model.weights=x.pt"]).model["name"] == "resnet18"
    by_value = compose_simulation(["method=analytic", "data=cifar10"], values={"model": {"weights": "x.pt"}})
    assert by_value.model["name"] == "resnet18"


@pytest.mark.integration
def test_one_digest_for_classes_apart_dirichlet_iid_and_one_hospital() -> None:
    ways = ("p5c2", "dirichlet-0.1-10", "iid-3", "iid-1")
    found = {way: simulate("analytic", "digits", way, seed=0, threads=1, model__width=180) for way in ways}
    assert found["p5c2"].manifest.model.options["kind"] == "patches"
    assert len({one.digest for one in found.values()}) == 1
    assert found["p5c2"].summary["global_accuracy"] > 0.95
