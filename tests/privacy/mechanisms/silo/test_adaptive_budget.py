"""What the bit of a following clip costs: its share of the noise and of the budget, and terms that are silent on it."""

from __future__ import annotations

import math

import pytest

from fl_core.errors import ConfigError
from privacy.accounting.accountant import Mechanism, PrivacyFilter, rdp
from privacy.mechanisms.silo.config import SiloDpConfig


def split_noise(noise: float, bit_noise: float) -> float:
    """Return z of the update where update and bit together are one release of noise z: (z^-2 - (2 s_b)^-2)^(-1/2).

    Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021,
    theorem 1.
    """
    return float((noise**-2 - (2 * bit_noise) ** -2) ** -0.5)


def test_update_and_bit_together_cost_what_the_budget_has() -> None:
    """z of the update is what `split_noise` leaves of the z that a run without a bit would have."""
    fixed = SiloDpConfig(epsilon=4.0, test_data="public", reserve_rounds=0)
    following = SiloDpConfig(epsilon=4.0, test_data="public", reserve_rounds=0, clipping="adaptive", bit_noise=20.0)
    whole, update = fixed.noise(10, 11), following.noise(10, 11)
    assert update == pytest.approx(split_noise(whole, 20.0), rel=1e-3)
    budget = PrivacyFilter.of(4.0, 1e-5)
    both = following.history(update, 10, 11)
    assert both == [Mechanism(update, 1.0, 10), Mechanism(40.0, 1.0, 10)]
    assert budget.used(both) == pytest.approx(1.0, abs=1e-3)
    assert float(rdp(both, [8.0])[0]) == pytest.approx(float(rdp([Mechanism(whole, 1.0, 10)], [8.0])[0]), rel=1e-3)


@pytest.mark.parametrize(
    "terms",
    [
        {"clipping": "adaptive"},
        {"clipping": "adaptive", "bit_noise": 2.0, "clip_decay": 0.9},
        {"bit_noise": 2.0},
        {"clipping": "sometimes"},
        {"clipping": "adaptive", "bit_noise": 2.0, "target_quantile": 1.0},
        {"clipping": "adaptive", "bit_noise": 2.0, "clip_rate": 0.0},
        {"clipping": "adaptive", "bit_noise": math.inf},
    ],
)
def test_terms_that_do_not_say_what_the_bit_costs_are_refused(terms: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-20"):
        SiloDpConfig.of(terms)
