"""A clip that follows a quantile of the silos' norms.

Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021,
algorithm 1, with silos in the place of users. Beside its update, silo k releases one bit, shifted so that an absent
silo counts as 0 and any other moves the sum by 1/2:

    b_k = [ ||V_k|| <= C_t ] - 1/2        b = 1/2 + (sum_k b_k + noise of std s_b) / |S_t|
    C_t+1 = C_t exp(-eta (b - gamma))     gamma: the target quantile, eta: the rate

C_t is public: it is broadcast with the model, and noise is z times the C_t that the silo received.
"""

from __future__ import annotations

import math

from fl_core.errors import RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Part, PartSpec, Tensors
from privacy.accounting.ranges import CLIP
from privacy.mechanisms.silo.config import BIT, SiloDpConfig

PART = "clipping"
"""The update's part with the bits, and the group of the server's state with C_t."""
_ROUNDING = 1e-6
"""Tolerance at the ends of the range of a clip, which is sent in float32."""
SPEC = PartSpec({"within": ()}, ())


def initial_clip(terms: SiloDpConfig) -> Tensors:
    return _setting(terms.clip) if terms.adaptive else {}


def clip_of(terms: SiloDpConfig, setting: Tensors | None) -> float | None:
    """Read C_t from a broadcast; None if the clip is fixed.

    Raises RefusedError (E-PRIV-15) if a clip was broadcast although it is fixed, is missing, or is out of range.
    """
    if not terms.adaptive:
        if setting is not None:
            raise RefusedError("E-PRIV-15", "the broadcast clip differs from the fixed clip of the plan")
        return None
    if setting is None or set(setting) != {"clip"} or setting["clip"].numel() != 1:
        raise RefusedError("E-PRIV-15", "the clip of this round was not sent with the model")
    low, high, _ = CLIP
    if not low * (1 - _ROUNDING) <= (clip := float(setting["clip"])) <= high * (1 + _ROUNDING):
        raise RefusedError("E-PRIV-15", f"expected a clip of {CLIP}, found {clip}")
    return clip


def below_clip(norm: float, clip: float) -> Part:
    """Return one silo's part before rounding and noise: 1/2 if its norm is within the clip, otherwise -1/2."""
    return Part({"within": torch.tensor(BIT if norm <= clip else -BIT, dtype=torch.float64)}, torch.tensor(1.0))


def update_clip(terms: SiloDpConfig, setting: Tensors, answered: Part) -> Tensors:
    """Return the next round's setting, within the range of clips; unchanged if no silo answered."""
    silos = float(answered.weight)
    if silos <= 0:
        return setting
    share = BIT + float(answered.total["within"]) / silos
    low, high, _ = CLIP
    followed = float(setting["clip"]) * math.exp(-terms.clip_rate * (share - terms.target_quantile))
    return _setting(min(max(followed, low), high))


def _setting(clip: float) -> dict[str, Tensor]:
    return {"clip": torch.tensor(clip, dtype=torch.float32)}
