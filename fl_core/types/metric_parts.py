"""The names of the parts with measurements in an update or a sum."""

from __future__ import annotations

METRICS = "metrics"
"""The part in every bundle: correct answers over test examples, per class."""
CLINICAL_PART = "clinical"
"""In runs with exact evaluations that send more: see training/clinical.py."""
GLOBAL_PARTS = (METRICS, CLINICAL_PART)
"""Parts that measure the model received."""
PERSONAL = "personal"
PERSONAL_PUBLIC = "personal_public"
PERSONAL_GA = "personal_ga"
PERSONAL_PARTS = (PERSONAL, PERSONAL_PUBLIC, PERSONAL_GA)
BY_HOSPITAL = "by_hospital"
"""The hospital's consent to store its own part of the sums and to show it under its name."""
OWN, PAIRED = "own", "paired"
"""Results of a hospital's local model on the same images as the received one; the difference of their areas
(delong.py)."""
CLOSING_PARTS = (BY_HOSPITAL, OWN, PAIRED)
"""Parts only of the closing evaluation, in runs that ask for them."""
METRIC_PARTS = frozenset({*GLOBAL_PARTS, *PERSONAL_PARTS, *CLOSING_PARTS})
"""Parts with measurements: no method's `merge` sees them."""
