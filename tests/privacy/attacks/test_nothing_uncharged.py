"""Nothing that leaves a hospital in a private run depends on its data, but through a release that was charged.

Non-interference: with the mechanisms blinded (empty samples, sums and counts of noise alone, an update of zeros), two
hospitals of other records, classes and sizes send the same bytes. So whatever else a method sends, sizes, step counts,
losses, presence of classes, is public by declaration.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.research.engines.in_process import InProcessSilo, MemoryStateStore, RoundHistory, SiloShare, simulate
from fl_core.errors import ConfigError
from fl_core.methods import METHODS, build_method
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.values import Bundle, ClassSums, MomentSums
from privacy import profiles
from privacy.accounting.release_plan import ReleaseAllowance
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise import grid, sources
from privacy.mechanisms.noise.sources import NoiseSource
from privacy.mechanisms.record import private_data
from privacy.mechanisms.silo.guard import SiloDpGuard
from privacy.profiles import record
from privacy.release_log import InMemoryReleaseLog
from tests.support import some
from tests.support.federations import FED, Given, manifest, same_bundle, shares

pytestmark = pytest.mark.integration

OPTIONS = {
    "fedmr": {"mu1": 1e-4, "mu2": 0.5, "inter_weighting": "example"},
    "fedcd": {"restarts": 2, "steps": 3},
    "fedgen": {"alpha": 1.0, "beta": 1.0, "made": 4, "noise": 3, "hidden": 8, "steps": 2, "draws": "class"},
    "creff": {"features": 3, "feature_steps": 2, "epochs": 1, "batch": 5},
    "fedbabu": {"finetune_epochs": 1},
    "fedrep": {"tune_epochs": 1},
    "analytic": {"release": "noisy"},
    "fedvls": {"suppression": "example"},
}


def run_of(method: str, profile: str = "dp_record", personal: bool = True, **terms: object) -> RunManifest:
    made = manifest(method, OPTIONS.get(method, {}), personal=personal)  # type: ignore[arg-type]
    members = tuple(replace(m, units=14) for m in made.members)
    choice = NamedOptions(profile, {"rng": "test", "epsilon": 50.0, **terms})  # type: ignore[arg-type]
    return replace(made, members=members, privacy=choice, layout={**made.layout, **profiles.extra_parts(choice)})


def other() -> SiloShare:
    """Make a hospital of more records, in other classes, than the first of `shares`."""
    draw = torch.Generator().manual_seed(99)
    x, y = torch.rand(23, 1, 8, 8, generator=draw), torch.randint(2, 4, (23,), generator=draw)
    return SiloShare(Given(x, y), Given(x[:5].clone(), y[:5].clone()))


PUBLIC = Given(torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(5)), torch.arange(6) % 4)


def sent(run: RunManifest, share: SiloShare, public: bool = False) -> tuple[list[Bundle], InMemoryReleaseLog]:
    """Let a hospital train and evaluate, and return all that leaves it."""
    log, runtime = InMemoryReleaseLog(), CompiledRun.of(run).silo_runtime()
    opened, open_test = CompiledRun.of(run).profile.data_factory(0, log), PUBLIC if public else None
    port = InProcessSilo(run, 0, share, runtime, open_test, opened)
    msg = runtime.method.broadcast(RunSetup.of(run).initial_state())
    rounds = [(0, TaskKind.TRAIN), (3, TaskKind.EVALUATE)]
    return [port.round(msg, replace(FED, round=t), kind) for t, kind in rounds], log


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mechanisms of record-level privacy see no data: what is left of them is noise.

    Sums still show the extractor that they were asked of: one that was trained without being charged would be seen.
    """

    def sums(
        query: ClassSums,
        examples: object,
        units: object,
        bound: float,
        weight: float,
        z: float,
        noise: NoiseSource,
        **more: object,
    ) -> dict[str, Tensor]:
        extracted = query.vectors(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))[0].double()
        shape = (query.n_classes, len(extracted))
        return {"sum": (alone(noise, z, *shape) + extracted).float(), "count": alone(noise, z, shape[0]).float()}

    def alone(noise: NoiseSource, z: float, *shape: int) -> Tensor:
        return grid.add_noise(torch.zeros(shape).long(), 1e-3, z, noise)

    monkeypatch.setattr(sources, "poisson_sample", lambda *_: torch.zeros(0, dtype=torch.long))

    def moments(
        query: MomentSums, examples: object, units: object, z: float, noise: NoiseSource, **more: object
    ) -> dict[str, Tensor]:
        extracted = query.vectors(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))[0]
        a, b = alone(noise, z, query.width, query.width), alone(noise, z, query.n_classes, query.width)
        return {"a": a, "b": b + extracted, "variance": torch.tensor(z**2)}

    monkeypatch.setattr(private_data, "class_sums", sums)
    monkeypatch.setattr(private_data, "moment_sums", moments)
    monkeypatch.setattr(private_data, "class_counts", lambda examples, units, n, z, noise: alone(noise, z, n).float())


