"""Frozen features: a run whose examples are the output of the body that its model begins with.

With `train.freeze=features` the body is the same function everywhere: in eval mode, with the weights of the run's
start or seed, on batches of one public shape that are filled with zeros. So an example has the same d0 numbers whoever
shares its batch, at whichever hospital it lies. What stands behind the body (the projection, which `model.adapter`
puts there, and the head) is the model of the run: methods, privacy, layouts and traffic know nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_core.datasets.examples import TensorExamples
from fl_core.errors import ConfigError, DataError
from fl_core.models.split_model import SplitModel, behind_body, body_rows
from fl_core.training.evaluation import METRIC_PARTS
from fl_core.training.local_data import eval_batch
from fl_core.types.records import FEATURES, Schema, TrainConfig
from fl_core.types.values import Examples, Layout

log = logging.getLogger(__name__)
ONE_IN = 100
"""Of so many examples one may be unreadable, and one of fewer: they are left out."""


class Trained(NamedTuple):
    """What a run trains, and the schema of the examples that it is trained on."""

    model: nn.Module
    schema: Schema


def trained_part(network: SplitModel, schema: Schema, train: TrainConfig, owner: str) -> Trained:
    """Return what a run trains of a network, which it shares the tensors of.

    Raises ConfigError (E-CFG-08) as `behind_body`, and where the body's output is no vector.
    """
    if train.freeze != FEATURES:
        return Trained(network, schema)
    model, blank = behind_body(network, owner), body_rows(network.body, torch.zeros(1, *schema.shape))
    if blank.dim() != 2:
        raise ConfigError(
            "E-CFG-08",
            f"expected a body whose output is a vector with train.freeze=features, found {owner}, which gives "
            f"{tuple(blank.shape[1:])}: leave train.freeze out",
        )
    return Trained(model, replace(schema, shape=tuple(blank.shape[1:]), columns=(), window=None))


def check_shared(method: str, layout: Layout, train: TrainConfig) -> None:
    """Raise ConfigError (E-CFG-08) where what a method shares is the frozen body alone."""
    own = [spec for name, spec in layout.items() if name not in METRIC_PARTS]
    if train.freeze == FEATURES and own and not any(spec.shapes for spec in own):
        raise ConfigError(
            "E-CFG-08",
            f"method {method}: expected something that is trained and shared, found that it shares the body alone, "
            "which train.freeze=features leaves as it is: set model.adapter=linear, whose layer is shared",
        )


class FeatureBatch(NamedTuple):
    """Positions of examples (b,) that were read, and their features (b, d0) on the CPU; done: of all, read or not."""

    positions: Tensor
    rows: Tensor
    done: int


def feature_batches(body: nn.Module, examples: Examples, device: torch.device) -> Iterator[FeatureBatch]:
    """Pass all examples through a frozen body once, in order, a batch at a time; the body is moved to the device.

    An example that cannot be read (E-DATA-04), or whose features are not finite, is named in the log and left out: a
    rule that looks at no other example. Raises DataError (E-DATA-04) once more than one in a hundred cannot be read.
    Features that are not finite never raise: a body that is made for it would ask of records what no ledger counts.
    """
    blank, _ = examples.batch(torch.zeros(0, dtype=torch.long))
    size, body = eval_batch(blank.shape[1:]), body.to(device)
    lost, n = 0, len(examples)
    for first in range(0, max(1, n), size):
        index = torch.arange(first, min(first + size, n))
        kept, x = _read(examples, index)
        x = torch.cat((x, x.new_zeros(size - len(x), *x.shape[1:])))
        rows = body_rows(body, x.to(device))[: len(kept)].float().cpu()
        finite = torch.isfinite(rows).all(1)
        for i in kept[~finite].tolist():
            log.warning("%s is left out: its features are not finite numbers", _name(examples, i))
        lost += len(index) - len(kept)
        if lost > max(1, n // ONE_IN):
            raise DataError(
                "E-DATA-04",
                f"expected readable examples but for one in {ONE_IN}, found more that are not: this hospital's log "
                "names them; restore them, or take them out (`silo data check`)",
            )
        yield FeatureBatch(kept[finite], rows[finite], min(first + size, n))


def in_memory(examples: Examples, batches: Iterable[FeatureBatch]) -> Examples:
    """Return the examples of some batches of features, all of which are kept in memory."""
    found = list(batches)
    return with_rows(examples, torch.cat([b.positions for b in found]), torch.cat([b.rows for b in found]))


def with_rows(examples: Examples, positions: Tensor, rows: Tensor) -> Examples:
    """Return the examples at `positions` (m,) with features (m, d0) in place of what they were made of."""
    groups = None if examples.groups is None else tuple(examples.groups[i] for i in positions.tolist())
    return TensorExamples(rows, examples.labels[positions], groups)


def _read(examples: Examples, index: Tensor) -> tuple[Tensor, Tensor]:
    """Read a batch; one by one where one of them cannot be."""
    try:
        return index, examples.batch(index)[0]
    except DataError as error:
        if error.code != "E-DATA-04":
            raise
    kept, found = list[Tensor](), [examples.batch(index[:0])[0]]
    for one in torch.split(index, 1):
        try:
            found.append(examples.batch(one)[0])
            kept.append(one)
        except DataError as error:
            if error.code != "E-DATA-04":
                raise
            log.warning("%s is left out: %s", _name(examples, int(one)), error.message)
    return torch.cat([index[:0], *kept]), torch.cat(found)


def _name(examples: Examples, i: int) -> str:
    paths = getattr(examples, "paths", None)
    return f"example {i + 1}" if paths is None else str(paths[i])
