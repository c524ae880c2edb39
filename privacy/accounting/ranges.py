"""Allowed ranges of the numbers in a private run. Outside them, float arithmetic could break a proved bound.

The coordinator checks this table when a run is frozen, and each hospital checks it on the received manifest.
`text()` is printed in the explanation of E-PRIV-20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from fl_core.aggregation.contributor_floor import CENSUS
from fl_core.errors import RefusedError
from fl_core.methods import method_class
from fl_core.rounds.manifest import RunManifest
from fl_core.types.records import MAX_VIEWS, TrainConfig
from privacy.accounting.record_config import DpConfig


class AllowedRange(NamedTuple):
    """A range from `low` to `high`. off: whether 0 is allowed too, which switches the option off."""

    low: float
    high: float
    off: bool = False

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high or (self.off and value == 0)

    def __str__(self) -> str:
        return f"{'0 or ' if self.off else ''}{self.low:g} to {self.high:g}"


CLIP = AllowedRange(1e-4, 1e4)
_STEPS = AllowedRange(1, 10**8)
_GROUPS: tuple[tuple[AllowedRange, tuple[str, ...]], ...] = (
    (
        CLIP,
        (
            "privacy.clip",
            "privacy.clip x privacy.coupled_clip_ratio",
            "privacy.clip x privacy.clip_decay^rounds",
            "privacy.prototype_bound",
            "privacy.prototype_bound x privacy.count_weight",
            "privacy.statistics_bound",
        ),
    ),
    (
        AllowedRange(1e-3, 1e3),
        ("privacy.coupled_clip_ratio", "privacy.count_weight", "privacy.prototype_scale", "method.tau", "method.tau_p"),
    ),
    (AllowedRange(1e-3, 1e6), ("privacy.epsilon",)),
    (AllowedRange(1e-15, 1e-3), ("privacy.delta",)),
    (
        AllowedRange(1e-2, 1e6),
        (
            "privacy.prototype_noise",
            "privacy.metric_noise",
            "privacy.count_noise",
            "privacy.statistics_noise",
            "privacy.metric_clip",
        ),
    ),
    (AllowedRange(1e-2, 1e6, True), ("privacy.bit_noise",)),
    (AllowedRange(1e-3, 1e9, True), ("privacy.min_count",)),
    (AllowedRange(1e-3, 10), ("privacy.clip_rate",)),
    (AllowedRange(1e-2, 1), ("privacy.clip_decay", "train.lr_decay")),
    (AllowedRange(1e-3, 0.999), ("privacy.target_quantile",)),
    (
        AllowedRange(1, 10**6),
        (
            "privacy.microbatch",
            "privacy.physical_batch",
            "privacy.prototype_every",
            "privacy.coupled_every",
            "train.batch_size",
        ),
    ),
    (AllowedRange(1, 10**6, True), ("privacy.max_per_unit",)),
    (AllowedRange(-1, 10**3), ("privacy.reserve_rounds",)),
    (AllowedRange(1e-6, 1e3), ("train.lr", "method.server_lr", "method.feature_lr")),
    (AllowedRange(1e-6, 0.999, True), ("train.momentum",)),
    (AllowedRange(1e-12, 10, True), ("train.weight_decay", "method.weight_decay")),
    (AllowedRange(1e-4, 1e4, True), ("train.clip_norm",)),
    (AllowedRange(1, 10**5), ("train.epochs", "rounds")),
    (AllowedRange(1, 10**8, True), ("train.max_steps", "train.micro_batch")),
    (AllowedRange(1, MAX_VIEWS), ("train.views",)),
    (_STEPS, ("epochs x units / train.batch_size",)),
    (AllowedRange(1, 10**4, True), ("cohort", "quorum", "image_size")),
    (AllowedRange(1, 10**4), ("silos", "grid.n_max")),
    (AllowedRange(1e-3, 2.0**40), ("grid.bounds",)),
    (AllowedRange(1, 1024, True), ("threads",)),
    (AllowedRange(1e-3, 1e9), ("deadline_s", "patience_s")),
    (AllowedRange(1, 10**9, True), ("units",)),
    (AllowedRange(-(2**63), 2**63 - 1), ("seed",)),
    (AllowedRange(1e-3, 1e5), ("method.scale", "method.logit_scale")),
    (AllowedRange(1e-3, 1e5, True), ("method.fix_scaling",)),
    (AllowedRange(1e-3, 1e3, True), ("fedlc.tau",)),
    (AllowedRange(1e-12, 1, True), ("method.eps",)),
    (AllowedRange(1e-12, 1e4, True), ("other strengths of a method",)),
    (AllowedRange(1, 10**5, True), ("other counts of a method or model", "other counts of privacy")),
    (AllowedRange(1e-6, 1e4, True), ("other numbers of a model", "other numbers of privacy")),
)
RANGES: Mapping[str, AllowedRange] = {name: allowed for allowed, names in _GROUPS for name in names}


def text() -> str:
    return "; ".join(f"{', '.join(names)}: {allowed}" for allowed, names in _GROUPS)


def check(manifest: RunManifest, terms: DpConfig) -> None:
    """Raise RefusedError (E-PRIV-20) if a number of a private run is outside its range.

    The manifest's fields have their types already; options of the method and the model can have any plain value.
    """
    for name, value, key in _numbers(manifest, terms):
        if not RANGES[key].holds(value):
            raise RefusedError(
                "E-PRIV-20", f"{name}: expected a number of {RANGES[key]} in a private run, found {value!r}"
            )


_Number = tuple[str, float, str]
"""A number's name in messages, its value, and its key in the table."""


