"""Analytic: second moments of frozen features, summed once, and a head in closed form.

He, Tong, Fang, Sun, Zeng, Li, Chen and Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
Pre-trained Models", CVPR 2025; Fani, Camoriano, Caputo and Ciccone, "Accelerating Heterogeneous Federated Learning
with Closed-form Classifiers", ICML 2024 (Fed3R). With z in R^(d+1) the feature of an example with a constant 1
behind it, y its class and w_y a weight that all silos share,

    A_k = sum_i w_{y_i} z_i z_i^T     B_k = sum_i w_{y_i} z_i e_{y_i}^T     n_k = examples per class
    A = sum_k A_k,  B = sum_k B_k,  n = sum_k n_k,  N = sum_c w_c n_c,  s = mean square of a feature

    ridge:  W = (A + lambda N U)^-1 B                            the constant is not penalised
    lda:    m_c = B_c / (w_c n_c),  S = (A - sum_c w_c n_c m_c m_c^T) / N + lambda U      over the features
            W_c = S^-1 m_c,  b_c = -m_c^T W_c / 2 + log(w_c n_c / N)
    ncm:    the nearest class mean: W_c = m_c,  b_c = -|m_c|^2 / 2

If lambda is given, U = s I. If not, U has the variances of the features, which follow from A. The head is then that of
standardised features, and lambda has the smallest generalised cross-validation error of ridge
(`closed_forms.choose_ridge`), from A, B, n and w. lda uses the same lambda, since it is ridge regression on class
scores (Hastie, Buja and Tibshirani, "Penalized Discriminant Analysis", Annals of Statistics 1995).

Exchanges, each with the same layout: counts of classes, if they determine the weights w_c = N / (C n_c); the moments.
(Version 0.1.0 chose lambda on a fifth of the examples, by a hash of each, and summed the moments of the others first.
Contributions to such runs are removed in the same two exchanges.)

The sums do not depend on the division of examples among hospitals, so the model is that of one hospital with all
examples. This holds to the last bit: entries of sqrt(w_y) z are rounded to multiples of 2^-14 and bounded by 32 before
they are multiplied, so that sums are exact in float64 and on the grid of the round (fixed_point.py), in any order and
any division. The server keeps A, B and n of a run. So later hospitals can add to them, and a hospital's contribution
can be removed: it sends its sums once more, and their digests show that these are the ones that were added.

A personal model weighs the hospital's own sums A_k, B_k once more, after the last exchange and at the hospital alone:

    W_k = (A + beta A_k + lambda N U)^-1 (B + beta B_k)

Private runs take another form, one release (Wang, "Revisiting Differentially Private Linear Regression", UAI 2018,
AdaSSP; Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss", STOC 2014). With R = bound, k = 1/4, weights r_y^2 <= 1,

    u = r_y (sqrt(1 - k^2) z / (R sqrt(d)), k), shortened to 1     A = sum u u^T + noise,  B = sum u e_y^T + noise
    ridge:  W = (A+ + (ridge + l S sqrt(d + 1)) I)^-1 B            ridge: as above, on the features alone; l = 1/2

where the noise on each number of svec(A) and B has the standard deviation s, and S^2 is the sum of all hospitals' s^2.
The spectral norm of A's noise is about sqrt(2 (d + 1)) S; lambda is a multiple of it. A+ keeps the eigenvalues of A
above 0; lda does the same with its matrix. Counts are B's entries for the constant. All of this is computed from the
release.

The mean of the features is most of their length and does not depend on the class. So it is released first (`centred`),
with a twentieth of 1 / z^2, as one sum over all records. With its estimate m, shrunk by its noise (James and Stein),
and the radius r = 0.5, a record then adds, with l = 1/4,

    u = r_y (v, k),   v = (sqrt(1 - k^2) z / (R sqrt(d)) - m) / r, shortened to sqrt(1 - k^2)

    ncm:  W_c = M_c = B_c / n_c,  b_c = -(|M_c|^2 - d (S / n_c)^2) / 2       without the square of the noise

where n_c are noisy counts, shrunk towards their mean by the variance of their noise. `mixed` = d': features are first
multiplied by a public matrix of d' columns with entries +-1 / sqrt(d') (Achlioptas, "Database-friendly Random
Projections", JCSS 2003), since the noise of a mean grows with d. Head and d' follow from d, the declared number of
records and the noise alone, when the run is made (`for_noise`).

`covariance="means"`: no A_k leaves. It is estimated from the means m_kc of the silos' examples of each class, which the
server then sees one by one (Goswami, Magistri, Wang, Twardowski, Bagdanov and van de Weijer, "Covariances for Free:
Exploiting Mean Distributions for Training-free Federated Learning", NeurIPS 2025, FedCOF), K_c silos having class c:

    S_c = sum_k n_kc (m_kc - m_c)(m_kc - m_c)^T / (K_c - 1)
    S   = sum_c w_c n_c S_c / sum_c w_c n_c    over the classes with K_c > 1
    A   = sum_c w_c n_c (m_c m_c^T + S)

`per_label`, the form of runs with several labels at once: a head for each label l, of those in whom it was looked for,

    A_l = sum_i z_i z_i^T,  B_l = sum_i t_il z_i   over known t_il, 1 where found and -1 where not
    W_l = (A_l + lambda_l n_l U_l)^-1 B_l          0 if the label is known in no example

S_c is an unbiased estimate of the class's covariance if its examples are divided at random. FedCOF differs: a class
with K_c = 1 has variance 0, ridge uses A without the part between classes, the rows of W have length 1, and the
shrinkage is lambda s I.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from fl_core import rng
from fl_core.errors import ConfigError, ProtocolError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared.closed_forms import (
    CONSTANT,
    balanced,
    choose_ridge,
    effective_records,
    estimated_moments,
    nearest_mean,
    packed,
    positive,
    shrunk,
    solve_lda,
    solve_penalised,
    solve_ridge,
    units,
    unpacked,
)
from fl_core.methods.shared.prototypes import features_of
from fl_core.models.split_model import SplitModel
from fl_core.tensors import Tensor, nn, torch
from fl_core.training.local_data import eval_batch
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability, Targets
from fl_core.types.interfaces import LocalData
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import (
    BatchSums,
    Bundle,
    LocalResult,
    MomentSums,
    Part,
    PartRule,
    RoundContext,
    State,
    Tensors,
)
from fl_core.validate import Count, NonNegative, Positive

MOMENTS, CLASSES = "moments", "classes"
STEP, MAX_ENTRY = 2.0**-14, 32.0
"""The grid of the entries, and their bound."""
BETAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Candidates for beta; 0 is the global model."""
FIT, ALL, REST, COUNT, MEAN, NOTHING = "fit", "all", "rest", "count", "mean", "nothing"
"""The subject of an exchange: moments of some or all examples, or class counts; nothing once all is summed."""
SHARE = 0.25
"""k, the entry of the constant in the vector that a private run sums: counts have noise of 4 s records."""
UNCENTRED_NOISE = 0.5
"""Lambda in units of S sqrt(d + 1) in the form of version 0.1.0."""
# The six below were chosen on validation images of digits and Fashion-MNIST: benchmarks/frozen/private.py.
NOISE = 0.25
"""Lambda in units of S sqrt(d + 1)."""
OF_MEAN = 0.05
"""Share of 1 / z^2 for the mean of a centred release."""
RADIUS = 0.5
"""r, in units of R sqrt(d): about the length that centred features of random layers have."""
MIXED, LEAST_MIXED = 0.06, 16
"""Of the nearest mean: square of the mean's noise, in units of the bound, that features may take; the fewest."""
RIDGE_FEATURES, RECORDS_PER_FEATURE = 512, 40
"""Features of ridge at most: so many, or one for 40 records in units of the noise, which was not measured."""
RIDGE_BELOW = 0.06
"""Noise of the moments, sqrt(d) S / N, above which the nearest mean is better: it needs no matrix, so less noise."""
MAX_WEIGHT = 10.0
"""Of a class in a private run, in units of one of average size: a smaller one would weigh all others down."""


