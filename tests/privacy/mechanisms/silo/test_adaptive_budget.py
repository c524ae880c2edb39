"""What the bit of a following clip costs: its share of the noise and of the budget, and terms that are silent on it."""

from __future__ import annotations

import math

import pytest

from fl_core.errors import ConfigError
from privacy.accounting.accountant import Filter, Mechanism, rdp
from privacy.mechanisms.silo.config import SiloDpConfig, split_noise


def test_noise_is_split_as_the_specification_says() -> None:
    """5.4: at z = 1 a bit of noise 0.75 leaves 1.34 to the update, one of 1.5 leaves 1.06."""
    assert split_noise(1.0, 0.75) == pytest.approx(1.34, abs=5e-3)
    assert split_noise(1.0, 1.5) == pytest.approx(1.06, abs=5e-3)
    for silos, noise in ((6, 0.12), (20, 0.04)):
        assert 0.75 / silos == pytest.approx(noise, abs=6e-3)
    for silos, noise in ((6, 0.25), (20, 0.07)):
        assert 1.5 / silos == pytest.approx(noise, abs=6e-3)
    with pytest.raises(ConfigError, match="E-PRIV-12"):
        split_noise(1.0, 0.5)


def test_update_and_bit_together_cost_what_the_budget_has() -> None:
    """z of the update is what `split_noise` leaves of the z that a run without a bit would have."""
    fixed = SiloDpConfig(epsilon=4.0, test_data="public", reserve_rounds=0)
    following = SiloDpConfig(epsilon=4.0, test_data="public", reserve_rounds=0, clipping="adaptive", bit_noise=20.0)
    whole, update = fixed.noise(10, 11), following.noise(10, 11)
    assert update == pytest.approx(split_noise(whole, 20.0), rel=1e-3)
    budget = Filter.of(4.0, 1e-5)
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
