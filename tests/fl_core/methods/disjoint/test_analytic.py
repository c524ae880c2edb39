"""Closed forms against scikit-learn, and sums that do not know how examples are divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from consilium.research.engines.in_process import SiloShare, local_ports
from consilium.research.simulate.runner import build_simulation
from consilium.testing.federation import MadeUp
from consilium.testing.methods import CHECKS, TRAIN, MethodCase
from coordinator.config.hydra_config import compose_spec
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.converter import Option
from fl_core.errors import ConfigError, ProtocolError, UnavailableError
from fl_core.methods import build_method
from fl_core.methods.disjoint import analytic
from fl_core.methods.disjoint.analytic import MAX_ENTRY, STEP, Analytic
from fl_core.methods.shared import closed_forms
from fl_core.models import build_model
from fl_core.rounds.capabilities import check_supported
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.records import Schema
from fl_core.types.values import Examples, Part, RoundContext, State
from tests.oracles.equations import slow_class_covariance, slow_gcv
from tests.support.federations import NAMES, go, manifest, same, shares

CLASSES, RECORDS = 4, 200
SCHEMA = Schema((6,), tuple("abcd"))


class Rows(Examples):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.labels = x, y

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.x[index], self.labels[index]


def records(n: int = RECORDS, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=draw)
    x = torch.randn(n, *SCHEMA.shape, generator=draw) + 0.7 * y.unsqueeze(1) * torch.tensor([1.0, -1, 1, 0, 0, 2])
    return Rows(x, y)


def model() -> torch.nn.Module:
    return build_model("random_features", {"width": 24}, SCHEMA, seed=3)


def trained(method: Analytic, parts: Sequence[Rows], rounds: int = 0) -> State:
    """Run the exchanges over these silos, through the grid of a run."""
    network = model()
    layout = derive_layout(method, network, SCHEMA)
    context = RoundContext(len(parts), CLASSES, rounds=rounds or method.exchanges, cohort=len(parts))
    server = method.init_server(model(), context)
    grid = FixedPointFormat("ring64", len(parts))
    for t in range(context.rounds):
        now = RoundContext(len(parts), CLASSES, context.rounds, t, len(parts))
        sums = Aggregator({name: layout[name] for name in method.sends}, grid, method.unsummed_parts)
        for k, part in enumerate(parts):
            data = PlainLocalData(RoundData(part, part, TRAIN, now.for_silo(k, 0)))
            sums.add(method.local(model(), method.broadcast(server), {}, data, now.for_silo(k, 0)).bundle, k)
        assert sums.clipped == 0
        server = method.merge(server, FixedPoint(grid).incoming(sums.total(), len(parts), t), now)
    return server


def head(server: State) -> np.ndarray:
    return torch.cat((server["w"]["head.weight"], server["w"]["head.bias"].unsqueeze(1)), dim=1).double().numpy()


def solved(method: Analytic, server: State) -> np.ndarray:
    """The head before it is rounded to float32."""
    return method._solved(server["sums"], server["asked"]["root"])[1].numpy()


def seen(rows: Rows) -> np.ndarray:
    """The features as the sums have them: on the grid."""
    z = analytic.features(model().eval(), rows.x)
    return analytic.entries(z, torch.ones(len(z), dtype=torch.float64))[:, :-1].numpy()


def test_two_records_by_hand() -> None:
    A = torch.zeros(3, 3, dtype=torch.float64)
    A[:2, :2] = torch.diag(torch.tensor([1.0, 4.0]))  # z = (1, 0) and (0, 2), the constant left out
    B = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    A[2, 2] = 1.0
    W = closed_forms.solve_ridge(A, B, ridge=1 / 2.5)  # lambda N = 1: the mean of the diagonal is 2.5
    assert torch.allclose(W, torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.4, 0.0]], dtype=torch.float64), atol=1e-15)


def test_ridge_is_scikit_learns_with_an_intercept() -> None:
    rows = records()
    server = trained(Analytic(ridge=0.01), [rows])
    z, target = seen(rows), np.eye(CLASSES)[rows.labels.numpy()]
    alpha = 0.01 * float(np.mean((z**2).sum(0)))
    reference = Ridge(alpha=alpha, fit_intercept=True, solver="cholesky").fit(z, target)
    exact = solved(Analytic(ridge=0.01), server)
    wanted = np.concatenate((reference.coef_, reference.intercept_[:, None]), axis=1)
    assert np.abs(exact - wanted).max() <= 1e-9 * np.abs(wanted).max()
    assert np.allclose(head(server), wanted, rtol=1e-6, atol=1e-6)


def test_lda_is_scikit_learns_with_the_same_shrinkage() -> None:
    rows, ridge = records(), 0.05
    server = trained(Analytic(head="lda", ridge=ridge), [rows])
    z = seen(rows)
    shift = ridge * float((z**2).mean())

    class Shrunk:
        def fit(self, found: np.ndarray) -> Shrunk:
            centred = found - found.mean(0)
            self.covariance_ = centred.T @ centred / len(found) + shift * np.eye(found.shape[1])
            return self

    reference = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Shrunk()).fit(z, rows.labels.numpy())
    exact = solved(Analytic(head="lda", ridge=ridge), server)
    wanted = np.concatenate((reference.coef_, reference.intercept_[:, None]), axis=1)
    assert np.abs(exact - wanted).max() <= 1e-8 * np.abs(wanted).max()


def test_the_nearest_class_mean_is_scikit_learns() -> None:
    rows, fresh = records(), seen(records(seed=9))
    W = head(trained(Analytic(head="ncm"), [rows]))
    reference = NearestCentroid().fit(seen(rows), rows.labels.numpy())
    assert (np.argmax(fresh @ W[:, :-1].T + W[:, -1], axis=1) == reference.predict(fresh)).all()


def test_balanced_weights_are_those_of_repeated_records() -> None:
    """Twice as many copies of the rare class are the same as a weight of two."""
    rows = records()
    rare = Rows(rows.x[rows.labels < 2][:60], rows.labels[rows.labels < 2][:60])
    n = torch.bincount(rare.labels, minlength=CLASSES).double()
    server = trained(Analytic(class_weights="balanced", ridge=0.01), [rare])
    z, root = seen(rare), np.sqrt(float(n.sum()) / (CLASSES * n[rare.labels].numpy()))
    weighed = np.concatenate((z, np.ones((len(z), 1))), axis=1) * root[:, None]
    A = weighed.T @ weighed
    penalty = np.diag([0.01 * np.diag(A)[:-1].mean()] * (len(A) - 1) + [0.0])
    wanted = np.linalg.solve(A + penalty, (weighed * root[:, None]).T @ np.eye(CLASSES)[rare.labels.numpy()]).T
    assert np.allclose(head(server), wanted, atol=2e-3 * np.abs(wanted).max())  # rounding is after the root


METHODS = (
    {},
    {"head": "lda"},
    {"head": "ncm"},
    {"class_weights": "balanced"},
    {"ridge": 0.001, "class_weights": "balanced"},
    {"ridge": 0.001},
)


@settings(max_examples=12, deadline=None)
@given(options=st.sampled_from(METHODS), seed=st.integers(0, 10_000), silos=st.integers(1, 12))
def test_any_division_of_the_same_examples_gives_the_same_model(options: dict, seed: int, silos: int) -> None:
    """Empty silos and silos of one class included; to the last bit."""
    rows, draw = records(), torch.Generator().manual_seed(seed)
    order = torch.randperm(RECORDS, generator=draw)
    owner = torch.randint(silos, (RECORDS,), generator=draw) if seed % 2 else rows.labels % silos
    parts = [Rows(rows.x[order[owner[order] == k]], rows.labels[order[owner[order] == k]]) for k in range(silos)]
    method = build_method("analytic", options)
    one, many = trained(method, [rows]), trained(method, parts)
    for group in ("w", "sums"):
        assert all(torch.equal(one[group][name], many[group][name]) for name in one[group])


def test_less_one_silo_is_never_having_had_it() -> None:
    """Sums are exact: what remains after subtraction is what the others give."""
    rows = records()
    parts = [Rows(rows.x[rows.labels == c], rows.labels[rows.labels == c]) for c in range(CLASSES)]
    whole, one, rest = (trained(Analytic(), silos)["sums"] for silos in (parts, parts[:1], parts[1:]))
    assert all(torch.equal(whole[name] - one[name], rest[name]) for name in whole)


@pytest.mark.parametrize("n", [20, 60, RECORDS])
def test_lambda_has_the_least_gcv_error_of_scikit_learns_hat_matrix(n: int) -> None:
    """To 1e-9, of fewer and of more records than features."""
    rows = records(n)
    server, z, target = trained(Analytic(), [rows]), seen(rows), np.eye(CLASSES)[rows.labels.numpy()]
    scores = [slow_gcv(z, target, np.ones(n), ridge) for ridge in closed_forms.LAMBDAS]
    scaled = StandardScaler().fit_transform(z)
    for ridge, score in zip(closed_forms.LAMBDAS, scores, strict=True):
        if n > z.shape[1]:  # of fewer records than features a small lambda leaves rounding alone
            hat = Ridge(alpha=ridge * n, solver="cholesky").fit(scaled, np.eye(n)).predict(scaled)
            error = ((target - hat @ target) ** 2).sum() / n / (1 - np.trace(hat) / n) ** 2
            assert score == pytest.approx(error, rel=1e-9)
    chosen = closed_forms.LAMBDAS[int(np.argmin(scores))]
    assert abs(float(server["chosen"]["ridge"]) - chosen) <= 1e-9 * chosen
    assert min(scores) < scores[0]


def test_balanced_lambda_is_that_of_the_weighted_hat_matrix() -> None:
    rows = records(120)
    rare = Rows(rows.x[24:], rows.labels[24:].clamp(min=1))
    server = trained(Analytic(class_weights="balanced"), [rare])
    n = torch.bincount(rare.labels, minlength=CLASSES).double()
    weights = (n.sum() / (CLASSES * n))[rare.labels].numpy()
    scores = [slow_gcv(seen(rare), np.eye(CLASSES)[rare.labels.numpy()], weights, k) for k in closed_forms.LAMBDAS]
    assert float(server["chosen"]["ridge"]) == closed_forms.LAMBDAS[int(np.argmin(scores))]


def test_records_of_one_weight_count_whole_and_a_rare_class_that_weighs_much_counts_little() -> None:
    n, even = torch.tensor([7.0, 90.0, 3.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert float(closed_forms.effective_records(n, even)) == 100.0
    root = closed_forms.balanced(n)
    expected = 9 / float((1 / n).sum())  # C^2 / sum_c 1 / n_c
    assert float(closed_forms.effective_records(n * root.square(), root)) == pytest.approx(expected, rel=1e-12)
    assert expected < 20


def constant_column(rows: Rows) -> torch.Tensor:
    """Sums A of 24 features, the first of which has one value."""
    z = np.concatenate((seen(rows), np.ones((len(rows.x), 1))), axis=1)
    z[:, 0] = 0.7
    return torch.from_numpy(z)


@pytest.mark.parametrize("ridge", [1e-4, 0.1])
def test_standardised_ridge_is_scikit_learns_on_scaled_features(ridge: float) -> None:
    rows = records()
    z, target = constant_column(rows), np.eye(CLASSES)[rows.labels.numpy()]
    W = closed_forms.solve_ridge(z.T @ z, torch.from_numpy(target.T) @ z, ridge, standardised=True).numpy()
    scaler = StandardScaler().fit(z[:, :-1].numpy())
    reference = Ridge(alpha=ridge * len(z), solver="cholesky").fit(scaler.transform(z[:, :-1].numpy()), target)
    coefficients = reference.coef_ / scaler.scale_
    wanted = np.concatenate((coefficients, (reference.intercept_ - coefficients @ scaler.mean_)[:, None]), axis=1)
    assert np.abs(W - wanted).max() <= 1e-9 * np.abs(wanted).max()
    assert np.abs(W[:, 0]).max() <= 1e-9  # what is the same everywhere says nothing


def test_standardised_lda_is_scikit_learns_on_scaled_features() -> None:
    rows, ridge = records(), 0.05
    z, y = constant_column(rows), rows.labels.numpy()
    target = torch.from_numpy(np.eye(CLASSES)[y].T)
    W = closed_forms.solve_lda(z.T @ z, target @ z, target.sum(1), ridge, standardised=True).numpy()
    scaled = StandardScaler().fit_transform(z[:, 1:-1].numpy())

    class Shrunk:
        def fit(self, within: np.ndarray) -> Shrunk:
            centred = within - within.mean(0)
            self.covariance_ = centred.T @ centred / len(within) + ridge * np.eye(within.shape[1])
            return self

    reference = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Shrunk()).fit(scaled, y)
    said, wanted = z.numpy() @ W.T, scaled @ reference.coef_.T + reference.intercept_
    said, wanted = (logits - logits[:, :1] for logits in (said, wanted))  # the mean is the same for all classes
    assert np.abs(said - wanted).max() <= 1e-9 * np.abs(wanted).max()


@pytest.mark.parametrize("sums", ["zeros", "negative", "no constant"])
def test_sums_that_no_records_have_choose_a_lambda_all_the_same(sums: str) -> None:
    z = constant_column(records(50))
    A, B = z.T @ z, torch.from_numpy(np.eye(CLASSES)[records(50).labels.numpy()].T) @ z
    if sums == "no constant":
        A[-1, -1] = 0.0
    A = {"zeros": 0 * A, "negative": -A}.get(sums, A)
    ridge = closed_forms.choose_ridge(A, B, torch.ones(CLASSES, dtype=torch.float64), 50.0)
    assert ridge in closed_forms.LAMBDAS
    assert bool(torch.isfinite(closed_forms.solve_ridge(A, B, ridge, standardised=True)).all())


def test_what_0_1_0_summed_in_two_exchanges_is_taken_out_in_two() -> None:
    """Version 0.1.0 chose lambda on a fifth of the examples, whose sums came last."""
    rows, added = records(), trained(Analytic(), [records()])["sums"]
    method = Analytic(withdraws="a0,b1")
    assert [method.expects(t) for t in range(3)] == ["a0", "b1", ""]
    taken = trained(method, [rows])["sums"]
    assert all(torch.equal(taken[name], -added[name]) for name in added)
    context = RoundContext(1, CLASSES, 2, 0, 1).for_silo(0, 0)
    data = PlainLocalData(RoundData(rows, rows, TRAIN, context))
    first = method.local(model(), method.broadcast(method.init_server(model(), context)), {}, data, context).bundle
    assert float(first["classes"].weight.sum()) == int((~analytic.held_out(rows.x)).sum()) < RECORDS


def test_rounds_beyond_the_exchanges_change_nothing() -> None:
    assert Analytic().exchanges == 1
    assert Analytic(class_weights="balanced").exchanges == 2
    once, often = trained(Analytic(), [records()]), trained(Analytic(), [records()], rounds=3)
    assert all(torch.equal(once["w"][name], often["w"][name]) for name in once["w"])


def test_a_record_has_the_same_features_whoever_is_in_its_batch() -> None:
    rows, network = records(1500), model().eval()
    whole = analytic.features(network, rows.x)
    for some in (slice(0, 1), slice(700, 1211), slice(1499, 1500)):
        assert torch.equal(analytic.features(network, rows.x[some]), whole[some])
    back = analytic.features(network, rows.x.flip(0)).flip(0)
    assert torch.equal(back, whole)


def test_entries_are_bounded_and_on_the_grid_whatever_the_features_are() -> None:
    z = torch.tensor([[math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-40, 0.5]])
    found = analytic.entries(z, torch.ones(1, dtype=torch.float64))
    assert bool((found.abs() <= MAX_ENTRY).all())
    assert bool((found / STEP == torch.round(found / STEP)).all())
    assert found[0, -2:].tolist() == [0.5, 1.0]


def test_a_silo_that_submits_no_prototypes_sends_zeros() -> None:
    rows, context = records(), RoundContext(1, CLASSES, cohort=1).for_silo(0, 0, prototypes=False)
    method = Analytic()
    msg = method.broadcast(method.init_server(model(), context))
    sent = method.local(model(), msg, {}, PlainLocalData(RoundData(rows, rows, TRAIN, context)), context).bundle
    assert all(not v.any() for part in sent.values() for v in (*part.total.values(), part.weight))


def test_a_class_without_examples_is_never_chosen_by_lda_and_ncm() -> None:
    rows = records()
    some = Rows(rows.x[rows.labels > 0], rows.labels[rows.labels > 0])
    for kind in ("lda", "ncm"):
        W = head(trained(Analytic(head=kind), [some]))
        assert (np.argmax(seen(rows) @ W[:, :-1].T + W[:, -1], axis=1) > 0).all()


@pytest.mark.parametrize(
    ("words", "rounds"),
    [([], 1), (["method.ridge=0.1"], 1), (["method.class_weights=balanced"], 2), (["rounds=4"], 4)],
)
def test_a_run_takes_as_many_rounds_as_there_are_exchanges(words: list[str], rounds: int) -> None:
    assert compose_spec(["data=digits", "method=analytic", *words]).rounds == rounds


def test_fewer_rounds_than_exchanges_are_refused_with_the_remedy() -> None:
    spec = compose_spec(["data=digits", "federation=p5c2", "method=analytic", "method.class_weights=balanced"])
    spec = replace(spec, rounds=1)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*takes 2 rounds.*leave rounds out"):
        build_simulation(spec)


@pytest.mark.parametrize("method", ["fedgela", "fedbabu"])
def test_a_method_that_would_train_nothing_of_frozen_features_is_refused_with_the_remedy(method: str) -> None:
    spec = compose_spec(["data=digits", "federation=p5c2", f"method={method}", "model=random_features"])
    with pytest.raises(ConfigError, match=r"E-CFG-08.*model\.adapter=linear.*method=analytic"):
        build_simulation(spec)


def test_a_head_without_a_bias_is_refused_with_the_remedy() -> None:
    network = build_model("random_features", {"width": 8, "head_bias": False}, SCHEMA, seed=0)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*model\.head_bias=true"):
        Analytic().init_server(network, RoundContext(1, CLASSES))


# ---- hospitals that leave, and personal models ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ridge": 0.01}, {"head": "lda"}, {"head": "ncm"}])
def test_a_simulated_run_that_takes_a_silo_out_ends_in_the_model_that_never_had_it(options: dict[str, Option]) -> None:
    of = lambda names: manifest(  # noqa: E731
        "analytic", options, model="random_features", model_options={"width": 24}, rounds=rounds, names=names
    )
    rounds = build_method("analytic", options).exchanges
    every = shares(n=60)
    some, rest = [0, 2], of([NAMES[0], NAMES[2]])
    whole, seen = go(of(NAMES), local_ports(RunSetup.of(of(NAMES)), every))
    without, _ = go(rest, local_ports(RunSetup.of(rest), [every[k] for k in some]))
    given = [record.added["east"] for record in seen.records if record.kind is TaskKind.TRAIN]
    assert len(given) == rounds
    assert len({digest for record in seen.records for digest in record.added.values()}) == 3 * rounds
    out = replace(of(["east"]), grid=of(NAMES).grid, aggregator=NamedOptions("mean"))
    out = replace(out, method=NamedOptions("analytic", {**out.method.options, "withdraws": ",".join(given)}))
    left, records = go(out, local_ports(RunSetup.of(out), [every[1]]), state=whole)
    assert same(left["sums"], without["sums"])
    assert same(left["w"], without["w"])
    assert all(not any(record.examples) for record in records.records)  # nobody measures the model of those who stay
    with pytest.raises(UnavailableError, match=r"E-RUN-03.*E-RUN-47"):
        go(out, local_ports(RunSetup.of(out), [every[2]]), state=whole)


def slow_personal(
    rows: Rows, server: State, options: Sequence[float], ridge: float, standardised: bool
) -> tuple[float, np.ndarray]:
    """Beta and W_k by explicit loops and inverses, from the state and the hospital's own rows."""
    z, y, out = seen(rows), rows.labels.numpy(), analytic.held_out(rows.x).numpy()
    z = np.concatenate((z, np.ones((len(z), 1))), axis=1)
    target = np.eye(CLASSES)[y]
    A, B = closed_forms.unpacked(server["sums"]["a"]).numpy(), server["sums"]["b"].numpy()
    each = ridge * np.diag(A)[:-1].mean() * np.ones(len(A) - 1)
    if standardised:
        each = ridge * (np.diag(A)[:-1] - A[-1, :-1] ** 2 / A[-1, -1])
    P = np.diag([*each, 0.0])
    grams = {part: (z[keep].T @ z[keep], target[keep].T @ z[keep]) for part, keep in (("fit", ~out), ("rest", out))}

    def weights(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return (np.linalg.inv(A + P) @ B.T).T

    scores = []
    for beta in options:
        fit, rest = grams["fit"], grams["rest"]
        W = weights(A - rest[0] + beta * fit[0], B - rest[1] + beta * fit[1])
        said = (z[out] @ W.T).argmax(1)
        scores.append(np.mean([(said[y[out] == c] == c).mean() for c in np.unique(y[out])]))
    beta = options[int(np.argmax(scores))]
    own = [grams["fit"][k] + grams["rest"][k] for k in (0, 1)]
    return beta, weights(A + beta * own[0], B + beta * own[1])


def turned(seed: int) -> Rows:
    """A hospital that calls the classes otherwise: only its own sums say so."""
    rows = records(160, seed)
    return Rows(rows.x, (rows.labels + 1) % CLASSES)


def personal_head(rows: Rows, server: State, method: Analytic) -> np.ndarray:
    context = RoundContext(2, CLASSES, 1, 1, 2).for_silo(0, 0)
    data = PlainLocalData(RoundData(rows, rows, TRAIN, context))
    made = method.personal(model(), method.broadcast(server), {}, data, context)
    return torch.cat((made.head.weight, made.head.bias.unsqueeze(1)), dim=1).detach().numpy()


@pytest.mark.parametrize("ridge", [1e-3, 0.0])
def test_a_personal_model_weighs_the_hospitals_own_sums_as_its_held_out_examples_say(ridge: float) -> None:
    method = Analytic(personal_head=True, ridge=ridge)
    alike, other = records(160, 5), turned(6)
    server = trained(method, [records(400, 4), alike, other])
    chosen = float(server["chosen"]["ridge"])
    betas = []
    for rows in (alike, other):
        beta, wanted = slow_personal(rows, server, analytic.BETAS, chosen, standardised=not ridge)
        betas.append(beta)
        assert np.allclose(personal_head(rows, server, method), wanted, rtol=1e-4, atol=1e-5)
    assert betas[1] > 1  # who is unlike the others needs its own sums
    assert np.abs(personal_head(other, server, method) - head(server)).max() > 0.01


def test_a_personal_model_of_beta_0_and_of_a_run_that_sends_no_sums_is_the_global_one() -> None:
    rows = records(300, 4)
    server = trained(Analytic(personal_head=True), [rows])
    assert np.array_equal(
        personal_head(Rows(rows.x[:1], rows.labels[:1]), server, Analytic()), head(server).astype("f4")
    )
    assert set(Analytic().broadcast(server)) == {"w", "asked"}
    nobody = Rows(rows.x[:0], rows.labels[:0])
    assert np.allclose(personal_head(nobody, server, Analytic(personal_head=True)), head(server), atol=1e-6)


def test_personal_heads_are_of_ridge_alone_and_of_finite_sums() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*head=ridge"):
        Analytic(personal_head=True, head="lda")
    method, rows = Analytic(personal_head=True), records()
    server = trained(method, [rows])
    server["sums"]["a"][3] = math.nan
    with pytest.raises(ProtocolError, match="E-WIRE-05"):
        personal_head(rows, server, method)


def test_personal_models_are_measured_at_the_end_and_are_better_where_hospitals_differ() -> None:
    found = {}
    for on in (False, True):
        options: dict[str, Option] = {"personal_head": on}
        run = manifest(
            "analytic", options, model="random_features", model_options={"width": 24}, rounds=1, personal=True
        )
        parts = [
            SiloShare(MadeUp(s.train.x, (s.train.labels + k) % CLASSES), s.test) for k, s in enumerate(shares(n=60))
        ]
        parts = [SiloShare(p.train, MadeUp(p.train.x, p.train.labels)) for p in parts]
        _, seen_ = go(run, local_ports(RunSetup.of(run), parts))
        assert "pa" not in seen_.records[0].personal
        found[on] = seen_.records[1].personal["pa"]
    assert found[True] > found[False]


# ---- covariances from class means (FedCOF) ---------------------------------------------------------------------------


def divided(rows: Rows, silos: int, seed: int = 0) -> list[Rows]:
    draw = torch.Generator().manual_seed(seed)
    owner = torch.randint(silos, (len(rows.labels),), generator=draw)
    return [Rows(rows.x[owner == k], rows.labels[owner == k]) for k in range(silos)]


MEANS = {"covariance": "means", "head": "lda", "ridge": 0.01}


@pytest.mark.parametrize("class_weights", ["none", "balanced"])
@pytest.mark.parametrize("head_kind", ["lda", "ridge"])
def test_a_head_from_class_means_is_that_of_the_slow_covariance(class_weights: str, head_kind: str) -> None:
    """Six silos; class 3 is at one of them alone, class 2 has a silo with a single example of it."""
    rows = records(240, seed=4)
    parts = divided(rows, 6)
    parts = [Rows(p.x[keep], p.labels[keep]) for k, p in enumerate(parts) for keep in [(p.labels < 3) | (k == 0)]]
    lonely = parts[5].labels != 2
    lonely[(~lonely).nonzero()[0]] = True
    parts[5] = Rows(parts[5].x[lonely], parts[5].labels[lonely])
    method = build_method("analytic", {**MEANS, "head": head_kind, "class_weights": class_weights})
    server = trained(method, parts)

    counts = np.array([torch.bincount(p.labels, minlength=CLASSES).tolist() for p in parts], dtype=float)
    n = counts.sum(0)
    w = n.sum() / (CLASSES * n) if class_weights == "balanced" else np.ones(CLASSES)
    z = [np.concatenate((seen(p), np.ones((len(p.x), 1))), axis=1) for p in parts]
    m = np.stack([np.concatenate(z)[np.concatenate([p.labels for p in parts]) == c].mean(0) for c in range(CLASSES)])
    known = [c for c in range(CLASSES) if (counts[:, c] > 0).sum() > 1]
    assert known == [0, 1, 2]
    pooled = np.zeros((m.shape[1], m.shape[1]))
    for c in known:
        held = [k for k in range(6) if counts[k, c]]
        means = [z[k][parts[k].labels.numpy() == c].mean(0).tolist() for k in held]
        pooled += w[c] * n[c] * np.array(slow_class_covariance(means, counts[held, c].tolist()))
    pooled /= sum(w[c] * n[c] for c in known)
    A = sum(w[c] * n[c] * (np.outer(m[c], m[c]) + pooled) for c in range(CLASSES))
    shift = 0.01 * np.diag(A)[:-1].mean()
    if head_kind == "ridge":
        wanted = np.linalg.solve(A + np.diag([shift] * (len(A) - 1) + [0.0]), (w * n)[:, None].T * m.T).T
    else:
        total = (w * n).sum()
        S = pooled[:-1, :-1] + shift / total * np.eye(len(A) - 1)
        W = np.linalg.solve(S, m[:, :-1].T).T
        bias = np.log(w * n / total) - (m[:, :-1] * W).sum(1) / 2
        wanted = np.concatenate((W, bias[:, None]), axis=1)
    rounding = 2e-3 if class_weights == "balanced" else 1e-6  # features are rounded after the root
    assert np.allclose(head(server), wanted, atol=rounding * np.abs(wanted).max())


@pytest.mark.integration
def test_the_covariance_from_class_means_is_unbiased() -> None:
    """As a distribution: over 6,000 draws its mean is the true covariance, and is not that of dividing by K."""
    draw, d = torch.Generator().manual_seed(11), 3
    root = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.5, 0.0], [-0.3, 0.8, 0.2]], dtype=torch.float64)
    true, mean, counts = root @ root.T, torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64), [3, 5, 9, 14]
    found = []
    for _ in range(6000):
        sums = [(torch.randn(n, d, generator=draw, dtype=torch.float64) @ root.T + mean).sum(0) for n in counts]
        b, n = torch.stack(sums).unsqueeze(1), torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
        A = closed_forms.estimated_moments(b, n, torch.ones(1, dtype=torch.float64))
        m = b.sum(0)[0] / sum(counts)
        found.append(A / sum(counts) - torch.outer(m, m))
    every = torch.stack(found)
    error = every.std(0) / math.sqrt(len(found))
    assert bool(((every.mean(0) - true).abs() < 4.5 * error).all())
    assert bool(((every.mean(0) * 3 / 4 - true).abs() > 8 * error).diagonal().all())


