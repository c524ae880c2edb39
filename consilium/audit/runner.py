"""The audits of a pool of images: run, compare, plot. `silo audit` and `python -m consilium.audit` share them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from consilium.audit import attacks, canaries, plots
from consilium.audit.canaries import CanaryResult
from consilium.audit.epsilon_bounds import auc, refuted
from consilium.audit.hostile import attacks as attacks_of_a_coordinator
from consilium.audit.target import AuditTarget
from consilium.audit.training import AuditTraining, memorising
from consilium.audit.worlds import AttackResult, measure
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import Option
from fl_core.errors import FederationError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, RunMember
from fl_core.types.records import Schema, TrainConfig
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise
from service_core.storage.private_files import replace_file

FLAGGED, QUIET = 2.0, 0.8
"""Thresholds with 500 canaries: without privacy at least epsilon 2 is refuted, at epsilon 1 at most 0.8."""
RETRIES = 2
"""At 95 % confidence one seed in twenty refutes a true claim, so an audit fails only if three seeds refute it."""
PLAIN = "no privacy"


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Settings of an audit. Training without privacy is always audited, too.

    epsilons, delta: the claims to test   seeds: repetitions of each audit   demanding: also check thresholds that are
    valid for `AuditTarget.digits`   seeded: use reproducible noise   trials: steps of each attack of a hostile
    coordinator in each world; None: the attack's own number
    """

    epsilons: tuple[float, ...] = (8.0, 1.0)
    delta: float = 1e-5
    seeds: int = 1
    demanding: bool = True
    seeded: bool = True
    trials: int | None = None

    @property
    def trainings(self) -> list[AuditTraining]:
        return [memorising(), *(AuditTraining(e, delta=self.delta) for e in self.epsilons)]

    def noise(self, *path: str | int) -> NoiseSource:
        return SeededNoise(0, "audit", *path) if self.seeded else SecureNoise()


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Expectation and result of one audit. holds: None if the result is only shown."""

    audit: str
    expected: str
    found: str
    holds: bool | None

    def line(self) -> str:
        if self.holds is None:
            return f"shows  {self.audit}: {self.found} ({self.expected})"
        return f"{'passed' if self.holds else 'FAILED'} {self.audit}: expected {self.expected}, measured {self.found}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One audit's numbers by training, its verdicts, and its plot's file name."""

    numbers: Mapping[str, object]
    verdicts: Sequence[AuditVerdict]
    picture: str

    def json(self) -> Mapping[str, object]:
        return {**self.numbers, "verdicts": [asdict(v) for v in self.verdicts], "picture": self.picture}


Audit = Callable[[AuditTarget, AuditSettings, Path], Outcome]


