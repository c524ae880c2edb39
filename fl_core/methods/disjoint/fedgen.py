"""FedGen: FedAvg taught by a generator of features that has learnt from all silos' classifiers.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1 and
their released code (feature_generator.py). From the second round on, with a_t = max(1e-4, alpha 0.98^t) and b_t alike,

    L = CE + (B_g/B) a_t mean_j CE(head(G(y_j, e_j)), y_j) + b_t mean_i KL(q_i || p_i),   q_i = head(G(y_i, e_i))

on labels y_j that some silo has; q_i passes no gradient on. Models are averaged as in FedAvg. Two modes to train G:

"plain"   as published: the server sees every silo's classifier and class counts, and nothing else of one silo.
"secagg"  a deviation: each silo takes the generator's steps on its own classifier's term, with a fresh Adam, and the
          differences are averaged; v_kc is its share of the counts that the federation had in the round before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax

from fl_core import rng
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import class_vectors, feature_generator
from fl_core.methods.shared.feature_generator import Generator, GeneratorConfig, SiloClassifiers
from fl_core.methods.shared.prototypes import features_of
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability, Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Losses, Part, PartRule, RoundContext, SgdOptions, State, Tensors
from fl_core.validate import Count, NonNegative, PositiveCount, at_least, bounded

HEADS, GENERATOR, LABELS = "heads", "generator", "labels"


def coefficient(start: float, t: int) -> float:
    """Return max(1e-4, start 0.98^t), and 0 for a term that is switched off."""
    return max(1e-4, start * 0.98**t) if start else 0.0


@dataclass(frozen=True, kw_only=True)
class FedGen(FedAvg):
    """As FedAvg, except that generated features teach the classifier and its answers on them steer the model.

    Attributes:
        mode: "plain" or "secagg"
        alpha, beta: a_0 and b_0
        made: B_g
        noise, hidden: sizes of the generator
        noise_kind: "normal", or "uniform" as released
        steps, lr, weight_decay: Adam of the generator
        diversity: strength of that term
        draws: "example" draws noise for each example of a batch, as published; "class" draws B_g times per class and
            round, and an example's term is the mean over those of its class

    Guarantees: round 0 is FedAvg bit for bit, and so is alpha = beta = 0.
    """

    name: ClassVar[str] = "fedgen"
    bias_follows_classes: ClassVar[bool] = False
    even_norms: ClassVar[bool] = False
    mode: Literal["plain", "secagg"] = "plain"
    alpha: NonNegative = 10.0
    beta: NonNegative = 10.0
    made: Annotated[int, bounded(at_least, 2)] = 32
    noise: PositiveCount = 32
    noise_kind: Literal["normal", "uniform"] = "normal"
    hidden: PositiveCount = 256
    steps: Count = 50
    lr: NonNegative = 3e-4
    weight_decay: NonNegative = 1e-2
    diversity: NonNegative = 1.0
    draws: Literal["example", "class"] = "example"

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({HEADS}) if self.mode == "plain" else frozenset()

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Draw noise per class: drawn place by place, it would move with every example more or less."""
        return {"draws": "class"} if self.draws == "example" and self.beta else {}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        remedy = "the server sees each silo's classifier: set mode=secagg"
        return {**super().unsupported, **({Capability.SECURE_AGGREGATION: remedy} if self.mode == "plain" else {})}

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta", HEADS) if self.mode == "plain" else ("delta", GENERATOR, LABELS)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Count classifiers and labels once; both hold class counts."""
        if self.mode == "plain":
            return {**super().part_rules, HEADS: PartRule(Weighing.ONCE, counts="n", level=True)}
        rules = {GENERATOR: PartRule(self.weighing), LABELS: PartRule(Weighing.ONCE, counts="n")}
        return {**super().part_rules, **rules}

    def generator_config(self, t: int) -> GeneratorConfig:
        """Return how the generator is trained in round t; its rate falls by 0.98 a round."""
        rate = self.lr * 0.98**t
        return GeneratorConfig(
            self.steps, rate, self.weight_decay, self.made, self.noise, self.noise_kind, self.diversity
        )

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        return self.hidden * (self.noise + n_classes + feature_dim) + self.made * (self.noise + self.made)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
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
        return {group: server[group] for group in ("w", GENERATOR, LABELS)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        t, known = context.round, msg[LABELS]["n"]
        a, b = ((coefficient(v, t) if t and bool(known.any()) else 0.0) for v in (self.alpha, self.beta))
        made = self._received(msg[GENERATOR], features_of(model))
        random = rng.stream(context.seed, "round", t, "silo", context.silo, "noise")
        device = next(model.parameters()).device
        made.to(device).eval()
        per_class = self._features_by_class(made, context) if b and self.draws == "class" else None

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            logits = model(x)
            plain = cross_entropy(logits, y, reduction="none")
            if not b:
                return Losses(plain)
            with torch.no_grad():
                q = (
                    log_softmax(self._logits(model, made, y, random), 1)
                    if per_class is None
                    else mean_log_softmax(model, per_class)[y]
                )
            steer = kl_div(log_softmax(logits, 1), q, reduction="none", log_target=True).sum(1)
            return Losses(plain + b * steer)

        def penalty(model: nn.Module) -> Tensor:
            y = feature_generator.draw_labels(self.made, known, random).to(device)
            return self.made / data.batch_size * a * cross_entropy(self._logits(model, made, y, random), y)

        data.sgd(model, loss, SgdOptions(penalty=penalty if a else None))
        return LocalResult(self.bundle(model, msg, data, context), silo)

    def _logits(self, model: nn.Module, made: Generator, y: Tensor, random: torch.Generator) -> Tensor:
        e = feature_generator.draw_noise(len(y), self.noise, self.noise_kind, random).to(y.device)
        with torch.no_grad():
            z = made(y, e)
        return head_logits(model, z)

    def _features_by_class(self, made: Generator, context: RoundContext) -> Tensor:
        """Generate a round's features of every class (C, B_g, d), from a stream that nothing else draws from."""
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "held noise")
        e = feature_generator.draw_noise(made.n_classes * self.made, self.noise, self.noise_kind, draw)
        return features_by_class(made, e, self.made)

    def _received(self, state: Tensors, split: SplitModel) -> Generator:
        made = feature_generator.seeded(0, split.n_classes, self.noise, self.hidden, split.feature_dim)
        tensor_maps.load_state(made, state)
        return made

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        head, counts = head_tensors(model), data.class_counts().cpu()
        if self.mode == "plain":
            return {HEADS: Part({**head, "n": counts}, torch.tensor(1.0))}
        before = msg[LABELS]["n"]
        share = counts / torch.maximum(before, counts).clamp(min=1e-12)
        classifiers = SiloClassifiers(head["weight"].unsqueeze(0), head["bias"].unsqueeze(0), share.unsqueeze(0))
        made = self._received(msg[GENERATOR], features_of(model))
        random = rng.stream(context.seed, "round", context.round, "generator")
        feature_generator.train(made, self.generator_config(context.round), classifiers, before + counts, random)
        moved = tensor_maps.sub(tensor_maps.copy_state(made), msg[GENERATOR])
        return {GENERATOR: Part.of(moved, self.weight(data)), LABELS: Part({"n": counts}, torch.tensor(1.0))}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
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
        classifiers = SiloClassifiers(heads["weight"], heads["bias"], feature_generator.shares(heads["n"]))
        moments = feature_generator.train(made, self.generator_config(context.round), classifiers, n, random, server)
        return {**after, **moments, GENERATOR: tensor_maps.copy_state(made)}


