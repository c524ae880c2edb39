"""A protocol: a comparison that is fixed, and committed, before its first run; read from protocols/NAME.yaml.

The digest of the file is part of every run's key: a change is a new protocol, with a new name. Rates and weights are
chosen on validation images and tuning seeds; the test images and the table's seeds are used once, by what was chosen.

title, question: as in a setting       estimate: CPU hours, and what they were measured on
words: what all runs share             images: {tuning: with validation images, table: with test images}
networks: {plain: words, ...}          lrs, widen: the grid, and how many steps it grows where the best rate is its end
methods: {NAME: [variants]}            as many for each; network=NAME stands for the words of a network
then: [words]                          tried with each method's best variant, at every rate
tuning_seeds, seeds, measures, diagnostics: as in a setting; the first measure chooses
gates: {level, lost, moves}            points from the paper's level; level where that is lost, %; least relative change
claims: a list of                      what the papers say, each judged by `verdicts.judge`
  {paper, claim, printed, level, method, measure, baselines: [NAME], moves: {diagnostic: up or down}}
  printed, level: points and %, or lost, also where the paper has none with these images
  moves: what shows that the method's own part is switched on
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import yaml

from benchmarks.comparison.settings import CURVES, DIAGNOSTICS, Words
from fl_core.errors import ConfigError
from fl_core.suggest import suggest
from privacy.accounting.uncertainty import LAST

FOLDER = Path(__file__).parent / "protocols"
BASELINE = "FedAvg"
ITS_OWN = ("network=", "method=", "method.", "train.momentum=", "train.weight_decay=", "prototype_share=")
"""How words begin in which the methods of a protocol may differ."""
TUNING_SEEDS, SEEDS = (100, 101), tuple(range(10, 20))


@dataclass(frozen=True, kw_only=True)
class Gates:
    """What a comparison must show before it says anything of a claim, for either sign.

    level: most points between our FedAvg and the paper's   lost: what FedAvg needs where the paper's is lost, %
    moves: least relative change of the diagnostic, in every tuning seed
    """

    level: float
    lost: float
    moves: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says of a method in this setting; printed, level: None where the paper has no number for it."""

    paper: str
    claim: str
    printed: float | None
    level: float | None
    method: str
    measure: str
    baselines: tuple[str, ...]
    moves: Mapping[str, str]


GATES = Gates(level=8, lost=60, moves=0.1)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The file, read; digest: of its bytes, the first 16 hexadecimal digits of their SHA-256."""

    name: str
    digest: str
    title: str
    question: str
    estimate: str
    words: Words
    images: Mapping[str, str]
    networks: Mapping[str, Words]
    lrs: tuple[float, ...]
    widen: int
    methods: Mapping[str, tuple[Words, ...]]
    then: tuple[Words, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    measures: Words
    diagnostics: Words
    gates: Gates
    claims: tuple[Claim, ...]

    def trials(self) -> int:
        """Return how many trials every method has on each tuning seed before its grid grows."""
        return (len(next(iter(self.methods.values()))) + len(self.then)) * len(self.lrs)

    def spelled(self, words: Words) -> Words:
        """Write networks out."""
        kind, _, name = words[0].partition("=")
        return (*self.networks[name], *words[1:]) if kind == "network" else words


def network_of(words: Words) -> str:
    """Return the name of a variant's network, empty where it names none."""
    kind, _, name = words[0].partition("=")
    return name if kind == "network" else ""


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, folder: Path = FOLDER) -> Protocol:
    """Read a protocol; raises ConfigError (E-CFG-01, E-CFG-02) on what is unknown, missing, or would not be fair."""
    if name not in (known := names(folder)):
        raise ConfigError("E-CFG-01", f"there is no protocol {name!r}: {suggest(name, known)}")
    content = (folder / f"{name}.yaml").read_bytes()
    raw = yaml.safe_load(content)
    valid = {f.name for f in fields(Protocol)} - {"name", "digest"}
    if not isinstance(raw, dict) or set(raw) != valid:
        odd = sorted(set(raw) ^ valid) if isinstance(raw, dict) else raw
        raise ConfigError("E-CFG-01", f"{name}.yaml: expected the keys {sorted(valid)}, missing or unknown: {odd}")
    protocol = Protocol(
        name=name,
        digest=hashlib.sha256(content).hexdigest()[:16],
        **{key: str(raw[key]) for key in ("title", "question", "estimate")},
        words=tuple(raw["words"].split()),
        images={kind: str(word) for kind, word in raw["images"].items()},
        networks={network: tuple(words.split()) for network, words in raw["networks"].items()},
        lrs=tuple(float(lr) for lr in raw["lrs"]),
        widen=int(raw["widen"]),
        methods={method: tuple(tuple(v.split()) for v in variants) for method, variants in raw["methods"].items()},
        then=tuple(tuple(words.split()) for words in raw["then"]),
        tuning_seeds=tuple(raw["tuning_seeds"]),
        seeds=tuple(raw["seeds"]),
        measures=tuple(raw["measures"]),
        diagnostics=tuple(raw["diagnostics"]),
        gates=Gates(**{key: float(value) for key, value in raw["gates"].items()}),
        claims=tuple(_claim(claim) for claim in raw["claims"]),
    )
    _check(protocol)
    return protocol


