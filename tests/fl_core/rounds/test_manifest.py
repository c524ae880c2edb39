"""The manifest: what both sides agreed on, and refuse to go on without."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config.hydra_config import compose_spec
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import ConfigError, ProtocolError
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions, RunManifest, RunMember, make_members
from fl_core.types.records import TrainConfig
from privacy.compiled_run import CompiledRun
from tests.support.federations import manifest

pytestmark = pytest.mark.integration


def test_round_trip_is_exact() -> None:
    run = replace(
        manifest("fedmr", {"mu2": 0.25}, share=0.5),
        grid=FixedPointFormat("ring32", 3, {"delta": 1.25, "delta.weight": 100.0}),
        image_size=64,
        software="consilium-fl 1",
    )
    back = RunManifest.from_json(run.to_json())
    assert back == run
    assert back.to_json() == run.to_json()
    assert back.digest() == run.digest()


def test_a_manifest_is_read_checked_and_named_without_torch() -> None:
    file = Path(__file__).parents[2] / "data/manifest_v1.json"
    program = (
        "import sys, pathlib; from fl_core.rounds.manifest import RunManifest\n"
        "run = RunManifest.from_json(pathlib.Path(sys.argv[1]).read_text())\n"
        "run.require_possible(); print(run.digest()[:6], run.kind.name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2069d4", "training", "False"]


def test_a_manifest_of_the_first_version_keeps_its_text_and_its_digest() -> None:
    text = (Path(__file__).parents[2] / "data/manifest_v1.json").read_text()
    run = RunManifest.from_json(text)
    assert run.to_json() == text
    assert run.digest() == "2069d47b2fbe44f2a263893835c213a5331e1049c9f5d8ccb1a67e1ff5fa3747"


def test_a_refusal_names_the_place_and_the_nearest_name() -> None:
    with pytest.raises(ProtocolError, match=r"manifest\.train: there is no 'lrr': did you mean 'lr'"):
        RunManifest.from_json(edited(train={"lrr": 0.1}))
    with pytest.raises(ProtocolError, match=r"manifest\.layout\['delta'\]\.weight_shape: expected a list, found 3"):
        RunManifest.from_json(edited(layout={"delta": {"weight": 3, "tensors": {}}}))


def test_digest_does_not_depend_on_the_order_of_options() -> None:
    a, b = manifest("fedmr", {"mu1": 0.1, "mu2": 0.2}), manifest("fedmr", {"mu2": 0.2, "mu1": 0.1})
    assert a.digest() == b.digest()


def test_digest_is_stable() -> None:
    """The same text on every machine and in every version of format 1."""
    run = manifest(train=TrainConfig(batch_size=4, epochs=1))
    text = run.to_json()
    assert json.loads(text)["format"] == 1
    assert ": " not in text
    assert list(json.loads(text)) == sorted(json.loads(text))
    small = replace(run, layout={}, members=(RunMember("a"),), method=NamedOptions("fedavg"))
    assert small.digest() == "4890bef5ea45bfe68f2fc19ae5272805cf604a248ac8ba65fca3162c929b83cb"


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 4},
        {"seed": 1},
        {"cohort": 2},
        {"quorum": 1},
        {"threads": 2},
        {"name": "other"},
        {"data": "x"},
        {"train": TrainConfig(lr=0.5)},
        {"layout": {}},
        {"grid": FixedPointFormat("ring64", 4)},
        {"deadline_s": 1.0},
        {"members": (RunMember("north"), RunMember("south"), RunMember("east"))},
        {"image_size": 8},
        {"software": "x"},
    ],
)
def test_every_field_is_part_of_the_digest(change: dict[str, object]) -> None:
    assert replace(manifest(), **change).digest() != manifest().digest()  # type: ignore[arg-type]


def edited(**change: object) -> str:
    return json.dumps(json.loads(manifest().to_json()) | change)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (edited(extra=1), "E-WIRE-06"),
        (edited(format=2), "E-WIRE-01"),
        (edited(train={"lr": 0.1, "speed": 3}), "E-WIRE-06"),
        (edited(method={"title": "fedavg"}), "E-WIRE-06"),
        (edited(layout={"delta": {"weight": 3, "tensors": []}}), "E-WIRE-06"),
        (json.dumps({"format": 1}), "E-WIRE-06"),
        ("{", "E-WIRE-06"),
        ("[]", "E-WIRE-06"),
        ("null", "E-WIRE-06"),
        ('{"format":1,"format":1}', "E-WIRE-06"),
        ("[" * 100_000, "E-WIRE-06"),
        (edited(name="?").replace('"?"', "[" * 900 + "]" * 900), "E-WIRE-06"),
        (edited(rounds=0).replace('"rounds": 0', '"rounds": ' + "9" * 5000), "E-WIRE-06"),
        (edited(rounds=2**64), "E-WIRE-06"),
        (edited(rounds=1.0), "E-WIRE-06"),
        (edited(rounds=True), "E-WIRE-06"),
        (edited(personal=1), "E-WIRE-06"),
        (edited(deadline_s=float("nan")), "E-WIRE-06"),
        (edited(image_size="64"), "E-WIRE-06"),
        (edited(name=None), "E-WIRE-06"),
        (edited(members="abc"), "E-WIRE-06"),
        (edited(members=[{"name": "a", "units": None}]), "E-WIRE-06"),
        (edited(schema={"shape": [1, 8, "8"], "classes": ["a"]}), "E-WIRE-06"),
        (edited(grid={"ring": "ring9", "n_max": 1, "bounds": {}}), "E-WIRE-06"),
        (edited(model={"name": "digits_cnn", "options": {"norm": {"a": 1}}}), "E-WIRE-06"),
        (edited(model={"name": "digits_cnn", "options": {"norm": float("nan")}}), "E-WIRE-06"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        RunManifest.from_json(text)
    assert caught.value.code == code


def test_index_of_a_member_and_of_a_stranger() -> None:
    assert [manifest().index(n) for n in ("north", "east", "south")] == [0, 1, 2]
    with pytest.raises(ConfigError) as caught:
        manifest().index("west")
    assert caught.value.code == "E-RUN-05"


def test_rosters() -> None:
    assert [m.prototypes for m in make_members(["a", "b"], 0, 0.0)] == [False, False]
    assert sum(m.prototypes for m in make_members([f"h{k}" for k in range(10)], 0, 0.8)) == 8
    for names in ([], ["a", "a"]):
        with pytest.raises(ConfigError) as caught:
            make_members(names, 0, 1.0)
        assert caught.value.code == "E-CFG-02"
    with pytest.raises(ConfigError):
        make_members(["a"], 0, 1.5)


@pytest.mark.fault("a coordinator", "asks a hospital for a million threads or 10^12 rounds", "refused with E-CFG-02")
@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 10**6},
        {"threads": -1},
        {"rounds": 10**12},
        {"rounds": -1},
        {"cohort": -1},
    ],
    ids=str,
)
def test_numbers_that_no_run_has_are_refused_before_anything_is_built(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"E-CFG-02.*{next(iter(wrong))}"):
        CompiledRun.of(RunManifest.from_json(replace(manifest(), **wrong).to_json()))


def test_metrics_that_no_version_knows_are_refused_before_anything_is_built() -> None:
    lying = replace(manifest(), evaluation=EvaluationTerms(metrics="all"))
    with pytest.raises(ConfigError, match=r"E-CFG-02.*metrics"):
        CompiledRun.of(RunManifest.from_json(lying.to_json()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", v) for v in (0.0, -0.1, 1e38, math.inf)),
        *(("momentum", v) for v in (-0.1, 1.0, math.inf)),
        *((name, v) for name in ("weight_decay", "clip_norm", "lr_decay") for v in (-0.1, 1e38, math.inf)),
        *((name, v) for name in ("batch_size", "epochs") for v in (0, -1, 2**40)),
        *((name, v) for name in ("max_steps", "micro_batch") for v in (-1, 2**40)),
        ("optimizer", "sdg"),
        ("amp", "fp8"),
        ("augment_on_device", True),
    ],
)
@pytest.mark.parametrize("privacy", ["none", "dp_record"])
def test_a_schedule_that_cannot_be_is_refused_by_the_lead_and_by_the_hospital_alike(
    name: str, value: object, privacy: str
) -> None:
    """Whatever the coordinator between them says, the hospital's own check names the same key."""
    train = replace(TrainConfig(), **{name: value})  # type: ignore[arg-type]
    lying = replace(manifest(), train=train, privacy=NamedOptions(privacy))
    with pytest.raises(ConfigError, match=rf"E-CFG-02.*train\.{name}") as at_hospital:
        CompiledRun.of(RunManifest.from_json(lying.to_json()))
    with pytest.raises(ConfigError) as at_lead:
        replace(compose_spec(["data=digits"]), train=train)
    assert str(at_lead.value) == str(at_hospital.value)


def test_a_number_that_is_none_is_refused_when_a_manifest_is_read() -> None:
    for value in (math.nan, 2**70, "1", None, True, [0.1]):
        for name in ("lr", "batch_size"):
            with pytest.raises(ProtocolError, match=rf"E-WIRE-06.*train\.{name}"):
                RunManifest.from_json(edited(train={name: value}))
