"""A comparison as data, read from settings/NAME.yaml.

title: Class-disjoint digits, linear model
question: Does a fixed classifier help where no class is at two hospitals?
words: data=digits federation=hospitals6 model=digits_linear rounds=20 threads=1    # what all runs share
lrs: [0.05, 0.1, 0.2, 0.5]             # the grid of every method
tuning_seeds: [100, 101, 102]          # choose each method's rate
seeds: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # the table's, none of them among tuning_seeds
measures: [ga, balanced, pa]           # the first one tunes
baseline: FedAvg                       # every other method minus this one
methods:
  FedAvg: [method=fedavg, method=fedavg train.momentum=0]                         # searched together with the rate
  FedGELA: [method=fedgela method.logit_scale=1, method=fedgela method.logit_scale=30]
diagnostics: [correlation]             # may be left out: what else is kept of the final model
device: cuda                           # may be left out: where the runs are made, unless --device says otherwise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from fl_core.errors import ConfigError
from fl_core.suggest import suggest

FOLDER = Path(__file__).parent / "settings"
CURVES: Mapping[str, str] = {
    "ga": "global accuracy",
    "balanced": "balanced global accuracy",
    "auc": "mean over classes of the area under the ROC curve (metrics=clinical)",
    "pa": "personal accuracy, mean over silos",
    "pm_v": "PM(V), personal models on the federation's test images of their silo's classes",
    "pm_l": "PM(L), the same with classes weighed as the silo has them",
}
"""What a run keeps after 0, 1, ..., T rounds; the last three are the silos' own models' after each round's training."""


DIAGNOSTICS: Mapping[str, str] = {
    "correlation": "mean squared correlation of two features within a class",
    "eigenvalues": "variance of the top 50 eigenvalues within a class (FedMR, Table 7)",
    "angle": "mean angle between the classes' mean features, degrees (FedGELA, Figure 2)",
}
"""What a run keeps of its final global model, on all test images."""

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods by name, and how they are compared; `words` and those of methods are words of `simulate`.

    methods: of each one or more variants (its weights, ...), searched together with the rate: as many for every method
    """

    name: str
    title: str
    question: str
    words: Words
    lrs: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    measures: Words
    baseline: str
    methods: Mapping[str, tuple[Words, ...]]
    diagnostics: Words = ()
    device: str = "cpu"


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, folder: Path = FOLDER) -> Comparison:
    """Read a comparison; raises ConfigError (E-CFG-01, E-CFG-02) on what is unknown, missing, or would not be fair."""
    if name not in (known := names(folder)):
        raise ConfigError("E-CFG-01", f"there is no comparison {name!r}: {suggest(name, known)}")
    raw = yaml.safe_load((folder / f"{name}.yaml").read_text())
    valid = {f.name for f in fields(Comparison)} - {"name"}
    if isinstance(raw, dict):
        raw = {"diagnostics": [], "device": "cpu", **raw}
    if not isinstance(raw, dict) or set(raw) != valid:
        odd = sorted(set(raw) ^ valid) if isinstance(raw, dict) else raw
        raise ConfigError(
            "E-CFG-01", f"{name}.yaml: expected the keys {sorted(valid)}, found other ones or none: {odd}"
        )
    found = Comparison(
        name=name,
        title=str(raw["title"]),
        question=str(raw["question"]),
        words=tuple(str(raw["words"]).split()),
        lrs=tuple(float(x) for x in raw["lrs"]),
        tuning_seeds=tuple(int(s) for s in raw["tuning_seeds"]),
        seeds=tuple(int(s) for s in raw["seeds"]),
        measures=tuple(str(m) for m in raw["measures"]),
        baseline=str(raw["baseline"]),
        methods={str(m): _variants(w) for m, w in raw["methods"].items()},
        diagnostics=tuple(str(d) for d in raw["diagnostics"]),
        device=str(raw["device"]),
    )
    _check(found)
    return found


def _variants(written: object) -> tuple[Words, ...]:
    return tuple(tuple(str(words).split()) for words in (written if isinstance(written, list) else [written]))


def _check(found: Comparison) -> None:
    where = f"{found.name}.yaml"
    if shared := sorted(set(found.seeds) & set(found.tuning_seeds)):
        raise ConfigError(
            "E-CFG-02", f"{where}: expected seeds that no rate was tuned on, found {shared} in both: change one list"
        )
    for label, values in (("lrs", found.lrs), ("tuning_seeds", found.tuning_seeds), ("seeds", found.seeds)):
        if not values or len(set(values)) < len(values):
            raise ConfigError("E-CFG-02", f"{where}: expected different {label}, one at least, found {list(values)}")
    for kind, valid, named in (
        ("measure", CURVES, found.measures or ("",)),
        ("diagnostic", DIAGNOSTICS, found.diagnostics),
    ):
        for name in named:
            if name not in valid:
                raise ConfigError("E-CFG-01", f"{where}: there is no {kind} {name!r}: {suggest(name, valid)}")
    if found.baseline not in found.methods:
        raise ConfigError(
            "E-CFG-01", f"{where}: there is no method {found.baseline!r}: {suggest(found.baseline, found.methods)}"
        )
    if len({len(variants) for variants in found.methods.values()}) > 1:
        numbers = ", ".join(f"{method} {len(variants)}" for method, variants in found.methods.items())
        raise ConfigError("E-CFG-02", f"{where}: expected as many variants of every method to search, found {numbers}")
    for method, variants in {**found.methods, "words": (found.words,)}.items():
        if tuned := [
            w for words in variants for w in words if w.startswith(("train.lr=", "seed=", "federation.partition_seed="))
        ]:
            raise ConfigError(
                "E-CFG-02", f"{where}, {method}: expected no rate and no seed, found {tuned[0]}: remove it"
            )