def test_what_leaves_a_silo_are_class_sums_and_no_matrix_of_features() -> None:
    network, method = model(), build_method("analytic", MEANS)
    plain, means = (derive_layout(m, network, SCHEMA) for m in (Analytic(), method))
    width = 24 + 1
    assert sum(math.prod(s) for s in plain["moments"].shapes.values()) == width * (width + 1) // 2
    assert method.sends == ("classes",)
    assert {name: spec.shapes for name, spec in means.items() if name in ("moments", "classes")} == {
        "classes": {"b": (CLASSES, width)}
    }
    assert set(method.init_server(model(), RoundContext(2, CLASSES))["sums"]) == {"b", "n"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_with_means_the_contract_of_methods_holds(check: Callable[[MethodCase], None]) -> None:
    check(MethodCase("analytic", {**MEANS, "class_weights": "balanced"}))
    check(MethodCase("analytic", MEANS))


def test_where_no_class_is_at_two_silos_there_is_no_covariance_and_the_error_says_what_to_do() -> None:
    rows = records()
    parts = [Rows(rows.x[rows.labels == c], rows.labels[rows.labels == c]) for c in range(CLASSES)]
    with pytest.raises(ConfigError, match=r"E-CFG-08.*method\.covariance=moments"):
        trained(build_method("analytic", MEANS), parts)


@pytest.mark.integration
def test_means_are_refused_where_single_hospitals_must_not_be_seen() -> None:
    method = build_method("analytic", MEANS)
    assert method.unsummed_parts == {"classes"}
    assert Analytic().unsummed_parts == frozenset()
    remedy = r"E-CFG-08.*method\.covariance=moments"
    for capability in (Capability.SECURE_AGGREGATION, Capability.DIFFERENTIAL_PRIVACY):
        with pytest.raises(ConfigError, match=remedy):
            check_supported(method, [capability])
    words = ["data=digits", "federation=iid-5", "method=analytic", "method.covariance=means", "model=random_features"]
    words += ["secagg=off"]
    build_simulation(compose_spec(words))
    for privacy, said in (("dp_record", remedy), ("dp_silo_small", r"E-PRIV-16.*privacy=dp_record")):
        with pytest.raises(ConfigError, match=said):
            build_simulation(compose_spec([*words, f"privacy={privacy}"]))
    with pytest.raises(ConfigError, match=r"E-CFG-08.*separately.*norm_clipped"):
        build_simulation(compose_spec([*words, "aggregator=median"]))


def test_means_without_a_use_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*leave method\.covariance out"):
        build_method("analytic", {"head": "ncm", "covariance": "means"})


def test_lambda_is_chosen_from_means_too() -> None:
    server = trained(build_method("analytic", {"covariance": "means"}), divided(records(240), 6))
    assert float(np.abs(head(server)).max()) > 0


@pytest.mark.parametrize("lie", [(1e-9, 5.0), (0.4, -1e6), (1.0, 2.0**23), (3.0, -(2.0**23)), (0.0, 7.0)])
def test_a_count_below_one_is_no_example_and_a_sum_is_held_to_what_examples_can_have(lie: tuple[float, float]) -> None:
    """A silo that lies moves the covariance no further than entries of honest features could."""
    draw = torch.Generator().manual_seed(1)
    n, b = torch.full((3, CLASSES), 5.0, dtype=torch.float64), torch.randn(3, CLASSES, 7, generator=draw).double()
    n[2, 1], b[2, 1] = lie[0], torch.full((7,), lie[1], dtype=torch.float64)
    method, context = build_method("analytic", MEANS), RoundContext(3, CLASSES, cohort=3)
    network = build_model("random_features", {"width": 6}, SCHEMA, seed=3)
    server = method.init_server(network, context)
    sums = method.merge(server, {"classes": Part({"b": b}, n)}, context)["sums"]
    there = float(lie[0]) if lie[0] >= 1 else 0.0
    assert float(sums["n"][1]) == 10.0 + there
    assert float((sums["b"][1] - b[:2, 1].sum(0)).abs().max()) <= MAX_ENTRY * there


def test_beta_is_chosen_although_no_example_was_held_out() -> None:
    """A fifth of few images may be none of them: the global model."""
    right, counts = torch.zeros(4, 7, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    assert analytic._first_best(right, counts) == 0
