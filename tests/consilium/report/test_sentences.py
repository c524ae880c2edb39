"""Sentences of a card say what its numbers say, and a bound on attackers is one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from consilium.report import sentences
from consilium.report.card import Card, Masks, Privacy, Share
from consilium.report.sentences import Sentence, most_found
from tests.support.cards import PRIVATE, card


def text(found: list[Sentence]) -> str:
    return " ".join(s.text for s in found)


def best_attack(epsilon: float, delta: float, false_alarms: float) -> float:
    """Attack the mechanism that tells most of all that are (epsilon, delta)-private, by Neyman and Pearson.

    Its outcomes are "in", "rather in", "rather out", "out" (Kairouz, Oh and Viswanath, ICML 2015, section 3.1).
    """
    near = (1 - delta) / (1 + math.exp(epsilon))
    inside = [delta, near * math.exp(epsilon), near, 0.0]
    outside = inside[::-1]
    found, left = 0.0, false_alarms
    for p, q in zip(inside, outside, strict=True):  # by falling likelihood ratio
        share = 1.0 if q == 0 else min(1.0, left / q)
        found += share * p
        left -= share * q
        if share < 1:
            break
    return found


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1, 4, 8, 30])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("false_alarms", [0.001, 0.01, 0.2, 0.9])
def test_no_test_finds_more_and_one_finds_as_many(epsilon: float, delta: float, false_alarms: float) -> None:
    assert most_found(epsilon, delta, false_alarms) == pytest.approx(best_attack(epsilon, delta, false_alarms))


def test_a_huge_epsilon_bounds_nothing() -> None:
    assert most_found(1e9, 1e-5) == pytest.approx(1.0)


def test_a_bound_is_never_rounded_down() -> None:
    said = text(sentences.epsilon(card(privacy=replace(PRIVATE, epsilon=1.0, delta=1e-5))))
    assert most_found(1.0, 1e-5) == pytest.approx(0.027193, abs=1e-6)
    assert "epsilon is at most 1 at delta 1e-05" in said
    assert "at most 2.72 %" in said
    assert "at most 2.73 %" in text(sentences.epsilon(card(privacy=replace(PRIVATE, delta=2e-5))))


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (Privacy("none"), "No epsilon holds: hospitals' updates had no noise"),
        (replace(PRIVATE, noise_from="test"), "No epsilon holds: the noise came from a reproducible source"),
        (replace(PRIVATE, alone=9.0, collusion=1), "while at most 1 of them colludes; if masks fail, it is 9.00"),
        (replace(PRIVATE, test_data="public"), "Test examples are not protected"),
        (replace(PRIVATE, subject="the whole hospital"), "For the whole hospital epsilon is"),
        (PRIVATE, "The schedule spends 0.80 of it"),
    ],
)
def test_what_epsilon_promises_is_said_with_what_it_relies_on(privacy: Privacy, said: str) -> None:
    assert said in text(sentences.epsilon(card(privacy=privacy)))


def test_a_run_in_clear_says_that_the_coordinator_could_read_it() -> None:
    assert "could read each hospital's by itself" in text(sentences.masks(card()))
    assert "unless more than 3 hospitals collude" in text(sentences.masks(card(masks=Masks(3, 2))))


def test_an_average_without_a_bound_is_said_to_be_one() -> None:
    made = card()
    assert "plain average" not in text(sentences.poisoning(made))
    assert "plain average" in text(sentences.poisoning(replace(made, updates=replace(made.updates, aggregator="mean"))))


def test_results_have_chance_beside_them_their_least_class_and_what_the_interval_is_of() -> None:
    said = text(sentences.results(card()))
    assert "balanced accuracy of 50.0 % (95 %: 20.0 to 90.0 %); guessing has 50.0 %" in said
    assert "The class recognised least is melanoma: 0.0 %" in said
    assert "The interval is that of the luck of the test examples" in said


def results(**other: object) -> Card:
    return card(results=replace(card().results, **other))


def test_results_of_an_earlier_model_are_not_said_of_this_one() -> None:
    said = text(sentences.results(results(of_exported_model=False)))
    assert "The model one round before this one (this one was not evaluated) has" in said


def test_what_is_withheld_has_no_number() -> None:
    hidden = Share(withheld="noise larger than signal")
    said = text(sentences.results(results(balanced=hidden, accuracy=hidden)))
    assert said == "No accuracy is given: noise larger than signal."


def test_classes_without_a_test_example_are_named() -> None:
    made = card()
    none = replace(made, classes=(replace(made.classes[0], test_examples=0), made.classes[1]))
    assert "there was none of nevus" in text(sentences.tested(none))
    assert "there was none" not in text(sentences.tested(made))
    assert sentences.tested(results(test_examples=None)) == []


def test_the_width_of_bins_does_not_pass_for_an_interval() -> None:
    assert "no interval of their luck" in text(sentences.calibration(results(macro_auc_low=0.8, macro_auc_high=0.82)))


def test_a_member_without_an_update_in_the_model_did_not_take_part() -> None:
    made = card()
    assert "Updates of 2 hospitals are in the model (north, south)" in text(sentences.where_data_are(made))
    away = replace(made, hospitals=(made.hospitals[0], replace(made.hospitals[1], rounds=0)))
    said = text(sentences.where_data_are(away))
    assert "Updates of 1 hospital are in the model (north)" in said
    assert "Of south, which belonged to the run, no update is in the model." in said


def test_masks_are_said_to_hide_a_liar() -> None:
    assert "a hospital that lies" in text(sentences.poisoning(card(masks=Masks(1, 2))))
    assert "a hospital that lies" not in text(sentences.poisoning(card()))