def _claim(raw: Mapping[str, object]) -> Claim:
    numbers = {key: None if raw[key] == "lost" else float(str(raw[key])) for key in ("printed", "level")}
    lists = {
        "baselines": tuple(cast("list[str]", raw["baselines"])),
        "moves": dict(cast("dict[str, str]", raw["moves"])),
    }
    return Claim(**{**raw, **numbers, **lists})  # type: ignore[arg-type]


def _check(protocol: Protocol) -> None:
    where = f"{protocol.name}.yaml"

    def require(fair: bool, expected: str, actual: object) -> None:
        if not fair:
            raise ConfigError("E-CFG-02", f"{where}: expected {expected}, found {actual}: correct it")

    def known(kind: str, name: str, valid: Mapping[str, object]) -> None:
        if name not in valid:
            raise ConfigError("E-CFG-01", f"{where}: there is no {kind} {name!r}: {suggest(name, valid)}")

    require(protocol.tuning_seeds == TUNING_SEEDS, f"tuning seeds {TUNING_SEEDS}", protocol.tuning_seeds)
    require(protocol.seeds == SEEDS, "seeds 10 to 19", protocol.seeds)
    images = protocol.images
    require(
        set(images) == {"tuning", "table"} and "-val" in images["tuning"] and "-test" in images["table"],
        "images: {tuning: ...-valN, table: ...-testN}",
        dict(images),
    )
    require(
        images["tuning"].partition("-val")[0] == images["table"].partition("-test")[0],
        "the same training images to tune and for the table",
        dict(images),
    )
    require(len(protocol.lrs) > 1 and list(protocol.lrs) == sorted(set(protocol.lrs)), "rising lrs", protocol.lrs)
    numbers = {method: len(variants) for method, variants in protocol.methods.items()}
    require(len(set(numbers.values())) == 1, "as many variants of every method", numbers)
    known("method", BASELINE, protocol.methods)
    require(protocol.gates == GATES, f"gates: {asdict(GATES)}", asdict(protocol.gates))
    require(0 <= protocol.widen <= 2, "widen from 0 to 2", protocol.widen)
    rounds = [int(word.removeprefix("rounds=")) for word in protocol.words if word.startswith("rounds=")]
    require(rounds >= [LAST], f"rounds={LAST} or more", rounds)
    for method, variants in protocol.methods.items():
        require(not method.startswith(f"{BASELINE},"), f"other names than those of {BASELINE}'s networks", method)
        require(len(set(variants)) == len(variants), "different variants of a method", variants)
        plain = all("method=fedavg" in words for words in variants)
        require(plain == (method == BASELINE), f"method=fedavg in all variants of {BASELINE} and no others", method)
        odd = [word for words in (*variants, *protocol.then) for word in words if not word.startswith(ITS_OWN)]
        require(not odd, f"words that begin with {', '.join(ITS_OWN)}", odd)
    for measure in protocol.measures:
        known("measure", measure, CURVES)
    for diagnostic in protocol.diagnostics:
        known("diagnostic", diagnostic, DIAGNOSTICS)
    for variants in (*protocol.methods.values(), (protocol.words,), protocol.then):
        for words in variants:
            if network := network_of(words):
                known("network", network, protocol.networks)
            fixed = [w for w in words if w.startswith(("train.lr=", "seed=", "federation.partition_seed=", "images="))]
            require(not fixed, "no rate, no seed and no images among words", fixed)
    for claim in protocol.claims:
        for method in (claim.method, *claim.baselines):
            known("method", method, protocol.methods)
        known("measure", claim.measure, dict.fromkeys(protocol.measures))
        require(claim.method not in (BASELINE, *claim.baselines), "a claim on a method and others", claim.method)
        require(claim.printed is None or claim.printed > 0, "a printed gain, or lost", claim.printed)
        for diagnostic, way in claim.moves.items():
            known("diagnostic", diagnostic, dict.fromkeys(protocol.diagnostics))
            require(way in ("up", "down"), "up or down", way)
