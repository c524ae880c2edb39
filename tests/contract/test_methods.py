"""What every registered method owes, whatever it computes: the checks that others run on their own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from consilium.testing.methods import CHECKS, CONTEXT, MethodCase, model_of
from fl_core.methods import METHODS
from fl_core.types.enums import Capability, Coupling
from fl_core.types.values import Weighing
from tests.support.federations import METHOD_OPTIONS

REPRESENTATIVES = {
    "fedavg": "one summed part and nothing else",
    "scaffold": "silo state that goes with the update",
    "fednova": "no adaptive optimizer, a part that counts steps, momentum at the server",
    "fedproto": "no global model, rows with weights of their own, silo state that is kept in any case",
    "fedbabu": "personal models at the end alone, a head that stays at the silo",
    "fedmr": "a loss that mixes examples, and another form for privacy",
    "fedgen": "parts that are merged one by one and count once, so no sum is enough for it",
    "local": "nothing is sent",
}
"""The methods that stand for the others below where time matters."""

OTHERS = (
    "fedprox feddyn feddc moon fedproc fedlc fedrs fedphp map fedper fedrep ditto fedrod creff fedgela fednh fedcd "
    "fedvls fedloge"
)
"""Checked by the slow tests; a method that is in neither list is checked always."""

TRAITS: Mapping[str, Callable[[MethodCase], object]] = {
    "the plain method": lambda c: not c.method.init_silo(model_of(), CONTEXT) and set(c.server) == {"w"},
    "sends nothing": lambda c: not c.sent,
    "rows of a part have weights of their own": lambda c: any(len(s.weight_shape) for s in c.sent.values()),
    "a part counts once": lambda c: any(r.weight is Weighing.ONCE for r in c.method.part_rules.values()),
    "a part counts steps": lambda c: any(r.steps for r in c.method.part_rules.values()),
    "parts are merged one by one": lambda c: c.method.unsummed_parts,
    "state of a silo goes with its update": lambda c: c.method.server_tracks_state,
    "state of a silo is kept in any case": lambda c: (
        c.method.init_silo(model_of(), CONTEXT) and not c.method.server_tracks_state
    ),
    "the server has state beside the model": lambda c: set(c.server) - {"w", "head"},
    "no global model": lambda c: not c.method.has_global_model,
    "the personal models count": lambda c: c.method.ga_is_personal,
    "personal models are made at the end": lambda c: c.method.personal_at_end,
    "the loss mixes examples": lambda c: c.method.coupling is Coupling.BATCH,
    "another form for privacy": lambda c: c.method.private_form,
    "no adaptive optimizer": lambda c: Capability.ADAPTIVE_OPTIMIZER in c.method.unsupported,
    "no secure aggregation": lambda c: Capability.SECURE_AGGREGATION in c.method.unsupported,
    "no privacy of records": lambda c: Capability.DIFFERENTIAL_PRIVACY in c.method.unsupported,
}


@cache
def case(name: str) -> MethodCase:
    return MethodCase(name, METHOD_OPTIONS.get(name, {}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS.split())) for name in METHODS]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_method_keeps(check: Callable[[MethodCase], None], name: str) -> None:
    check(case(name))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_representative_has_each_trait(trait: str) -> None:
    assert any(TRAITS[trait](case(name)) for name in REPRESENTATIVES)
