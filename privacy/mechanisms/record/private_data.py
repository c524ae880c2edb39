"""A hospital's examples under record-level differential privacy: noisy training, and noisy sums.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep Learning with Differential Privacy", CCS 2016,
Algorithm 1, with Poisson samples of constant rate and a constant divisor:

S     = sum over drawn units of clip_C1(gradient)
        [ + sum over M microbatches of clip_C2(B / M times the gradient of coupled terms) ]
grad  = (round(S / g) + N) g / B,   N integer noise of parameter s / g,   s = z (C1 + 2 C2) (1 + slack)

then penalty, `clip_norm`, shift, weight decay, momentum: computed from these integers (grid.py, which also defines the
slack).

A unit is a record, or the group (patient, lesion) named in the data: its gradient is the mean over its examples. The
coupled terms of a loss see microbatches to which drawn units are assigned at random, so that one unit changes one
microbatch: its clipped gradient by at most 2 C2. Sums over classes are joint releases of (sum, count).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from fl_core.errors import RefusedError
from fl_core.survey.answers import known_patients
from fl_core.survey.facts import names_patients
from fl_core.tensors import TORCH, Tensor, nn, torch
from fl_core.training.local_data import PlainLocalData
from fl_core.training.schedule import effective_steps
from fl_core.training.team import HelperData
from fl_core.types.enums import Split
from fl_core.types.interfaces import Gradients as SomeGradients
from fl_core.types.interfaces import RoundData, StepPart
from fl_core.types.values import (
    AS_SCHEDULED,
    ClassSums,
    Losses,
    LossFn,
    MomentSums,
    Query,
    SgdOptions,
    SurveySums,
    Tensors,
)
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan
from privacy.mechanisms.noise import grid, sources
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise
from privacy.mechanisms.record import survey
from privacy.mechanisms.record.class_sums import KeyedUnits, PrivacyUnits, class_counts, class_sums, pad_batch
from privacy.mechanisms.record.draws import DrawPath, Draws, is_stochastic, layers_scope, unit_scope
from privacy.mechanisms.record.model_check import validate
from privacy.mechanisms.record.moments import ReleaseGrid, moment_sums
from privacy.release_log import InMemoryReleaseLog, ReleaseLog

if TORCH:  # without it there are sums, and no steps
    from fl_core.training.optimizers import correct_gradient, make_optimizers
    from privacy.mechanisms.record.per_sample_gradients import (
        PADDING,
        ClippedGradientEngine,
        Gradients,
        clipped,
        per_unit,
        trainable,
    )


class DpSgdLocalData:
    """`LocalData` under record-level differential privacy, for one round.

    Guarantees: every release is taken from `allowance` before an example is read; sizes and steps depend only on the
    declared size; an empty sample gives an ordinary step; a unit whose numbers are not finite contributes zero without
    an error; no unit changes another unit's contribution. With infinite clips, no noise and the same batches, the
    gradients equal those of `PlainLocalData`.
    """

    def __init__(
        self,
        data: RoundData,
        plan: ReleasePlan,
        allowance: ReleaseAllowance,
        noise: NoiseSource,
        log: ReleaseLog | None = None,
        sum_grid: ReleaseGrid | None = None,
    ) -> None:
        """Open a round. sum_grid: the grid of sums over silos, if these share noise."""
        self._plain = PlainLocalData(replace(data, progress=None))
        self.lr, self.batch_size = self._plain.lr, self._plain.batch_size
        self._split = {Split.TRAIN: data.train, Split.TEST: data.test}
        self._units = {split: PrivacyUnits.of(examples) for split, examples in self._split.items()}
        self._config, self._context, self._plan = data.config, data.context, plan
        self._allowance, self._noise = allowance, noise
        self._device, self._team = data.device or torch.device("cpu"), data.team
        self._log = log or InMemoryReleaseLog()
        self._progress = data.progress or (lambda *_: None)
        self._calls, self._sum_grid = 0, sum_grid

    @property
    def multi_label(self) -> bool:
        return self._plain.multi_label

    def planned_steps(self, epochs: float | None = None) -> int:
        return self._plan.rates.steps(self._config.epochs if epochs is None else epochs)

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        return effective_steps(self._config, steps, self.lr * mu)

    def size(self) -> float:
        """Return the declared number of units, or 1 with uniform weights. The true number never leaves."""
        return 1.0 if self._plan.terms.weights == "uniform" else float(self._plan.units)

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        """Train `model` in place with noisy clipped gradients and return the steps taken.

        Raises ConfigError (E-PRIV-14) on a layer that mixes examples; RefusedError: E-PRIV-15 on a call that was not
        planned, E-PRIV-16 on a coupled term of a method that declares none.
        """
        validate(model)
        planned = self.planned_steps(options.epochs) if options.steps is None else options.steps
        for release in self._plan.training(planned):
            self._allowance.take(release)
        draws, grouped = self._draws(model, loss), self._split[Split.TRAIN].groups is not None
        with _trainable_only(model, options.only) as named:
            optimizers = make_optimizers(named, options.lr_scale * self.lr, self._config, options.no_momentum)
            model.train()
            with draws.scope(), per_unit(model, grouped=grouped) as engine:
                for step in range(planned):
                    self._gradient(engine, model, loss, step, draws)
                    self._add_data_free_terms(model, named, options)
                    for optimizer in optimizers:
                        optimizer.step()
                    self._progress(step + 1, planned)
            self._team.finish(list(named.values()))
        return planned

    def _draws(self, model: nn.Module, loss: LossFn) -> Draws:
        path: DrawPath = ("sgd", self._calls)
        self._calls += 1
        train, stochastic = self._split[Split.TRAIN], False
        if not self._noise.private:
            x, y = train.batch(torch.zeros(0, dtype=torch.long))
            blank = x.new_zeros(2, *x.shape[1:]).to(self._device), y.new_zeros(2, *y.shape[1:]).to(self._device)
            stochastic = is_stochastic(model, loss, *blank)
        return Draws(self._noise, train, self._config.augment, path, stochastic)

    def _gradient(self, engine: ClippedGradientEngine, model: nn.Module, loss: LossFn, step: int, draws: Draws) -> None:
        plan, terms, params = self._plan, self._plan.terms, trainable(model)
        total = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        units = KeyedUnits(self._units[Split.TRAIN], self._split[Split.TRAIN])
        path = (*draws.path, "step", step)
        drawn = sources.poisson_sample(self._noise, units, plan.rate, *path, "sample")
        coupled = plan.is_coupled(step)
        micro = coupled and terms.coupled == "micro"
        # The coupled term is a mean over M microbatches, the rest a mean over B examples; all is divided by B below.
        weight = 1.0 if micro else plan.batch / plan.groups
        subset = partial(draws.subset, most=terms.max_per_unit, step=step) if terms.max_per_unit else None

        def losses(index: Tensor, rows: int = 1) -> Losses:
            x, y = draws.read(index, step)
            return self._checked(loss(model, pad_batch(x, rows).to(self._device), pad_batch(y, rows).to(self._device)))

        if not micro:
            rows = 1 if draws.unit_by_unit else plan.rows  # a unit that is computed separately keeps its shape
            chunks = units.units.chunks(drawn, 0 if draws.unit_by_unit else rows, subset)
            while some := list(islice(chunks, self._team.size)):
                parts = [self._part(draws, index, unit, rows, step, len(drawn)) for index, unit in some[1:]]
                self._team.deal(params, parts)
                index, unit = some[0]
                losses_of = partial(lambda i: losses(i, rows).per_example, index)
                with draws.for_units(index, step):
                    number = padded(unit, rows).to(self._device)
                    _add(total, engine.clipped_sum(losses_of, number, terms.clip, len(drawn)))
                for gradients in self._team.collect():
                    _add(total, gradients)
        if coupled:
            group_of = sources.random_groups(self._noise, units.at(drawn), plan.groups, *path, "groups")
            for group in range(plan.groups):
                for index, _ in units.units.chunks(drawn[group_of == group], None, subset):
                    with draws.for_group(group, step):
                        group_losses = losses(index)
                    term = group_losses.objective() if micro else group_losses.coupled
                    if term is not None and term.requires_grad:
                        _add(total, clipped(term * weight, params, terms.clip if micro else terms.coupled_clip))
        self._release(total, params, plan.groups if micro else plan.batch)

    def _part(self, draws: Draws, index: Tensor, unit: Tensor, rows: int, step: int, in_all: int) -> StepPart:
        """Build the input with which a helper clips and adds up a chunk of units."""
        x, y = (pad_batch(rows_of, rows) for rows_of in draws.read(index, step))
        seed = draws.seed_of_units(index, step)
        return StepPart((x, y, padded(unit, rows)), (self._plan.terms.clip, in_all), seed)

    def _release(self, total: Gradients, params: Sequence[nn.Parameter], divisor: float) -> None:
        g = grid.step(self._plan.terms.clip, sum(p.numel() for p in params))
        for p, s in zip(params, total, strict=True):
            noisy = grid.add_noise(grid.rounded(s.cpu(), g), g, self._plan.std, self._noise)
            p.grad = (noisy / divisor).to(p)

    def _checked(self, losses: Losses) -> Losses:
        if losses.coupled is not None and not self._plan.coupled and self._plan.terms.coupled != "off":
            raise RefusedError(
                "E-PRIV-16",
                "the loss has a coupled term, and the method declares Coupling.EXAMPLE: its term would be left out",
            )
        return losses

    def _add_data_free_terms(self, model: nn.Module, named: dict[str, nn.Parameter], options: SgdOptions) -> None:
        """Add terms that do not depend on examples: after the noise, before the momentum buffer."""
        if options.penalty is not None:
            params = list(named.values())
            slopes = torch.autograd.grad(options.penalty(model), params, allow_unused=True)
            for p, g in zip(params, slopes, strict=True):
                if g is not None and p.grad is not None:
                    p.grad.add_(g)
        correct_gradient(named, self._config.clip_norm, options)

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Release a sum over the units of a split with noise; sums over public test examples are exact.

        Raises RefusedError: E-PRIV-15 on a release that was not planned, E-PRIV-16 on a query without a joint bound.
        Rounds without a release of prototypes give zeros of weight 0.
        """
        if isinstance(query, SurveySums):
            return self._survey(query)
        public = split is Split.TEST and self._plan.terms.test_data == "public"
        if split is Split.GLOBAL or public:
            return self._plain.sum(query, bound=bound, split=split)
        plan, terms = self._plan, self._plan.terms
        if isinstance(query, MomentSums) and split is Split.TRAIN:
            release = plan.moments(self._context.round) if self._context.round in plan.moment_shares else None
            if release is None:
                raise RefusedError("E-PRIV-15", "this round plans no release of moments, but the method requested one")
            self._allowance.take(release)
            return moment_sums(
                query,
                self._split[split],
                self._units[split],
                release.alone.noise,
                self._noise,
                few=terms.min_count,
                device=self._device,
                on=self._sum_grid,
            )
        if not isinstance(query, ClassSums):
            raise RefusedError(
                "E-PRIV-16", "under differential privacy, sums per class need a bound, and this query has none"
            )
        if split is Split.TRAIN and not plan.sends_prototypes(self._context.round):
            width = self._width(query)
            return {"sum": torch.zeros(query.n_classes, width), "count": torch.zeros(query.n_classes)}
        release = plan.prototypes if split is Split.TRAIN else plan.metrics
        self._allowance.take(release)
        bound = terms.prototype_bound if bound is None else bound
        weight = terms.count_weight * bound if split is Split.TRAIN else bound
        few = terms.min_count if split is Split.TRAIN else 0.0
        return class_sums(
            query,
            self._split[split],
            self._units[split],
            bound,
            weight,
            release.mechanism.noise,
            self._noise,
            few=few,
            device=self._device,
        )

    def _survey(self, query: SurveySums) -> Tensors:
        """Answer a survey once per data version. A repeated question gets the cached answer at no cost."""
        planned, noise = self._plan.survey, self._plan.survey[0].mechanism.noise
        train, test = self._split[Split.TRAIN], self._split[Split.TEST]
        query = known_patients(query, names_patients(train, test))
        name = survey.release_name(query, noise)
        counts = self._log.cached(name, torch.float64)
        if counts is None:
            for release in planned:
                self._allowance.take(release)
            counts = survey.survey_release(query, train, test, noise, self._noise, self._progress)
            self._log.cache(name, counts)
        return survey.as_answers(query, counts, noise)

    def _width(self, query: ClassSums) -> int:
        """Return the width of a query's vectors, without reading the hospital's examples."""
        shape = self._split[Split.TRAIN].batch(torch.zeros(0, dtype=torch.long))[0].shape[1:]
        blank = torch.zeros(2, *shape, device=self._device)
        return int(query.vectors(blank, torch.zeros(2, dtype=torch.long, device=self._device)).shape[1])

    def class_counts(self) -> Tensor:
        """Release the number of units per class (C,) once, with noise; the release is cached."""
        counts = self._log.cached("class counts")
        if counts is None:
            self._allowance.take(self._plan.class_counts)
            counts = class_counts(
                self._split[Split.TRAIN],
                self._units[Split.TRAIN],
                self._context.n_classes,
                self._plan.class_counts.mechanism.noise,
                self._noise,
            )
            self._log.cache("class counts", counts)
        return counts

    def contributes(self) -> Tensor:
        return self.class_counts() >= 0.5