def private(method: str) -> bool:
    try:
        capabilities.check_supported(build_method(method, OPTIONS.get(method, {})), {Capability.DIFFERENTIAL_PRIVACY})
    except ConfigError:
        return False
    return True


PRIVATE = [m for m in sorted(METHODS) if private(m)]


@pytest.mark.parametrize("method", PRIVATE)
def test_t_43_t_28_what_leaves_under_record_level_privacy_depends_on_data_through_the_mechanisms_alone(
    method: str, blind: None
) -> None:
    mine, charged = sent(run_of(method), shares()[0])
    theirs, also = sent(run_of(method), other())
    assert charged.releases == also.releases
    for a, b in zip(mine, theirs, strict=True):
        assert same_bundle(a, b)


@pytest.mark.parametrize("method", some(PRIVATE))
def test_with_uniform_weights_every_method_counts_a_hospital_once(method: str) -> None:
    """Weights per class are noisy counts, which are charged; a weight of one number is 1, or 0 of what is not there."""
    bundles, _ = sent(run_of(method, personal=False, weights="uniform"), shares()[0])
    weights = {float(part.weight) for part in bundles[0].values() if not part.weight.dim()}
    assert weights <= {0.0, 1.0}
    sized, _ = sent(run_of(method, personal=False), shares()[0])
    assert {float(part.weight) for part in sized[0].values() if not part.weight.dim()} <= {0.0, 1.0, 14.0}


def test_all_methods_are_covered_but_those_that_say_that_they_cannot_be() -> None:
    assert set(METHODS) - set(PRIVATE) == {"fedcd"}


def test_with_open_eyes_the_same_two_hospitals_differ() -> None:
    """The test above can fail: what was blinded is what told the hospitals apart."""
    mine, _ = sent(run_of("fedproto"), shares()[0])
    theirs, _ = sent(run_of("fedproto"), other())
    assert not same_bundle(mine[0], theirs[0])


TRAINING = sorted(set(METHODS) - {"analytic"})
ADAPTIVE: dict[str, object] = {"clipping": "adaptive", "bit_noise": 20.0}


@pytest.mark.parametrize(
    ("method", "terms"), [*((name, {}) for name in TRAINING), *some([(name, ADAPTIVE) for name in TRAINING])]
)
def test_t_43_what_leaves_under_silo_level_privacy_depends_on_data_through_the_guard_alone(
    method: str, terms: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from privacy.mechanisms.silo import adaptive_clipping

    run = run_of(method, "dp_silo_small", False, allow_large=True, **terms)
    if method == "local" and terms:  # it sends nothing whose norm a clip could follow
        with pytest.raises(ConfigError, match=r"clipping=fixed"):
            CompiledRun.of(run)
        return
    plain = SiloDpGuard._rounded

    def blinded(self: SiloDpGuard, parts: Bundle, clip: float, noise: float) -> Bundle:
        return {
            name: replace(
                part,
                total={k: v * 0 for k, v in part.total.items()},
                weight=part.weight * 0 if part.weight.dim() else part.weight,
            )
            for name, part in plain(self, parts, clip, noise).items()
        }

    monkeypatch.setattr(SiloDpGuard, "_rounded", blinded)
    if terms:
        start = CompiledRun.of(run).guards.silo[0].initial_setting()
        monkeypatch.setattr(
            SiloDpGuard, "with_setting", lambda self, _: replace(self, broadcast_clip=float(start["clip"]))
        )
    (mine, charged), (theirs, also) = sent(run, shares()[0]), sent(run, other())
    assert charged.releases == also.releases
    assert (adaptive_clipping.PART in mine[0]) is bool(terms)
    for a, b in zip(mine, theirs, strict=True):
        assert same_bundle(a, b)


def test_exact_sums_are_refused_under_silo_level_privacy_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"E-PRIV-16.*set privacy=dp_record"):
        _ = CompiledRun.of(run_of("analytic", "dp_silo_small", False, allow_large=True)).guards


