"""Python's arguments as a configuration, and keys that were meant and not found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.config.hydra_config import compose_from, compose_simulation, compose_spec
from coordinator.config.keywords import Keywords
from fl_core.errors import ConfigError


def test_arguments_compose_what_the_words_of_the_command_compose() -> None:
    arguments = {"method": "fedmr", "data": "digits", "train__lr": 0.5, "train": {"epochs": 2}, "silos": ("a", "b")}
    words = ["method=fedmr", "data=digits", "train.lr=0.5", "train.epochs=2", "silos=[a,b]"]
    made = Keywords(arguments)
    assert compose_spec(made.words, values=made.values) == compose_spec(words)
    assert compose_simulation(made.words, values=made.values) == compose_simulation(words)


def test_values_change_the_configuration_that_a_run_continues_as_words_do() -> None:
    parent = compose_spec(["method=fedmr", "data=digits", "rounds=7"])
    made = Keywords({"rounds": np.int64(3), "train__lr": 0.5, "name": "it's\\ [x]"})
    continued = compose_from(parent, made.words, made.values)
    assert (continued.rounds, continued.train.lr, continued.name) == (3, 0.5, "it's\\ [x]")
    assert continued.method == parent.method
    with pytest.raises(ConfigError, match="E-CFG-08"):
        compose_from(parent, [], Keywords({"model__weights": Path("x")}).values)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seed": object()}, "seed: expected a plain value"),
        ({"model": object()}, "model: expected a name"),
        ({"rounds": 3, "rounds__x": 4}, "rounds.x: rounds has two values"),
    ],
)
def test_what_is_no_plain_value_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Keywords(arguments)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=0.1"], "did you mean train.lr=...?"),
        (["learning_rate=0.1"], "did you mean train.lr=...?"),
        (["train__lr=0.1"], "did you mean train.lr=...?"),
        (["train_lr=0.1"], "did you mean train.lr=...?"),
        (["train.learning_rate=0.1"], "did you mean 'lr'?"),
        (["momentun=0.1"], "did you mean train.momentum=...?"),
        (["num_rounds=3"], "did you mean 'rounds'?"),
        (["random_state=3"], "did you mean 'seed'?"),
        (["method=fedmr", "mu1=0.1"], "did you mean method.mu1=...?"),
        (["privacy=dp_record", "epsilon=8"], "did you mean privacy.epsilon=...?"),
        (["metod=fedmr"], "did you mean 'method'?"),
        (["nothing_like_it=3"], "there is no key 'nothing_like_it': valid: "),
        (["lr=0.1", "method=none_such"], "there is no key 'lr': valid: "),
    ],
)
def test_a_key_inside_of_a_group_is_found_by_its_name_and_by_names_of_other_libraries(
    words: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_spec(words)
    assert caught.value.code == "E-CFG-01"
    assert says in str(caught.value)


@pytest.mark.parametrize("key", ["lr", "learning_rate", "train_lr"])
def test_python_is_answered_with_the_name_that_python_takes(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"no key '{key}': did you mean train__lr=\.\.\.\?"):
        compose_simulation([], values=Keywords({key: 0.1}).values)