def head_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copy the head: weight (C, d) and bias (C,), zeros where it has none."""
    named = {name: v.cpu() for name, v in tensor_maps.copy_state(features_of(model).head).items()}
    return {"bias": torch.zeros(len(named["weight"])), **named}


def head_logits(model: nn.Module, z: Tensor) -> Tensor:
    """Return the head's logits (..., C) of features (..., d), past the hooks that gradients of examples need."""
    head = dict(features_of(model).head.named_parameters())
    return linear(z.to(head["weight"]), head["weight"], head.get("bias"))


def features_by_class(made: Generator, e: Tensor, per_class: int) -> Tensor:
    """Generate features (C, n, d) of n noise vectors per class, from noise e (C n, noise)."""
    device = next(made.parameters()).device
    y = torch.arange(made.n_classes, device=device).repeat_interleave(per_class)
    with torch.no_grad():
        z: Tensor = made(y, e.to(device))
    return z.view(made.n_classes, per_class, -1)


def mean_log_softmax(model: nn.Module, z: Tensor) -> Tensor:
    """Return the log of the mean softmax per class (C, C) on features z (C, n, d).

    KL from it has the mean gradient of KL from each single softmax: what one draw per example estimates.
    """
    return log_softmax(head_logits(model, z), 2).logsumexp(1) - log(z.shape[1])
