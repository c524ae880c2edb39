"""A kind of run that no source file knows: every hospital is asked for one number, how many records it trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from fl_core import kinds
from fl_core.kinds import RunKind
from fl_core.kinds.one_answer import OneAnswer
from fl_core.types.interfaces import LocalData
from fl_core.types.values import RoundContext, Tensors


class HeadcountRun(RunKind):
    name = "headcount"
    program = "tests.support.headcount:Headcount"
    parts: ClassVar[Mapping[str, str]] = {"headcount": "how many training images are here"}
    answered = "Hospitals have counted"

    def length(self, rounds: int) -> str:
        return "one number, without training"

    def how_to_read(self, run: str) -> str:
        return f"coordinator show {run}"


@dataclass(frozen=True, kw_only=True)
class Headcount(OneAnswer):
    name: ClassVar[str] = HeadcountRun.name

    def blank(self, n_classes: int) -> Tensors:
        return {"records": torch.zeros((), dtype=torch.float64)}

    def answer(self, data: LocalData, context: RoundContext) -> Tensors:
        return {"records": data.class_counts().double().sum()}


@contextmanager
def headcounts() -> Iterator[RunKind]:
    kind = HeadcountRun()
    kinds.register(kind)
    try:
        yield kind
    finally:
        kinds.unregister(kind)