@dataclass(frozen=True, kw_only=True)
class Analytic(FedAvg):
    """A linear head on frozen features, solved from one sum; it is exact for any division of the classes.

    Attributes:
        head: "ridge", "lda" or "ncm"; "auto" is ridge, or in a private run the best one for its noise
        ridge: lambda, in units of the features' mean square; 0: features are standardised, and lambda is chosen from
            the sums, in no further exchange
        class_weights: "balanced" gives every class the same share, in one more exchange, which counts
        release: "centred" is the form of private runs, where lambda follows from the noise, and ridge comes on top of
            it; "noisy" is that of version 0.1.0, without the mean
        mixed: features that a centred release is about; 0: all of the body's, as they are
        bound: of the root mean square of a record's features in that form: longer ones are shortened
        personal_head: sends A and B back to every hospital, which computes its personal model from them. It uses the
            beta with the best balanced accuracy on a fifth of its training examples, which A leaves out in this
            choice; only for head=ridge
        withdraws: digests of the sums, one per exchange, separated by commas, that this run removes from those of its
            start; `coordinator withdraw` sets it
        covariance: from the "moments" of all examples, or estimated from silos' class "means", for "lda" and "ridge"
        per_label: a separate head and moments for each label; a run with several labels at once sets it

    Guarantees: any division of the same examples among silos gives the same model, to the last bit on one machine,
    unless A is estimated, noisy, or an update was clipped; between machines the solution differs as their libraries of
    linear algebra do. The model's body is neither trained nor sent. Rounds beyond the exchanges change nothing. Sums
    minus those of a silo are those of the others, to the last bit. Only the accuracy of a personal model leaves.
    """

    name: ClassVar[str] = "analytic"
    omitted_at_default: ClassVar[frozenset[str]] = frozenset(
        {"personal_head", "withdraws", "release", "bound", "mixed", "covariance", "per_label"}
    )
    multi_label_form: ClassVar[Mapping[str, bool]] = {"per_label": True}
    bias_follows_classes: ClassVar[bool] = False
    suitable_model: ClassVar[str] = "random_features"
    exact: ClassVar[bool] = True
    personal_at_end: ClassVar[bool] = True
    head: Literal["auto", "ridge", "lda", "ncm"] = "auto"
    ridge: NonNegative = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    release: Literal["exact", "noisy", "centred"] = "exact"
    bound: Positive = 1.0
    mixed: Count = 0
    personal_head: bool = False
    withdraws: str = ""
    covariance: Literal["moments", "means"] = "moments"
    per_label: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_head and self._solver != "ridge":
            raise ConfigError("E-CFG-02", f"personal_head=true needs head=ridge, found {self.head}: change one of them")
        if self._estimates and self.head == "ncm":
            raise ConfigError(
                "E-CFG-02",
                "expected method.head=lda or ridge for a covariance from means, found method.head=ncm, which has none: "
                "change it, or leave method.covariance out",
            )
        plain = self._solver == "ridge" and self.class_weights == "none" and self._adds_up
        if self.per_label and (not plain or self.personal_head):
            raise ConfigError(
                "E-CFG-02",
                "multi-label data need method.head=ridge, no class_weights, exact sums of moments and no "
                "personal_head: leave other values of these options out",
            )
        if not re.fullmatch("[0-9a-f,]*", self.withdraws):
            raise ConfigError("E-CFG-02", "method.withdraws must contain digests: leave it out")
        if not self._adds_up and (self.personal_head or self.withdraws):
            what = "personal_head=true" if self.personal_head else "a withdrawal"
            choice = "the noisy ones of a private run" if self._is_noisy else "class means alone"
            raise ConfigError(
                "E-CFG-02",
                f"expected exact sums of all moments for {what}, found {choice}: leave it out, or take privacy=none "
                "and method.covariance=moments",
            )

    @property
    def has_global_model(self) -> bool:  # type: ignore[override]
        """Return False in a run that removes a hospital's sums, so that nothing is measured there."""
        return not self.withdraws

    @property
    def targets(self) -> Targets:  # type: ignore[override]
        """Leave coarse labels out of all sums."""
        return frozenset({Capability.MULTI_LABEL if self.per_label else Capability.COARSE_LABELS})

    @property
    def _estimates(self) -> bool:
        return self.covariance == "means"

    @property
    def _is_noisy(self) -> bool:
        return self.release != "exact"

    @property
    def _solver(self) -> str:
        return "ridge" if self.head == "auto" else self.head

    @property
    def _adds_up(self) -> bool:
        return not self._is_noisy and not self._estimates

    @property
    def sends(self) -> tuple[str, ...]:
        if self._is_noisy:
            return (MOMENTS,)
        return (CLASSES,) if self._estimates else (CLASSES, MOMENTS)

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({CLASSES}) if self._estimates else frozenset()

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        return {name: PartRule() for name in self.sends}

    @property
    def private_form(self) -> Mapping[str, str | int]:
        return {"release": "centred"} if self._adds_up and not self.per_label else {}

    @property
    def exchanges(self) -> int:
        return len(self._plan)

    @property
    def _plan(self) -> tuple[str, ...]:
        if self.withdraws:
            return (ALL,) if "," not in self.withdraws else (FIT, REST)
        counts = (COUNT,) if self.class_weights == "balanced" else ()
        return (*counts, MEAN, ALL) if self.release == "centred" else (*counts, ALL)

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        left_out = "set cohort=0: there is only one sum, so a hospital without a part in it has no part in the model"
        reasons = {**super().unsupported, Capability.PARTIAL_PARTICIPATION: left_out}
        if self.per_label:
            return {
                **reasons,
                Capability.DIFFERENTIAL_PRIVACY: "multi-label data have no noisy release in this method: use fedavg",
            }
        if not self._estimates:
            return reasons
        apart = "the server sees each silo's class means: set method.covariance=moments"
        return {**reasons, Capability.DIFFERENTIAL_PRIVACY: apart, Capability.SECURE_AGGREGATION: apart}

    def for_noise(self, width: int, records: float, noise: float) -> Mapping[str, str | int]:
        """Choose the head and the features of a centred release, as far as they were left open.

        Of the nearest mean the mean's noise takes at most sqrt(`MIXED`) of the length that a vector can have.
        """
        if self.release != "centred":
            return {}
        of_mean = noise / math.sqrt(OF_MEAN) / records
        of_ridge = min(self.mixed or ridge_features(records, noise), width)
        few = ridge_noise(of_ridge, records, noise) < RIDGE_BELOW
        head = self.head if self.head != "auto" else "ridge" if few else "ncm"
        of_means = self.mixed or max(math.floor(MIXED / of_mean**2), LEAST_MIXED)
        mixed = of_means if head == "ncm" else of_ridge
        return {"head": head, "mixed": mixed if mixed < width else 0}

    def shared(self, name: str) -> bool:
        return name.startswith("head.")

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        matrices = 0 if self._estimates else 12 if self.personal_head else 4 * n_classes if self.per_label else 4
        return matrices * (feature_dim + CONSTANT) ** 2 + 2 * n_classes * (feature_dim + CONSTANT)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Make the state; raises ConfigError (E-CFG-08) on a head that is not linear or has no bias."""
        head = features_of(model).head
        if not isinstance(head, nn.Linear) or head.bias is None:
            raise ConfigError(
                "E-CFG-08",
                "the method needs a linear head with a bias: choose another model, or set model.head_bias=true",
            )
        everything, classes, width = tensor_maps.copy_state(model), context.n_classes, self._width(head.in_features)
        triangle = (width * (width + 1) // 2,)
        moments = {} if self._estimates else {"a": (classes, *triangle) if self.per_label else triangle}
        last = {"variance": ()} if self._is_noisy else {"n": (classes,)}
        shapes = {**moments, "b": (classes, width), **last}
        centre = torch.zeros(width - CONSTANT, dtype=torch.float64)
        return {
            "w": {name: torch.zeros_like(v) for name, v in everything.items() if self.shared(name)},
            "frozen": {name: v for name, v in everything.items() if not self.shared(name)},
            "asked": {
                "root": torch.ones(classes, dtype=torch.float64),
                **({"mean": centre} if self.release == "centred" else {}),
            },
            "sums": {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()},
            "chosen": {"ridge": torch.tensor(float(self.ridge), dtype=torch.float64)},
        }

    def broadcast(self, server: State) -> State:
        more = ("sums", "chosen") if self.personal_head else ()
        return {group: server[group] for group in ("w", "asked", *more)}

    def fingerprint(self, update: Bundle) -> str:
        if not self._adds_up:  # noise is never drawn again, and a covariance of means is no sum
            return ""
        added = {"a": update[MOMENTS].total["a"], "b": update[CLASSES].total["b"], "n": update[CLASSES].weight}
        return tensor_maps.digest({name: v.detach().cpu().double() + 0.0 for name, v in added.items()})  # -0 is 0

    def expects(self, round: int) -> str:
        return self.withdraws.split(",")[round] if self.withdraws and round < self.exchanges else ""

    def _about(self, context: RoundContext) -> str:
        return self._plan[context.round] if context.round < len(self._plan) else NOTHING

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        model.eval()
        net, request, about = features_of(model), msg["asked"], self._about(context)
        width, classes = net.feature_dim + CONSTANT, context.n_classes
        if self._is_noisy:
            return LocalResult({MOMENTS: self._released(net, request, about, data, context)}, silo)
        sums = {
            "b": torch.zeros(classes, width, dtype=torch.float64),
            "n": torch.zeros(classes, dtype=torch.float64),
        }
        if not self._estimates:
            shape = (classes, width, width) if self.per_label else (width, width)
            sums["a"] = torch.zeros(shape, dtype=torch.float64)
        if context.prototypes and about == COUNT:
            sums["n"] = data.class_counts().double()
        elif context.prototypes and about != NOTHING:
            part_of = lambda x, y: held_out(x) == (about == REST)  # noqa: E731, ARG005
            of_batch = BatchSums(lambda x, y: self._sums(net, request, about, x, y), None if about == ALL else part_of)
            sums |= data.sum(of_batch)
        parts = {CLASSES: Part({"b": sums["b"]}, sums["n"].float())}
        if not self._estimates:
            weight = sums["n"] if self.per_label else sums["n"].sum()
            parts[MOMENTS] = Part({"a": packed(sums["a"])}, weight.float())
        return LocalResult(parts, silo)

    def _sums(self, net: nn.Module, request: Tensors, about: str, x: Tensor, y: Tensor) -> Tensors:
        if self.per_label:
            return _sums_by_label(entries(features(net, x), torch.ones(len(y), device=x.device)), y)
        kept = torch.ones(len(y), dtype=torch.bool) if about == ALL else held_out(x) == (about == REST)
        z, y = features(net, x)[kept.to(x.device)], y[kept.to(y.device)]
        root, one_hot = request["root"].to(z.device), nn.functional.one_hot(y, len(request["root"])).double()
        weighed = entries(z, root[y])
        sums = {"b": one_hot.T @ weighed, "n": one_hot.sum(0)}
        if not self._estimates:
            sums["a"] = weighed.T @ weighed
        return sums

    def _released(self, net: SplitModel, request: Tensors, about: str, data: LocalData, context: RoundContext) -> Part:
        """Ask for a release: the sums, before them the mean, or noisy counts of classes, in their places of B."""
        classes, width = context.n_classes, self._width(net.feature_dim)
        sums: dict[str, Tensor] = {
            "a": torch.zeros(width, width, dtype=torch.float64),
            "b": torch.zeros(classes, width, dtype=torch.float64),
            "variance": torch.zeros((), dtype=torch.float64),
        }
        scale, mean = self._scale(net.feature_dim), request.get("mean") if about == ALL else None

        def vectors(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                z = features_of(net).features(x).double()
            z = z @ mixing(net.feature_dim, self.mixed).to(z.device) if self.mixed else z
            whole = torch.cat((z, z.new_ones(len(z), CONSTANT)), dim=1) * scale.to(z.device)
            if about == MEAN:
                return whole
            if mean is not None:
                v, longest = (whole[:, :-CONSTANT] - mean.to(z.device)) / RADIUS, math.sqrt(1 - SHARE**2)
                v = v * (longest / v.norm(dim=1, keepdim=True).clamp(min=longest))
                whole = torch.cat((v, whole[:, -CONSTANT:]), dim=1)
            return whole * request["root"].to(z.device)[y].unsqueeze(1)

        if context.prototypes and about == COUNT:
            sums["b"][:, -1] = SHARE * data.class_counts().double()
        elif context.prototypes and about == MEAN:
            sums |= data.sum(MomentSums(vectors, width, classes, SHARE, second=False, joint=True, share=OF_MEAN))
        elif context.prototypes and about == ALL:
            share = 1 - OF_MEAN if self.release == "centred" else 1.0
            sums |= data.sum(MomentSums(vectors, width, classes, SHARE, second=self._solver != "ncm", share=share))
        return Part({**sums, "a": packed(sums["a"])}, torch.tensor(data.size()))

    def _width(self, d: int) -> int:
        return (self.mixed or d) + CONSTANT

    def _scale(self, d: int) -> Tensor:
        """Return what features and constant are multiplied by in a private run; d: features of the body."""
        one = math.sqrt((1 - SHARE**2) / d) / self.bound
        scale = torch.full((self._width(d),), one, dtype=torch.float64)
        scale[-CONSTANT:] = SHARE
        return scale

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        if self._is_noisy:
            return self._merged_release(server, total[MOMENTS].total, self._about(context))
        if self._estimates:
            return self._merge_means(server, total[CLASSES], context)
        counts, about = total[CLASSES].weight.double(), self._about(context)
        if about == NOTHING or (about == COUNT and not bool(counts.sum() > 0)):
            return server
        if about == COUNT:
            return {**server, "asked": {**server["asked"], "root": balanced(counts)}}
        new = {"a": total[MOMENTS].total["a"], "b": total[CLASSES].total["b"], "n": counts}
        sign = -1.0 if self.withdraws else 1.0
        sums = {name: server["sums"][name] + sign * value.double() for name, value in new.items()}
        if not bool(sums["n"].sum() > 0):
            return {**server, "sums": sums}
        chosen, W = self._solved(sums, server["asked"]["root"])
        head = _head(W)
        kept = {"sums": sums, "chosen": {"ridge": torch.tensor(chosen, dtype=torch.float64)}}
        return {**server, "w": {name: head[name] for name in server["w"]}, **kept}

    def _merged_release(self, server: State, release: Tensors, about: str) -> State:
        if about == COUNT:
            counts = release["b"][:, -1].double() / SHARE
            least = max(float(counts.clamp(min=0.0).mean()) / MAX_WEIGHT, 1.0)
            root = torch.rsqrt(counts.clamp(min=least))
            return {**server, "asked": {**server["asked"], "root": root / root.max()}}
        if about == NOTHING or not bool(release["variance"] > 0 or release["b"].any()):
            return server
        if about == MEAN:
            return {**server, "asked": {**server["asked"], "mean": _shrunk_mean(release)}}
        sums = {name: value + release[name].double() for name, value in server["sums"].items()}
        head = _head(self._solved_noisy(sums, server["asked"], server["w"]["head.weight"].shape[1]))
        return {**server, "w": {name: head[name] for name in server["w"]}, "sums": sums}

    def _solved_noisy(self, sums: Tensors, request: Tensors, d: int) -> Tensor:
        """Return W (C, d + 1) for the body's d features."""
        root, variance, centred = request["root"], sums["variance"].clamp(min=0), "mean" in request
        A, B = unpacked(sums["a"]), sums["b"] * root.unsqueeze(1)
        counts = sums["b"][:, -1] / (SHARE * root)
        present = counts >= 1.0  # else all that is known of a class is noise
        if not bool(present.any()):
            return torch.zeros(len(B), d + CONSTANT, dtype=torch.float64)
        if centred:
            counts = shrunk(counts, variance / (SHARE * root).square()).clamp(min=1.0)
        weights, B = torch.where(present, root.square() * counts, 0.0), torch.where(present.unsqueeze(1), B, 0.0)
        scale = self._scale(d)
        noise = (NOISE if centred else UNCENTRED_NOISE) * math.sqrt(float(variance) * len(A))
        if self._solver == "ridge":
            W = solve_ridge(positive(A), B, self.ridge, noise)
        else:
            scale[-CONSTANT:] = 1.0  # these heads have biases of their own
            own = variance / counts.square() if centred else torch.zeros_like(counts)
            W = (
                solve_lda(A, B, weights, self.ridge, noise)
                if self.head == "lda"
                else nearest_mean(B, weights, own / root.square())
            )
        if centred:
            W = torch.cat((W[:, :-CONSTANT] / RADIUS, W[:, -CONSTANT:]), dim=1)
            W[:, -1] -= W[:, :-CONSTANT] @ request["mean"] / scale[-1]
        W = W * scale
        return torch.cat((W[:, :-CONSTANT] @ mixing(d, self.mixed).T, W[:, -CONSTANT:]), dim=1) if self.mixed else W

    def _merge_means(self, server: State, each: Part, context: RoundContext) -> State:
        """Merge silos' sums of each class, (K, C, d + 1) and (K, C), which are seen one by one.

        A count below 1 is no example, and a sum beyond what so many examples can have is cut.
        """
        n, about, request = each.weight.double(), self._about(context), server["asked"]
        n = torch.where(n >= 1.0, n, 0.0)
        if about == NOTHING or not bool(n.any()):
            return server
        if about == COUNT:
            return {**server, "asked": {**request, "root": balanced(n.sum(0))}}
        bound = MAX_ENTRY * n.unsqueeze(2)
        b = torch.minimum(torch.maximum(each.total["b"].double(), -bound), bound)
        sums, weighted = {"b": b.sum(0), "n": n.sum(0)}, b * request["root"].unsqueeze(1)
        A = estimated_moments(weighted, n, request["root"].square())
        head = _head(self._solved({**sums, "a": packed(A)}, request["root"])[1])
        return {**server, "w": {name: head[name] for name in server["w"]}, "sums": sums}

    def _solved(self, sums: Tensors, root: Tensor) -> tuple[float, Tensor]:
        """Return lambda, 0 where each label has its own, and W (C, d + 1)."""
        if self.per_label:
            looked = sums["n"] >= 1.0
            each = zip(sums["a"], sums["b"], sums["n"], looked.tolist(), strict=True)
            rows = [self._ridge(unpacked(a), b.unsqueeze(0), n, n)[1][0] if any_ else 0 * b for a, b, n, any_ in each]
            return self.ridge, torch.stack(rows)
        A, B, weights = unpacked(sums["a"]), sums["b"] * root.unsqueeze(1), root.square() * sums["n"]
        if self._solver == "ncm":
            return self.ridge, nearest_mean(B, weights)
        if self._solver == "ridge":
            return self._ridge(A, B, weights, effective_records(weights, root))
        ridge = self.ridge or choose_ridge(A, B, weights, float(effective_records(weights, root)))
        return ridge, solve_lda(A, B, weights, ridge, standardised=not self.ridge)

    def _ridge(self, A: Tensor, B: Tensor, weighted: Tensor, n: Tensor) -> tuple[float, Tensor]:
        ridge = self.ridge or choose_ridge(A, B, weighted, float(n))
        return ridge, solve_ridge(A, B, ridge, standardised=not self.ridge)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Solve the hospital's personal head; raises ProtocolError (E-WIRE-05) if the received sums are not finite."""
        if not self.personal_head or not bool(msg["sums"]["n"].sum() > 0):
            return self.global_model(model, msg)
        if not tensor_maps.all_finite({**msg["sums"], **msg["chosen"]}):
            raise ProtocolError("E-WIRE-05", "expected finite sums from the coordinator, found NaN or infinity")
        net, root = features_of(model.eval()), msg["asked"]["root"]

        def moments(x: Tensor, y: Tensor) -> Tensors:
            sums = {about: self._sums(net, msg["asked"], about, x, y) for about in (FIT, REST)}
            return {f"{about} {name}": sums[about][name] for about in (FIT, REST) for name in ("a", "b")}

        moment_sums = data.sum(BatchSums(moments))
        A, B = unpacked(msg["sums"]["a"]), msg["sums"]["b"]
        fit, rest = ((moment_sums[f"{about} a"], moment_sums[f"{about} b"]) for about in (FIT, REST))
        without = (A - rest[0], B - rest[1]) if context.prototypes else (A, B)
        penalty = float(msg["chosen"]["ridge"]) * units(A, standardised=not self.ridge)

        def head(A: Tensor, B: Tensor) -> Tensor:
            return solve_penalised(A, B * root.unsqueeze(1), penalty)

        heads = torch.stack([head(without[0] + b * fit[0], without[1] + b * fit[1]) for b in BETAS])
        request = {**msg["asked"], "candidates": heads.float()}
        right = data.sum(BatchSums(lambda x, y: self._correct_counts(net, request, x, y)))
        beta = BETAS[_first_best(right["right"], right["n"])]
        W = head(A + beta * (fit[0] + rest[0]), B + beta * (fit[1] + rest[1])).float()
        tensor_maps.load_state(model, {**msg["w"], "head.weight": W[:, :-CONSTANT], "head.bias": W[:, -1]})
        return model

    @staticmethod
    def _correct_counts(net: nn.Module, request: Tensors, x: Tensor, y: Tensor) -> Tensors:
        """Count the held-out examples by class (C,), and the correct answers of each candidate head (C, K)."""
        kept = held_out(x)
        z, y = features(net, x)[kept.to(x.device)], y[kept.to(y.device)]
        return _judged(z, y, request["candidates"].to(z.device))

    def exported(self, server: State) -> Tensors:
        return {**server["frozen"], **server["w"]}


