"""When a round closes: the situations of the rule one by one, and all of them against a second telling of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_core.rounds.closing import Attendance, ClosingRule, ClosingVerdict, Decision, needed

PATIENCE = 60.0
DEADLINE = 86400.0
RULE = ClosingRule(4, DEADLINE, PATIENCE)
ALL = frozenset("abc")


def cohort(*changed: Attendance) -> list[Attendance]:
    """Six silos of which those not named answered after 100 to 500 s, each with every class."""
    names = {s.name for s in changed}
    rest = [Attendance(n, answered=100.0 * (k + 1), classes=ALL) for k, n in enumerate("uvwxyz") if n not in names]
    return [*rest, *changed]


def awaited(decision: Decision) -> dict[str, float]:
    return {a.name: a.until for a in decision.awaited}


@pytest.mark.parametrize(("quorum", "size", "expected"), [(0, 6, 4), (0, 3, 2), (0, 2, 2), (0, 1, 1), (0, 10, 7)])
def test_without_a_quorum_two_thirds_are_needed(quorum: int, size: int, expected: int) -> None:
    assert needed(quorum, size) == expected
    assert needed(size + 5, size) == size
    assert needed(1, size) == 1


def test_a_round_that_everybody_answered_closes() -> None:
    assert RULE.decide(cohort(), 600.0) == Decision(ClosingVerdict.CLOSE)


def test_a_slow_silo_is_awaited_for_twice_the_time_of_half_of_the_cohort() -> None:
    slow = cohort(Attendance("z", classes=ALL))
    assert awaited(RULE.decide(slow, 599.0)) == {"z": 600.0}  # half of six answered after 300 s
    assert RULE.decide(slow, 600.0) == Decision(ClosingVerdict.CLOSE)


def test_a_dead_silo_whose_classes_others_hold_is_not_awaited() -> None:
    assert RULE.decide(cohort(Attendance("z", offline=61.0, classes=ALL)), 500.0) == Decision(ClosingVerdict.CLOSE)


def test_a_silo_that_was_away_for_a_moment_counts_as_connected() -> None:
    """A restart of a silo, or of the coordinator, takes seconds and changes no model."""
    assert awaited(RULE.decide(cohort(Attendance("z", offline=59.0, classes=ALL)), 500.0)) == {"z": 600.0}


@pytest.mark.parametrize(
    ("offline", "missed", "until"), [(None, 9, 6000.0), (90.0, 1, 3000.0), (90.0, 2, 0.0), (59.0, 2, 6000.0)]
)
@pytest.mark.parametrize("classes", [frozenset("ad"), None])
def test_the_only_holder_of_a_class_is_awaited_longer(
    classes: frozenset[str] | None, offline: float | None, missed: int, until: float
) -> None:
    alone = cohort(Attendance("z", offline=offline, missed=missed, classes=classes))
    if until:
        assert awaited(RULE.decide(alone, until - 1)) == {"z": until}
    decision = RULE.decide(alone, max(until, 500.0))
    assert decision.verdict is ClosingVerdict.CLOSE
    assert [(a.name, a.classes) for a in decision.lost] == ([("z", ("d",))] if classes else [])


def test_of_two_holders_the_second_is_awaited_no_longer_once_the_first_has_brought_the_class() -> None:
    y, z = Attendance("y", offline=90.0, classes=frozenset("d")), Attendance("z", classes=frozenset("d"))
    assert awaited(RULE.decide(cohort(y, z), 700.0)) == {"y": 3000.0, "z": 6000.0}
    z = Attendance("z", answered=700.0, classes=frozenset("d"))
    assert RULE.decide(cohort(y, z), 700.0) == Decision(ClosingVerdict.CLOSE)


def test_short_rounds_are_not_hasty() -> None:
    quick = [Attendance(n, answered=0.1, classes=ALL) for n in "uvwxy"]
    assert awaited(RULE.decide([*quick, Attendance("z", classes=ALL)], 59.0)) == {"z": PATIENCE}
    assert awaited(RULE.decide([*quick, Attendance("z", classes=frozenset("d"))], 599.0)) == {"z": 10 * PATIENCE}


def test_below_the_quorum_everybody_is_awaited_to_the_deadline_and_then_the_run_pauses() -> None:
    few = cohort(*(Attendance(n, offline=1e6, missed=9, classes=ALL) for n in "xyz"))
    assert awaited(RULE.decide(few, DEADLINE - 1)) == dict.fromkeys("xyz", DEADLINE)
    assert RULE.decide(few, DEADLINE) == Decision(ClosingVerdict.PAUSE)


def test_at_the_deadline_a_round_with_its_quorum_closes_whoever_is_missing() -> None:
    late = cohort(Attendance("y", classes=None), Attendance("z", classes=frozenset("d")))
    short = ClosingRule(4, 550.0, PATIENCE)
    assert awaited(short.decide(late, 549.0)) == {"y": 550.0, "z": 550.0}
    assert short.decide(late, 550.0).verdict is ClosingVerdict.CLOSE


def test_who_refused_is_not_awaited_and_a_quorum_out_of_reach_pauses_at_once() -> None:
    assert (
        RULE.decide(cohort(Attendance("z", refused=True, classes=frozenset("d"))), 500.0).verdict
        is ClosingVerdict.CLOSE
    )
    refused = [Attendance(n, refused=True) for n in "xyz"]
    assert RULE.decide(cohort(*refused), 400.0) == Decision(ClosingVerdict.PAUSE)


def test_refusals_do_not_leave_the_others_awaited_for_ever() -> None:
    one = ClosingRule(1, math.inf, PATIENCE)
    silos = [*(Attendance(n, refused=True) for n in "uvwx"), Attendance("y", answered=100.0, classes=ALL)]
    assert awaited(one.decide([*silos, Attendance("z", classes=ALL)], 150.0)) == {"z": 200.0}


def test_an_extension_is_for_all_who_are_awaited_and_for_the_deadline() -> None:
    longer = ClosingRule(4, DEADLINE, PATIENCE, extension=3600.0)
    away = cohort(Attendance("y", classes=ALL), Attendance("z", offline=1e6, missed=5, classes=ALL))
    assert awaited(longer.decide(away, 700.0)) == {"y": 600.0 + 3600, "z": 3600.0}
    few = cohort(*(Attendance(n, classes=ALL) for n in "xyz"))
    assert awaited(longer.decide(few, 700.0)) == dict.fromkeys("xyz", DEADLINE + 3600)


# ---- a second telling of the rule ----------------------------------------------------------------------------------


def oracle(rule: ClosingRule, silos: Sequence[Attendance], now: float) -> str:
    """Say the same, one silo and one sentence at a time."""
    can = [s for s in silos if not s.refused]
    inside = [s for s in can if s.answered is not None]
    outside = [s for s in can if s.answered is None]
    over = now >= rule.deadline + rule.extension
    if len(inside) < rule.needed:
        return "pause" if over or len(can) < rule.needed else "wait"
    answered_by_now = sorted(s.answered or 0.0 for s in inside)
    h = next((t for n, t in enumerate(answered_by_now, 1) if 2 * n >= len(can)), math.inf)
    h = max(h, rule.patience / 2)
    for silo in outside:
        here = silo.offline is None or silo.offline < rule.patience
        alone = silo.classes is None or any(
            all(c not in (other.classes or ()) for other in inside) for c in silo.classes
        )
        if alone and here:
            factor = 20
        elif alone and silo.missed < 2:
            factor = 10
        elif here and not alone:
            factor = 2
        else:
            factor = 0
        limit = factor * h if factor else 0.0
        if now < limit + rule.extension and not over:
            return "wait"
    return "close"


TIMES = st.floats(0, 2000)
SILOS = st.lists(
    st.builds(
        lambda state, at, offline, missed, classes: Attendance(
            "s", at if state == 0 else None, state == 1, offline, missed, classes
        ),
        st.integers(0, 3),
        TIMES,
        st.none() | st.floats(0, 500),
        st.integers(0, 3),
        st.none() | st.frozensets(st.sampled_from("abc")),
    ),
    min_size=1,
    max_size=8,
)


@given(SILOS, TIMES, st.integers(1, 8), st.sampled_from([300.0, 1500.0, math.inf]), st.sampled_from([0.0, 400.0]))
def test_the_rule_says_what_its_second_telling_says(
    silos: list[Attendance], now: float, quorum: int, deadline: float, extension: float
) -> None:
    rule = ClosingRule(min(quorum, len(silos)), deadline, PATIENCE, extension)
    assert rule.decide(silos, now).verdict.value == oracle(rule, silos, now)


@given(SILOS, TIMES, st.integers(1, 8))
def test_who_is_awaited_now_is_given_up_in_the_end(silos: list[Attendance], now: float, quorum: int) -> None:
    rule = ClosingRule(min(quorum, len(silos)), DEADLINE, PATIENCE)
    assert all(now < a.until <= DEADLINE for a in rule.decide(silos, now).awaited)
    assert rule.decide(silos, DEADLINE).verdict is not ClosingVerdict.WAIT
