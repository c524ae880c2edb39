"""Silo-level differential privacy: the joint norm of a silo's update is clipped, and noise is added on the grid.

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with whole
silos in the place of users. In round t the vector of silo k is everything it sends, block by block,

V_k = clip_{C_t}( [ x_s / scale_s ]_s )        x_s: weighed totals of part s, and its weights if these are data

A weight of one number per silo is public: a_k = N_k / max_j N_j of the declared sizes, or 1; it multiplies its block
before the clip and is sent unchanged. Weights per class are data, and part of the vector. Adding or removing all data
of one silo (its place in the roster stays) moves the sum by at most C_t, so noise z C_t scale_s on block s makes a
round one Gaussian release of noise z. Noise is integer, on the run's grid; C_t is lowered by the possible rounding of a
norm. If silos share the noise (`SharedNoise`), each adds its part to the update and to the clip's bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.grid_bounds import NOISE_STDS
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.run_setup import RunSetup
from fl_core.tensors import Tensor, torch
from fl_core.types.interfaces import Guard
from fl_core.types.metric_parts import GLOBAL_PARTS, METRICS
from fl_core.types.values import Bundle, Layout, Part, Tensors
from privacy.accounting.dry_run import SIZE, dry_run
from privacy.accounting.shared_noise import SharedNoise
from privacy.mechanisms.noise.discrete_gaussian import MIN_SIGMA
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise
from privacy.mechanisms.silo import adaptive_clipping
from privacy.mechanisms.silo.config import BIT, SiloDpConfig

MAX_NUMBERS = 20_000
"""Most coordinates without privacy.allow_large=true; with more, noise hides the signal of a few silos."""
_FINE_BITS = 20
"""Bits between the noise's standard deviation and the finest digit in use; finer digits of the grid are not used."""


