"""The search's second implementation of private FedAvg agrees with the simulation where noise is negligible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.privacy_budget import search
from coordinator.config.hydra_config import compose_simulation
from coordinator.simulate import runner
from fl_core import datasets
from fl_core.models import build_model


@pytest.mark.parametrize("d", [0, 16])
def test_clipped_sums_are_those_of_single_gradients(d: int) -> None:
    model = build_model("digits_linear", {"projection": [d] if d else []}, datasets.schema_of("digits"), 3).double()
    pixels, labels = datasets.load("digits/hospital0").train.batch(torch.arange(7))
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(pixels.double(), labels, strict=True):
        loss = cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        expected = [e + g * (1.5 / norm).clamp(max=1.0) for e, g in zip(expected, grads, strict=True)]
    (x, y), *_ = search._data("hospitals6")[0]
    found = search._clipped_sum(search._initial(d, 3), x[:7], y[:7], 1.5)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-5, atol=1e-7)


def test_a_run_without_noise_is_the_simulations_at_epsilon_600() -> None:
    words = ["model=digits_linear", "method=fedavg", "rounds=4", "train.lr=5", "train.batch_size=300", "seed=2"]
    private = ["privacy=dp_record", "privacy.epsilon=600", "privacy.rng=test", "privacy.test_data=public"]
    simulated = runner.run(compose_simulation([*words, "train.weight_decay=0", *private])).accuracies[1:]
    assert search.run(search.Setting(rounds=4), 2, noisy=False) == pytest.approx(simulated, abs=0.012)
    assert simulated[-1] > 0.5
