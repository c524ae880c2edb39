"""Shares of 32 bytes. Shamir, "How to Share a Secret", CACM 1979, over the field of p = 2^256 + 297.

The share of x is the value at x of a polynomial of degree t - 1. Its constant term is the secret (little-endian), its
other coefficients are uniform: t shares determine the secret, t - 1 reveal nothing. The field is barely larger than
the secrets.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from fl_core.types.secagg import SHARE

PRIME = 2**256 + 297
_DRAWN = 2**257 - 1
Random = Callable[[int], bytes]


def split(secret: bytes, xs: Sequence[int], t: int, random: Random = secrets.token_bytes) -> list[bytes]:
    """Share 32 bytes among the points xs, distinct and positive; t shares restore them. random: returns n bytes."""
    coefficients = [int.from_bytes(secret, "little")]
    while len(coefficients) < t:
        if (drawn := int.from_bytes(random(SHARE), "little") & _DRAWN) < PRIME:
            coefficients.append(drawn)
    return [_value(coefficients, x).to_bytes(SHARE, "little") for x in xs]


def _value(coefficients: Sequence[int], x: int) -> int:
    y = 0
    for coefficient in reversed(coefficients):
        y = (y * x + coefficient) % PRIME
    return y


def weights(xs: Sequence[int], at: int = 0) -> list[int]:
    """Return Lagrange's weights: the value at `at` is the sum of weight times share over the distinct points xs."""
    values = []
    for x in xs:
        top = bottom = 1
        for other in xs:
            if other != x:
                top, bottom = top * (other - at) % PRIME, bottom * (other - x) % PRIME
        values.append(top * pow(bottom, -1, PRIME) % PRIME)
    return values


def combine(shares: Sequence[bytes], by: Sequence[int]) -> int:
    """Return the weighted sum of shares."""
    return sum(w * int.from_bytes(s, "little") for w, s in zip(by, shares, strict=True)) % PRIME


def join(shares: Sequence[bytes], by: Sequence[int]) -> bytes | None:
    """Return the secret under weights at 0; None if the value does not fit 32 bytes, so some share is wrong."""
    value = combine(shares, by)
    return value.to_bytes(SHARE - 1, "little") if value < 2**256 else None
