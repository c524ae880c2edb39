"""Simulations that are killed and go on: the bits of an undisturbed run, and no checkpoint that is not whole."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from consilium.research import commands as research
from consilium.research.simulate import checkpoints, runner
from consilium.research.simulate.checkpoints import Checkpoints
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.run_spec import RunSpec
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.engine import Observer
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State

pytestmark = pytest.mark.integration

ROUNDS, EVERY = 7, 3
BASE = ("data=digits", "federation=iid-4", "model=digits_mlp", "train.max_steps=2", f"rounds={ROUNDS}", "seed=3")
RUNS = {
    "a server that counts silo states": ("method=scaffold", "cohort=2"),
    "personal models of silos that wait": ("method=ditto", "cohort=2", "personal=true"),
    "masks, a census and medians of norms": (
        "method=fednh",
        "secagg=on",
        "secagg.min_contributors=2",
        "aggregator=norm_clipped",
    ),
    "record privacy": ("method=fedavg", "privacy=dp_record", "privacy.rng=test", "privacy.epsilon=50"),
    "silo privacy": (
        "method=fedavg",
        "privacy=dp_silo_small",
        "privacy.rng=test",
        "privacy.epsilon=1000",
        "privacy.delta=0.0001",
    ),
}


class KilledError(BaseException):
    """Ends a simulation as a kill would: nothing of ours catches it."""


class Rounds(Observer):
    """Notes the rounds that open, and ends the simulation at an event of a round."""

    def __init__(self, at: tuple[str, int] | None = None) -> None:
        self.opened_rounds: list[int] = []
        self._at, self._round = at, -1

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        self._round = context.round
        self.opened_rounds.append(context.round)
        self._event("opened")

    def closed(self, record: RoundRecord, server: State) -> None:
        self._event("closed")

    def _event(self, name: str) -> None:
        if self._at == (name, self._round):
            raise KilledError


@cache
def composed(words: tuple[str, ...]) -> RunSpec:
    return compose_simulation([*BASE, *words])


def go(words: tuple[str, ...], folder: Path, watch: Observer | None = None, spill: Path | None = None) -> object:
    engine = SimulationEngine(spill=spill, checkpoints=Checkpoints(folder, EVERY))
    return runner.run(composed(words), None, watch, engine).summary()


@cache
def undisturbed(words: tuple[str, ...]) -> object:
    return runner.run(composed(words)).summary()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    go((), folder)
    return folder


@pytest.fixture
def kept(finished: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints of a finished run."""
    return shutil.copytree(finished, tmp_path / "kept")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "record privacy" else []) for n in RUNS]
)
def test_a_run_that_was_ended_twice_ends_in_the_summary_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    for event in (("closed", 3), ("opened", 6)):
        with pytest.raises(KilledError):
            go(RUNS[name], tmp_path, Rounds(event))
    last = Rounds()
    assert go(RUNS[name], tmp_path, last) == undisturbed(RUNS[name])
    assert last.opened_rounds == [6, 7]


def test_states_of_silos_that_lie_in_files_come_back(tmp_path: Path) -> None:
    words, spill = RUNS["a server that counts silo states"], tmp_path / "spill"
    with pytest.raises(KilledError):
        go(words, tmp_path / "kept", Rounds(("closed", 5)), spill=spill)
    assert go(words, tmp_path / "kept", spill=spill) == undisturbed(words)


def test_an_end_costs_at_most_the_rounds_between_two_checkpoints(tmp_path: Path) -> None:
    for at in (2, 5):
        with pytest.raises(KilledError):
            go((), tmp_path / str(at), Rounds(("closed", at)))
        again = Rounds()
        go((), tmp_path / str(at), again)
        assert at - EVERY <= again.opened_rounds[0] <= at


def test_a_finished_run_is_only_evaluated_again(kept: Path) -> None:
    again = Rounds()
    assert go((), kept, again) == undisturbed(())
    assert again.opened_rounds == [ROUNDS]


def test_slow_rounds_are_kept_every_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    with pytest.raises(KilledError):
        go((), tmp_path, Rounds(("closed", 1)))
    again = Rounds()
    go((), tmp_path, again)
    assert again.opened_rounds[0] == 1


