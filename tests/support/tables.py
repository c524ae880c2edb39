"""Tables of patients with a schema beside them, made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.images import write_csv

SCHEMA = """
label = "diagnosis"
classes = ["benign", "malignant"]
{roles}
[columns.age]
type = "integer"
min = 0
max = 120

[columns.marker]
type = "number"
min = -1.0
max = 3.0
missing = "indicator"

[columns.sex]
type = "category"
categories = ["f", "m"]

[columns.smoker]
type = "boolean"
"""
HEADER = ("visit", "patient", "age", "marker", "sex", "smoker", "diagnosis", "split")


def rows(n: int, seed: int = 0) -> list[list[object]]:
    """Draw rows whose diagnosis follows from age and marker; two visits per patient."""
    rng = np.random.default_rng(seed)
    found: list[list[object]] = []
    for k in range(n):
        age, marker = int(rng.integers(0, 121)), round(float(rng.uniform(-1, 3)), 4)
        sick = age / 60 + marker > 2
        cell = "" if rng.random() < 0.1 else marker
        split = "train" if k // 2 % 5 else "test"
        found.append(
            [f"v{seed}-{k}", f"p{seed}-{k // 2}", age, cell, "fm"[k % 2], "yes", ("benign", "malignant")[sick], split]
        )
    return found


def write_table(
    folder: Path, body: list[list[object]], roles: str = 'split = "split"', schema: str = SCHEMA, name: str = "patients"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(schema.replace("{roles}", roles))
    return write_csv(folder / f"{name}.csv", HEADER, body)
