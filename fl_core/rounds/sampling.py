"""Draws the cohort of a round and the silos that submit prototypes. Both are public and verifiable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fl_core import rng
from fl_core.errors import ConfigError


def sample_cohort(seed: int, round: int, n_silos: int, size: int) -> list[int]:
    """Draw the cohort of a round without replacement, sorted; all silos when size is 0 or n_silos."""
    if not 0 <= size <= n_silos:
        raise ConfigError("E-CFG-02", f"expected a cohort between 0 (all) and {n_silos} silos, found cohort={size}")
    if size in (0, n_silos):
        return list(range(n_silos))
    from fl_core.tensors import torch

    order = torch.randperm(n_silos, generator=rng.stream(seed, "cohort", round))
    return sorted(int(k) for k in order[:size])


def prototype_submitters(seed: int, names: Sequence[str], share: float) -> list[bool]:
    """Choose round(share * N) silos that submit prototypes, for the whole run.

    They are the silos with the smallest SHA-256 over (seed, name), so every participant can verify the list. FedMR
    Table 5 (shares 1.0, 0.8, 0.5); share 0 is "prototypes off".
    """
    if not 0.0 <= share <= 1.0:
        raise ConfigError("E-CFG-02", f"expected a share of silos between 0 and 1, found prototype_share={share}")
    rank = sorted(names, key=lambda name: hashlib.sha256(f"prototypes|{seed}|{name}".encode()).digest())
    chosen = set(rank[: int(share * len(names) + 0.5)])
    return [name in chosen for name in names]
