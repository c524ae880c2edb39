"""What a GPU is needed for, on a CPU: each step once, further rounds at each visit, and a step that fails is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, runs, throughput
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import ConfigError
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext


class Visit:
    """A visit whose time is counted in rounds."""

    device, data_root = "cpu", None

    def __init__(self, out: Path, rounds: int) -> None:
        self.out, self.left, self.noted = out, float(rounds), list[Mapping[str, object]]()

    def note(self, file: str, line: Mapping[str, object]) -> None:
        self.noted.append(line)
        self.left -= "after" in line


def test_each_visit_does_further_rounds_of_the_run_with_the_fewest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "TURN", 1)
    asked, seen = runs.listed(True, "")[:2], []
    for rounds in (1, 2, 9):
        visit = Visit(tmp_path, rounds)
        found = runs.go_on(asked, visit)
        seen += [(line["run"], line["after"]) for line in visit.noted if "after" in line]
    first, second = (run.name for run in asked)
    assert seen == [(first, 0), (second, 0), (first, 1), (second, 1), (first, 2), (second, 2)]
    assert found == {"complete": True, "rounds": {first: 2, second: 2}}


def test_the_runs_are_the_papers_with_their_forms_of_fedmr() -> None:
    listed = runs.listed(False, "data=cifar10")
    assert len({run.name for run in listed}) == 16
    some = {run.name: run.words for run in listed if run.name in ("FedMR code p5c2", "FedMR paper p10c3")}
    cuda = torch.device("cuda")
    specs = {name: compose_simulation(runs._words(runs.Run(name, words), cuda)) for name, words in some.items()}
    assert all(s.train.augment_on_device and s.train.cudnn_benchmark for s in specs.values())
    small = runs._words(runs.listed(True, "")[0], cuda)
    assert not compose_simulation(small).train.augment_on_device  # the digits are not augmented there
    assert {(s.model["name"], s.data["name"], s.train.epochs, s.train.amp) for s in specs.values()} == {
        ("resnet18", "cifar10", 10, "bf16")
    }
    code, paper = specs["FedMR code p5c2"].method, specs["FedMR paper p10c3"].method
    assert (code["intra"], code["mu1"], code["mu2"]) == ("code", 0.01, 0)
    assert (paper["intra"], paper["mu1"], paper["mu2"]) == ("paper", 1e-5, 0.1)


def test_a_step_is_done_once_and_one_that_fails_is_told_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def sound(_: gpu.Visit) -> dict[str, object]:
        calls.append("sound")
        return {"number": 1}

    def failing(_: gpu.Visit) -> dict[str, object]:
        calls.append("failing")
        raise ConfigError("E-CFG-02", "no such device")

    visit = gpu.Visit(tmp_path, "cpu", float("inf"), True, None, "")
    assert [gpu.visit(visit, {"a": sound, "b": failing}) for _ in range(2)] == [1, 1]
    assert calls == ["sound", "failing", "failing"]
    kept = gpu.lines(tmp_path / "steps.jsonl")
    assert [(line["step"], line["complete"]) for line in kept] == [("a", True), ("b", False), ("b", False)]
    assert kept[1]["wrong"] == ["ConfigError: E-CFG-02: no such device"]
    assert all({"date", "device"} <= set(line) for line in kept)
    over = gpu.Visit(tmp_path / "over", "cpu", 0.0, True, None, "")
    assert gpu.visit(over, {"a": sound}) == 0
    assert "not reached in time: a" in capsys.readouterr().out
    assert gpu.lines(tmp_path / "over/steps.jsonl") == []


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--device", "cuda:99", "--out", str(tmp_path)]) == 2
    assert "E-CFG-02" in capsys.readouterr().err


def test_a_bare_loop_and_a_silos_training_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "WORDS", throughput.WORDS[:-1])  # compiled in the slow test
    found = throughput.measure("cpu", small=True)
    assert len(found["images_per_second"]) == len(throughput.WORDS)  # type: ignore[arg-type]
    assert throughput.measure("cpu", True, lambda: 0.0) == {"complete": False, "images_per_second": {}}


def test_a_check_names_what_is_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    words, more, options, _ = checks.KINDS["plain"]
    monkeypatch.setattr(checks, "BASE", (*checks.BASE, "rounds=1", "train.max_steps=1"))
    monkeypatch.setattr(
        checks, "KINDS", {"same": (words, more, options, 0.0), "other": (words, ("seed=2",), options, 0.02)}
    )
    assert checks.check("same", "cpu") == {"apart": 0.0, "most": 0.0, "wrong": []}
    assert [text.partition(":")[0] for text in checks.check("other", "cpu")["wrong"]] == ["other"]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile takes minutes where cores are busy
def test_the_small_mode_does_all_steps_on_a_cpu(tmp_path: Path) -> None:
    assert gpu.main(["--small", "--device", "cpu", "--minutes", "30", "--out", str(tmp_path)]) == 0
    assert [line["step"] for line in gpu.lines(tmp_path / "steps.jsonl")] == [*gpu.STEPS]
    assert all(line["complete"] and not line.get("wrong") for line in gpu.lines(tmp_path / "steps.jsonl"))


def test_images_that_are_not_there_are_told_before_anything_is_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert gpu.main(["--device", "cpu", "--data-root", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "E-DATA-02" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_round_for_which_there_is_no_time_is_not_begun(tmp_path: Path) -> None:
    visit = Visit(tmp_path, 100)
    watch = runs._Watch("a", visit, 5)
    context, record = RoundContext(1, 1), RoundRecord(0, TaskKind.TRAIN, (1.0,), (2.0,), ())
    watch.opened(context, TaskKind.TRAIN, [])
    visit.left = 40.0
    watch.closed(record, {})
    assert visit.noted[0]["seconds"] == 60.0
    with pytest.raises(runs.TimeUpError):
        watch.opened(context, TaskKind.TRAIN, [])