def _numbers(manifest: RunManifest, terms: DpConfig) -> Iterator[_Number]:
    """List the numbers of a manifest, then those computed from them."""
    single: Mapping[str, float] = {
        "rounds": manifest.rounds,
        "cohort": manifest.cohort,
        "quorum": manifest.quorum,
        "threads": manifest.threads,
        "seed": manifest.seed,
        "image_size": manifest.image_size or 0,
        "silos": len(manifest.members),
        "grid.n_max": manifest.grid.n_max,
        "deadline_s": manifest.deadline_s,
        "patience_s": manifest.patience_s,
    }
    yield from ((name, value, name) for name, value in single.items())
    bounds = {k: v for k, v in manifest.grid.bounds.items() if k != CENSUS}  # words of 0 and 1, without noise
    yield from ((f"grid.bounds.{k}", v, "grid.bounds") for k, v in bounds.items())
    yield from ((f"units of {m.name}", m.units, "units") for m in manifest.members)
    yield from _of_config("train", manifest.train)
    yield from _of_method(manifest)
    yield from _of_model(manifest.model.options)
    yield from _of_config("privacy", terms)
    yield from ((name, value, name) for name, value in terms.derived(manifest.rounds).items())
    yield from _of_steps(manifest)


def _of_config(prefix: str, config: TrainConfig | DpConfig) -> Iterator[_Number]:
    for f in fields(config):
        if type(f.default) in (int, float):
            name = f"{prefix}.{f.name}"
            other = f"other {'counts' if type(f.default) is int else 'numbers'} of {prefix}"
            yield name, getattr(config, f.name), name if name in RANGES else other


def _of_method(manifest: RunManifest) -> Iterator[_Number]:
    """List a method's numbers. An option that is not in the table counts as a strength, or a count if it is whole."""
    defaults = {f.name: f.default for f in fields(method_class(manifest.method.name))}
    for option, value in manifest.method.options.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # the method checks words
        whole = type(defaults.get(option)) is int
        keys = (f"{manifest.method.name}.{option}", f"method.{option}")
        other = "other counts of a method or model" if whole else "other strengths of a method"
        yield f"method.{option}", value, next((k for k in keys if k in RANGES), other)


def _of_model(options: Mapping[str, object]) -> Iterator[_Number]:
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and not isinstance(one, bool):
                kind = "counts of a method or model" if isinstance(one, int) else "numbers of a model"
                yield f"model.{option}", one, f"other {kind}"


def _of_steps(manifest: RunManifest) -> Iterator[_Number]:
    """List the steps of the longest call of `sgd` at the largest hospital; planning lists each step."""
    train, key = manifest.train, "epochs x units / train.batch_size"
    method_epochs = [v for k, v in manifest.method.options.items() if k.endswith("epochs") and isinstance(v, int)]
    most = max([train.epochs, *method_epochs]) * max(m.units for m in manifest.members)
    yield key, max(1, most // train.batch_size), key
