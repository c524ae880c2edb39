"""What accuracy to expect of a private run: counted on models of the same words, before a budget is spent."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from consilium.research.simulate import runner
from consilium.research.simulate.expectation import Expectation, expect
from coordinator.cli.main import program
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from fl_core.errors import ConfigError
from privacy.accounting.uncertainty import Estimate

pytestmark = pytest.mark.integration

WORDS = ("data=digits", "federation=hospitals6", "privacy=dp_record", "privacy.epsilon=8")
CLOSED = (*WORDS, "method=analytic", "model=random_features", "model.kind=cosine", "model.width=64", "method.bound=0.6")


def asked(*words: str) -> str:
    result = CliRunner().invoke(program().build(["privacy"]), ["privacy", "preview", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    number = int(words[words.index("--expect") + 1]) if "--expect" in words else 0
    assert result.stderr.splitlines() == [f"simulation {k + 1} of {number} done" for k in range(number)]
    return " ".join(result.stdout.split())


def test_it_is_counted_without_noise_on_all_test_images_and_equal_words_give_equal_numbers() -> None:
    found = expect(compose_spec([*CLOSED, "seed=4"]), 2)
    assert (found.chance, len(found.sizes), len(found.accuracies)) == (0.1, 6, 2)
    spec = compose_spec([*CLOSED, "seed=5", "privacy.rng=test"])
    result, sets = runner.run(spec), runner.read_silos(spec, None, datasets.load_all)
    model, tests = result.run.classifier(result.server).eval(), [s.test for s in sets]
    right = sum(int((model(t.batch(torch.arange(len(t)))[0]).argmax(1) == t.labels).sum()) for t in tests)
    assert found.accuracies[1] == pytest.approx(right / sum(map(len, tests)))
    assert found.read[1].facts() == result.estimates[-1].facts()
    assert expect(compose_spec([*CLOSED, "seed=4"]), 2) == found


def test_the_preview_says_the_interval_where_the_budget_goes_and_without_it_how_to_get_it() -> None:
    said = asked(*CLOSED, "privacy.reserve_rounds=1", "--expect", "2")
    assert "% (guessing: 10 %), from 2 runs on digits, divided among 6 hospitals of" in said
    assert "of epsilon 8, hospital0 plans" in said
    assert "privacy.reserve_rounds=0" in said
    assert "to estimate the accuracy, add --expect 3" in asked(*CLOSED)
    assert "nothing is reserved to repeat" in asked(*CLOSED)  # a run of one release is submitted again
    facts = json.loads(asked(*CLOSED, "--expect", "1", "--json"))["expected"]
    assert facts["teaches"] == (facts["balanced_accuracy"][0] > 0.15)


@pytest.mark.parametrize(("balanced", "teaches"), [((0.1, 0.12), False), ((0.1, 0.6), True)])
def test_what_is_no_better_than_guessing_is_called_that(balanced: tuple[float, float], teaches: bool) -> None:
    found = Expectation("digits", [100, 120], balanced, balanced, [Estimate(withheld="noise")], 0.1)
    assert found.teaches == teaches
    assert ("little better than guessing" in " ".join(found.lines())) != teaches
    assert "the lead would see: withheld: noise" in next(iter(found.lines()))


def test_a_method_without_a_global_model_is_refused() -> None:
    words = ["method=local", "data=digits", "rounds=1", "train.max_steps=1", "privacy=dp_record"]
    with pytest.raises(ConfigError, match="E-CFG-08"):
        expect(compose_spec(words), 1)