def test_the_newest_two_are_kept(kept: Path) -> None:
    assert sorted(p.name for p in kept.iterdir()) == ["lock", "round-000006", "round-000007"]


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "facts", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(
    damage: str, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = kept / "round-000007"
    file = newest / ("checkpoint.json" if damage in ("facts", "empty") else "server")
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-4])
    elif damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    again = Rounds()
    with caplog.at_level(logging.WARNING):
        assert go((), kept, again) == undisturbed(())
    assert again.opened_rounds == [6, 7]
    assert "round-000007" in caplog.text
    assert "after round 6" in caplog.text
    whole = Rounds()
    go((), kept, whole)
    assert whole.opened_rounds == [7]  # it was written again


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_in_silence(kept: Path) -> None:
    for file in kept.glob("*/server"):
        file.write_bytes(b"x")
    with pytest.raises(StateError, match="to start again, remove that folder") as caught:
        go((), kept)
    assert caught.value.code == "E-STATE-22"


def test_what_a_kill_left_half_written_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        go((), tmp_path, Rounds(("closed", 4)))
    half = tmp_path / "unfinished"
    half.mkdir()
    (half / "server").write_bytes(b"half")
    again = Rounds()
    assert go((), tmp_path, again) == undisturbed(())
    assert again.opened_rounds[0] == 3
    assert not half.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("train.lr=0.5",), r"manifest\.train\.lr: 0\.\d+ stored, 0\.5 now"),
        (("rounds=9",), r"manifest\.rounds: 7 stored, 9 now"),
        (("federation=iid-4", "seed=4"), "seed"),
        (("federation.partition_seed=9",), r"data\.0"),
    ],
)
def test_a_changed_configuration_is_refused_with_what_differs(words: tuple[str, ...], named: str, kept: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        go(words, kept)
    assert caught.value.code == "E-CFG-08"


def test_two_simulations_do_not_share_a_folder_also_when_its_lock_file_is_gone(tmp_path: Path) -> None:
    with Checkpoints(tmp_path).locked():
        with pytest.raises(StateError, match="E-STATE-20"):
            go((), tmp_path)
        (tmp_path / "lock").unlink()
        with pytest.raises(StateError, match="E-STATE-20"):
            go((), tmp_path)


def test_what_checkpoints_of_format_1_say_of_a_run_keeps_its_names(kept: Path) -> None:
    facts = json.loads((kept / "round-000007/checkpoint.json").read_text())
    body = json.loads(facts["body"])
    assert (sorted(facts), facts["format"]) == (["body", "digest", "format"], 1)
    assert sorted(body) == [
        *("best_round", "files", "identity", "measured", "records", "releases", "round", "silos", "threads"),
    ]
    assert sorted(body["identity"]) == ["computed", "data", "manifest"]
    low, high = body["records"][0]["clinical"]["auc"][0]
    assert (body["records"][0]["kind"], 0 <= low <= high <= 1) == ("train", True)


def test_no_rounds_between_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoints(tmp_path, 0)
    assert caught.value.code == "E-CFG-02"


def test_the_command_goes_on_in_its_folder_and_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BASE, "rounds=2", "train.max_steps=1"]
    research.simulate(words, out=tmp_path, checkpoint_every=1, as_json=True)
    first = capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("round-*")) == ["round-000001", "round-000002"]
    research.simulate(words, out=tmp_path)
    assert "before round   1" not in capsys.readouterr().err
    research.simulate(words, out=tmp_path, as_json=True)
    assert capsys.readouterr().out == first
    with pytest.raises(ConfigError, match="--out FOLDER"):
        research.simulate(words, checkpoint_every=1)


def test_a_run_that_is_ended_while_it_writes_checkpoints_ends_in_the_bits_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 1, 4, 7, ... files were put on the disk, until no more are left to write."""
    fsync, words, left = os.fsync, RUNS["a server that counts silo states"], 0

    def ends(file: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        fsync(file)

    monkeypatch.setattr(os, "fsync", ends)
    for before in itertools.count(1, 3):
        left = before
        try:
            found = go(words, tmp_path)
            break
        except KilledError:
            continue
    assert found == undisturbed(words)
    assert before > 10  # so many ends were there
