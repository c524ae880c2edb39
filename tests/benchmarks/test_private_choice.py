"""What a private release leaves open: chosen on validation images, and what a private run of images takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from benchmarks import run_store
from benchmarks.frozen import private
from benchmarks.frozen.private import Setting
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core import datasets
from fl_core.methods.disjoint import analytic
from privacy.compiled_run import CompiledRun

pytestmark = pytest.mark.integration


def stored() -> Mapping[str, run_store.Run]:
    return run_store.read(private.FOLDER / private.STORE)


def test_the_defaults_of_a_private_run_are_those_that_validation_images_chose() -> None:
    runs = stored()
    chosen, _ = private.search(lambda asked: {setting.key: runs[setting.key] for setting in asked})
    kind, width = str(chosen.pop("body")).split()
    assert {name: getattr(analytic, name) for name in chosen} == chosen
    spec = compose_spec(["method=analytic", "data=digits", "federation=hospitals6", "privacy=dp_record"])
    assert (spec.model["name"], spec.model["kind"], spec.model["width"]) == ("random_features", kind, int(width))
    made = manifest_from(spec, [f"hospital{k}" for k in range(private.HOSPITALS)], [240.0] * 6)
    assert made.method.options["release"] == "centred"
    assert (private.FOLDER / private.TABLE).read_text() == private.table(runs)


def test_validation_images_are_a_fifth_of_the_training_images_and_no_test_image() -> None:
    x, y, measured, truth = private.validation("digits")
    silos = [datasets.load(str(r)) for r in datasets.federation("digits", "hospitals6")]
    trained, tested = ({bytes(image) for silo in silos for image in _bytes(split(silo))}
                       for split in (lambda s: s.train, lambda s: s.test))  # fmt: skip
    inside, apart = ({bytes(image) for image in (v * 16).byte().flatten(1).numpy()} for v in (x, measured))
    assert inside | apart == trained
    assert not inside & apart
    assert not apart & tested - trained
    assert (len(y), len(truth)) == (len(x), len(measured))
    assert 0.15 < len(measured) / (len(x) + len(measured)) < 0.25


def _bytes(split):  # type: ignore[no-untyped-def]
    return (split.batch(torch.arange(len(split)))[0] * 16).byte().flatten(1).numpy()


def test_the_noise_of_the_search_is_that_of_a_run_of_six_hospitals() -> None:
    """Against the plan of the run: z of both releases, as its ledger is charged, and all hospitals' noise added up."""
    for epsilon, shared in ((8.0, True), (1.0, False)):
        words = ["method=analytic", "data=digits", "federation=hospitals6", "privacy=dp_record"]
        words += ["privacy.rng=test", "privacy.test_data=public", f"privacy.epsilon={epsilon}"]
        words += ["privacy.placement=distributed", "secagg=on", "secagg.min_sum=6"] if shared else []
        names = [f"hospital{k}" for k in range(6)]
        run = CompiledRun.of(manifest_from(compose_spec(words), names, [240.0] * 6))
        of_mean, of_sums = run.profile.releases(0)
        z = 1 / math.sqrt(sum(1 / release.mechanism.noise**2 for release in (of_mean, of_sums)))
        summed = z * math.sqrt(6 / 5) if shared else z * math.sqrt(6)
        assert private.noise_of(epsilon, shared=shared) == pytest.approx(summed, rel=1e-3)


def test_a_search_takes_the_best_of_each_line_and_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "SETS", ("digits",))
    monkeypatch.setattr(private, "START", {"body": "patches 36", "RADIUS": 9.0})
    monkeypatch.setattr(private, "GRID", {"RADIUS": (9.0, 0.35), "body": ("patches 36", "patches 18")})
    asked: list[Setting] = []

    def complete(settings):  # type: ignore[no-untyped-def]
        asked.extend(settings)
        return {setting.key: private.measure(setting) for setting in settings}

    chosen, rows = private.search(complete)
    assert chosen["RADIUS"] == 0.35  # nine times the bound leaves noise alone
    assert [setting.values["RADIUS"] for setting in asked[2:4]] == [0.35, 0.35]
    assert chosen["RIDGE_BELOW"] in private.THRESHOLDS
    assert len(rows) == 4 + len(private.THRESHOLDS)