@dataclass(frozen=True)
class SiloDpGuard(Guard):
    """The guard at the silo, and with central noise at the coordinator.

    Attributes:
        noise: z of a round's update
        shares: a_k of each silo
        sized: parts whose weight is a_k; that of others is 1 or 0
        scale: public factor of parts with weights per class
        broadcast_clip: C_t as broadcast, None if the clip is fixed
        shared: terms of shared noise, None if each silo's noise is enough alone

    Guarantees: the bundle keeps its layout; everything that depends on data is clipped, and noisy unless noise is
    central; evaluation passes unchanged if test data are public.
    """

    terms: SiloDpConfig
    grid: FixedPointFormat
    layout: Layout
    noise: float
    shares: tuple[float, ...]
    sized: frozenset[str]
    scale: float
    seed: int
    broadcast_clip: float | None = None
    shared: SharedNoise | None = None
    group: ClassVar[str] = adaptive_clipping.PART

    def initial_setting(self) -> Tensors:
        return adaptive_clipping.initial_clip(self.terms)

    def with_setting(self, setting: Tensors | None) -> SiloDpGuard:
        """Return the guard with a round's clip; raises RefusedError (E-PRIV-15) as `adaptive_clipping.clip_of`."""
        return replace(self, broadcast_clip=adaptive_clipping.clip_of(self.terms, setting))

    def next_setting(self, setting: Tensors, answered: Part) -> Tensors:
        return adaptive_clipping.update_clip(self.terms, setting, answered)

    def clip_at(self, round: int) -> float:
        """Return C_t; raises RefusedError (E-PRIV-15) if it is adaptive and was not broadcast."""
        if self.terms.adaptive and self.broadcast_clip is None:
            raise RefusedError("E-PRIV-15", "the clip of this round was not sent with the model")
        return self.terms.clip_at(round) if self.broadcast_clip is None else self.broadcast_clip

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:
        """Clip one silo's bundle, round it to the grid and, unless noise is central, add noise."""
        weighed = {name: self._weighed(name, part, silo) for name, part in bundle.items()}
        if self.terms.adaptive and set(bundle) - set(GLOBAL_PARTS):
            update, clip, _ = self._blocks(weighed, round)[0]
            weighed[adaptive_clipping.PART] = adaptive_clipping.below_clip(
                self._norm({name: weighed[name] for name in update}), clip
            )
        central = self.terms.central
        noisy = dict(weighed)
        for names, clip, noise in self._blocks(weighed, round):
            part_of = {name: weighed[name] for name in names}
            units = self._rounded(part_of, clip, noise)
            source = self._source(round, "silo", silo, names)
            noisy |= units if central else self._noisy(units, clip, noise, source)
        return noisy

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        """Add central noise to the sum, which is still on the grid; return it unchanged if silos add the noise."""
        if not self.terms.central:
            return total
        noisy = dict(total)
        for names, clip, noise in self._blocks(total, round):
            part_of = {name: total[name] for name in names}
            source = self._source(round, "sum", 0, names)
            noisy |= self._noisy(part_of, clip, noise, source, self.grid.n_max)
        return noisy

    def sensitivity(self) -> Mapping[str, float]:
        """Return, per part, the most that all data of one silo can move the sum in round 0."""
        first = replace(self, broadcast_clip=self.terms.clip if self.terms.adaptive else None)
        blocks = first._blocks(self.layout, 0)
        return {name: clip * self._scale(name) for names, clip, _ in blocks for name in names}

    def require_room(self) -> None:
        """Raise ConfigError (E-PRIV-20) unless shared noise fits the grid in round 0. Later rounds check this again.

        If a noisy number had to be clipped to the grid's bound, the sum of the noises would be wrong.
        """
        first = replace(self, broadcast_clip=self.terms.clip if self.terms.adaptive else None)
        for names, clip, noise in first._blocks(self.layout, 0):
            for segment, scale in first._segments(names):
                first._require_room(segment, clip * scale, clip * noise * scale)

    def _segments(self, names: list[str]) -> Iterator[tuple[str, float]]:
        for name in names:
            yield name, self._scale(name)
            if self.layout[name].weight_shape:
                yield f"{name}.weight", self._scale(name)

    def _require_room(self, segment: str, bound: float, sigma: float) -> None:
        steps = sigma * 2.0 ** (self.grid.frac_bits(segment) - self._fine(segment, sigma))
        most = bound + NOISE_STDS * sigma
        if most > self.grid.bound(segment) * (1 + 1e-9):  # both are floats
            raise ConfigError(
                "E-PRIV-20",
                f"{segment!r} can reach {most:.4g} with noise, but the grid ends at {self.grid.bound(segment):.4g}: "
                "set secagg.ring=ring64 or a smaller privacy.clip",
            )
        if steps < MIN_SIGMA:
            raise ConfigError(
                "E-PRIV-20",
                f"each hospital's noise share on {segment!r} is {steps:.3g} grid steps, at least {MIN_SIGMA:g} are "
                f"needed: set secagg.ring=ring64 or a larger privacy.clip",
            )

    def value_bounds(self) -> Mapping[str, float | None]:
        """Return the bound of each clipped part's numbers, with 13.5 std of noise; None if the clip adapts."""
        first = replace(self, broadcast_clip=self.terms.clip if self.terms.adaptive else None)
        bounds: dict[str, float | None] = {}
        for names, clip, noise in first._blocks(self.layout, 0):
            moves = self.terms.adaptive and not {METRICS, adaptive_clipping.PART} & {*names}
            for name in names:
                bounds[name] = None if moves else clip * self._scale(name) * (1 + NOISE_STDS * noise)
        return bounds

    def _blocks(self, parts: Mapping[str, object], round: int) -> list[tuple[list[str], float, float]]:
        """List the vectors that are clipped jointly (update, bit, evaluation) as (parts, clip, noise / clip).

        noise: that of one silo; at the coordinator, the central noise.
        """
        alone = self.shared.alone if self.shared else float
        update = [name for name in sorted(parts) if name not in (*GLOBAL_PARTS, adaptive_clipping.PART)]
        blocks = [(update, self.clip_at(round), alone(self.noise))] if update else []
        if adaptive_clipping.PART in parts:
            blocks.append(([adaptive_clipping.PART], BIT, alone(self.terms.bit.noise)))
        if METRICS in parts and self.terms.test_data == "private":
            blocks.append(([METRICS], self.terms.metric_clip, self.terms.metric_noise))
        return blocks

    def _scale(self, name: str) -> float:
        per_class = name not in (*GLOBAL_PARTS, adaptive_clipping.PART) and self.layout[name].weight_shape
        return self.scale if per_class else 1.0

    def _norm(self, parts: Bundle) -> float:
        squares = [
            float((v.double() / self._scale(name)).square().sum())
            for name, part in parts.items()
            for v in self._values(part).values()
        ]
        return math.sqrt(sum(squares))

    def _weighed(self, name: str, part: Part, silo: int) -> Part:
        if name in GLOBAL_PARTS or part.weight.dim():
            return part
        sent = float(part.weight)
        share = (self.shares[silo] if name in self.sized else 1.0) if sent else 0.0
        factor = share / sent if sent else 0.0
        return Part({key: v.double() * factor for key, v in part.total.items()}, torch.tensor(share))

    @staticmethod
    def _values(part: Part) -> dict[str, Tensor]:
        return dict(part.total) | ({"": part.weight} if part.weight.dim() else {})

    def _fine(self, segment: str, sigma: float) -> int:
        """Return the number of low bits of the grid that are not used, so that noise stays in the range of float64."""
        return max(0, math.floor(math.log2(sigma)) + self.grid.frac_bits(segment) - _FINE_BITS)

    def _rounded(self, parts: Bundle, clip: float, noise: float) -> Bundle:
        """Clip the joint vector to C minus the possible rounding, and round it; zero if a number is not finite."""
        slack, norm = 0.0, self._norm(parts)
        for name, part in parts.items():
            scale = self._scale(name)
            for key, value in self._values(part).items():
                segment = name if key else f"{name}.weight"
                step = 2.0 ** (self._fine(segment, noise * clip * scale) - self.grid.frac_bits(segment)) / scale
                slack += value.numel() * (step / 2) ** 2
        finite = math.isfinite(norm)  # if not, contribute zero: an error would reveal it
        bound = clip - math.sqrt(slack)
        if bound <= 0:
            raise ConfigError("E-PRIV-20", f"privacy.clip={clip}: the grid is too coarse for it; choose a larger one")
        factor = min(1.0, bound / norm) if norm and finite else 1.0

        def units(segment: str, value: Tensor, sigma: float) -> Tensor:
            left_out = self._fine(segment, sigma)
            kept = value.double() if finite else torch.zeros_like(value, dtype=torch.float64)
            scaled = kept * (factor * 2.0 ** (self.grid.frac_bits(segment) - left_out))
            return scaled.round_().long() << left_out

        return self._mapped(parts, units, clip * noise)

    def _noisy(self, parts: Bundle, clip: float, noise: float, source: NoiseSource, silos: int = 1) -> Bundle:
        def noisy(segment: str, value: Tensor, sigma: float) -> Tensor:
            left_out, bits = self._fine(segment, sigma), self.grid.frac_bits(segment)
            if self.shared:
                self._require_room(segment, sigma / noise, sigma)
            drawn = source.discrete_gaussian(tuple(value.shape), sigma * 2.0 ** (bits - left_out)) << left_out
            limit = silos * math.floor(self.grid.bound(segment) * 2.0**bits)
            return (value + drawn).clamp_(-limit, limit)

        return self._mapped(parts, noisy, clip * noise)

    def _mapped(self, parts: Bundle, change: Callable[[str, Tensor, float], Tensor], sigma: float) -> Bundle:
        """Change every tensor, in the order of names: received tensors may be in another order."""
        parts_changed = {}
        for name, part in parts.items():
            s = sigma * self._scale(name)
            total = {key: change(name, value, s) for key, value in sorted(part.total.items())}
            weight = change(f"{name}.weight", part.weight, s) if part.weight.dim() else part.weight
            parts_changed[name] = Part(total, weight)
        return parts_changed

    def _source(self, round: int, where: str, silo: int, names: list[str]) -> NoiseSource:
        if self.terms.rng == "secure":
            return SecureNoise()
        return SeededNoise(self.seed, "round", round, where, silo, "silo-level", *names)


