"""The study of FedGELA's frame: it answers as the run's record does, under words that replace the setting's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper import frame, study
from benchmarks.run_store import seeded
from coordinator.config.hydra_config import compose_simulation


def test_fedgelas_plain_frame_answers_as_its_record_says_and_equal_counts_change_nothing() -> None:
    words = ["experiment=fedgela_3", "scale=small", "federation=p5c2", "cohort=0", "rounds=2", "train.max_steps=3"]
    found = frame.answers(words, 0, None)
    result = study.runner.run(seeded(compose_simulation(words), 0))
    assert found["plain"]["accuracy"] == round(result.accuracies[-1], 4)
    assert found["plain"]["balanced"] == pytest.approx(result.records[-1].balanced_accuracy, abs=1e-4)
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    equal = frame.ways(logits, torch.full((4,), 7.0))
    assert all(torch.equal(way.argmax(1), logits.argmax(1)) for way in equal.values())
    skewed = frame.ways(torch.tensor([[2.0, 1.2]]), torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(skewed["adapted"], torch.tensor([[0.4, 2.16]]))
    assert [int(skewed[name].argmax()) for name in ("plain", "adapted", "shifted", "levelled")] == [0, 1, 1, 0]


def test_words_given_to_the_frame_study_replace_those_of_the_setting() -> None:
    assert frame.replaced(["a=1", "b=2"], ["b=3", "c=4"]) == ["a=1", "b=3", "c=4"]
