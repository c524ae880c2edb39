"""FedMR: the numbers of its specification (MR-1 to MR-10), its oracles and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from helpers_core import FED, SCHEMA, manifest, same, shares
from hypothesis import given
from hypothesis import strategies as st
from oracles import slow_class_sums, slow_inter, slow_inter_paired, slow_intra
from torch import Tensor

from fl_core import cohort, rng, trees
from fl_core.errors import ConfigError
from fl_core.local import PlainData
from fl_core.methods import build_method
from fl_core.methods import prototypes as proto
from fl_core.methods.fedmr import FedMR
from fl_core.methods.manifold import IntraVariant, References, inter_paired, inter_terms, intra_loss, pick, spread
from fl_core.models import build_model
from fl_core.simulate import History, simulate
from fl_core.types import Coupling, Losses, Part, State, TrainConfig, Turn

F64 = torch.float64
PAPER, CODE, LITERAL = IntraVariant(), IntraVariant(code=True), IntraVariant(literal_std=True)
X1 = torch.tensor([[1, 2], [2, 1], [3, 4], [4, 3]], dtype=F64)
LINE = torch.tensor([-3, -1, 0, 1, 2, 4], dtype=F64).unsqueeze(1)


def intra(z: Tensor, y: Tensor | None = None, form: IntraVariant = PAPER) -> float:
    y = torch.zeros(len(z), dtype=torch.int64) if y is None else y
    return float(intra_loss(z, y, int(y.max()) + 1, form))


def refs(g: list[list[float]], known: list[bool], negatives: list[bool] | None = None) -> References:
    negatives = [True] * len(g) if negatives is None else negatives
    return References(torch.tensor(g, dtype=F64), torch.tensor(known), torch.tensor(negatives))


def inter(z: Tensor, y: Tensor, ref: References, *, no_margin: bool = False) -> float:
    return float(inter_terms(z, y, ref, no_margin=no_margin, equal_examples=False).mean())


def spread_of_spectrum(m: Tensor) -> float:
    eigenvalues = torch.linalg.eigvalsh(m)
    return float((eigenvalues - eigenvalues.mean()).square().sum())


def test_mr_1_correlated_pair() -> None:
    r = torch.corrcoef(X1.T)
    assert torch.allclose(r, torch.tensor([[1, 0.6], [0.6, 1]], dtype=F64))
    assert torch.linalg.eigvalsh(r).tolist() == pytest.approx([0.4, 1.6])
    assert intra(X1) == pytest.approx(2.72, abs=1e-7)
    assert spread_of_spectrum(r) == pytest.approx(0.72) == pytest.approx(2.72 - 2)  # Lemma 1
    literal = r * 4 / 3
    assert intra(X1, form=LITERAL) == pytest.approx(4.835556, abs=1e-6)
    assert spread_of_spectrum(literal) == pytest.approx(1.28) == pytest.approx(4.835556 - (8 / 3) ** 2 / 2, abs=1e-6)
    assert pytest.approx(2.835556) == 4.835556 - 2  # Lemma 1 fails with the printed variance
    assert intra(X1, form=CODE) == pytest.approx(0.81, abs=1e-7)


def test_mr_2_line_collapse_is_the_maximum() -> None:
    z = LINE * torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=F64)
    assert intra(z) == pytest.approx(25, abs=1e-5)
    assert intra(z, form=CODE) == pytest.approx(25 / 6, abs=1e-6)


def test_mr_3_decorrelated_features_are_the_minimum() -> None:
    z = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=F64)
    assert intra(z) == pytest.approx(3, abs=1e-6)
    assert intra(z, form=CODE) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("form", [PAPER, CODE, LITERAL])
@pytest.mark.parametrize("y", [[0, 0, 0, 0], [0, 1, 2, 3]])
def test_mr_4_point_collapse_and_lonely_examples_give_a_differentiable_zero(form: IntraVariant, y: list[int]) -> None:
    z = torch.ones(4, 3, dtype=F64) if len(set(y)) == 1 else torch.randn(4, 3, generator=rng.stream(0, "z")).double()
    z.requires_grad_()
    loss = intra_loss(z, torch.tensor(y), 4, form)
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_mr_5_two_classes() -> None:
    z = torch.cat([X1, LINE * torch.ones(1, 2, dtype=F64)])
    y = torch.tensor([0] * 4 + [1] * 6)
    assert intra(z, y) == pytest.approx(3.36, abs=1e-6)
    assert intra(z, y, CODE) == pytest.approx(2.824, abs=1e-6)


G6 = [[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]]
Z6 = torch.tensor([[1, 0], [3, 0], [3, 0], [1, 0]], dtype=F64)
Y6 = torch.tensor([0, 0, 1, 1])


def test_mr_6_inter_of_two_classes() -> None:
    every = refs(G6, [True] * 3)
    observed = refs(G6, [True] * 3, [True, True, False])
    assert inter(Z6, Y6, every) == pytest.approx(0.5)
    assert inter(Z6, Y6, observed) == pytest.approx(1.0)
    assert float(inter_paired(Z6, Y6, every)) == pytest.approx(0.0)
    assert inter(Z6, Y6, every, no_margin=True) == pytest.approx(2.0)
    assert inter(Z6, Y6, refs(G6, [True, True, False])) == pytest.approx(1.0)
    assert inter(Z6, Y6, refs(G6, [False] * 3)) == 0


def test_mr_7_a_missing_class_matters() -> None:
    z, y = torch.tensor([[0, 2]], dtype=F64), torch.tensor([0])
    assert inter(z, y, refs(G6, [True] * 3)) == pytest.approx(0.5)
    assert inter(z, y, refs(G6, [True] * 3, [True, True, False])) == 0


def test_mr_8_averaged_heads_of_class_disjoint_silos_are_tilted() -> None:
    """Section 3.2: three silos with two of three classes each; the mean of their best heads points elsewhere."""
    h = math.sqrt(3) / 2
    heads = [
        [[0.5, -h], [-0.5, h], [0, 0]],
        [[0.5, h], [0, 0], [-0.5, -h]],
        [[0, 0], [0, 1], [0, -1]],
    ]
    start = {"w": {"head": torch.zeros(3, 2, dtype=F64)}}
    total = Part.of({"head": torch.tensor(heads[0], dtype=F64)})
    for head in heads[1:]:
        total = total + Part.of({"head": torch.tensor(head, dtype=F64)})
    mean = FedMR(mu2=0).merge(start, {"delta": total}, FED)["w"]["head"]
    y = (math.sqrt(3) + 2) / 6
    assert y == pytest.approx(0.6220085)
    assert torch.allclose(mean, torch.tensor([[1 / 3, 0], [-1 / 6, y], [-1 / 6, -y]], dtype=F64), atol=1e-7)
    assert mean.norm(dim=1).tolist() == pytest.approx([1 / 3, 0.643951, 0.643951], abs=1e-6)
    best = torch.tensor([[1, 0], [-h, 0.5], [-h, -0.5]], dtype=F64)
    angles = torch.rad2deg(torch.arccos((torch.nn.functional.cosine_similarity(mean, best)).clamp(-1, 1)))
    assert angles.tolist() == pytest.approx([0, 45, 45], abs=1e-4)


@pytest.mark.parametrize("origin", [(0.0, 0.0), (3.0, -2.0)])
def test_mr_9_prototypes_are_means_by_class_counts(origin: tuple[float, float]) -> None:
    """Class 0: A has 10 examples of mean (1, 1), B 30 of mean (5, 1); class 1 has nobody."""
    state = {"g": torch.tensor([origin, (7.0, 8.0)]), "known": torch.tensor([float(any(origin)), 1.0])}

    def sent(n: float, mean: tuple[float, float]) -> Part:
        offset = torch.stack([n * (torch.tensor(mean) - torch.tensor(origin)), torch.zeros(2)])
        return Part({"offset": offset}, torch.tensor([n, 0.0]))

    a, b = sent(10, (1, 1)), sent(30, (5, 1))
    assert proto.merged(state, a + b)["g"].tolist() == [[4, 1], [7, 8]]
    alone = proto.merged(state, a + proto.withheld(state))
    assert alone["g"].tolist() == [[1, 1], [7, 8]]
    assert alone["known"].tolist() == [1, 1]
    nobody = proto.merged({**state, "known": torch.tensor([0.0, 1.0])}, proto.withheld(state))
    assert nobody["g"].tolist() == [list(origin), [7, 8]]
    assert nobody["known"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("n", "share", "submitters"),
    [(10, 0.5, 5), (10, 0.8, 8), (10, 1.0, 10), (50, 0.5, 25), (50, 0.8, 40), (50, 1.0, 50)],
)
def test_mr_10_share_of_submitters_is_exact_and_frozen(n: int, share: float, submitters: int) -> None:
    names = [f"h{k}" for k in range(n)]
    drawn = cohort.prototype_submitters(7, names, share)
    assert sum(drawn) == submitters
    assert drawn == cohort.prototype_submitters(7, names, share)
    by_name = dict(zip(names[::-1], cohort.prototype_submitters(7, names[::-1], share), strict=True))
    assert [by_name[name] for name in names] == drawn


batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.lists(st.integers(0, 3), min_size=n, max_size=n), st.integers(1, 6), st.integers(0, 999))
)


def draw_batch(case: tuple[list[int], int, int]) -> tuple[Tensor, Tensor]:
    labels, d, seed = case
    z = torch.randn(len(labels), d, generator=rng.stream(seed, "z"), dtype=F64).requires_grad_()
    return z, torch.tensor(labels)


@given(batches, st.sampled_from([PAPER, CODE, LITERAL]))
def test_intra_equals_the_oracle_with_its_gradient(case: tuple[list[int], int, int], form: IntraVariant) -> None:
    z, y = draw_batch(case)
    if form.code and z.shape[1] == 1:
        return  # no pair of dimensions to average over: checked below
    # The oracle of `code` sums the d x d matrix, which holds no pairs of examples: two independent roads.
    fast = intra_loss(z, y, 4, form)
    slow = slow_intra(z, y, code=form.code, literal_std=form.literal_std, eps=form.eps)
    assert torch.allclose(fast, slow, rtol=1e-9, atol=1e-9)
    (of_fast,) = torch.autograd.grad(fast, z)
    (of_slow,) = torch.autograd.grad(slow, z)
    assert torch.allclose(of_fast, of_slow, rtol=1e-6, atol=1e-6)


def test_code_loss_of_one_dimension_is_zero() -> None:
    assert intra(LINE, form=CODE) == pytest.approx(0, abs=1e-9)


def test_intra_gradient_matches_finite_differences() -> None:
    z = torch.randn(7, 4, generator=rng.stream(1, "z"), dtype=F64).requires_grad_()
    y = torch.tensor([0, 1, 0, 1, 1, 2, 0])
    for form in (IntraVariant(eps=1e-3), IntraVariant(code=True, eps=1e-3), IntraVariant(literal_std=True, eps=1e-3)):
        assert torch.autograd.gradcheck(lambda v, form=form: intra_loss(v, y, 3, form), (z,))


def test_inter_gradient_matches_finite_differences_and_is_finite_at_a_prototype() -> None:
    ref = refs([[0.0, 0, 1], [1, 0, 0], [0, 2, 0]], [True, True, True])
    z = torch.randn(5, 3, generator=rng.stream(2, "z"), dtype=F64).requires_grad_()
    y = torch.tensor([0, 1, 0, 1, 2])
    assert torch.autograd.gradcheck(
        lambda v: inter_terms(v, y, ref, no_margin=False, equal_examples=False).mean(), (z,)
    )
    assert torch.autograd.gradcheck(lambda v: inter_paired(v, y, ref), (z,))
    at = ref.g[y].clone().requires_grad_()
    inter_terms(at, y, ref, no_margin=True, equal_examples=False).mean().backward()
    assert at.grad is not None
    assert bool(torch.isfinite(at.grad).all())


masks = st.lists(st.booleans(), min_size=4, max_size=4)


@given(batches, masks, masks, st.booleans())
def test_inter_equals_the_oracle(
    case: tuple[list[int], int, int], known: list[bool], negatives: list[bool], no_margin: bool
) -> None:
    z, y = draw_batch(case)
    g = torch.randn(4, z.shape[1], generator=rng.stream(case[2], "g"), dtype=F64)
    ref = References(g, torch.tensor(known), torch.tensor(negatives))
    fast = inter_terms(z, y, ref, no_margin=no_margin, equal_examples=False).mean()
    assert torch.allclose(fast, slow_inter(z, y, g, known, negatives, no_margin), atol=1e-9)
    assert torch.allclose(inter_paired(z, y, ref), slow_inter_paired(z, y, g, known, negatives), atol=1e-9)


def test_example_weighting_gives_terms_of_one_example_each() -> None:
    g = torch.randn(4, 3, generator=rng.stream(0, "g"), dtype=F64)
    ref = References(g, torch.tensor([True, True, True, False]), torch.tensor([True] * 4))
    z, y = torch.randn(6, 3, generator=rng.stream(0, "z"), dtype=F64), torch.tensor([0, 0, 0, 1, 2, 3])

    def terms(rows: slice, equal: bool) -> Tensor:
        return inter_terms(z[rows], y[rows], ref, no_margin=True, equal_examples=equal)

    together = terms(slice(None), True)
    for i in range(6):
        assert torch.equal(terms(slice(i, i + 1), True), together[i : i + 1])
    assert not torch.allclose(terms(slice(0, 1), False), terms(slice(None), False)[:1])  # equation 4 knows the labels
    assert float(together[5]) == 0  # class 3 has no prototype


def test_lite_draws_without_replacement_and_keeps_the_mean() -> None:
    draw = rng.stream(0, "lite")
    few = pick(50, 10, draw)
    assert isinstance(few, Tensor)
    assert len(set(few.tolist())) == 10
    assert pick(10, 50, draw) == pick(10, 0, draw) == slice(None)
    placed = spread(torch.arange(10.0), few, 50)
    assert float(placed.mean()) == pytest.approx(4.5)
    assert float(placed[few[3]]) == 15
    counts = torch.zeros(20)
    for _ in range(400):
        counts[pick(20, 10, draw)] += 1
    assert float((counts - 200).abs().max()) < 5 * math.sqrt(400 * 0.25)  # uniform: five standard deviations


# ---- the method -------------------------------------------------------------------------------------------------


def run(method: str, options: Mapping[str, str | int | float | bool], share: float = 1.0) -> tuple[State, History]:
    history = History()
    made = manifest(method, options, train=TrainConfig(lr=0.05, batch_size=4, epochs=2), share=share)
    return simulate(made, shares(), history), history


def test_both_weights_at_zero_is_fedavg_bit_for_bit() -> None:
    mine, _ = run("fedmr", {"mu1": 0.0, "mu2": 0.0})
    assert same(mine["w"], run("fedavg", {})[0]["w"])


def test_prototypes_off_is_intra_alone_bit_for_bit_and_nothing_else_travels() -> None:
    off, _ = run("fedmr", {"mu1": 1e-4, "prototypes": False})
    alone, _ = run("fedmr", {"mu1": 1e-4, "mu2": 0.0})
    assert same(off["w"], alone["w"])
    assert not same(off["w"], run("fedmr", {"mu1": 1e-4})[0]["w"])
    assert sorted(manifest("fedmr", {"prototypes": False}).layout) == ["delta", "metrics"]
    assert sorted(manifest("fedmr").layout) == ["delta", "metrics", "prototypes"]
    assert set(off) == {"w"}


def test_share_decides_whose_prototypes_are_in_the_mean() -> None:
    finals = {}
    for share in (0.0, 0.5, 0.8, 1.0):
        made = manifest("fedmr", share=share)
        assert sum(m.prototypes for m in made.members) == int(share * 3 + 0.5)
        state, _ = run("fedmr", {}, share)
        held = {c for k, m in enumerate(made.members) if m.prototypes for c in (k, k + 1)}
        assert {c for c in range(4) if state["prototypes"]["known"][c]} == held
        assert bool((state["prototypes"]["g"][[c for c in range(4) if c not in held]] == 0).all())
        finals[share] = state["w"]
    assert same(finals[0.0], run("fedmr", {"prototypes": False})[0]["w"])  # nothing known: L_inter stays inactive
    assert not same(finals[0.5], finals[1.0])


class Watched(PlainData):
    """Counts `sum` queries."""

    sums = 0

    def sum(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.sums += 1
        return super().sum(*args, **kwargs)


def one_turn(method: FedMR, *, submits: bool = True, known: bool = True) -> tuple[Watched, State, Part | None, State]:
    share, model = shares()[0], build_model("digits_cnn", {}, SCHEMA, 0)
    turn = Turn(FED, 0, 0, submits)
    data = Watched(share.train, share.test, TrainConfig(batch_size=4, epochs=1), turn)
    server = dict(method.init_server(model, FED))
    if known and "prototypes" in server:
        server["prototypes"] = {
            "g": torch.randn(4, 64, generator=rng.stream(0, "g")),
            "known": torch.tensor([1.0, 1, 1, 0]),
        }
        server["prototypes"]["g"][3] = 0
    bundle = method.local(model, method.broadcast(server), {}, data, turn).bundle
    return data, server, bundle.get("prototypes"), {"w": trees.read(model)}


def test_a_silo_that_does_not_submit_makes_no_query_and_sends_zeros() -> None:
    data, _, part, trained = one_turn(FedMR(), submits=False)
    assert part is not None
    assert data.sums == 0
    assert not part.weight.any()
    assert not part.total["offset"].any()
    submitted = one_turn(FedMR())
    assert submitted[0].sums == 1
    assert same(trained["w"], submitted[3]["w"])  # it receives and uses prototypes all the same


def test_prototypes_are_class_means_of_the_trained_model_in_eval_mode() -> None:
    _, server, part, trained = one_turn(FedMR())
    assert part is not None
    model = build_model("digits_cnn", {}, SCHEMA, 5)
    trees.write(model, trained["w"])
    share = shares()[0]
    with torch.no_grad():
        z = model.eval().features(share.train.batch(torch.arange(len(share.train)))[0])
    total, count = slow_class_sums(z, share.train.labels, 4)
    assert torch.equal(part.weight, count)
    g = proto.merged(server["prototypes"], part)["g"]
    assert torch.allclose(g[:2], total[:2] / count[:2].unsqueeze(1), atol=1e-4)
    assert torch.equal(g[2:], server["prototypes"]["g"][2:])


def test_lite_paired_observed_warm_up_and_literal_each_change_training() -> None:
    base = one_turn(FedMR(mu1=1e-4, mu2=0.5))[3]["w"]
    for other in (
        FedMR(mu1=1e-4, mu2=0.5, lite=2),
        FedMR(mu1=1e-4, mu2=0.5, lite=3, lite_scope="both"),
        FedMR(mu1=1e-4, mu2=0.5, inter="paired_sample"),
        FedMR(mu1=1e-4, mu2=0.5, negatives="observed"),
        FedMR(mu1=1e-4, mu2=0.5, warmup=4),
        FedMR(mu1=1e-4, mu2=0.5, paper_literal_std=True),
        FedMR(mu1=1e-4, mu2=0.5, intra="code"),
        FedMR(mu1=1e-4, mu2=0.5, no_margin=True),
        FedMR(mu1=1e-4, mu2=0.5, inter_weighting="example"),
    ):
        assert not same(one_turn(other)[3]["w"], base), other
    assert same(one_turn(FedMR(mu1=1e-4, mu2=0.5, lite=50))[3]["w"], base)  # more than a batch holds
    early = one_turn(FedMR(mu1=1e-4, mu2=0.5), known=False)[3]["w"]
    assert same(early, one_turn(FedMR(mu1=1e-4, mu2=0.0))[3]["w"])  # nothing known yet


def test_objective_is_equation_5() -> None:
    method, model, share = FedMR(mu1=1e-3, mu2=0.7), build_model("digits_cnn", {}, SCHEMA, 0).double(), shares()[1]
    x, y = share.train.batch(torch.arange(9))
    g = torch.randn(4, 64, generator=rng.stream(0, "g"), dtype=F64)
    msg = {"w": trees.read(model), "prototypes": {"g": g, "known": torch.ones(4)}}
    turn = Turn(FED, 0, 0)
    losses: list[Losses] = []

    class Catch(PlainData):
        def sgd(self, model, loss, **_):  # type: ignore[no-untyped-def]
            losses.append(loss(model, x.double(), y))
            return 0

        def sum(self, query, **_):  # type: ignore[no-untyped-def]
            return {"sum": torch.zeros(4, 64), "count": torch.zeros(4)}

    method.local(model, msg, {}, Catch(share.train, share.test, TrainConfig(), turn), turn)
    z = model.features(x.double())
    ce = torch.nn.functional.cross_entropy(model.head(z), y)
    between = slow_inter(z, y, g, [True] * 4, [True] * 4)
    assert torch.allclose(losses[0].per_example.mean(), ce + 0.7 * between)
    assert losses[0].coupled is not None
    assert torch.allclose(losses[0].coupled, 1e-3 * slow_intra(z, y))


def test_coupling_says_what_mixes_a_batch() -> None:
    assert FedMR().coupling is Coupling.BATCH
    assert FedMR(mu2=0).coupling is Coupling.BATCH
    assert FedMR(mu1=0).coupling is Coupling.BATCH  # weights of equation 4 come from the labels of the batch
    assert FedMR(mu1=0, inter="paired_sample", inter_weighting="example").coupling is Coupling.BATCH
    assert FedMR(mu1=0, inter_weighting="example").coupling is Coupling.EXAMPLE
    assert FedMR(mu1=0, mu2=0).coupling is FedMR(mu1=0, prototypes=False).coupling is Coupling.EXAMPLE


@pytest.mark.parametrize(
    "options",
    [{"mu1": -1}, {"mu2": -0.1}, {"lite": -1}, {"intra": "papers"}, {"negatives": "some"}, {"lite_scope": "intra"},
     {"inter": "paired_sample", "no_margin": True}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_method("fedmr", options)
    assert caught.value.code == "E-CFG-02"
