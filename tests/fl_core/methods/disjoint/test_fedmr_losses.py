"""FedMR: the numbers of its specification (MR-1 to MR-10), its oracles and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_core import rng
from fl_core.methods.disjoint.fedmr import (
    FedMR,
    IntraVariant,
    PrototypeTargets,
    inter_paired,
    inter_terms,
    intra_loss,
    sample_batch,
    scatter,
)
from fl_core.methods.shared import prototypes
from fl_core.rounds import sampling
from fl_core.types.values import Part
from tests.oracles.equations import slow_inter, slow_inter_paired, slow_intra
from tests.support.federations import FED

F64 = torch.float64
PAPER, CODE, LITERAL = IntraVariant(), IntraVariant(code=True), IntraVariant(literal_std=True)
MEAN = IntraVariant(mean=True)
FORMS = (PAPER, CODE, LITERAL, MEAN)
X1 = torch.tensor([[1, 2], [2, 1], [3, 4], [4, 3]], dtype=F64)
LINE = torch.tensor([-3, -1, 0, 1, 2, 4], dtype=F64).unsqueeze(1)


def intra(z: Tensor, y: Tensor | None = None, form: IntraVariant = PAPER) -> float:
    y = torch.zeros(len(z), dtype=torch.int64) if y is None else y
    return float(intra_loss(z, y, int(y.max()) + 1, form))


def refs(g: list[list[float]], known: list[bool], negatives: list[bool] | None = None) -> PrototypeTargets:
    negatives = [True] * len(g) if negatives is None else negatives
    return PrototypeTargets(torch.tensor(g, dtype=F64), torch.tensor(known), torch.tensor(negatives))


def inter(z: Tensor, y: Tensor, ref: PrototypeTargets, *, no_margin: bool = False) -> float:
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


@pytest.mark.parametrize("copies", [1, 3, 10])
def test_the_mean_form_does_not_depend_on_the_number_of_features(copies: int) -> None:
    """Repeated features say nothing new: the mean squared correlation stays, the paper's sum grows with d^2."""
    z = torch.randn(9, 4, generator=rng.stream(3, "z"), dtype=F64)
    wide = z.repeat(1, copies)
    assert intra(wide, form=MEAN) == pytest.approx(intra(z, form=MEAN), rel=1e-6)
    assert intra(wide) == pytest.approx(copies**2 * intra(z), rel=1e-6)


def test_the_mean_form_is_one_on_a_line_and_the_least_where_features_are_decorrelated() -> None:
    line = LINE * torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=F64)
    apart = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=F64)
    assert intra(line, form=MEAN) == pytest.approx(1, abs=1e-6)
    assert intra(apart, form=MEAN) == pytest.approx(1 / 3, abs=1e-6)


def test_mr_3_decorrelated_features_are_the_minimum() -> None:
    z = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=F64)
    assert intra(z) == pytest.approx(3, abs=1e-6)
    assert intra(z, form=CODE) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("form", [*FORMS, *(form._replace(eps=0.0) for form in FORMS)])
