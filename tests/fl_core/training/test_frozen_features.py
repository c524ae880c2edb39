"""Frozen features: the same bits wherever a record lies, a head that is trained alone, a whole model that comes out."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.research.engines.in_process import RoundHistory, simulate, with_features
from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation, compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from fl_core.datasets import TensorExamples
from fl_core.datasets.augmentation import DIGITS
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.errors import ConfigError, DataError
from fl_core.methods import METHODS
from fl_core.models import MODELS, SplitModel
from fl_core.models.split_model import HIDDEN
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import frozen_features
from fl_core.training.frozen_features import FixedViews, feature_batches, in_memory, trained_part
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Examples, RoundContext, State
from privacy.accounting.release_plan import ReleaseAllowance
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.profiles.record import release_plan
from tests.support import some
from tests.support.federations import MODEL_SHAPES, manifest, same, schema, shares, small
from tests.support.privacy import NoNoise, ce

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
FROZEN = TrainConfig(batch_size=5, epochs=1, freeze="features")
FIXED_HEAD = {"fedgela", "fedrep", "fedbabu", "fedper"}
"""Methods of whose shared part nothing is left without an adapter."""
WORDS = ["data=digits", "federation=hospitals6", "train.freeze=features", "train.max_steps=2", "threads=1"]


def features_of_all(body: nn.Module, examples: Examples, device: torch.device) -> Examples:
    return in_memory(examples, feature_batches(body, examples, device))


def drawn(shape: tuple[int, ...], n: int) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, 9, (n, *shape), generator=g).float() if shape == (12,) else torch.randn(n, *shape, generator=g)
    )


@pytest.mark.parametrize("name", some([name for name in MODELS if name in MODEL_SHAPES]))
def test_a_record_has_the_same_bits_whoever_is_in_its_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_features, "eval_batch", lambda _: 23)
    x, body = drawn(MODEL_SHAPES[name], 40), small(name).body
    there = features_of_all(body, TensorExamples(x, torch.arange(40)), CPU)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for index in (order, torch.arange(7, 19), torch.tensor([39])):
        found = features_of_all(body, TensorExamples(x[index], index), CPU)
        assert torch.equal(found.x, there.x[index])
        assert torch.equal(found.labels, index)


def test_features_are_those_of_the_body_in_eval_mode_and_patients_stay_patients() -> None:
    model = small("digits_cnn", norm="batch")
    model.train()(torch.randn(8, 1, 8, 8))  # moves the statistics of batch norm
    x, groups = drawn((1, 8, 8), 6), tuple("aabbcd")
    found = features_of_all(model.body, TensorExamples(x, torch.arange(6), groups), CPU)
    with torch.no_grad():
        assert torch.allclose(found.x, model.eval().body(x), atol=1e-6)
    assert found.groups == groups


def test_no_example_has_features_of_the_right_width() -> None:
    found = features_of_all(small("digits_cnn").body, TensorExamples(drawn((1, 8, 8), 0), torch.arange(0)), CPU)
    assert found.x.shape == (0, small("digits_cnn").feature_dim)


# ---- what is left out ------------------------------------------------------------------------------------------------


class Broken(TensorExamples):
    """Examples of which some cannot be read."""

    def __init__(self, n: int, broken: set[int]) -> None:
        super().__init__(drawn((1, 8, 8), n), torch.arange(n) % 4)
        self.paths = [Path(f"{i}.png") for i in range(n)]
        self.broken = broken

    def batch(self, index, augment=None):  # type: ignore[no-untyped-def]
        if bad := self.broken & set(index.tolist()):
            raise DataError("E-DATA-04", f"expected a readable image at {min(bad)}.png, found garbage")
        return super().batch(index, augment)


def test_a_broken_image_is_named_in_the_log_and_left_out_and_no_other_record_notices(caplog) -> None:  # type: ignore[no-untyped-def]
    body = small("digits_cnn").body
    with caplog.at_level(logging.WARNING):
        found = features_of_all(body, Broken(300, {3, 250}), CPU)
    whole, kept = features_of_all(body, Broken(300, set()), CPU), [i for i in range(300) if i not in (3, 250)]
    assert torch.equal(found.x, whole.x[kept])
    assert torch.equal(found.labels, whole.labels[kept])
    assert ["3.png" in r.getMessage() or "250.png" in r.getMessage() for r in caplog.records] == [True, True]


def test_a_truncated_file_is_left_out_by_its_path(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    paths = [tmp_path / f"{k}.png" for k in range(5)]
    for k, path in enumerate(paths):
        Image.new("RGB", (32, 32), (40 * k, 0, 0)).save(path)
    paths[2].write_bytes(paths[2].read_bytes()[:40])
    body, labels = small("simple_cnn").body, torch.arange(5)
    with caplog.at_level(logging.WARNING):
        found = features_of_all(body, ImageExamples(paths, labels, ImageTransform(32)), CPU)
    assert found.labels.tolist() == [0, 1, 3, 4]
    assert len(found.x.unique(dim=0)) == 4
    assert [str(paths[2]) in record.getMessage() for record in caplog.records] == [True]


def test_more_than_one_in_a_hundred_is_refused_without_a_number(caplog) -> None:  # type: ignore[no-untyped-def]
    body = small("digits_cnn").body
    assert len(features_of_all(body, Broken(40, {5}), CPU)) == 39  # one is always left out
    with pytest.raises(DataError, match="E-DATA-04") as caught:
        features_of_all(body, Broken(300, {1, 2, 3, 4}), CPU)
    assert "4 " not in caught.value.message


@pytest.mark.fault("a lead", "freezes a body whose output is infinite for some records", "these records are left out")
def test_features_that_are_no_numbers_are_left_out_however_many_they_are() -> None:
    x = drawn((1, 8, 8), 300)
    x[7:207] = math.inf
    found = features_of_all(small("digits_cnn").body, TensorExamples(x, torch.arange(300)), CPU)
    assert found.labels.tolist() == [*range(7), *range(207, 300)]
    assert bool(torch.isfinite(found.x).all())


# ---- what is trained -------------------------------------------------------------------------------------------------


def frozen(method: str = "fedavg", adapter: str = "none", train: TrainConfig = FROZEN, **more) -> RunManifest:  # type: ignore[no-untyped-def]
    return manifest(method, train=train, model_options={"adapter": adapter}, **more)


def final(made: RunManifest):  # type: ignore[no-untyped-def]
    run = RunSetup.of(made)
    return run, simulate(run, with_features(run, shares()[: len(made.members)]), RoundHistory())


@pytest.mark.parametrize(
    ("adapter", "names"),
    [
        ("none", {"head.weight", "head.bias"}),
        ("linear", {"head.weight", "head.bias", "projection.0.weight", "projection.0.bias"}),
        ("mlp", {f"{m}.{k}" for m in ("head", "projection.0", "projection.2") for k in ("weight", "bias")}),
    ],
)
def test_head_and_adapter_alone_are_trained_and_sent_and_the_export_is_whole(adapter: str, names: set[str]) -> None:
    run, state = final(frozen(adapter=adapter))
    d = run.network.head.in_features
    assert set(run.manifest.layout["delta"].shapes) == set(state["w"]) == names
    assert run.schema.shape == (d,)
    if adapter == "mlp":
        assert run.manifest.layout["delta"].shapes["projection.0.weight"] == (HIDDEN, d)
    fresh, exported = tensor_maps.copy_state(run.network), run.exported(state)
    assert set(exported) == set(fresh)
    assert same(
        {n: v for n, v in exported.items() if n not in names}, {n: v for n, v in fresh.items() if n not in names}
    )
    assert not same({n: exported[n] for n in names}, {n: fresh[n] for n in names})
    whole, x = RunSetup.of(frozen(adapter=adapter, train=replace(FROZEN, freeze="none"))), drawn((1, 8, 8), 9)
    model = whole.new_model().eval()
    tensor_maps.load_state(model, exported)  # as anybody loads it who knows of no freezing
    with torch.no_grad():
        assert torch.equal(model(x), run.classifier(state).eval()(x))


def test_one_step_is_a_step_of_softmax_regression_on_the_features() -> None:
    train = TrainConfig(lr=0.5, momentum=0.0, weight_decay=0.0, batch_size=1000, epochs=1, freeze="features")
    run, state = final(frozen(train=train, rounds=1, names=["north"]))
    (share,) = shares()[:1]
    z = features_of_all(run.network.body, share.train, CPU).x.double()
    W, b = (run.network.state_dict()[f"head.{k}"].double() for k in ("weight", "bias"))
    error = torch.softmax(z @ W.T + b, 1) - nn.functional.one_hot(share.train.labels, 4).double()
    moved = {"head.weight": W - 0.5 * error.T @ z / len(z), "head.bias": b - 0.5 * error.mean(0)}
    for name, value in moved.items():
        assert torch.allclose(state["w"][name].double(), value, atol=1e-5)  # the round's grid


def test_the_analytic_head_is_the_same_to_the_bit_whether_features_are_frozen_or_not() -> None:
    words = ["method=analytic", "data=digits", "federation=hospitals6", "threads=1"]
    one, other = (runner.run(compose_simulation([*words, f"train.freeze={f}"])) for f in ("none", "features"))
    assert one.model_digest == other.model_digest


@pytest.mark.parametrize("adapter", ["none", "linear"])
@pytest.mark.parametrize("method", some(METHODS, 4))
def test_every_method_runs_on_frozen_features_or_is_refused_by_name_with_the_remedy(method: str, adapter: str) -> None:
    rounds = [] if METHODS[method]().exchanges else ["rounds=1"]
    spec = compose_simulation([*WORDS, *rounds, f"method={method}", f"model.adapter={adapter}"])
    if method in FIXED_HEAD and adapter == "none":
        with pytest.raises(ConfigError, match=f"method {method}.*model.adapter=linear") as caught:
            runner.run(spec)
        assert caught.value.code == "E-CFG-08"
        return
    result = runner.run(spec)
    body = {n for n in tensor_maps.copy_state(result.run.network) if n.startswith("body.")}
    for name, part in result.manifest.layout.items():
        assert not body & set(part.shapes), name
    if result.method.has_global_model:
        exported = result.run.exported(result.server)
        fresh = tensor_maps.copy_state(result.run.network)
        assert same({n: exported[n] for n in body}, {n: fresh[n] for n in body})


def test_the_methods_with_a_fixed_head_are_refused_each() -> None:
    for method in sorted(FIXED_HEAD):
        with pytest.raises(ConfigError, match=f"method {method}.*model.adapter=linear"):
            manifest_from(compose_spec([*WORDS, f"method={method}"]), ["a", "b"])
        manifest_from(compose_spec([*WORDS, f"method={method}", "model.adapter=linear"]), ["a", "b"])


def test_private_steps_see_the_head_alone_and_clip_exact_norms_of_each_record() -> None:
    clip, n = 0.3, 24
    train = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=n, epochs=1, freeze="features")
    made = frozen(train=train, rounds=1)
    terms = {"epsilon": 8.0, "clip": clip, "rng": "test"}
    members = tuple(replace(m, units=n) for m in made.members)
    run = CompiledRun.of(replace(made, members=members, privacy=NamedOptions("dp_record", terms)))
    plan, model = release_plan(run, 0), run.new_model()
    assert set(tensor_maps.copy_state(model)) == {"head.weight", "head.bias"}
    x, y = drawn((1, 8, 8), n), torch.arange(n) % 4
    rows = features_of_all(run.network.body, TensorExamples(x, y), CPU)
    context = RoundContext(3, 4, 1).for_silo(0, 0)

    class All(NoNoise):
        def uniform_of(self, units, *about):  # type: ignore[no-untyped-def]
            return torch.zeros(len(units)).double()

    allowance = ReleaseAllowance(plan.releases(0, True))
    data = DpSgdLocalData(RoundData(rows, rows, plan.rates.train, context), plan, allowance, All(1, "x"))
    W, b = model.head.weight.detach().double(), model.head.bias.detach().double()
    assert data.sgd(model, ce) == 1
    z = torch.cat((rows.x.double(), torch.ones(n, 1).double()), 1)
    error = torch.softmax(z @ torch.cat((W, b[:, None]), 1).T, 1) - nn.functional.one_hot(y, 4).double()
    gradients = error[:, :, None] * z[:, None, :]
    norms = error.norm(dim=1) * z.norm(dim=1)
    assert bool((norms > clip).all())
    expected = (gradients * (clip / norms)[:, None, None]).sum(0) / plan.batch
    found = torch.cat((W - model.head.weight.detach(), (b - model.head.bias.detach())[:, None]), 1)
    assert torch.allclose(found, expected, atol=2e-5)


# ---- views -----------------------------------------------------------------------------------------------------------


def seen(n: int = 12, copies: int = 1) -> TensorExamples:
    """Return images that are moved when they are augmented, each of them so many times."""
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(3)).repeat(copies, 1, 1, 1)
    return TensorExamples(x, torch.arange(n).repeat(copies), how=DIGITS)


def views_of(examples: Examples, number: int = 4) -> FixedViews:
    made = in_memory(examples, feature_batches(small("digits_cnn").body, examples, CPU, number))
    assert isinstance(made, FixedViews)
    return made


def test_views_follow_from_the_content_of_a_record_alone() -> None:
    whole, order = seen(), torch.randperm(12, generator=torch.Generator().manual_seed(2))
    found = views_of(whole).stored(torch.arange(12))
    for index in (order, torch.tensor([7]), torch.arange(3, 9)):
        part = TensorExamples(whole.x[index], index, how=DIGITS)
        assert torch.equal(views_of(part).stored(torch.arange(len(index))), found[index])
    twice = views_of(seen(copies=2)).stored(torch.arange(24))
    assert torch.equal(twice[:12], twice[12:])


def test_the_first_view_is_the_record_as_it_is_and_all_views_differ() -> None:
    plain, views = features_of_all(small("digits_cnn").body, seen(), CPU), views_of(seen())
    assert torch.equal(views.batch(torch.arange(12))[0], plain.batch(torch.arange(12))[0])
    for row in views.stored(torch.arange(12)):
        assert len({v.numpy().tobytes() for v in row}) == 4


def test_a_step_draws_each_view_equally_often_from_its_stream() -> None:
    views, all_ = views_of(seen(1)), torch.zeros(4000, dtype=torch.long)
    x, _ = views.batch(all_, torch.Generator().manual_seed(0))
    again, _ = views.batch(all_, torch.Generator().manual_seed(0))
    assert torch.equal(x, again)
    counts = torch.tensor([int((x == v).all(1).sum()) for v in views.stored(torch.tensor([0]))[0]])
    assert int(counts.sum()) == 4000
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 16.3  # chi-square of 3 degrees: one in a thousand is above


def test_views_are_one_record_and_one_unit_of_privacy() -> None:
    views = views_of(seen(copies=1))
    assert len(views) == 12
    assert len(PrivacyUnits.of(views)) == 12
    patients = FixedViews(views.stored(torch.arange(12)), views.labels, tuple("aabbccddeeff"))
    assert len(PrivacyUnits.of(patients)) == 6


def test_a_record_of_many_views_moves_a_private_step_by_its_one_clipped_gradient() -> None:
    clip, n = 0.3, 12
    train = TrainConfig(
        lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=n, epochs=1, freeze="features", augment=True, views=4
    )
    made = frozen(train=train, rounds=1)
    members = tuple(replace(m, units=n) for m in made.members)
    terms = {"epsilon": 8.0, "clip": clip, "rng": "test"}
    run = CompiledRun.of(replace(made, members=members, privacy=NamedOptions("dp_record", terms)))
    plan, context, steps = release_plan(run, 0), RoundContext(3, 4, 1).for_silo(0, 0), list[Tensor]()

    class All(NoNoise):
        def uniform_of(self, units, *about):  # type: ignore[no-untyped-def]
            return torch.zeros(len(units)).double()

    for left_out in (None, *range(n)):
        index = torch.tensor([i for i in range(n) if i != left_out])
        views = views_of(TensorExamples(seen(n).x[index], index % 4, how=DIGITS))
        model, allowance = run.new_model(), ReleaseAllowance(plan.releases(0, True))
        data = DpSgdLocalData(RoundData(views, views, plan.rates.train, context), plan, allowance, All(1, "x"))
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        assert data.sgd(model, ce) == 1
        steps.append(before - torch.cat([p.detach().flatten() for p in model.parameters()]).double())
    moved = [float((steps[0] - step).norm()) * plan.batch for step in steps[1:]]
    assert max(moved) <= clip * (1 + 1e-3)
    assert min(moved) >= clip * 0.9


def test_views_change_what_is_learnt_and_not_what_is_measured_first() -> None:
    train = replace(FROZEN, augment=True, views=4)
    ends, first = list[State](), list[float]()
    for made in (frozen(), frozen(train=train)):
        run, history = RunSetup.of(made), RoundHistory()
        ends.append(simulate(run, with_features(run, shares()), history))
        first.append(history.accuracies[0])
    assert first[0] == first[1]
    assert not same(ends[0]["w"], ends[1]["w"])


# ---- what does not go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.augment=true"], "train.views=2 to 64"),
        (["train.views=4"], "train.augment=true"),
        (["train.views=65", "train.augment=true"], "64"),
        (["train.views=4", "train.augment=true", "train.freeze=none"], "train.freeze=features"),
        (["train.views=4", "train.augment=true", "method=analytic"], "analytic: expected train.views=1"),
        (["train.freeze=body"], "features"),
        (["model.adapter=big"], "linear"),
        (["model.adapter=linear", "model.projection=[8]"], "leave one out"),
    ],
)
def test_what_does_not_go_with_frozen_features_is_refused_with_the_remedy(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest_from(compose_spec([*WORDS, *words]), ["a", "b"])
    assert says in caught.value.message


def test_a_model_with_a_pass_of_its_own_is_refused() -> None:
    class Own(SplitModel):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x)) * 2

    base = small("digits_cnn")
    own = Own(base.body, base.projection, base.head, base.feature_dim, base.n_classes)
    with pytest.raises(ConfigError, match="E-CFG-08"):
        trained_part(own, schema((1, 8, 8)), FROZEN, "mine")
    flat = SplitModel(nn.Identity(), base.projection, base.head, base.feature_dim, base.n_classes)
    with pytest.raises(ConfigError, match="E-CFG-08"):
        trained_part(flat, schema((1, 8, 8)), FROZEN, "mine")


def test_runs_without_frozen_features_keep_their_digests() -> None:
    spec = compose_spec(["method=fedavg", "data=digits"])
    made = manifest_from(spec, ["a", "b"])
    assert "freeze" not in made.to_json()
    assert "adapter" not in made.to_json()
    assert RunManifest.from_json(made.to_json()) == made
    assert '"freeze"' not in RunSpec.from_json(spec.to_json()).to_json()
    asked = manifest_from(compose_spec(["data=digits", "train.freeze=features", "model.adapter=mlp"]), ["a", "b"])
    assert RunManifest.from_json(asked.to_json()) == asked
    assert (asked.train.freeze, asked.model.options["adapter"]) == ("features", "mlp")
