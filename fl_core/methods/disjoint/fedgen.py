"""FedGen: FedAvg taught by a generator of features that has learnt from all silos' classifiers.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1 and
their released code (generator.py). From the second round on, with a_t = max(1e-4, alpha 0.98^t) and b_t alike,

    L = CE + (B_g/B) a_t mean_j CE(head(G(y_j, e_j)), y_j) + b_t mean_i KL(q_i || p_i),   q_i = head(G(y_i, e_i))

on labels y_j that somebody has; q_i passes no gradient on. Models are averaged as in FedAvg. Two modes to train G:

"plain"   as published: the server sees every silo's classifier and class counts, and nothing else of one silo.
"secagg"  a deviation: each silo takes the generator's steps on its own classifier's term, with Adam begun anew, and the
          differences are averaged; v_kc is its share of the counts that the federation had in the round before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fl_core import rng
from fl_core.methods.building_blocks import answers, class_vectors, feature_generator
from fl_core.methods.building_blocks.answers import classifier
from fl_core.methods.building_blocks.feature_generator import Generator, SiloClassifiers
from fl_core.methods.building_blocks.prototypes import features_of
from fl_core.methods.disjoint.fedgen_options import GENERATOR, HEADS, LABELS, FedGenOptions, coefficient
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Losses, Part, RoundContext, SgdOptions, State, Tensors


@dataclass(frozen=True, kw_only=True)
class FedGen(FedGenOptions):
    """As FedAvg, except that made-up features teach the classifier and its answers steer the model.

    The options: fedgen_options.py. Guarantees: round 0 is FedAvg bit for bit, and so is alpha = beta = 0.
    """

    name: ClassVar[str] = "fedgen"

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start with an untrained generator and no label known."""
        split, seed = features_of(model), class_vectors.seed_of(model)
        made = feature_generator.seeded(seed, context.n_classes, self.noise, self.hidden, split.feature_dim)
        state = {
            **super().init_server(model, context),
            GENERATOR: tensor_maps.copy_state(made),
            LABELS: {"n": torch.zeros(context.n_classes)},
        }
        if self.mode == "secagg":
            return state
        return {**state, **feature_generator.fresh_moments(made), "seed": {"s": torch.tensor(float(seed))}}

    def broadcast(self, server: State) -> State:
        """Send the model, the generator and the federation's class counts."""
        return {group: server[group] for group in ("w", GENERATOR, LABELS)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Train with the generator's help; send the classifier, or what it taught the generator."""
        tensor_maps.load_state(model, msg["w"])
        t, known = context.round, msg[LABELS]["n"]
        a, b = ((coefficient(v, t) if t and bool(known.any()) else 0.0) for v in (self.alpha, self.beta))
        made = self._received(msg[GENERATOR], features_of(model))
        random = rng.stream(context.seed, "round", t, "silo", context.silo, "noise")
        device = next(model.parameters()).device
        made.to(device).eval()
        held = self._held(made, context) if b and self.draws == "class" else None

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            logits = model(x)
            plain = cross_entropy(logits, y, reduction="none")
            if not b:
                return Losses(plain)
            with torch.no_grad():
                q = (
                    log_softmax(self._answers(model, made, y, random), 1)
                    if held is None
                    else answers.mean(model, held)[y]
                )
            steer = kl_div(log_softmax(logits, 1), q, reduction="none", log_target=True).sum(1)
            return Losses(plain + b * steer)

        def taught(model: nn.Module) -> Tensor:
            y = feature_generator.draw_labels(self.made, known, random).to(device)
            return self.made / data.batch_size * a * cross_entropy(self._answers(model, made, y, random), y)

        data.sgd(model, loss, SgdOptions(penalty=taught if a else None))
        return LocalResult({"delta": self.delta(model, msg, data), **self._lessons(model, msg, data, context)}, silo)

    def _answers(self, model: nn.Module, made: Generator, y: Tensor, random: torch.Generator) -> Tensor:
        e = feature_generator.draw_noise(len(y), self.noise, self.noise_kind, random).to(y.device)
        with torch.no_grad():
            z = made(y, e)
        return answers.of(model, z)

    def _held(self, made: Generator, context: RoundContext) -> Tensor:
        """Make a round's features of every class (C, B_g, d), from a stream that nothing else draws from."""
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "held noise")
        e = feature_generator.draw_noise(made.n_classes * self.made, self.noise, self.noise_kind, draw)
        return answers.held(made, e, self.made)

    def _received(self, state: Tensors, split: SplitModel) -> Generator:
        made = feature_generator.seeded(0, split.n_classes, self.noise, self.hidden, split.feature_dim)
        tensor_maps.load_state(made, state)
        return made

    def _lessons(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        """Make what trains the generator: this silo's classifier, or the steps that it asks for."""
        head, counts = classifier(model), data.class_counts().cpu()
        if self.mode == "plain":
            return {HEADS: Part({**head, "n": counts}, torch.tensor(1.0))}
        before = msg[LABELS]["n"]
        share = counts / torch.maximum(before, counts).clamp(min=1e-12)
        teacher = SiloClassifiers(head["weight"].unsqueeze(0), head["bias"].unsqueeze(0), share.unsqueeze(0))
        made = self._received(msg[GENERATOR], features_of(model))
        random = rng.stream(context.seed, "round", context.round, "generator")
        feature_generator.train(made, self.course(context.round), teacher, before + counts, random)
        moved = tensor_maps.sub(tensor_maps.copy_state(made), msg[GENERATOR])
        return {GENERATOR: Part.of(moved, self.weight(data)), LABELS: Part({"n": counts}, torch.tensor(1.0))}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Average models, and train the generator or average it too."""
        after = super().merge(server, total, context)
        part = total[HEADS if self.mode == "plain" else LABELS]
        n = part.total["n"].sum(0).float() if self.mode == "plain" else part.total["n"].float()
        after = {**after, LABELS: {"n": torch.where(n > 0, n, server[LABELS]["n"])}}
        if self.mode == "secagg":
            return {**after, GENERATOR: tensor_maps.add(server[GENERATOR], total[GENERATOR].mean())}
        if not bool((n > 0).any()):
            return after
        heads = {name: v.float() for name, v in part.total.items()}
        c, d = heads["weight"].shape[1:]
        made = feature_generator.seeded(0, c, self.noise, self.hidden, d)
        tensor_maps.load_state(made, server[GENERATOR])
        random = rng.stream(int(server["seed"]["s"]), "round", context.round, "generator")
        teachers = SiloClassifiers(heads["weight"], heads["bias"], feature_generator.shares(heads["n"]))
        moments = feature_generator.train(made, self.course(context.round), teachers, n, random, server)
        return {**after, **moments, GENERATOR: tensor_maps.copy_state(made)}