@pytest.mark.parametrize("y", [[0, 0, 0, 0], [0, 1, 2, 3]])
def test_mr_4_point_collapse_and_lonely_examples_give_a_differentiable_zero(form: IntraVariant, y: list[int]) -> None:
    z = torch.ones(4, 3, dtype=F64) if len(set(y)) == 1 else torch.randn(4, 3, generator=rng.stream(0, "z")).double()
    z.requires_grad_()
    loss = intra_loss(z, torch.tensor(y), 4, form)
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 1e-18], ids=["in part alone", "of hardly any variance"])
def test_without_eps_a_class_that_is_alone_or_does_not_vary_leaves_the_gradient_finite(
    form: IntraVariant, scale: float
) -> None:
    """In float32, as in training: one feature of ReLU that is 0 everywhere, one class with one example."""
    z = scale * torch.rand(5, 4, generator=rng.stream(2, "z"))
    z[:, 0] = 0.0
    z.requires_grad_()
    loss = intra_loss(z, torch.tensor([0, 0, 0, 0, 1]), 4, form._replace(eps=0.0))
    loss.backward()
    assert z.grad is not None
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(z.grad).all())
    assert (float(loss.detach()) > 0) is (scale == 1.0)


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
    assert prototypes.update(state, a + b)["g"].tolist() == [[4, 1], [7, 8]]
    alone = prototypes.update(state, a + prototypes.empty_part(state))
    assert alone["g"].tolist() == [[1, 1], [7, 8]]
    assert alone["known"].tolist() == [1, 1]
    nobody = prototypes.update({**state, "known": torch.tensor([0.0, 1.0])}, prototypes.empty_part(state))
    assert nobody["g"].tolist() == [list(origin), [7, 8]]
    assert nobody["known"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("n", "share", "submitters"),
    [(10, 0.5, 5), (10, 0.8, 8), (10, 1.0, 10), (50, 0.5, 25), (50, 0.8, 40), (50, 1.0, 50)],
)
def test_mr_10_share_of_submitters_is_exact_and_frozen(n: int, share: float, submitters: int) -> None:
    names = [f"h{k}" for k in range(n)]
    drawn = sampling.prototype_submitters(7, names, share)
    assert sum(drawn) == submitters
    assert drawn == sampling.prototype_submitters(7, names, share)
    by_name = dict(zip(names[::-1], sampling.prototype_submitters(7, names[::-1], share), strict=True))
    assert [by_name[name] for name in names] == drawn


batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.lists(st.integers(0, 3), min_size=n, max_size=n), st.integers(1, 6), st.integers(0, 999))
)


def draw_batch(case: tuple[list[int], int, int]) -> tuple[Tensor, Tensor]:
    labels, d, seed = case
    z = torch.randn(len(labels), d, generator=rng.stream(seed, "z"), dtype=F64).requires_grad_()
    return z, torch.tensor(labels)


@given(batches, st.sampled_from([PAPER, CODE, LITERAL, MEAN]))
def test_intra_equals_the_oracle_with_its_gradient(case: tuple[list[int], int, int], form: IntraVariant) -> None:
    z, y = draw_batch(case)
    if form.code and z.shape[1] == 1:
        return  # no pair of dimensions to average over: checked below
    # The oracle of `code` sums the d x d matrix, which holds no pairs of examples: two independent roads.
    fast = intra_loss(z, y, 4, form)
    slow = slow_intra(z, y, code=form.code, literal_std=form.literal_std, eps=form.eps, mean=form.mean)
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
    ref = PrototypeTargets(g, torch.tensor(known), torch.tensor(negatives))
    fast = inter_terms(z, y, ref, no_margin=no_margin, equal_examples=False).mean()
    assert torch.allclose(fast, slow_inter(z, y, g, known, negatives, no_margin), atol=1e-9)
    assert torch.allclose(inter_paired(z, y, ref), slow_inter_paired(z, y, g, known, negatives), atol=1e-9)


def test_example_weighting_gives_terms_of_one_example_each() -> None:
    g = torch.randn(4, 3, generator=rng.stream(0, "g"), dtype=F64)
    ref = PrototypeTargets(g, torch.tensor([True, True, True, False]), torch.tensor([True] * 4))
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
    few = sample_batch(50, 10, draw)
    assert isinstance(few, Tensor)
    assert len(set(few.tolist())) == 10
    assert sample_batch(10, 50, draw) == sample_batch(10, 0, draw) == slice(None)
    placed = scatter(torch.arange(10.0), few, 50)
    assert float(placed.mean()) == pytest.approx(4.5)
    assert float(placed[few[3]]) == 15
    counts = torch.zeros(20)
    for _ in range(400):
        counts[sample_batch(20, 10, draw)] += 1
    assert float((counts - 200).abs().max()) < 5 * math.sqrt(400 * 0.25)  # uniform: five standard deviations
