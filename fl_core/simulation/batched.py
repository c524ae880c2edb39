"""Many small silos at once: one model per silo in one tensor per parameter, and a step of all of them by `vmap`.

A small model keeps neither a GPU nor a processor's vector units busy; fifty of them do. The batches are those of the
loop, drawn from its streams. Silos of other sizes are padded, and what is padded counts nothing.

It is not bit-identical to the loop: kernels of several models add in another order. It agrees within float noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fl_core import rng
from fl_core.aggregation.fixed_point import check_layout
from fl_core.errors import ConfigError, FederationError
from fl_core.methods.drift.fedprox import FedProx
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.engine import Observer, Replies
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import round_layout
from fl_core.simulation.in_process import (
    InProcessSilo,
    ResumePoint,
    SiloShare,
    local_ports,
    run_rounds,
    thread_count,
)
from fl_core.simulation.silo_states import StateStore
from fl_core.training import optimizers
from fl_core.training.evaluation import CLINICAL_PART, evaluate_global
from fl_core.training.local_data import PlainLocalData, draw_batches
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Method, SiloPort
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Examples, Part, RoundContext, State, Tensors

AT_ONCE = 32
"""Silos in one tensor: more gain nothing on a processor, and take memory for as many models."""


def require_supported(run: RunSetup) -> None:
    """Raise ConfigError (E-CFG-08) on a run whose silos cannot train in one tensor."""
    method, train = run.method, run.manifest.train
    wanted, found = optimizers.of_plain_training(train) or ("", "")
    random_or_shared = (_BatchNorm, _DropoutNd, nn.RNNBase)
    layers = sorted({type(m).__name__ for m in run.model.modules() if isinstance(m, random_or_shared)})
    reasons = [
        ("method=fedavg or fedprox without prototypes", method.name, _proximal(method) is not None),
        ("a run without privacy", run.manifest.privacy.name, run.manifest.privacy.name == "none"),
        ("personal=false", "personal=true", not run.manifest.personal),
        ("train.optimizer=sgd", train.optimizer, train.optimizer == "sgd"),
        (wanted, found, not found),
        ("a model without batch norm, dropout and recurrent layers", ", ".join(layers), not layers),
    ]
    for wanted, found, holds in reasons:
        if not holds:
            raise ConfigError("E-CFG-08", f"--engine batched: expected {wanted}, found {found}: use --engine local")


def _proximal(method: Method) -> float | None:
    """Return the strength of the pull to what was received; None for a method that trains in another way."""
    if type(method) is FedAvg:
        return 0.0
    if type(method) is FedProx and not method.uses_prototypes:
        return method.mu
    return None


def simulate_batched(
    run: RunSetup,
    shares: Sequence[SiloShare],
    observer: Observer,
    states: StateStore | None = None,
    device: torch.device | None = None,
    resume: ResumePoint | None = None,
    threads: int = 0,
) -> State:
    """Do a run with the silos of a round trained together, from where it goes on, and return the final server state.

    Guarantees: within float noise of `in_process.simulate`, for equal batches. Raises as `require_supported`.
    """
    require_supported(run)
    with thread_count(run.manifest.threads or threads):
        ports = local_ports(run, shares, None, states, device)
        cohort = BatchedCohort(run, device or torch.device("cpu"))
        return run_rounds(run.round_loop(ports, parallel=1, exchange=cohort.exchange), run, observer, resume)


class BatchedCohort:
    """Trains the silos of a round together; a way to ask a cohort (`RoundLoop.exchange`)."""

    def __init__(self, run: RunSetup, device: torch.device, at_once: int = AT_ONCE) -> None:
        require_supported(run)
        self._run, self._device, self._at_once = run, device, at_once
        self._model = run.new_model().to(device)
        self._trainable = [name for name, p in self._model.named_parameters() if p.requires_grad]
        self._mu = _proximal(run.method) or 0.0

    def exchange(self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind) -> Replies:
        silos = [port for port in ports if isinstance(port, InProcessSilo)]
        for start in range(0, len(silos), self._at_once):
            some = silos[start : start + self._at_once]
            bundles = self._measured(some, msg, context)
            errors: dict[int, FederationError] = {}
            if kind is TaskKind.TRAIN:
                deltas, errors = self._trained(some, msg, context)
                bundles = [bundle | {"delta": deltas[k]} if k in deltas else bundle for k, bundle in enumerate(bundles)]
            for k, (silo, bundle) in enumerate(zip(some, bundles, strict=True)):
                yield silo.name, self._reply(silo, bundle, errors.get(k), kind)

    def _reply(
        self, silo: InProcessSilo, bundle: Bundle, error: FederationError | None, kind: TaskKind
    ) -> Future[Bundle]:
        reply = Future[Bundle]()
        if error is not None:
            reply.set_exception(error)
            return reply
        check_layout(bundle, round_layout(self._run.method, self._run.manifest.layout, kind))
        if kind is TaskKind.TRAIN:
            silo.states.stage(silo.index, {})
        reply.set_result(bundle)
        return reply

    def _measured(self, silos: Sequence[InProcessSilo], msg: State, context: RoundContext) -> list[dict[str, Part]]:
        """Measure what was received on each silo's test images, as `run_silo_round` does."""
        manifest, method = self._run.manifest, self._run.method
        model = method.global_model(self._model, msg)
        n_classes, found = len(manifest.schema.classes), []
        for silo in silos:
            share, at_silo = silo.share, context.for_silo(silo.index, manifest.seed)
            data = PlainLocalData(share.train, share.test, manifest.train, at_silo, self._device)
            found.append(evaluate_global(model, data, n_classes, CLINICAL_PART in manifest.layout))
        return found

    def _trained(
        self, silos: Sequence[InProcessSilo], msg: State, context: RoundContext
    ) -> tuple[dict[int, Part], dict[int, FederationError]]:
        """Train all silos from what was received; return what each sends, and the errors of those without examples."""
        manifest, method = self._run.manifest, self._run.method
        assert isinstance(method, FedAvg)
        plans, errors = dict[int, _Plan](), dict[int, FederationError]()
        for k, silo in enumerate(silos):
            try:
                plans[k] = _Plan.of(silo, context, manifest.seed, manifest.train)
            except FederationError as error:
                errors[k] = error
        if not plans:
            return {}, errors
        received = {name: value.to(self._device) for name, value in msg["w"].items()}
        stacked = self._steps(
            list(plans.values()), received, manifest.train.lr * manifest.train.lr_decay**context.round
        )
        deltas = {}
        for place, (k, plan) in enumerate(plans.items()):
            moved = {
                name: (stacked[name][place] - value).cpu() if name in stacked else torch.zeros_like(value).cpu()
                for name, value in received.items()
            }
            deltas[k] = Part.of(moved, method.weight(plan.data))
        return deltas, errors

    def _steps(self, plans: Sequence[_Plan], received: Tensors, lr: float) -> dict[str, Tensor]:
        """Take every silo's steps; return its parameters, (silos, ...) each."""
        config, n = self._run.manifest.train, len(plans)
        start = {name: received[name] for name in self._trainable}
        weights = {name: v.expand(n, *v.shape).clone() for name, v in start.items()}
        velocity = {name: torch.zeros_like(v) for name, v in weights.items()}
        fixed = {name: v for name, v in tensor_maps.named_tensors(self._model).items() if name not in start}
        self._model.train()
        gradients = vmap(grad(_objective(self._model, fixed)))
        for step in range(max(len(p.batches) for p in plans)):
            x, y, counted = (t.to(self._device) for t in _padded(plans, step))
            found = gradients(weights, x, y, counted)
            if self._mu:
                found = {name: g + self._mu * (weights[name] - start[name]) for name, g in found.items()}
            if config.clip_norm:
                found = _clipped(found, config.clip_norm)
            moves = (counted.sum(1) > 0).to(x.dtype) * lr  # a silo that has taken all of its steps stays
            for name, g in found.items():
                moved = g + config.weight_decay * weights[name]
                velocity[name] = config.momentum * velocity[name] + moved
                along = moved + config.momentum * velocity[name] if config.nesterov else velocity[name]
                weights[name] = weights[name] - moves.view(-1, *([1] * (along.dim() - 1))) * along
        return weights


