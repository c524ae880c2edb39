"""A hospital in masked runs: keys, masks and answers over its session; what a liar asks is refused and recorded."""

from __future__ import annotations

import pytest

from privacy.secagg.coordinator_side import SealedRound
from tests.support.masked import (
    OWN,
    MaskedHospital,
    confirmation_of,
    in_clear,
    open_message,
    shares_of,
    sign_as_coordinator,
)


@pytest.fixture
def hospital(tmp_path):
    made = MaskedHospital(tmp_path / "home0")
    made.start()
    yield made
    made.stop()
    made.host.stop()


def sealed(hospital, offer, own=True):
    total, plain = hospital.sum_of(offer, own)
    seal = total.seal(sign_as_coordinator)
    keys = next(iter(hospital.colleagues.values())).keys
    return SealedRound(total, seal, keys.peers), plain


def opened(hospital, state, silent=()):
    """Bring a sealed round to its end: the hospital and its colleagues confirm and answer."""
    hospital.send_seal(state.seal)
    state.confirm(OWN, confirmation_of(hospital.confirmed()))
    for u, colleague in hospital.colleagues.items():
        if u not in silent:
            state.confirm(u, colleague.confirm(hospital.run, state.seal))
    hospital.control.last.send(secagg_open=open_message(state.opening(OWN)))
    state.answer(OWN, shares_of(hospital.shares()))
    for u, colleague in hospital.colleagues.items():
        if u not in silent:
            state.answer(u, colleague.answer(hospital.run, state.opening(u)))
    return state.finish()


def test_a_masked_round_is_opened_to_the_exact_sum_of_what_the_hospital_and_its_colleagues_sent(hospital):
    hospital.exchange()
    offer = hospital.train()
    state, plain = sealed(hospital, offer)
    found = opened(hospital, state)
    own = in_clear(hospital.manifest, offer, hospital)
    assert (found.model == plain[0] + own[0]).all()
    assert (found.classes == plain[1] + own[1]).all()
    assert {"sealed", "opened"} <= set(hospital.events())
