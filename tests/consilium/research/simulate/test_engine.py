"""How a simulation is spread over this machine: what is decided, what is refused, and that it changes no bit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilium.research.engines import workers
from consilium.research.engines.in_process import thread_count
from consilium.research.simulate import engine, runner
from consilium.research.simulate.checkpoints import Checkpoints
from consilium.research.simulate.engine import SimulationEngine, threads_of
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.run_spec import RunSpec
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.engine import Observer
from fl_core.types.records import RoundRecord
from fl_core.types.values import State
from tests.support.federations import manifest

WORDS = ("data=digits", "federation=iid-4", "model=digits_mlp", "train.max_steps=2", "rounds=3")
PRIVATE = ("privacy=dp_silo_small", "privacy.rng=test", "privacy.epsilon=1000", "privacy.delta=0.0001")


def digest(*words: str, **options: object) -> str:
    return runner.run(compose_simulation([*WORDS, *words]), engine=SimulationEngine(**options)).model_digest  # type: ignore[arg-type]


def test_a_silos_threads_are_the_runs_or_its_share_of_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "cores", lambda: 8)
    open_ = replace(manifest(), threads=0)
    with thread_count(8):
        assert threads_of(replace(open_, threads=3)) == 3
        assert threads_of(open_) == 2  # three silos on eight cores
        assert threads_of(replace(open_, cohort=1)) == 8
    with thread_count(1):
        assert threads_of(open_) == 1


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (PRIVATE, {}),
        ((), {"device": "cuda"}),
        ((), {"exact": True}),
        ((), {"engine": "ray"}),
        (("train.compile=true",), {}),
    ],
)
def test_workers_that_cannot_be_are_refused(
    words: tuple[str, ...], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("device") == "cuda":
        monkeypatch.setattr(engine, "choose_device", torch.device)
        monkeypatch.setattr(runner, "choose_device", lambda _: torch.device("cpu"))
    with pytest.raises(ConfigError, match="--workers") as caught:
        digest(*words, workers=2, **options)
    assert caught.value.code == "E-CFG-08"


def test_workers_for_which_there_is_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.memory, "free_memory", lambda _: 400 << 20)
    with pytest.raises(RefusedError, match="at most 1 workers") as caught:
        digest(workers=2)
    assert caught.value.code == "E-RUN-38"


def test_small_runs_and_private_ones_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WorkerPool", pytest.fail)
    digest()
    digest(*PRIVATE, "train.max_steps=1", "rounds=1")


def test_workers_that_nobody_asked_for_and_cannot_be_are_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> None:
        raise ConfigError("E-CFG-08", "a class of the caller")

    monkeypatch.setattr(engine.WorkerPool, "start", fails)
    monkeypatch.setattr(engine, "worthwhile", lambda *_: True)
    monkeypatch.setattr(engine, "cores", lambda: 2)
    with caplog.at_level(logging.WARNING):
        assert digest() == digest(workers=1)
    assert "train in one process: a class of the caller" in caplog.text
    with pytest.raises(ConfigError):
        digest(workers=2)


@pytest.mark.integration
def test_a_run_goes_on_with_the_threads_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine, or under another share of it: they decide the last bit."""
    kept, seen = Checkpoints(tmp_path), list[int]()

    class Watch(Observer):
        def closed(self, record: RoundRecord, server: State) -> None:
            seen.append(torch.get_num_threads())

    spec = replace(compose_simulation([*WORDS]), threads=0)
    for machine in (2, 1):
        for module in (engine, runner):
            monkeypatch.setattr(module, "threads_of", lambda _, n=machine: n)
        runner.run(spec, observer=Watch(), engine=SimulationEngine(checkpoints=kept, workers=1))
    assert set(seen) == {2}


@pytest.mark.slow
def test_a_simulation_in_workers_ends_in_the_same_summary_with_checkpoints_and_spilt_states(tmp_path: Path) -> None:
    words, kept = ("method=scaffold", "cohort=2", "personal=true"), Checkpoints(tmp_path / "kept", 1)
    assert digest(*words, workers=2, checkpoints=kept, spill=tmp_path / "spill") == digest(*words, workers=1)


@pytest.mark.parametrize("word", ["train.compile=true", "train.cudnn_benchmark=true"])
def test_kernels_chosen_by_their_speed_do_not_go_with_deterministic_ones(word: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-08.*--deterministic"):
        digest(word, exact=True)


@pytest.mark.parametrize(
    "word", ["train.amp=bf16", "train.channels_last=true", "train.cudnn_benchmark=true", "train.compile=true"]
)
def test_words_that_record_level_privacy_cannot_follow_are_refused_before_the_run(word: str) -> None:
    spec = compose_simulation([*WORDS, "privacy=dp_record", word])
    with pytest.raises(ConfigError, match=f"E-CFG-08.*record-level privacy.*{word}"):
        runner.build_simulation(spec)


def test_words_at_their_defaults_are_in_no_manifest_and_no_configuration() -> None:
    spec = compose_simulation(WORDS)
    run, _ = runner.build_simulation(spec)
    for text in (spec.to_json(), run.to_json()):
        assert not {"compile", "cudnn_benchmark", "augment_on_device"} & set(json.loads(text)["train"])
    chosen = compose_simulation([*WORDS, "train.compile=true"])
    assert json.loads(runner.build_simulation(chosen)[0].to_json())["train"]["compile"] is True
    assert RunSpec.from_json(chosen.to_json()).train.compile