@pytest.mark.parametrize("public", [False, True], ids=["at a hospital", "with a public test set"])
@pytest.mark.parametrize("method", ["fedavg", "fedbabu", "fedrep", "fedgela", "fedproto", "ditto", "fednh"])
def test_personal_models_are_in_the_dry_run_every_release_is_planned_and_every_planned_one_is_made(
    method: str, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ReleaseAllowance] = []

    def allow(planned: list[object]) -> ReleaseAllowance:
        opened.append(ReleaseAllowance(planned))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(record, "ReleaseAllowance", allow)
    run = run_of(method)
    _, log = sent(run, shares()[0], public)
    assert [r for s in opened for r in s.left] == []
    assert [r for s in opened for r in s.made] != []
    purposes = [r.purpose for r in log.releases]
    assert purposes.count("evaluation") == 2 * METHODS[method].has_global_model + 1
    extra = {"fedbabu": 1, "fedrep": 1}.get(method, 0)
    without = sent(run_of(method, personal=False), shares()[0])[1].releases
    assert purposes.count("training") == [r.purpose for r in without].count("training") + extra
    assert ("class counts" in purposes) is (public or method == "fedgela")


@pytest.mark.parametrize("profile", ["dp_record", "dp_silo_small"])
def test_t_23_two_production_runs_differ_and_no_state_holds_a_generators(profile: str) -> None:
    """Secure noise is never repeated; what is checkpointed has the groups and tensors of the plain run, no more."""
    more = {"allow_large": True} if profile == "dp_silo_small" else {}
    run = run_of("fedavg", profile, False, rng="secure", **more)
    (mine, _), (again, _) = sent(run, shares()[0]), sent(run, shares()[0])
    assert not same_bundle(mine[0], again[0])
    states = [MemoryStateStore(), MemoryStateStore()]
    finals = []
    for made, kept in ((run, states[0]), (replace(run, privacy=NamedOptions("none")), states[1])):
        opened = (
            [CompiledRun.of(run).profile.data_factory(k, InMemoryReleaseLog()) for k in range(3)]
            if made is run
            else None
        )
        finals.append(simulate(CompiledRun.of(made), shares(), RoundHistory(), opened, kept))
    assert {g: sorted(t) for g, t in finals[0].items()} == {g: sorted(t) for g, t in finals[1].items()}
    for k in range(3):
        one, other_ = ({g: sorted(t) for g, t in (s.get(k) or {}).items()} for s in states)
        assert one == other_
    assert all(v.dtype is not torch.uint8 for group in finals[0].values() for v in group.values())


@pytest.mark.parametrize("profile", ["dp_record", "dp_silo_small"])
def test_t_45_the_report_names_what_its_epsilon_means(profile: str) -> None:
    run = run_of("fedavg", profile, False, **({"allow_large": True} if profile == "dp_silo_small" else {}))
    found = CompiledRun.of(run).profile.report([sent(run, shares()[0])[1].releases] * 3)
    assert found is not None
    for fact in (
        "unit",
        "adjacency",
        "delta",
        "accountant",
        "noise",
        "rng",
        "private",
        "epsilon",
        "epsilon_replace_one",
    ):
        assert found[fact] not in (None, ""), fact
    assert (found["rng"], found["private"]) == ("test", False)
    assert "classes" in str(found["note"])
