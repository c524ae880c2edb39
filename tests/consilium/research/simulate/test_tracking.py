"""`coordinator simulate --tracker`: each round as it is closed, as the displays show it; nothing that noise hides."""

from __future__ import annotations

import inspect
import pickle
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from consilium import ConfigError, Progress, simulate
from consilium.research import commands as research
from consilium.research import trackers
from consilium.research.simulate.runner import SimulationJob, run_id, tracked
from coordinator.cli.runs import watch
from fl_core.errors import UnavailableError
from privacy.accounting import uncertainty

pytestmark = pytest.mark.integration

WORDS = {"data": "digits", "federation": "p5c2", "rounds": 2, "train": {"max_steps": 2}, "threads": 1}
Curves = dict[str, list[tuple[int, float]]]


def read(folder: Path) -> Curves:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_each_round_is_in_the_tracker_before_the_next_one_begins_and_says_what_the_result_says(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(progress: Progress) -> None:
        (folder,) = tmp_path.iterdir()
        seen.append(len(read(folder).get("accuracy", ())))

    made = simulate(**WORDS, tracker=f"tensorboard:{tmp_path}", progress=look)
    assert seen == [0, 1]  # `progress` comes first in each round
    found = read(tmp_path / run_id(made.manifest))
    assert [step for step, _ in found["accuracy"]] == [0, 1, 2]
    assert [v for _, v in found["accuracy"]] == pytest.approx([e.point for e in made.result.estimates])
    assert found["macro_auc"][-1][1] == pytest.approx(made.frame.query("measure == 'macro_auc'").value.iloc[-1])
    assert found["macro_auc/low"][-1][1] <= found["macro_auc"][-1][1] <= found["macro_auc/high"][-1][1]
    assert made.digest == simulate(**WORDS).digest


def test_a_private_run_gives_a_tracker_what_its_displays_show_and_no_true_accuracy(tmp_path: Path) -> None:
    made = simulate(
        **WORDS | {"rounds": 1},
        method="fedavg",
        privacy={"name": "dp_record", "epsilon": 8},
        tracker=f"tensorboard:{tmp_path}",
    )
    found = read(tmp_path / run_id(made.manifest))
    assert "macro_auc" not in found
    for step, record in enumerate(made.result.records):
        shown = uncertainty.accuracy(record.correct, record.examples, made.result.noise.of(record.included))
        logged = [dict(found.get(f"accuracy{end}", ())).get(step) for end in ("", "/low", "/high")]
        assert logged == ([None] * 3 if shown.point is None else pytest.approx([shown.point, shown.low, shown.high]))


class Fake:
    def __init__(self, fails_at: int = 99) -> None:
        self.fails_at, self.steps, self.state = fails_at, list[int](), ""

    def log(self, step: int, values: object, tags: object) -> None:
        if step == self.fails_at:
            raise UnavailableError("E-NET-01", "expected MLflow, found nobody")
        self.steps.append(step)

    def end(self, state: str) -> None:
        self.state = state


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    made = [Fake(1), Fake()]
    opened = iter(made)
    monkeypatch.setattr(trackers, "open_tracker", lambda *_: next(opened))
    return made


def test_a_tracker_that_takes_nothing_more_is_warned_about_and_the_simulation_goes_on(fakes: list[Fake]) -> None:
    with pytest.warns(UserWarning, match=r"E-NET-01.*simulate again with --tracker"):
        made = simulate(**WORDS, tracker=["mlflow:http://127.0.0.1:9", "tensorboard:x"])
    assert len(made.result.records) == 3
    assert [(fake.steps, fake.state) for fake in fakes] == [([0], ""), ([0, 1, 2], "finished")]


@pytest.mark.parametrize(("raised", "state"), [(KeyboardInterrupt, "aborted"), (ValueError, "failed")])
def test_a_simulation_that_ends_early_ends_so_in_the_tracker(
    fakes: list[Fake], raised: type[BaseException], state: str
) -> None:
    def stop(_: Progress) -> None:
        raise raised

    fakes[0].fails_at = 99
    with suppress(raised):
        simulate(**WORDS, tracker="tensorboard:x", progress=stop)
    assert fakes[0].state == state


def test_another_form_is_refused_before_any_data_are_read() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*tensorboard:DIR or mlflow:URI"):
        simulate(data="folder", tracker="wandb:me")  # without a path of the data, which is said later
    with pytest.raises(ConfigError, match=r"E-CFG-02"), tracked(["tensorboard:"], None, print):
        pass


def test_the_command_has_the_option_of_watch_and_each_run_of_a_sweep_a_run_in_the_tracker(tmp_path: Path) -> None:
    ours, theirs = (inspect.signature(of).parameters["tracker"] for of in (research.simulate, watch))
    assert ours == theirs
    fixed = ["data=digits", "federation=p5c2", "rounds=1", "train.max_steps=1", "threads=1"]
    job = SimulationJob(trackers=[f"tensorboard:{tmp_path}"])
    for seed in (0, 1):
        run = pickle.loads(pickle.dumps(partial(job.run_of_sweep, ["seed"])))  # as it comes to a process of its own
        run([*fixed, f"seed={seed}"])
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    assert all(read(folder)["accuracy"][-1][0] == 1 for folder in folders)


def test_the_same_configuration_is_the_same_run_and_its_name_is_one_that_trackers_take() -> None:
    manifests = [simulate(**WORDS | {"rounds": 1}, seed=seed).manifest for seed in (0, 0, 1)]
    first, again, other = map(run_id, manifests)
    assert first == again != other
    assert trackers._RUN_ID.fullmatch(first)
