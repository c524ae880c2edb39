"""What the clinical part of an update may claim: whole counts, and the same examples in each of its tables.

| tensor             | rule                                                                                |
|--------------------|-------------------------------------------------------------------------------------|
| all but confidence | whole numbers, 0 or more                                                            |
| confusion          | row c adds up to the examples of class c in the part "metrics", its diagonal is the |
|                    | correct answers there                                                               |
| positive, negative | row c adds up to the examples of class c, to all others                             |
| examples, correct  | add up to all examples, to all correct answers; correct <= examples in each bin     |
| confidence         | in bin k between k / 15 and (k + 1) / 15 times its examples                         |

A silo that withholds the part sends zeros of weight 0, whatever it says in "metrics".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ROUNDING = 1e-6
"""Of float32, in which counts travel: exact up to 16 million."""


def clinical_fault(total: Mapping[str, Tensor], weight: Tensor, correct: Tensor, examples: Tensor) -> str:
    """Say what is wrong with a part, in words that end with what was expected; empty where nothing is.

    total, weight: of the clinical part   correct, examples: (C,) of "metrics". All float64 and finite.
    """
    counts = {name: v for name, v in total.items() if name != "confidence"}
    if float(weight) == 0:
        return "values of weight 0, expected 0" if any(bool(v.any()) for v in total.values()) else ""
    for name, v in counts.items():
        if bool((v < 0).any()) or not torch.equal(v, v.round()):
            return f"{name!r} holds what is no count, expected whole numbers of 0 or more"
    every = examples.sum()
    sums = (
        ("weight", weight, every),
        ("rows of 'confusion'", counts["confusion"].sum(1), examples),
        ("diagonal of 'confusion'", counts["confusion"].diagonal(), correct),
        ("rows of 'positive'", counts["positive"].sum(1), examples),
        ("rows of 'negative'", counts["negative"].sum(1), every - examples),
        ("sum of 'examples'", counts["examples"].sum(), every),
        ("sum of 'correct'", counts["correct"].sum(), correct.sum()),
    )
    for what, found, expected in sums:
        if bool(((found - expected).abs() > _room(expected)).any()):
            return f"{what} {_shown(found)}, expected {_shown(expected)} as in 'metrics'"
    if bool((counts["correct"] > counts["examples"]).any()):
        return "more correct answers than examples in a bin, expected at most as many"
    edges = torch.arange(len(counts["examples"]) + 1, dtype=torch.float64) / len(counts["examples"])
    low, high = edges[:-1] * counts["examples"], edges[1:] * counts["examples"]
    confidence = total["confidence"]
    if bool(((confidence < low - _room(low)) | (confidence > high + _room(high))).any()):
        return "a sum of confidences outside its bin, expected between its edges times its examples"
    return ""


def _room(expected: Tensor) -> Tensor:
    return _ROUNDING * expected.abs().clamp(min=1.0)


def _shown(values: Tensor) -> str:
    return ", ".join(f"{v:g}" for v in values.reshape(-1)[:10].tolist()) + (" ..." if values.numel() > 10 else "")
