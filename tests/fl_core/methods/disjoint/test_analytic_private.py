"""The form of analytic that private runs take: solved from one noisy release, and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.errors import ConfigError
from fl_core.methods import build_method
from fl_core.methods.disjoint import analytic
from fl_core.methods.disjoint.analytic import (
    MAX_WEIGHT,
    OF_MEAN,
    RADIUS,
    RECORDS_PER_FEATURE,
    RIDGE_FEATURES,
    SHARE,
    UNCENTRED_NOISE,
    Analytic,
)
from fl_core.methods.shared import closed_forms
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.values import MomentSums, Part, RoundContext, State
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise.sources import NoiseSource, SeededNoise
from privacy.mechanisms.record import moments
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.release_log import InMemoryReleaseLog
from tests.fl_core.methods.disjoint.test_analytic import CLASSES, SCHEMA, TRAIN, Rows, head, model, records, trained
from tests.support.privacy import NoNoise, extreme_records

WIDTH = 25
EXTREMES = (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-40, 0.0, 3e4)


def plan_of(method: Analytic, epsilon: float = 8.0) -> ReleasePlan:
    terms = RecordDpConfig(epsilon=epsilon, rng="test", test_data="public", reserve_rounds=0)
    return ReleasePlan.of(terms, TRAIN, method.exchanges, 200, method, model(), SCHEMA)


def solved(
    method: Analytic, parts: Sequence[Rows], noise: type[NoiseSource] = SeededNoise, epsilon: float = 8.0
) -> State:
    """Run the exchanges over private silos."""
    server = method.init_server(model(), RoundContext(len(parts), CLASSES))
    plan, logs = plan_of(method, epsilon), [InMemoryReleaseLog() for _ in parts]
    for t in range(method.exchanges):
        now, total = RoundContext(len(parts), CLASSES, method.exchanges, t, len(parts)), None
        for k, part in enumerate(parts):
            allowance = ReleaseAllowance(plan.releases(t, True, counts=t == 0))
            opened = RoundData(part, part, TRAIN, now.for_silo(k, 0))
            data = DpSgdLocalData(opened, plan, allowance, noise(3, "round", t, "silo", k), logs[k])  # type: ignore[call-arg]
            sent = method.local(model(), method.broadcast(server), {}, data, now.for_silo(k, 0)).bundle["moments"]
            assert not allowance.left
            total = sent if total is None else total + sent
        assert total is not None
        server = method.merge(server, {"moments": total}, now)
    return server


def noisy(**options: object) -> Analytic:
    made = build_method("analytic", {"release": "noisy", "head": "ridge", **options})
    assert isinstance(made, Analytic)
    return made


def without_noise(method: Analytic, rows: Rows) -> State:
    context = RoundContext(1, CLASSES)
    data, server = (
        PlainLocalData(RoundData(rows, rows, TRAIN, context.for_silo(0, 0))),
        method.init_server(model(), context),
    )
    sent = method.local(model(), method.broadcast(server), {}, data, context.for_silo(0, 0)).bundle
    return method.merge(server, sent, context)


@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_without_noise_and_clipping_it_is_the_exact_ridge(ridge: float) -> None:
    """Features of the exact form are rounded to 2^-14."""
    wanted = head(trained(Analytic(ridge=ridge), [records()]))
    found = head(without_noise(noisy(ridge=ridge, bound=3.0), records()))
    assert np.allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["lda", "ncm"])
def test_without_noise_other_heads_are_the_exact_ones(form: str) -> None:
    wanted = head(trained(Analytic(head=form, ridge=1e-3), [records()]))
    found = head(without_noise(noisy(head=form, ridge=1e-3), records()))
    decided = [_decided(W) for W in (wanted, found)]
    assert (decided[0] == decided[1]).mean() > 0.99


def _decided(W: np.ndarray) -> np.ndarray:
    fresh = records(seed=9)
    z = analytic.features(model().eval(), fresh.x).double().numpy()
    found: np.ndarray = (z @ W[:, :-1].T + W[:, -1]).argmax(1)
    return found


def test_lambda_follows_from_the_noise_and_negative_eigenvalues_are_cut() -> None:
    """Solved once more with NumPy, from the state that the server keeps."""
    rows, method = records(), noisy(ridge=0.05)
    server = solved(method, [rows, records(seed=2)], epsilon=1.0)
    A, B = closed_forms.unpacked(server["sums"]["a"]).numpy(), server["sums"]["b"].numpy()
    variance = 2 * 2 * plan_of(method, 1.0).noise ** 2
    assert float(server["sums"]["variance"]) == pytest.approx(variance)
    values, vectors = np.linalg.eigh(A)
    assert values.min() < 0  # of so much noise
    repaired = (vectors * np.maximum(values, 0)) @ vectors.T
    noise = UNCENTRED_NOISE * math.sqrt(variance * WIDTH)
    penalty = np.full(WIDTH, 0.05 * np.diag(repaired)[:-1].mean() + noise)
    penalty[-1] = noise
    W = np.linalg.solve(repaired + np.diag(penalty), B.T).T
    scale = np.array([math.sqrt((1 - SHARE**2) / (WIDTH - 1))] * (WIDTH - 1) + [SHARE])
    assert np.allclose(head(server), W * scale, rtol=1e-4, atol=1e-6)
    assert np.linalg.eigvalsh(closed_forms.positive(torch.from_numpy(A)).numpy()).min() > -1e-9


@pytest.mark.parametrize("form", ["ridge", "lda", "ncm"])
@pytest.mark.parametrize("epsilon", [8.0, 0.3])
def test_a_head_is_finite_under_any_noise_and_without_records(form: str, epsilon: float) -> None:
    empty = Rows(torch.zeros(0, *SCHEMA.shape), torch.zeros(0, dtype=torch.long))
    for parts in ([records()], [empty], [empty, records(3)]):
        for balanced in ("none", "balanced"):
            method = noisy(head=form, ridge=0.0, class_weights=balanced)
            assert np.isfinite(head(solved(method, parts, epsilon=epsilon))).all()


def test_the_private_form_needs_no_exchange_for_lambda() -> None:
    assert noisy(ridge=0.0).exchanges == 1
    assert noisy(ridge=0.0, class_weights="balanced").exchanges == 2
    assert noisy(release="centred", class_weights="balanced").exchanges == 3
    assert Analytic().private_form == {"release": "centred"}
    assert not noisy().private_form


def test_weights_of_classes_follow_noisy_counts_within_bounds() -> None:
    """None above 1, so that no record is longer; none below a tenth of an average class's, whatever counts say."""
    method = noisy(class_weights="balanced")
    server, context = method.init_server(model(), RoundContext(1, CLASSES)), RoundContext(1, CLASSES, 2)
    for counts in ([100.0, 25.0, 400.0, 100.0], [1e6, 0.0, 0.0, 0.0], [0.0] * 4, [-5.0, 3.0, 1e-40, 1e30]):
        b = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
        b[:, -1] = SHARE * torch.tensor(counts)
        sums = {"a": torch.zeros(WIDTH * (WIDTH + 1) // 2), "b": b, "variance": torch.zeros(())}
        root = method.merge(server, {"moments": Part(sums, torch.tensor(1.0))}, context)["asked"]["root"]
        assert bool((root > 0).all())
        assert float(root.max()) == 1.0
        mean = max(np.maximum(counts, 0).mean(), 1e-9)
        heavy = [c for c in range(CLASSES) if counts[c] > mean / MAX_WEIGHT and counts[c] >= 1]
        if len(heavy) > 1:
            ratio = float(root[heavy[0]] / root[heavy[1]]) ** 2
            assert ratio == pytest.approx(counts[heavy[1]] / counts[heavy[0]], rel=1e-6)


@pytest.mark.parametrize("bad", EXTREMES)
@pytest.mark.parametrize("options", [{}, {"release": "centred"}, {"release": "centred", "mixed": 8}], ids=str)
def test_no_message_of_a_coordinator_moves_a_record_further(bad: float, options: dict[str, object]) -> None:
    """Weights of classes and the mean come from outside: the bound is applied after them."""
    method, x = noisy(**options), torch.stack([image.flatten()[:6] for _, image, _ in extreme_records()])
    y = torch.tensor([label for _, _, label in extreme_records()])
    asked: list[MomentSums] = []

    class Asked(DpSgdLocalData):
        def sum(self, query, **more):  # type: ignore[no-untyped-def]
            asked.append(query)
            return super().sum(query, **more)

    rows = Rows(x, y)
    for t in range(method.exchanges):
        plan, context = plan_of(method), RoundContext(1, CLASSES, method.exchanges, t).for_silo(0, 0)
        allowance = ReleaseAllowance(plan.releases(t, True))
        data = Asked(RoundData(rows, rows, TRAIN, context), plan, allowance, NoNoise(1, "x"))
        msg = method.broadcast(method.init_server(model(), context))
        told = {name: torch.full_like(v, bad) for name, v in msg["asked"].items()}
        method.local(model(), {**msg, "asked": told}, {}, data, context)
    for query in asked:
        _no_record_moves_it_further(query, rows)


def _no_record_moves_it_further(query: MomentSums, rows: Rows) -> None:
    x, y, whole = rows.x, rows.labels, _flat(query, rows)
    for gone in range(len(y)):
        keep = torch.arange(len(y)) != gone
        moved = float((whole - _flat(query, Rows(x[keep], y[keep]))).norm())
        assert moved <= moments.sensitivity(query) * (1 + 1e-12)


def _flat(query: MomentSums, rows: Rows) -> Tensor:
    a, b = moments.exact_sums(query, rows, PrivacyUnits.of(rows), moments.FINEST)
    below, columns = torch.tril_indices(len(a), len(a))
    factor = torch.where(below == columns, 1.0, math.sqrt(2.0)).double()
    return torch.cat((a[below, columns].double() * factor * moments.FINEST**2, b.double().flatten() * moments.FINEST))


# ---- centred ---------------------------------------------------------------------------------------------------------


def centred(**options: object) -> Analytic:
    return noisy(release="centred", **options)


def quiet(method: Analytic, rows: Rows) -> State:
    """Run the exchanges over plain data, whose sums have no noise."""
    server = method.init_server(model(), RoundContext(1, CLASSES))
    for t in range(method.exchanges):
        context = RoundContext(1, CLASSES, method.exchanges, t, 1)
        data = PlainLocalData(RoundData(rows, rows, TRAIN, context.for_silo(0, 0)))
        sent = method.local(model(), method.broadcast(server), {}, data, context.for_silo(0, 0)).bundle
        server = method.merge(server, sent, context)
    return server


@pytest.mark.parametrize("form", ["ridge", "ncm"])
def test_without_noise_it_is_the_head_of_centred_features_computed_with_numpy(form: str) -> None:
    rows = records()
    server = quiet(centred(head=form, ridge=1e-3), rows)
    z = analytic.features(model().eval(), rows.x).double().numpy() * math.sqrt((1 - SHARE**2) / (WIDTH - 1))
    mean = z.mean(0)
    assert np.allclose(server["asked"]["mean"].numpy(), mean, atol=1e-4)
    v = (z - mean) / RADIUS
    v /= np.maximum(1, np.linalg.norm(v, axis=1) / math.sqrt(1 - SHARE**2))[:, None]
    y, fresh = rows.labels.numpy(), records(seed=9)
    t = analytic.features(model().eval(), fresh.x).double().numpy()
    u = (t * math.sqrt((1 - SHARE**2) / (WIDTH - 1)) - mean) / RADIUS
    if form == "ncm":
        means = np.stack([v[y == c].mean(0) for c in range(CLASSES)])
        scores = -((u[:, None] - means) ** 2).sum(2)
    else:
        fitted = Ridge(alpha=1e-3 * (v**2).sum(0).mean()).fit(v, np.eye(CLASSES)[y])
        scores = fitted.predict(u)
    found = head(server)
    assert ((t @ found[:, :-1].T + found[:, -1]).argmax(1) == scores.argmax(1)).mean() > 0.99


def test_the_square_of_a_noisy_class_mean_is_right_on_average() -> None:
    """The bias of the nearest mean: what the noise adds to the square of a mean, up to many times the square itself."""
    generator = torch.Generator().manual_seed(3)
    means, counts = torch.randn(3, 40, generator=generator).double() / 6, torch.tensor([20.0, 60.0, 200.0]).double()
    noise = torch.randn(4000, 3, 40, generator=generator).double() * 30
    found = torch.stack(
        [
            closed_forms.nearest_mean(
                torch.cat((means * counts.unsqueeze(1) + n, counts.unsqueeze(1)), 1), counts, (30 / counts) ** 2
            )[:, -1]
            for n in noise
        ]
    )
    off = (-2 * found.mean(0) - means.square().sum(1)) / (2 * found.std(0) / math.sqrt(len(noise)))
    assert bool((off.abs() < 4).all())
    assert float((30 / counts[0]) ** 2 * 40) > 10 * float(means[0].square().sum())


def test_noisy_counts_move_towards_their_mean_only_as_far_as_they_are_noise() -> None:
    counts = torch.tensor([90.0, 110.0, 95.0, 105.0], dtype=torch.float64)
    assert torch.equal(closed_forms.shrunk(counts, torch.zeros(4).double()), counts)
    assert torch.equal(closed_forms.shrunk(counts, torch.full((4,), 1e6).double()), torch.full_like(counts, 100.0))
    uneven = torch.tensor([10.0, 1000.0], dtype=torch.float64)
    assert torch.allclose(closed_forms.shrunk(uneven, torch.full((2,), 100.0).double()), uneven, rtol=0.05)


def test_features_are_mixed_by_the_same_matrix_everywhere_which_keeps_their_lengths() -> None:
    matrix = analytic.mixing(1024, 200)
    assert matrix.shape == (1024, 200)
    assert set(matrix.unique().tolist()) == {-1 / math.sqrt(200), 1 / math.sqrt(200)}
    assert "".join("-+"[v > 0] for v in matrix[0, :12].tolist()) == "+-+---+-+++-"  # of no library's version
    z = torch.randn(300, 1024, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose((z @ matrix).norm(dim=1), z.norm(dim=1), rtol=0.25)


def test_head_and_features_follow_from_noise_and_sizes_alone() -> None:
    method = Analytic(release="centred")
    assert method.for_noise(1024, 1440.0, 0.7) == {"head": "ridge", "mixed": RIDGE_FEATURES}
    assert method.for_noise(RIDGE_FEATURES, 1440.0, 0.7) == {"head": "ridge", "mixed": 0}
    assert method.for_noise(1024, 24000.0, 1.0) == {"head": "ridge", "mixed": 24000 // RECORDS_PER_FEATURE}
    strong = method.for_noise(1024, 1440.0, 8.0)
    assert strong["head"] == "ncm"
    assert 16 <= strong["mixed"] < 400  # type: ignore[operator]
    assert method.for_noise(1024, 1e6, 8.0) == {"head": "ridge", "mixed": 0}  # many records outweigh it
    chosen = Analytic(release="centred", head="lda", mixed=50)
    assert chosen.for_noise(1024, 1440.0, 8.0) == {"head": "lda", "mixed": 50}
    assert not Analytic().for_noise(1024, 1440.0, 8.0)
    manifests = [
        manifest_from(
            compose_spec([*WORDS, f"privacy.epsilon={epsilon}"]), [f"hospital{k}" for k in range(6)], [290.0] * 6
        )
        for epsilon in (8, 0.5)
    ]
    assert [m.method.options["head"] for m in manifests] == ["ridge", "ncm"]
    width = manifests[1].method.options["mixed"] + 1  # type: ignore[operator]
    assert manifests[1].layout["moments"].shapes["b"] == (10, width)


@pytest.mark.parametrize("options", [{}, {"mixed": 8}, {"class_weights": "balanced"}], ids=str)
@pytest.mark.parametrize("form", ["ridge", "lda", "ncm"])
@pytest.mark.parametrize("epsilon", [8.0, 0.3])
def test_a_centred_head_is_finite_under_any_noise_and_without_records(
    form: str, epsilon: float, options: dict[str, object]
) -> None:
    empty = Rows(torch.zeros(0, *SCHEMA.shape), torch.zeros(0, dtype=torch.long))
    for parts in ([records()], [empty], [empty, records(3)]):
        found = head(solved(centred(head=form, **options), parts, epsilon=epsilon))
        assert found.shape == (CLASSES, WIDTH)
        assert np.isfinite(found).all()


WORDS = (
    "method=analytic",
    "data=digits",
    "federation=hospitals6",
    "model=random_features",
    "model.width=384",
    "threads=1",
    "privacy=dp_record",
    "privacy.rng=test",
    "privacy.test_data=public",
)


def test_the_demos_hospitals_reach_more_than_what_training_does_in_one_charged_round() -> None:
    """One seed of the table of benchmarks/comparison, where ten are; three rounds are charged as one."""
    result = runner.run(compose_spec([*WORDS, "rounds=3", "privacy.epsilon=8", "privacy.reserve_rounds=0"]))
    accuracies = [e.point for e in result.estimates]
    assert accuracies[2] is not None
    assert accuracies[2] > 0.9
    assert accuracies[2] == accuracies[3]
    assert result.manifest.private_form == {"release": "exact"}
    assert result.privacy is not None
    assert 0.999 * 7.9 < result.privacy["epsilon"] <= 8  # type: ignore[index, operator]


def test_the_plan_is_known_before_any_record_and_says_what_is_then_released() -> None:
    spec = compose_spec([*WORDS, "rounds=3", "method.class_weights=balanced"])
    run = CompiledRun.of(manifest_from(spec, [f"hospital{k}" for k in range(6)], [290.0] * 6))
    purposes = [r.purpose for r in run.profile.releases(0)]
    assert purposes == ["class counts", "moments", "moments"]
    assert [r.purpose for r in run.profile.releases(0, prototypes=False)] == ["class counts"]
    (first, *_) = run.profile.project()
    of_mean, of_sums = (r.mechanism.noise for r in run.profile.releases(0)[1:])
    assert of_mean**2 == pytest.approx((1 / OF_MEAN - 1) * of_sums**2)  # of 1 / z^2 the mean has a small part
    assert (first.steps, first.noise) == (2, of_sums)
    assert first.epsilon_most <= 8


def test_what_an_exact_run_asks_for_is_refused_in_a_private_one() -> None:
    """Whoever writes the manifest by hand."""
    spec = compose_spec(WORDS)
    made = manifest_from(spec, [f"hospital{k}" for k in range(6)], [290.0] * 6)
    exact = replace(made, method=replace(made.method, options={**made.method.options, "release": "exact"}))
    with pytest.raises(ConfigError, match=r"set method.release=centred"):
        CompiledRun.of(exact)
