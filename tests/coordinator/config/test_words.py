"""Words that say a configuration again: what a command for a new run is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.config.hydra_config import compose_spec, words_of
from fl_core.rounds.manifest import Weights


@pytest.mark.integration
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["method=fedmr", "method.mu1=0.3", "data=digits", "federation=p5c2", "train.lr=0.5", "rounds=7", "silos=[a,b]"],
        ["method=analytic", "method.ridge=0", "data=digits", "model=random_features", "model.kind=relu", "seed=3"],
        ["data=folder", "data.classes=['A (b)',c-d,\"it's\",'1e5']", "data.image_size=64", "name='a, b = c'"],
        ["data=isic2019", "privacy=dp_record", "privacy.epsilon=4", "deadline_s=inf"],
        ["experiment=fedmr", "federation=p7c3@2", "aggregator=median", "lost_state=restart"],
        ["data=digits", "name=null", "cohort=2", "personal=true"],
    ],
)
def test_words_of_a_configuration_compose_it_again(words: list[str]) -> None:
    spec = compose_spec(words)
    again = words_of(spec)
    assert again
    assert compose_spec(again) == spec


def test_a_configuration_that_no_words_say_has_none() -> None:
    spec = replace(compose_spec(["data=digits"]), weights=Weights("a" * 64, 1, "b" * 64))
    assert words_of(spec) == []
    assert words_of(replace(spec, weights=None, method={"name": "of_another_machine"})) == []