class PrivateHelperData(HelperData):
    """`LocalData` of a helper in a run with record-level privacy: it clips and sums units; the leader adds noise."""

    def __init__(self, *of_helper: Any, grouped: bool) -> None:  # noqa: ANN401
        super().__init__(*of_helper)
        self._grouped = grouped

    @contextmanager
    def computing(
        self, model: nn.Module, loss: LossFn, params: Sequence[nn.Parameter]
    ) -> Iterator[Callable[[StepPart], SomeGradients]]:
        names = {name for name, p in model.named_parameters() if any(p is moved for moved in params)}
        with (
            _trainable_only(model, names.__contains__),
            layers_scope(SecureNoise()),
            per_unit(model, grouped=self._grouped) as engine,
        ):
            model.train()

            def gradients(part: StepPart) -> SomeGradients:
                (x, y, number), (clip, in_all) = (t.to(self.device) for t in part.tensors), part.numbers
                with unit_scope(part.seed):
                    return engine.clipped_sum(lambda: loss(model, x, y).per_example, number, clip, int(in_all))

            yield gradients


def padded(unit: Tensor, rows: int) -> Tensor:
    """Extend unit numbers (n,) with `PADDING` for the rows that `pad_batch` adds."""
    return torch.cat((unit, unit.new_full((-len(unit) % rows,), PADDING)))


def _add(total: Gradients, more: SomeGradients) -> None:
    for t, m in zip(total, more, strict=True):
        if m is not None:
            t.add_(m.to(t.device))


@contextmanager
def _trainable_only(model: nn.Module, only: Callable[[str], bool] | None) -> Iterator[dict[str, nn.Parameter]]:
    """Freeze the other parameters inside the block, so that their gradients are not computed, clipped or noised."""
    frozen = [p for name, p in model.named_parameters() if p.requires_grad and only is not None and not only(name)]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield {name: p for name, p in model.named_parameters() if p.requires_grad}
    finally:
        for p in frozen:
            p.requires_grad_(True)