def _sums_by_label(z: Tensor, y: Tensor) -> Tensors:
    """Sum over entries z (B, D) float64 and labels y (B, L), each over the examples in which it is known."""
    labelled = (y != UNKNOWN).double()
    answers = labelled * torch.where(y == FOUND, 1.0, -1.0).double()
    a = torch.stack([(z * of.unsqueeze(1)).T @ z for of in labelled.T])
    return {"a": a, "b": answers.T @ z, "n": labelled.sum(0)}


def _head(W: Tensor) -> Tensors:
    return {"head.weight": W[:, :-CONSTANT].float(), "head.bias": W[:, -1].float()}


def ridge_features(records: float, noise: float) -> int:
    return max(RIDGE_FEATURES, math.floor(records / noise / RECORDS_PER_FEATURE))


def ridge_noise(features: int, records: float, noise: float) -> float:
    """Return sqrt(d) S / N of the moments of so many features; noise: z of the sum over all hospitals."""
    return math.sqrt(2 * features / (1 - OF_MEAN)) * noise / records


@lru_cache(maxsize=4)
def mixing(d: int, mixed: int) -> Tensor:
    """Return the public matrix (d, mixed) of entries +-1 / sqrt(mixed), which leaves lengths about as they are."""
    bits = np.frombuffer(rng.numpy_stream(0, "mixed features").bytes(-(-d * mixed // 8)), dtype=np.uint8)
    signs = torch.from_numpy(np.unpackbits(bits)[: d * mixed].astype(np.float64)) * 2 - 1
    return signs.view(d, mixed) / math.sqrt(mixed)


def _shrunk_mean(release: Tensors) -> Tensor:
    """Return the mean of scaled features from its noisy sum, shorter by what its noise adds to its square."""
    total, records = release["b"][0, :-CONSTANT].double(), release["b"][0, -1].double() / SHARE
    if not bool(records >= 1.0):
        return torch.zeros_like(total)
    of_noise = len(total) * release["variance"].double() / total.square().sum().clamp(min=1e-300)
    return total / records * (1 - of_noise).clamp(min=0.0)


def _first_best(right: Tensor, counts: Tensor) -> int:
    """Return the first of the best: the smallest beta, 0 where no example was held out."""
    accuracy = _balanced(right, counts)
    return int(torch.nonzero(accuracy == accuracy.max())[0])


def _balanced(right: Tensor, counts: Tensor) -> Tensor:
    """Return the balanced accuracy of each candidate (K,): equal ones where no example was held out."""
    present = counts > 0
    if not bool(present.any()):
        return torch.zeros_like(right[0])
    return (right[present] / counts[present].unsqueeze(1)).mean(0)


def _judged(z: Tensor, y: Tensor, heads: Tensor) -> Tensors:
    """Return examples (C,) and the right answers of heads (K, C, d + 1) about them (C, K)."""
    one_hot, plain = nn.functional.one_hot(y, heads.shape[1]).double(), entries(z, torch.ones(len(y), device=z.device))
    logits = torch.einsum("nd,kcd->nkc", plain.float(), heads)
    return {"n": one_hot.sum(0), "right": one_hot.T @ (logits.argmax(2) == y.unsqueeze(1)).double()}


def held_out(x: Tensor) -> Tensor:
    """Return for each example (B, ...) whether it is in the fifth on which beta is chosen, by a hash of its numbers."""
    rows = x.detach().cpu().contiguous().flatten(1).numpy()
    keys = [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in rows]
    return torch.tensor([key % 5 == 0 for key in keys], dtype=torch.bool)


def features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the features (B, d) of examples in a batch of one shape, whatever B is: a record's have the same bits."""
    rows = eval_batch(x.shape[1:])
    whole = torch.cat((x, x.new_zeros(-len(x) % rows, *x.shape[1:])))
    with torch.no_grad():
        parts = [features_of(net).features(part) for part in torch.split(whole, rows)]
    z = torch.cat(parts) if parts else features_of(net).features(x.new_zeros(rows, *x.shape[1:]))
    return z[: len(x)]


def entries(z: Tensor, root: Tensor) -> Tensor:
    """Return sqrt(w) (z, 1) (B, d + 1) in float64, on the grid and within its bound; one that is not finite is 0."""
    whole = torch.cat((z.double(), z.new_ones(len(z), CONSTANT).double()), dim=1) * root.unsqueeze(1)
    return (torch.round(whole.nan_to_num(0.0, 0.0, 0.0) / STEP) * STEP).clamp(-MAX_ENTRY, MAX_ENTRY)