def white_box(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:
    """AU-4: canaries that each push their own coordinate, among as many records as the target has."""
    m, records = _canaries(target), len(target.y)

    def one(training: AuditTraining, seed: int) -> CanaryResult:
        short = AuditTraining(training.epsilon, steps=200, lr=0.1, delta=training.delta)
        return canaries.dirac(short, m, records, seed, setting.noise("white-box", seed, str(training.epsilon)))

    return _by_canaries("white-box canaries", one, m, setting, out / "canaries_white_box.png")


def black_box(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:
    """AU-5: images with wrong labels, scored by the final loss."""
    m = _canaries(target)

    def one(training: AuditTraining, seed: int) -> CanaryResult:
        noise = setting.noise("black-box", seed, str(training.epsilon))
        return canaries.mislabelled(training, target, m, seed, noise)

    return _by_canaries("black-box canaries", one, m, setting, out / "canaries_black_box.png")


def membership(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:
    """AU-7: infer from an image's loss whether it was trained on.

    For (epsilon, 0)-private training no attack has an AUC above e^eps / (1 + e^eps). Decided by the mean over seeds.
    """
    results = {
        _name(t): [
            canaries.members(t, target, seed, setting.noise("membership", seed, str(t.epsilon)))
            for seed in range(setting.seeds)
        ]
        for t in setting.trainings
    }
    plots.curves({name: pairs[0] for name, pairs in results.items()}, out / "membership.png")
    by = {name: [auc(*pair) for pair in pairs] for name, pairs in results.items()}
    n = len(results[PLAIN][0][0])
    error = math.sqrt((2 * n + 1) / (12 * n * n) / setting.seeds)
    shown = {name: f"AUC {_repeat(values)}" for name, values in by.items()}
    verdicts = [AuditVerdict(f"membership by loss, {PLAIN}", "for comparison", shown[PLAIN], None)]
    if setting.demanding:
        holds = fmean(by[PLAIN]) >= 0.55
        verdicts = [AuditVerdict(f"membership by loss, {PLAIN}", "AUC at least 0.55", shown[PLAIN], holds)]
    for t in setting.trainings[1:]:
        most = 0.58 if setting.demanding else min(1.0, 1 / (1 + math.exp(-t.epsilon)) + 3 * error)
        holds = fmean(by[_name(t)]) <= most
        verdicts.append(
            AuditVerdict(f"membership by loss, {_name(t)}", f"AUC at most {most:.3f}", shown[_name(t)], holds)
        )
    return Outcome({"auc": by, "members": n, "standard_error": error}, verdicts, "membership.png")


def presence(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:
    """AU-8: infer a hospital's classes from its update, even with record-level privacy. A sum reveals less."""
    results = {_name(t): [_presence(target, setting, t, s) for s in range(setting.seeds)] for t in setting.trainings}
    update_aucs = {name: [f.update_auc for f in runs] for name, runs in results.items()}
    sum_aucs = {name: [f.sum_auc for f in runs] for name, runs in results.items()}
    plots.presence(update_aucs, sum_aucs, out / "class_presence.png")
    numbers = {"one_update": update_aucs, "sum_only": sum_aucs, "hospitals": len(results[PLAIN][0].truth)}
    near = all(abs(a - 0.5) <= 0.1 for values in sum_aucs.values() for a in values)
    verdicts = [
        AuditVerdict(
            "class presence, updates seen",
            "AUC > 0.98 without privacy",
            _summary(update_aucs),
            min(update_aucs[PLAIN]) > 0.98,
        ),
        AuditVerdict("class presence, sum seen", "AUC 0.5 +- 0.1", _summary(sum_aucs), near),
    ]
    if not setting.demanding:
        verdicts = [AuditVerdict(v.audit, "only a masked sum hides it", v.found, None) for v in verdicts]
    return Outcome(numbers, verdicts, "class_presence.png")


def prototypes(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:
    """AU-9: find the images behind a prototype of few images, and reconstruct an image from it."""
    runs = [attacks.prototypes(target, seed=s, seeded=setting.seeded) for s in range(setting.seeds)]
    plots.tracing(runs, out / "prototypes.png")
    by = {of[0].case: [f.tracing for f in of] for of in zip(*runs, strict=True)}
    verdict = AuditVerdict("prototype tracing", "fewer images and less noise show more", _summary(by), None)
    if setting.demanding:
        expected = "1 image: AUC > 0.95 bare, < 0.75 at noise 8"
        holds = min(by["1 image, bare"]) > 0.95 and max(by["1 image, noise 8"]) < 0.75
        verdict = AuditVerdict("prototype tracing", expected, _summary(by), holds)
    return Outcome({"prototypes": [[asdict(f) for f in results] for results in runs]}, [verdict], "prototypes.png")


def hostile(target: AuditTarget, setting: AuditSettings, out: Path) -> Outcome:  # noqa: ARG001
    """Attack artificial records as a coordinator that chooses the model and knows all records but one (hostile.py)."""
    results: list[AttackResult] = []
    for attack in attacks_of_a_coordinator():
        for _ in range(RETRIES + 1):
            measured = measure(attack, trials=setting.trials)
            if measured.holds:
                break
        results.append(measured)
    passed = accepted()
    plots.refuted({m.attack: (m.printed, m.lower, m.gaussian) for m in results}, out / "hostile.png")
    verdicts = [
        AuditVerdict(
            f"hostile coordinator, {m.attack}",
            f"at most {m.printed:.3g}",
            f"{max(m.lower, m.gaussian):.2f}",
            m.holds,
        )
        for m in results
    ]
    shown = ", ".join(passed) if passed else f"all {len(list(dishonest()))} refused"
    verdicts.append(AuditVerdict("hostile manifests", "all refused", shown, not passed))
    numbers = {"attacks": [asdict(m) for m in results], "manifests_accepted": passed}
    return Outcome(numbers, verdicts, "hostile.png")


AUDITS: Mapping[str, Audit] = {
    "hostile": hostile,
    "white-box": white_box,
    "black-box": black_box,
    "membership": membership,
    "presence": presence,
    "prototypes": prototypes,
}
SHARES: Mapping[str, float] = {
    "hostile": 0.3,
    "white-box": 0.15,
    "black-box": 0.3,
    "membership": 0.1,
    "presence": 0.1,
    "prototypes": 0.05,
}
"""Approximate share of the total time that each audit takes, to estimate the time left."""


def minutes_left(done: Sequence[str], left: Sequence[str], seconds: float) -> float | None:
    behind, ahead = (sum(SHARES.get(name, 0.1) for name in names) for names in (done, left))
    return seconds / behind * ahead / 60 if behind else None


def save(file: Path, name: str, facts: Mapping[str, object]) -> None:
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    replace_file(file, f"{json.dumps({**stored, name: facts}, indent=1)}\n".encode(), 0o600)


def _canaries(target: AuditTarget) -> int:
    return min(canaries.CANARIES, len(target.y) // 2)


def _by_canaries(
    name: str, one: Callable[[AuditTraining, int], CanaryResult], m: int, setting: AuditSettings, file: Path
) -> Outcome:
    results: dict[str, list[CanaryResult]] = {}
    verdicts = []
    for training in setting.trainings:
        most = QUIET if training.epsilon == 1 and setting.demanding else training.epsilon
        runs = [_without_canaries(one, training, seed, most) for seed in range(setting.seeds)]
        results[_name(training)] = runs
        shown = ", ".join(f"{f.guesses.epsilon:.2f}" for f in runs)
        bounds = [f.guesses.epsilon for f in runs]
        if training.private:
            verdicts.append(AuditVerdict(f"{name}, {_name(training)}", f"at most {most:g}", shown, max(bounds) <= most))
            continue
        ceiling = refuted(setting.delta, m, m, m)
        demanded = setting.demanding and m >= canaries.CANARIES
        expected = f"at least {FLAGGED:g}" if demanded else f"{m} canaries can show at most {ceiling:.2f}"
        verdicts.append(AuditVerdict(f"{name}, {PLAIN}", expected, shown, min(bounds) >= FLAGGED if demanded else None))
    claims = {_name(t): t.epsilon for t in setting.trainings if t.private}
    plots.bounds(results, claims, file)
    rows = {training: [_row(f) for f in runs] for training, runs in results.items()}
    return Outcome({"bounds": rows, "ceiling": refuted(setting.delta, m, m, m)}, verdicts, file.name)


def _without_canaries(
    one: Callable[[AuditTraining, int], CanaryResult], training: AuditTraining, seed: int, most: float
) -> CanaryResult:
    for again in range(RETRIES + 1):
        result = one(training, seed + 1000 * again)
        if not training.private or result.guesses.epsilon <= most:
            break
    return result


def _presence(target: AuditTarget, setting: AuditSettings, training: AuditTraining, seed: int) -> attacks.Presence:
    lr = training.lr if training.private else 0.1
    short = AuditTraining(training.epsilon, steps=20, lr=lr, delta=training.delta)
    return attacks.class_presence(short, target, seed, seed if setting.seeded else None)


def _row(found: CanaryResult) -> Mapping[str, object]:
    return {"auc": found.auc, "score": found.score, **asdict(found.guesses)}


def _name(training: AuditTraining) -> str:
    return f"epsilon {training.epsilon:g}" if training.private else PLAIN


def _summary(values: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{name} {_repeat(several)}" for name, several in values.items())


def _repeat(values: Sequence[float]) -> str:
    several = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{several}"


# ---- manifests of a hostile coordinator ------------------------------------------------------------------------------

_SCHEMA = Schema((1, 8, 8), ("a", "b"))
BAD = (math.nan, math.inf, -1.0, 1e38, 1e-40)
NUMBERS = ("clip", "prototype_bound", "prototype_noise", "count_weight", "delta", "metric_noise", "coupled_clip_ratio")


def honest() -> RunManifest:
    method, model = build_method("fedavg", {}), build_model("digits_linear", {}, _SCHEMA, 0)
    return RunManifest(
        name="audit",
        method=NamedOptions("fedavg", {}),
        model=NamedOptions("digits_linear", {}),
        data="digits",
        schema=_SCHEMA,
        train=TrainConfig(batch_size=64),
        rounds=2,
        seed=0,
        members=(RunMember("a", units=100), RunMember("b", units=100)),
        layout=derive_layout(method, model, _SCHEMA, False),
        grid=FixedPointFormat("ring64", 2),
        privacy=NamedOptions("dp_record", {"epsilon": 8.0}),
    )


def dishonest() -> Iterator[tuple[str, RunManifest]]:
    made = honest()
    for name in NUMBERS:
        for value in BAD:
            yield (
                f"privacy.{name}={value:g}",
                replace(made, privacy=NamedOptions("dp_record", {"epsilon": 8.0, name: value})),
            )
    for value in BAD:
        yield f"train.lr={value:g}", replace(made, train=replace(made.train, lr=value))
        released = NamedOptions("analytic", {"release": "noisy", "bound": value})
        yield f"method=analytic method.bound={value:g}", replace(made, method=released)
        yield f"method.mu={value:g}", replace(made, method=NamedOptions("fedprox", {"mu": value}))
    yield "privacy.epsilon=nan", replace(made, privacy=NamedOptions("dp_record", {"epsilon": math.nan}))
    lite: dict[str, Option] = {"mu1": 0.0, "mu2": 0.1, "inter_weighting": "example", "lite": 10}
    yield "method=fedmr lite=10", replace(made, method=NamedOptions("fedmr", lite))
    yield "method=fedmr inter_weighting=batch", replace(made, method=NamedOptions("fedmr", {"mu1": 0.0, "mu2": 0.1}))
    yield "privacy=dp_none", replace(made, privacy=NamedOptions("dp_none", {}))


def accepted() -> list[str]:
    names = []
    for name, manifest in dishonest():
        try:
            CompiledRun.of(manifest)
        except FederationError:
            continue
        names.append(name)
    return names