def coordinates(layout: Layout) -> int:
    """Count the numbers of an update that get noise."""
    parts = [spec for name, spec in layout.items() if name not in (*GLOBAL_PARTS, adaptive_clipping.PART)]
    return sum(math.prod(s) for p in parts for s in (*p.shapes.values(), *([p.weight_shape] if p.weight_shape else [])))


def silo_level(run: RunSetup) -> SiloDpGuard:
    """Plan the guard of a run: noise from the member that takes part most often, weights from declared sizes.

    Raises ConfigError: E-PRIV-17 if a size used as a weight was not declared, E-PRIV-16 on what silo-level privacy does
    not cover: too many coordinates, personal models, weights that follow from data, noise that is not at the silo on
    single silos' parts, exact sums over examples; E-PRIV-16, E-CFG-02 as `SharedNoise.of`, E-PRIV-20 as `require_room`.
    """
    manifest, method = run.manifest, run.method
    terms = SiloDpConfig.of(manifest.privacy.options)
    if method.exact:
        raise ConfigError(
            "E-PRIV-16",
            f"method {method.name} sends sums over examples, and one clip for a whole hospital would keep only their "
            "direction: set privacy=dp_record, which bounds each record",
        )
    uniform = terms.weights == "uniform"
    if not uniform and (missing := [m.name for m in manifest.members if m.units < 1]):
        raise ConfigError(
            "E-PRIV-17",
            f"{missing[0]} has not declared its size, which private runs need: start it with "
            "`silo serve --nominal-size N`, or set privacy.weights=uniform",
        )
    if (numbers := coordinates(manifest.layout)) > MAX_NUMBERS and not terms.allow_large:
        raise ConfigError(
            "E-PRIV-16",
            f"expected at most {MAX_NUMBERS} numbers under silo-level privacy, found {numbers}: the noise would be "
            "many times the signal; send prototypes or a head alone (method=fedproto), choose privacy=dp_record, "
            "or accept it with privacy.allow_large=true",
        )
    if terms.adaptive and not coordinates(manifest.layout):
        raise ConfigError(
            "E-PRIV-16",
            f"method {method.name} has nothing to adapt the clip to: expected privacy.clipping=fixed",
        )
    if manifest.personal or (method.unsummed_parts and terms.placement != "local"):
        remedy = "personal=false" if manifest.personal else "privacy.placement=local"
        raise ConfigError("E-PRIV-16", f"silo-level privacy covers only sums over silos: set {remedy}")
    weights = dry_run(method, run.new_model(), run.schema, manifest.train, lambda _: 1, probe=False).weights
    if odd := sorted(name for name, w in weights.items() if w not in (0.0, 1.0, SIZE)):
        raise ConfigError(
            "E-PRIV-16",
            f"method {method.name} weights {odd[0]!r} by values that depend on the data: set method.weights=uniform",
        )
    most = 1 if uniform else max(m.units for m in manifest.members)
    trained = max(map(len, run.training_rounds))
    guard = SiloDpGuard(
        terms,
        manifest.grid,
        manifest.layout,
        terms.noise(trained, trained + 1),
        tuple(1.0 if uniform else m.units / most for m in manifest.members),
        frozenset(name for name, w in weights.items() if w == SIZE),
        most * terms.prototype_scale,
        manifest.seed,
        shared=SharedNoise.of(manifest) if terms.distributed else None,
    )
    if guard.shared:
        guard.require_room()
    return guard