@dataclass(frozen=True, slots=True)
class _Plan:
    """One silo's steps: its examples, their places batch by batch, and the stream of its augmentation."""

    data: PlainLocalData
    examples: Examples
    batches: Sequence[Tensor]
    augment: torch.Generator | None

    @classmethod
    def of(cls, silo: InProcessSilo, context: RoundContext, seed: int, config: TrainConfig) -> _Plan:
        context = context.for_silo(silo.index, seed)
        data = PlainLocalData(silo.share.train, silo.share.test, config, context)
        path = ("round", context.round, "silo", silo.index, "sgd", 0)
        order = rng.stream(seed, *path, "order")
        batches = draw_batches(len(silo.share.train), config.batch_size, order, data.planned_steps())
        augment = rng.stream(seed, *path, "augment") if config.augment else None
        return cls(data, silo.share.train, batches, augment)


def _objective(model: nn.Module, fixed: Tensors) -> Callable[[Tensors, Tensor, Tensor, Tensor], Tensor]:
    """Make one silo's loss: the mean over the examples of its batch that count."""

    def loss(weights: Tensors, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            logits: Tensor = functional_call(model, {**weights, **fixed}, (x,))
            return logits

        per_example = FedAvg.loss(forward, x, y).per_example  # type: ignore[arg-type]
        return (per_example * counted).sum() / counted.sum().clamp(min=1.0)

    return loss


def _padded(plans: Sequence[_Plan], step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Read one step's batches: x (silos, B, ...), y (silos, B), and which of them count (silos, B)."""
    none = torch.zeros(0, dtype=torch.int64)
    read = [p.examples.batch(p.batches[step] if step < len(p.batches) else none, p.augment) for p in plans]
    longest, first = max(len(y) for _, y in read), read[0][0]
    x = first.new_zeros(len(plans), longest, *first.shape[1:])
    y, counted = torch.zeros(len(plans), longest, dtype=torch.int64), torch.zeros(len(plans), longest)
    for k, (own, labels) in enumerate(read):
        x[k, : len(labels)], y[k, : len(labels)], counted[k, : len(labels)] = own, labels, 1.0
    return x, y, counted


def _clipped(gradients: Tensors, bound: float) -> dict[str, Tensor]:
    """Clip each silo's gradient (silos, ...) to a norm over all parameters, as `clip_grad_norm_` does."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    factor = (bound / (norms + 1e-6)).clamp(max=1.0)
    return {name: g * factor.view(-1, *([1] * (g.dim() - 1))) for name, g in gradients.items()}
