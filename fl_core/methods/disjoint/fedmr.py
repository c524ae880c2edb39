"""FedMR: FedAvg with reshaped feature manifolds.

Fan, Yao, Han, Zhang, Wang and Zhang, "Federated Learning under Partially Class-Disjoint Data via Manifold
Reshaping", TMLR 2023, equations 3 to 5 and Algorithm 1 (losses: manifold.py, prototypes: prototypes.py).

    min_w  CE(w) + mu1 L_intra(w) + mu2 L_inter(w; g)          (5), by E epochs of SGD from w
    g_c    = sum_k p_k^c g_k^c, p_k^c = n_k^c / sum_k n_k^c    after training, in eval mode, over all of D_k
    w, g travel down and up; w as in FedAvg

Where the paper is silent or contradicts its own lemma, the default is what its text argues for, the printed form an
option: `paper_literal_std`, `inter`, `negatives`; `intra="code"` is the official code's loss, which has no L_inter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import rng
from fl_core.methods.building_blocks import prototypes
from fl_core.methods.disjoint.fedmr_options import FedMROptions
from fl_core.methods.losses import fedmr
from fl_core.methods.losses.fedmr import IntraVariant, PrototypeTargets
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, Coupling, Losses, LossFn, Part, RoundContext, State


@dataclass(frozen=True, kw_only=True)
class FedMR(FedMROptions):
    """As FedAvg, except that features are decorrelated within classes and kept apart from other classes' prototypes.

    The options: fedmr_options.py. Guarantees: mu1 = mu2 = 0 is FedAvg bit for bit; without prototypes the bundle is
    FedAvg's.
    """

    name: ClassVar[str] = "fedmr"

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start from the initialised model, with no prototype known."""
        start = {"w": tensor_maps.copy_state(model)}
        unknown = prototypes.initial_prototypes(context.n_classes, prototypes.features_of(model).feature_dim)
        return {**start, prototypes.PROTOTYPES: unknown} if self.uses_prototypes else start

    def broadcast(self, server: State) -> State:
        """Send the model and the prototypes."""
        return dict(server)

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        """Measure prototypes around the received ones."""
        return (
            {prototypes.PROTOTYPES: prototypes.part_to_send(model, msg, data, context)} if self.uses_prototypes else {}
        )

    def _references(self, msg: State, data: LocalData) -> PrototypeTargets | None:
        """Choose what L_inter measures against; None while no prototype is known."""
        if not self.uses_prototypes or not bool((known := msg[prototypes.PROTOTYPES]["known"] > 0).any()):
            return None
        negatives = data.class_counts() > 0 if self.negatives == "observed" else known
        return PrototypeTargets(msg[prototypes.PROTOTYPES]["g"], known, negatives)

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        """Make equation 5 for one silo's round; L_inter is per example but for `paired_sample`."""
        t, ref = context.round, self._references(msg, data)
        mu2 = self.mu2 * (min(1.0, t / self.warmup) if self.warmup else 1.0)
        draw = rng.stream(context.seed, "round", t, "silo", context.silo, "lite")
        form = IntraVariant(self.intra == "code", self.paper_literal_std, self.eps)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = prototypes.features_of(model)
            z = split.features(x)
            per_example, coupled = cross_entropy(split.head(z), y, reduction="none"), z.new_zeros(())
            few = fedmr.sample_batch(len(y), self.lite, draw)
            if self.mu1:
                seen = few if self.lite_scope == "both" else slice(None)
                coupled = coupled + self.mu1 * fedmr.intra_loss(z[seen], y[seen], context.n_classes, form)
            if ref is not None and mu2 and self.inter == "paired_sample":
                coupled = coupled + mu2 * fedmr.inter_paired(z[few], y[few], ref)
            elif ref is not None and mu2:
                equal = self.inter_weighting == "example"
                terms = fedmr.inter_terms(z[few], y[few], ref, no_margin=self.no_margin, equal_examples=equal)
                per_example = per_example + mu2 * fedmr.scatter(terms, few, len(y))
            return Losses(per_example, coupled if self.coupling is Coupling.BATCH else None)

        return loss

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Average models as FedAvg does, and prototypes by class counts; classes nobody reported keep theirs."""
        after = super().merge(server, total, context)
        if not self.uses_prototypes:
            return after
        return {
            **after,
            prototypes.PROTOTYPES: prototypes.update(server[prototypes.PROTOTYPES], total[prototypes.PROTOTYPES]),
        }
