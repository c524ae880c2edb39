"""A short pass of every decoder; `python -m tests.fuzz TARGET` is a long one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.fuzz.found import FOUND
from tests.fuzz.limits import limited
from tests.fuzz.mutations import NASTY_BYTES, any_bytes
from tests.fuzz.targets import TARGETS

EXAMPLES = 12


@pytest.mark.fault(
    "an attacker",
    "sends arbitrary bytes to a decoder",
    "a value or an error with a code; it never hangs or exhausts memory",
)
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_give_a_value_or_an_error_of_ours(name: str) -> None:
    target = TARGETS[name]
    samples = target.samples()

    @settings(
        max_examples=EXAMPLES // 4 if target.slow else EXAMPLES,
        derandomize=True,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(any_bytes(samples, target.is_json))
    def attempt(data: bytes) -> None:
        with limited(target.memory):
            target.run(data)

    nasty = () if target.slow else NASTY_BYTES
    for data in (*samples, *nasty, *FOUND.get(name, ())):
        attempt = example(data)(attempt)
    attempt()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "ledger_rows"])
def test_what_a_target_is_tried_with_is_what_it_accepts(name: str) -> None:
    target = TARGETS[name]
    for sample in target.samples():
        target.decode(sample)


def test_what_was_found_belongs_to_a_target() -> None:
    assert set(FOUND) <= set(TARGETS)
